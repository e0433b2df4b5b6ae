"""Damage to a file, as a disk makes it."""

from pathlib import Path


def flip(path: Path, at: int = -1, mask: int = 1) -> None:
    """Turn over these bits of one byte, in place: links to the file have them too."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)
