"""Files opened by name: a pipe blocks its reader, and a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from os import PathLike

LARGEST_TEXT = 1 << 30


def open_regular(path: str | PathLike[str]) -> int:
    """A descriptor for reading.

    Raises:
        OSError: The file is missing or no regular file, or no file can have that name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # NUL, or characters that no file system has
        raise OSError(errno.EINVAL, f"a name that no file can have ({error})", str(path)) from error
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "a pipe or a device instead of a regular file", str(path))


def read_regular(path: str | PathLike[str], limit: int = LARGEST_TEXT) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: As `open_regular`, or it has more than `limit` bytes.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", str(path))
    return data
