"""Reads any range of any tensor of a checkpoint, whoever wrote it in whatever slices.

wanted           |<--------- [start, stop) -------->|
slices   |-- file 0 --|-- file 1 --|------ file 2 ------|-- file 3 --|
read              |###|############|################|
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from fullshard.checkpoint.files import TensorFile, checksum_of
from fullshard.checkpoint.format import (
    COMPLETE,
    INDEX,
    ITEMSIZE,
    STATE,
    Index,
    Manifest,
    StoredSlice,
    name_in_file,
)
from fullshard.checkpoint.retain import Found, unusable
from fullshard.checkpoint.values import GetTensor, decode
from fullshard.config.regular_files import read_regular
from fullshard.errors import CheckpointError, untrusted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, open for reading.

    Attributes:
        path: Its folder.
        manifest: Its files.
        index: Its tensors.
        state: state.json.
        bytes_read: How many bytes of tensors were read so far, as its only element.
        checked: Whether all files have the bytes that were written; else `read` compares slices.
    """

    path: Path
    manifest: Manifest
    index: Index
    state: dict[str, Any]
    bytes_read: list[int] = field(default_factory=lambda: [0])
    checked: bool = False
    _files: dict[str, TensorFile] = field(default_factory=dict[str, TensorFile])
    _closing: ExitStack = field(default_factory=ExitStack)

    @classmethod
    @contextmanager
    def open(cls, found: Found, *, checked: bool = False) -> Generator[Checkpoint]:
        """Read the index.

        Args:
            found: Where it is.
            checked: Whether the caller has compared all checksums.

        Raises:
            CheckpointError: The checkpoint is not complete, or its index is damaged.
        """
        path = found.path
        if found.manifest is None:
            raise CheckpointError(
                f"checkpoint '{path}': expected a complete one; {found.why}. Take an older one."
            )
        index, state = read_tables(found)
        with ExitStack() as closing:
            yield cls(path, found.manifest, index, state, checked=checked, _closing=closing)

    def text(self, name: str) -> str | None:
        """A text file of the checkpoint, or None."""
        if name not in self.manifest.files:
            return None
        return _read_text(self.path, name, self.manifest)

    def value(self, name: str, coded: Any, get_tensor: GetTensor) -> Any:
        """A value of state.json.

        Raises:
            CheckpointError: It is malformed, or a tensor of it is missing.
        """
        with untrusted(f"{self.path / STATE}: {name}", "a value that fs.save wrote"):
            return decode(coded, get_tensor)

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
            file = self._file(piece.file, name)
            file.read(name, (start - piece.start) * size, out[:count])
            if not self.checked:
                is_whole = count == (piece.stop - piece.start) * size
                self._compare(key, piece, out[:count] if is_whole else file.whole(name))
            self.bytes_read[0] += count
            out, start, at = out[count:], end, at + 1

    def read_own(
        self, key: str, rank: int, held: tuple[int, int] | None = None
    ) -> tuple[tuple[int, ...], bytearray] | None:
        """Shape and bytes of an opaque tensor as one rank wrote it; None where it wrote none.

        Args:
            key: Key of the tensor.
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
                data = file.whole(name)
                self._compare(key, piece, data)
                return file.entries[name][1], data
        return None

    def damaged_tensors(self, file: str) -> list[str]:
        """Keys whose slices in a file have other bytes than were written."""
        wrong: list[str] = []
        for key, tensor in self.index.tensors.items():
            for piece in tensor.slices:
                if piece.file != file:
                    continue
                name = name_in_file(key)
                data = self._file(file, name).whole(name)
                if xxhash.xxh3_128_hexdigest(data) != piece.checksum:
                    wrong.append(key)
        return wrong

    def _compare(self, key: str, piece: StoredSlice, data: memoryview | bytearray) -> None:
        """A slice's bytes with those that were written, at about memory's speed."""
        if xxhash.xxh3_128_hexdigest(data) != piece.checksum:
            raise CheckpointError(
                f"{self.path / piece.file}: expected the bytes of {key} that were written; they "
                "differ. Take another checkpoint; `fullshard ckpt verify` shows all damage."
            )

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


def first_whole(
    path: Path, found: Sequence[Found], seat: tuple[int, int], tell: Callable[[Any], list[Any]]
) -> Found:
    """The first checkpoint that can be read; each rank compares its share of files. A collective.

    Args:
        path: Where they were looked for.
        found: The newest first, the same on all ranks.
        seat: This rank, and the number of ranks.
        tell: Gives what every rank says.

    Raises:
        CheckpointError: There is none; says what was skipped and why.
    """
    skipped: list[str] = []
    for entry in found:
        why = entry.why
        if entry.manifest is not None:
            told: list[str] = tell(why_not(entry, *seat))
            why = next((text for text in told if text), "")
            if not why:
                return entry
        skipped.append(f"{entry.path.name}: {why}")
        if seat[0] == 0 and len(found) > 1:
            logger.warning("skipped checkpoint %s: %s", entry.path, why)
    raise unusable(path, skipped)


def why_not(found: Found, rank: int = 0, num_ranks: int = 1) -> str:
    """Why a complete checkpoint cannot be read; empty where it can.

    Args:
        found: A complete checkpoint.
        rank: Ranks compare a share of the files each.
        num_ranks: How many there are.
    """
    assert found.manifest is not None
    try:
        if rank == 0:
            read_tables(found)
        for name in sorted(found.manifest.files)[rank::num_ranks]:
            if checksum_of(found.path / name) != found.manifest.files[name].checksum:
                return f"{name} has other bytes than were written"
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def read_tables(found: Found) -> tuple[Index, dict[str, Any]]:
    """index.json and state.json of a complete checkpoint.

    Raises:
        CheckpointError: One is damaged, or names a file that the checkpoint lacks.
    """
    path, manifest = found.path, found.manifest
    assert manifest is not None
    index = Index.from_json(_read_text(path, INDEX, manifest), str(path / INDEX))
    with untrusted(path, "the tables of a checkpoint"):
        named = {piece.file for tensor in index.tensors.values() for piece in tensor.slices}
        if not named <= manifest.files.keys():
            raise ValueError(f"{INDEX} names {min(named - manifest.files.keys())}, which it lacks")
        state: dict[str, Any] = json.loads(_read_text(path, STATE, manifest))
        optimizer: Any = state.get("optimizer") or {"class": "", "groups": [], "scalars": {}}
        tables: list[Any] = [state["state"], state["extra"]]
        tables += [optimizer["groups"], optimizer["scalars"]]
        kinds = ((dict,), (dict,), (list, dict), (dict,))
        if not all(map(isinstance, tables, kinds)) or not isinstance(optimizer["class"], str):
            raise ValueError(f"{STATE} with other values than fs.save writes")
        if state["step"] != manifest.step:
            raise ValueError(f"step {state['step']} in {STATE} and {manifest.step} in {COMPLETE}")
    return index, state


def _read_text(path: Path, name: str, manifest: Manifest) -> str:
    with untrusted(path / name, "a file of a checkpoint"):
        data = read_regular(path / name)
        facts = manifest.files.get(name)
        if facts is None or xxhash.xxh3_128_hexdigest(data) != facts.checksum:
            raise CheckpointError(
                f"{path / name}: expected the bytes that were written; they differ. "
                "Take another checkpoint."
            )
        return data.decode()
