"""Checkpoints as bytes on disk: their format, and how they are written, committed, found and read.

This package uses no array library; engines pass and receive bytes. docs/checkpoints.md describes
the format for other programs.
"""
