"""Checkpoints in other tools' formats, in and out, one tensor at a time.

    a folder of any tool ---> Source ---> a checkpoint | a Hugging Face folder | torch's DCP
                                    `---> compared with another Source

What a folder is, is found by what lies in it. Nothing that could execute code is read: pickles
are unpickled with a list of what they may name.
"""
