"""Memory-mapped tokens in files: those that fullshard made, and existing arrays.

    .npy    one axis of integers; the header has the dtype
    .bin    Megatron: dtype and counts are in the .idx file of the same name
            llm.c: 256 int32 before the tokens; the first one gives the dtype
            nanoGPT: only tokens, in uint16 or `data.dtype`

Nothing is copied. Rows of a fixed length are read from the files of a source, one after another.

    files       [ a.bin        ][ b.bin             ]
    rows        |<-- 0 -->|<-- 1 -->|<-- 2 -->| rest: dropped
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from os.path import samestat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fullshard.config.regular_files import open_regular
from fullshard.data.order import Indices
from fullshard.errors import DataError, untrusted

SAMPLE_BYTES = 4096  # at each of some 64 places of a file
MEGATRON = b"MMIDIDX\x00\x00"
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}  # the version and dtype of each mark
LLM_C_HEADER = 1024  # bytes


@dataclass(frozen=True)
class TokenFile:
    """Tokens in a file.

    Attributes:
        file: Path of the file.
        dtype: Dtype of the tokens, by numpy's name.
        offset: Byte of the first token.
        count: Number of tokens.
        checksum: Checksum of the tokens; empty if it is not known.
        sample: Checksum of a few tokens of an existing array, from all over the file. It shows that
            the file was replaced, on every machine and without reading the file.
        identity: See `identity_of`, from when a run was prepared. On that machine, all tokens of
            another file, or of one that was changed since, are compared.
    """

    file: str
    dtype: str
    offset: int
    count: int
    checksum: str = ""
    sample: str = ""
    identity: str = ""

    def mapped(self) -> npt.NDArray[np.integer]:
        """The tokens, (count,), read from disk when they are used.

        A file that was removed or replaced by another one stays mapped.

        Raises:
            DataError: See `map_tokens`; also if they were changed in place since the first call.
        """
        array, seen = mapped_once(self)
        with suppress(OSError):
            now = Path(self.file).stat()
            if samestat(now, seen[0]) and identity_of(now) != identity_of(seen[0]):
                map_tokens(self, whole=True)
                seen[0] = now
        return array

    def part(self, start: int, stop: int) -> TokenFile:
        """Tokens [start, stop) of these."""
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        part = TokenFile(self.file, self.dtype, offset, stop - start)
        return replace(part, sample=_sample(map_tokens(part)))


def map_tokens(tokens: TokenFile, *, whole: bool = False) -> npt.NDArray[np.integer]:
    """The tokens of a file as it is now.

    Args:
        tokens: The tokens from when the run was prepared.
        whole: Compare the checksum of all tokens, not only of the sample.

    Raises:
        DataError: The file is gone, is too short, or has other tokens.
    """
    if not tokens.count:
        return np.empty(0, tokens.dtype)
    expected = "the tokens from when the run was prepared"
    with untrusted(f"data: '{tokens.file}'", expected, DataError, "Start the run again."):
        with os.fdopen(open_regular(tokens.file), "rb") as file:
            found = np.memmap(file, tokens.dtype, "r", tokens.offset, (tokens.count,))
            now = identity_of(os.fstat(file.fileno()))
        is_here = tokens.identity.startswith(f"{socket.gethostname()} ")
        whole = whole or (is_here and now not in (tokens.identity, _COMPARED.get(tokens)))
        is_other = whole and tokens.checksum and tokens.checksum != checksum_of(found)
        if is_other or tokens.sample not in ("", _sample(found)):
            raise ValueError("other tokens")
        if whole:
            _COMPARED[tokens] = now
        return found


_COMPARED: dict[TokenFile, str] = {}  # identities of files whose tokens were compared here


@lru_cache(maxsize=1024)  # a process may have 65,530 maps
def mapped_once(tokens: TokenFile) -> tuple[npt.NDArray[np.integer], list[os.stat_result]]:
    """The tokens of a file, and the file when they were compared last."""
    return map_tokens(tokens), [Path(tokens.file).stat()]


def identity_of(file: os.stat_result) -> str:
    """Host, and times of a file: others after any change of the file.

    The last one cannot be set back, but changes with each link, as runs have to prepared tokens.
    Numbers of files are left out: those of buckets and other mounts (FUSE) change by themselves.
    """
    changed = file.st_ctime_ns if file.st_nlink == 1 else 0
    return f"{socket.gethostname()} {file.st_mtime_ns} {changed}"


def checksum_of(*arrays: npt.NDArray[Any]) -> str:
    """Checksum of arrays of tokens, one after another."""
    checksum = xxhash.xxh3_128()
    for array in arrays:
        checksum.update(np.ascontiguousarray(array).data)
    return checksum.hexdigest()


def sample_of(files: Iterable[Path]) -> str:
    """Checksum of a sample of the bytes of files."""
    found = xxhash.xxh3_128()
    for file in sorted(files):
        size = file.stat().st_size
        with file.open("rb") as opened:
            for start in range(0, size, max(SAMPLE_BYTES, size // 64)):
                opened.seek(start)
                found.update(opened.read(SAMPLE_BYTES))
    return found.hexdigest()


def _sample(array: npt.NDArray[np.integer]) -> str:
    return checksum_of(array[:: len(array) // 256 + 1])


class Rows:
    """Rows of `length` tokens from several sources, numbered source by source.

    Args:
        sources: Files of each source.
        length: Tokens per row.
    """

    def __init__(self, sources: Sequence[list[TokenFile]], length: int) -> None:
        self.sources, self.length = sources, length
        counts = ([one.count for one in files] for files in sources)
        self._bounds = [[0, *itertools.accumulate(of_files)] for of_files in counts]
        self.sizes = [bounds[-1] // length for bounds in self._bounds]
        self._first = np.cumsum([0, *self.sizes])

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def checksums(self) -> list[list[str]]:
        """Checksums of the files of each source."""
        return [[file.checksum for file in files] for files in self.sources]

    @property
    def num_dropped(self) -> int:
        """Tokens at the ends of sources that do not fill a row."""
        return sum(bounds[-1] % self.length for bounds in self._bounds)

    def take(self, rows: Indices) -> Indices:
        """Tokens of some rows, shape (len(rows), length)."""
        found = np.empty((len(rows), self.length), dtype=np.int64)
        for at, row in enumerate(rows.tolist()):
            source = int(np.searchsorted(self._first, row, "right")) - 1
            place = (row - int(self._first[source])) * self.length
            self.read(source, place, found[at])
        return found

    def _reach(self, source: int, stop: int) -> None:
        """Makes sure that a source has `stop` tokens."""

    def read(self, source: int, place: int, into: Indices) -> None:
        """Fills an array with the tokens of a source from a place on."""
        self._reach(source, place + len(into))
        bounds, done = self._bounds[source], 0
        number = bisect_right(bounds, place) - 1
        while done < len(into):
            start = place + done - bounds[number]
            piece = self.sources[source][number].mapped()[start : start + len(into) - done]
            into[done : done + len(piece)] = piece
            done, number = done + len(piece), number + 1


def tokens_in(file: Path, dtype: str | None) -> TokenFile:
    """The tokens of an existing array.

    Args:
        file: A .npy or .bin file.
        dtype: data.dtype; None: the dtype in the file, else uint16.

    Raises:
        DataError: It is not such a file, or has another dtype.
    """
    with untrusted(
        f"data.path: '{file}'", "an array of tokens", DataError, "Write it again, or use another."
    ):
        found, says = _npy(file) if file.suffix.lower() == ".npy" else _bin(file, dtype)
    own = np.dtype(found.dtype).name  # of either byte order
    if dtype not in (None, own):
        raise DataError(
            f"data.dtype: expected {own}, which {says} of '{file}' says, got {dtype}. Leave it out."
        )
    return found


def _npy(file: Path) -> tuple[TokenFile, str]:
    array = np.lib.format.open_memmap(file, mode="r")
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(
            f"it contains {array.dtype} of shape {array.shape} instead of one axis of integers"
        )
    if (more := file.stat().st_size - array.offset - array.nbytes) > 0:
        raise ValueError(f"{more:,} bytes follow its {len(array):,} tokens")
    return TokenFile(str(file.absolute()), array.dtype.str, array.offset, len(array)), "the header"


def _bin(file: Path, dtype: str | None) -> tuple[TokenFile, str]:
    size, index, offset, says = file.stat().st_size, file.with_suffix(".idx"), 0, ""
    with file.open("rb") as opened:
        start = opened.read(12)
    if index.is_file():
        dtype, says = _megatron(index, size), index.name
    elif len(start) == 12 and struct.unpack("<i", start[:4])[0] in LLM_C:
        mark, version, count = struct.unpack("<3i", start)
        (known, dtype), says, offset = LLM_C[mark], "the header", LLM_C_HEADER
        if version != known:
            raise ValueError(f"its header has version {version} of llm.c's format, not {known}")
        if offset + count * np.dtype(dtype).itemsize != size:
            raise ValueError(f"its header counts {count:,} tokens, which {size:,} bytes are not")
    found = np.dtype(dtype or "uint16")
    if (size - offset) % found.itemsize:
        raise ValueError(f"{size - offset:,} bytes are not a whole number of {found}")
    count = (size - offset) // found.itemsize
    tokens = TokenFile(str(file.absolute()), found.name, offset, count)
    some = tokens.mapped()[: 1 << 16]
    is_enough = count >= (2 if dtype is None else 64)  # ids that the user has named may be few
    if not says and is_enough and some[::2].any() and not some[1::2].any():
        raise ValueError(f"every second {found} is 0: set data.dtype, perhaps to a wider one")
    return tokens, says


def _megatron(index: Path, size: int) -> str:
    """The dtype in the index of a .bin file of `size` bytes."""
    with index.open("rb") as opened:
        mark, version, code, count, _ = struct.unpack("<9sQBQQ", opened.read(34))
    if mark != MEGATRON or version != 1 or code not in MEGATRON_DTYPES:
        raise ValueError(f"'{index.name}' is not an index of Megatron, version 1, of integers")
    lengths = np.memmap(index, np.int32, "r", 34, (count,)) if count else np.empty(0, np.int32)
    total = int(lengths.sum(dtype=np.int64)) * np.dtype(MEGATRON_DTYPES[code]).itemsize
    if total != size:
        raise ValueError(f"'{index.name}' counts {total:,} bytes, the file has {size:,}")
    return MEGATRON_DTYPES[code]
