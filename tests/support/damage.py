"""Damages a file as a disk would."""

from pathlib import Path


def flip(path: Path, at: int = -1, mask: int = 1) -> None:
    """Flips these bits of one byte in place, so that hard links to the file change too."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)
