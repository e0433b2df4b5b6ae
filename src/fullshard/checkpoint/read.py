"""Reads any range of any tensor of a checkpoint, whoever wrote it in whatever slices.

wanted           |<--------- [start, stop) -------->|
slices   |-- file 0 --|-- file 1 --|------ file 2 ------|-- file 3 --|
read              |###|############|################|
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from fullshard.checkpoint.files import TensorFile, checksum_of
from fullshard.checkpoint.format import (
    INDEX,
    ITEMSIZE,
    STATE,
    Index,
    Manifest,
    name_in_file,
)
from fullshard.checkpoint.retain import Found
from fullshard.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, open for reading.

    Attributes:
        path: Its folder.
        manifest: Its files.
        index: Its tensors.
        state: state.json.
        bytes_read: How many bytes of tensors were read so far, as its only element.
    """

    path: Path
    manifest: Manifest
    index: Index
    state: dict[str, Any]
    bytes_read: list[int] = field(default_factory=lambda: [0])
    _files: dict[str, TensorFile] = field(default_factory=dict[str, TensorFile])
    _closing: ExitStack = field(default_factory=ExitStack)

    @classmethod
    @contextmanager
    def open(cls, found: Found) -> Generator[Checkpoint]:
        """Read the index.

        Raises:
            CheckpointError: The checkpoint is not complete, or its index is damaged.
        """
        path = found.path
        if found.manifest is None:
            raise CheckpointError(
                f"checkpoint '{path}': expected a complete one; {found.why}. Take an older one."
            )
        texts = {name: _read_text(path, name, found.manifest) for name in (INDEX, STATE)}
        index = Index.from_json(texts[INDEX], str(path / INDEX))
        with ExitStack() as closing:
            state: dict[str, Any] = json_of(texts[STATE], path / STATE)
            yield cls(path, found.manifest, index, state, _closing=closing)

    def text(self, name: str) -> str | None:
        """A text file of the checkpoint, or None."""
        if name not in self.manifest.files:
            return None
        return _read_text(self.path, name, self.manifest)

    def read(self, key: str, start: int, stop: int, out: memoryview) -> None:
        """Fill `out` with elements [start, stop) of a tensor, in the dtype it is stored in.

        Raises:
            CheckpointError: A file is damaged.
        """
        tensor = self.index.tensors[key]
        size = ITEMSIZE[tensor.dtype]
        assert out.nbytes == (stop - start) * size, (key, start, stop, out.nbytes)
        if start == stop:
            return
        at = bisect_right(tensor.slices, start, key=lambda piece: piece.start) - 1
        name = name_in_file(key)
        while start < stop:
            piece = tensor.slices[at]
            end = min(stop, piece.stop)
            count = (end - start) * size
            self._file(piece.file, name).read(name, (start - piece.start) * size, out[:count])
            self.bytes_read[0] += count
            out, start, at = out[count:], end, at + 1

    def read_own(
        self, key: str, rank: int, held: tuple[int, int] | None = None
    ) -> tuple[tuple[int, ...], bytearray] | None:
        """Shape and bytes of an opaque tensor as one rank wrote it; None where it wrote none.

        Args:
            key: Of the tensor.
            rank: Who wrote it.
            held: The range of the parameter that the rank must have held then, where there is one.

        Raises:
            CheckpointError: It held another range.
        """
        for piece in self.index.tensors[key].slices:
            if piece.rank == rank:
                if held not in (None, (piece.start, piece.stop)):
                    raise CheckpointError(
                        f"{self.path}: expected the same strategy, because {key} belongs to "
                        f"elements {piece.start:,} to {piece.stop:,} of its parameter and nobody "
                        f"can cut it anew; this rank holds {held}. Load under the old strategy."
                    )
                name = name_in_file(key)
                file = self._file(piece.file, name)
                _, shape, begin, end = file.entries[name]
                data = bytearray(end - begin)
                file.read(name, 0, memoryview(data))
                return shape, data
        return None

    def damaged_tensors(self, file: str) -> list[str]:
        """Keys whose slices in a file have other bytes than were written."""
        wrong: list[str] = []
        for key, tensor in self.index.tensors.items():
            for piece in tensor.slices:
                if piece.file != file:
                    continue
                name = name_in_file(key)
                opened = self._file(file, name)
                _, _, begin, end = opened.entries[name]
                data = memoryview(bytearray(end - begin))
                opened.read(name, 0, data)
                if xxhash.xxh3_128(data).hexdigest() != piece.checksum:
                    wrong.append(key)
        return wrong

    def _file(self, name: str, tensor: str) -> TensorFile:
        if name not in self._files:
            opened = TensorFile.open(self.path / name)
            self._files[name] = self._closing.enter_context(opened)
        if tensor not in self._files[name].entries:
            raise CheckpointError(
                f"{self.path / name}: expected a slice of {tensor}; there is none. "
                "Take another checkpoint."
            )
        return self._files[name]


def damaged_files(found: Found, part: int = 0, num_parts: int = 1) -> list[str]:
    """Files whose bytes have another checksum than when they were written.

    Args:
        found: A complete checkpoint.
        part: Which share of the files to look at.
        num_parts: How many shares there are; ranks look at one each.
    """
    assert found.manifest is not None
    names = sorted(found.manifest.files)[part::num_parts]
    return [
        name
        for name in names
        if checksum_of(found.path / name) != found.manifest.files[name].checksum
    ]


def json_of(text: str, origin: Path) -> Any:
    """Parse a JSON file of a checkpoint.

    Raises:
        CheckpointError: It is damaged.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise CheckpointError(
            f"{origin}: expected JSON; {error}. Take another checkpoint."
        ) from error


def _read_text(path: Path, name: str, manifest: Manifest) -> str:
    try:
        data = (path / name).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path / name}: expected a file of a checkpoint; {error.strerror}."
        ) from error
    facts = manifest.files.get(name)
    if facts is None or xxhash.xxh3_128(data).hexdigest() != facts.checksum:
        raise CheckpointError(
            f"{path / name}: expected the bytes that were written; they differ. "
            "Take another checkpoint."
        )
    return data.decode()
