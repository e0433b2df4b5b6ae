"""Bytes on disk: what a checkpoint is, how it is written, committed, found again and read.

Nothing here knows an array library; engines hand in bytes and ask for bytes. The format for other
programs: docs/checkpoints.md.
"""
