"""Reads files: regular ones only, because a pipe can block its reader and a device may be endless.

Tables that are data ship with fullshard as YAML.
"""

from __future__ import annotations

import errno
import os
import stat
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from fullshard.config.values import nearest

LARGEST_TEXT = 1 << 30


def open_regular(path: str | PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens a regular file and returns its descriptor.

    Raises:
        OSError: The file is missing or not regular, or the name is impossible.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except ValueError as error:  # NUL, or characters that no file system supports
        raise OSError(errno.EINVAL, f"an invalid file name ({error})", str(path)) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "a pipe or a device instead of a regular file", str(path))


def read_regular(path: str | PathLike[str], limit: int = LARGEST_TEXT) -> bytes:
    """Reads a regular file.

    Raises:
        OSError: As for `open_regular`, or the file has more than `limit` bytes.
    """
    data = bytearray()
    with os.fdopen(open_regular(path), "rb") as file:
        while part := file.read(1 << 20):  # read(n) allocates n bytes at once
            data += part
            if len(data) > limit:
                raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", str(path))
    return bytes(data)


def packaged_table(package: str, name: str) -> Any:
    """Reads a table that ships with fullshard."""
    import yaml  # which a GPU's machine may lack

    text = files(package).joinpath(name).read_text("utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def did_you_mean_path(path: Path) -> str:
    """`Did you mean '...'?`, with the nearest name in the first folder that exists; or ""."""
    existing = path.parent
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    try:
        wanted = path.relative_to(existing).parts[0]
        if (existing / wanted).is_symlink() and not (existing / wanted).exists():
            return f"'{existing / wanted}' is a broken link."
        near = None if path.exists() else nearest(wanted, [p.name for p in existing.iterdir()])
    except (OSError, ValueError, IndexError):  # an impossible name, or a folder without access
        return ""
    return f"Did you mean '{existing / near}'?" if near else ""
