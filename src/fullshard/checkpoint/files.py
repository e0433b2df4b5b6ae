"""Durable files: tensors in safetensors, texts, folders. They are on disk when a call returns."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import xxhash

from fullshard.checkpoint.format import (
    ITEMSIZE,
    FileFacts,
    StoredSlice,
    StoredTensor,
    name_in_file,
    natural,
)
from fullshard.checkpoint.storage import StorePath, new_object, open_for_reading
from fullshard.errors import CheckpointError, untrusted

HASHED = 1 << 19  # bytes read and hashed at a time: they fit in a core's own cache
REQUESTED = 32 << 20  # bytes that are read from a store at a time: a request costs tens of ms
CHUNK = 16 << 20  # bytes written, and hashed, at a time: small enough to still be in the cache
SYNC_FILE_RANGE_WRITE = 2  # of <fcntl.h>: start, do not wait
LARGEST_HEADER = 100_000_000  # bytes; the safetensors library's own limit
HEADER_ALIGNMENT = 64  # alignment of tensors for vector loads


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    call: Any = getattr(ctypes.CDLL(None), "sync_file_range", None)  # the os module has none
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a tensor, to be written.

    Attributes:
        key: See [Note: keys] in format.py.
        dtype: Dtype, as safetensors names it.
        shape: Global shape; of an opaque tensor its own.
        start: First element, in row-major order; for an opaque tensor, the first of its parameter.
        stop: One past the last.
        data: Returns its bytes in one block; called when they are written.
        opaque: Whether only this rank can read it (see [Note: keys] in format.py).
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: Callable[[], memoryview]
    opaque: bool = False

    @property
    def num_bytes(self) -> int:
        numel = math.prod(self.shape) if self.opaque else self.stop - self.start
        return numel * ITEMSIZE[self.dtype]

    @property
    def is_there(self) -> bool:
        """Whether there is anything to write: a rank may own no element of a tensor."""
        return self.opaque or self.start < self.stop or 0 in self.shape

    def shape_in_file(self) -> tuple[int, ...]:
        """The tensor's own shape if the slice is the whole tensor."""
        if self.opaque or self.stop - self.start == math.prod(self.shape):
            return self.shape
        return (self.stop - self.start,)


@dataclass(frozen=True, slots=True)
class Written:
    """A file that a rank wrote, and the slices in it."""

    name: str
    facts: FileFacts
    tensors: dict[str, StoredTensor]


def write_tensors(path: Path, pieces: Sequence[Piece], rank: int) -> Written:
    """Writes a safetensors file of slices and syncs it to disk.

    The full size is allocated first, so that a full disk is found before the first byte is written.

    Raises:
        OSError: The disk is full, or is not to be written.
    """
    header, size = _header(pieces)
    whole = xxhash.xxh3_128(header)
    tensors: dict[str, StoredTensor] = {}
    with _new_file(path, size) as write:
        write(memoryview(header))
        for piece in pieces:
            checksum = xxhash.xxh3_128()
            data = chunk = piece.data()
            assert data.nbytes == piece.num_bytes, (piece.key, data.nbytes, piece.num_bytes)
            for at in range(0, data.nbytes, CHUNK):
                chunk = data[at : at + CHUNK]
                checksum.update(chunk)
                whole.update(chunk)
                write(chunk)
            owner = rank if piece.opaque else -1
            stored = StoredSlice(path.name, piece.start, piece.stop, checksum.hexdigest(), owner)
            tensors[piece.key] = StoredTensor(piece.dtype, piece.shape, (stored,))
            del data, chunk  # before the next one is read
    return Written(path.name, FileFacts(size, whole.hexdigest()), tensors)


def write_text(path: Path, text: str) -> FileFacts:
    """Writes a small file whole: under another name, synced and renamed, or as one object."""
    data = text.encode()
    if isinstance(path, StorePath):
        path.write_bytes(data)
    else:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)  # of a killed process that had our number
        with _new_file(aside, len(data)) as write:
            write(memoryview(data))
        aside.replace(path)
    return FileFacts(len(data), xxhash.xxh3_128(data).hexdigest())


def sync_folder(path: Path) -> None:
    """Syncs the entries of a folder to disk, if its file system can; a store has none."""
    if isinstance(path, StorePath):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # SMB's and some of FUSE cannot
            raise
    finally:
        os.close(descriptor)


def checksum_of(path: Path, on_bytes: Callable[[int], None] = lambda _count: None) -> str:
    """xxh3_128 of a file's bytes; `on_bytes` is called with the number of bytes read."""
    digest, offset = xxhash.xxh3_128(), 0
    with open_for_reading(path) as (size, read):
        buffer = memoryview(bytearray(max(1, min(size, _chunk_bytes(path)))))
        while count := read(buffer, offset):
            digest.update(buffer[:count])
            on_bytes(count)
            offset += count
    return digest.hexdigest()


def _chunk_bytes(path: Path) -> int:
    return REQUESTED if isinstance(path, StorePath) else HASHED


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open safetensors file, with the range of each tensor's bytes.

    Attributes:
        path: The file.
        fill: Fills memory from an offset of the file; returns the number of bytes.
        entries: (dtype, shape, first byte, one past the last) by name, from the file's beginning.
    """

    path: Path
    fill: Callable[[memoryview, int], int]
    entries: dict[str, tuple[str, tuple[int, ...], int, int]]

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Generator[TensorFile]:
        """Read the header.

        Raises:
            CheckpointError: It is no safetensors file, or cut short.
        """
        with ExitStack() as closing:
            with untrusted(path, "a whole safetensors file"):
                size, read = closing.enter_context(open_for_reading(path))
                found = cls(path, read, _read_header(size, read))
            yield found

    def read(self, name: str, first_byte: int, out: memoryview) -> None:
        """Fill `out` with a tensor's bytes from `first_byte` of the tensor on.

        Raises:
            CheckpointError: The file ends before.
        """
        _, _, begin, end = self.entries[name]
        offset = begin + first_byte
        if offset + out.nbytes > end:
            raise CheckpointError(
                f"{self.path}: expected {first_byte + out.nbytes:,} bytes of {name}; its header "
                f"says {end - begin:,}. Use another checkpoint."
            )
        while out.nbytes:
            count = self.fill(out, offset)
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: expected {end:,} bytes; the file is truncated. Use another "
                    "checkpoint."
                )
            out, offset = out[count:], offset + count

    def whole(self, name: str) -> bytearray:
        """All bytes of a tensor."""
        _, _, begin, end = self.entries[name]
        data = bytearray(end - begin)
        self.read(name, 0, memoryview(data))
        return data


def _header(pieces: Sequence[Piece]) -> tuple[bytes, int]:
    """The first bytes of a safetensors file, and the size of the whole."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.num_bytes
        table[name_in_file(piece.key)] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape_in_file()),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, len(header) + end


def _read_header(
    size: int, read: Callable[[memoryview, int], int]
) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Raise ValueError if tensors overlap, leave gaps, or do not match their shape."""
    first = bytearray(8)
    read(memoryview(first), 0)
    length = int.from_bytes(first, "little")
    if not 2 <= length <= min(size - 8, LARGEST_HEADER):
        raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
    text = bytearray(length)
    read(memoryview(text), 8)
    table: dict[str, Any] = json.loads(text)
    table.pop("__metadata__", None)
    end = base = 8 + length
    found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in table.items():
        begin, stop = (base + natural(offset) for offset in entry["data_offsets"])
        found[name] = (str(entry["dtype"]), tuple(map(natural, entry["shape"])), begin, stop)
    for name, (dtype, shape, begin, stop) in sorted(found.items(), key=lambda f: f[1][2:]):
        wanted = math.prod(shape) * ITEMSIZE.get(dtype, 0)
        if begin != end or stop < begin or (dtype in ITEMSIZE and stop - begin != wanted):
            raise ValueError(f"{name} of {dtype} {shape} at bytes {begin:,} to {stop:,}")
        end = stop
    if end != size:
        raise ValueError(f"{size:,} bytes, of which tensors fill {end:,}")
    return found


@contextmanager
def _new_file(path: Path, size: int) -> Generator[Callable[[memoryview], None]]:
    """Creates a file; yields a function that appends to it.

    The file is synced at the end of the block, or removed if the block fails.
    """
    if isinstance(path, StorePath):
        with new_object(path) as write:
            yield write
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
        yield partial(_append, descriptor)
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _append(descriptor: int, data: memoryview) -> None:
    """Writes all bytes, and starts their way to the disk while the next ones are hashed and copied.

    Without the hint the kernel starts at fsync, when all bytes are in the page cache. Its result is
    ignored, and systems without this call skip it.
    """
    start_writing = _sync_file_range()
    begin, count = os.lseek(descriptor, 0, os.SEEK_CUR), data.nbytes
    while data.nbytes:
        data = data[os.write(descriptor, data) :]
    if start_writing is not None:
        start_writing(descriptor, begin, count, SYNC_FILE_RANGE_WRITE)
