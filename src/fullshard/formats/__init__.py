"""Imports and exports checkpoints of other tools, one tensor at a time.

    a folder of any tool ---> Source ---> a checkpoint | a Hugging Face folder | torch's DCP
                                    `---> compared with another Source

The format of a folder is detected from its files. Reading executes no code: the unpickler accepts
only a fixed list of names.
"""
