"""Reads any range of any tensor of a checkpoint, independent of the slices in its files.

wanted           |<--------- [start, stop) -------->|
slices   |-- file 0 --|-- file 1 --|------ file 2 ------|-- file 3 --|
read              |###|############|################|
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from os.path import lexists
from pathlib import Path
from typing import Any

import xxhash

from fullshard.checkpoint.commit import Ranks
from fullshard.checkpoint.files import TensorFile, checksum_of
from fullshard.checkpoint.format import (
    COMPLETE,
    INDEX,
    ITEMSIZE,
    OLD,
    STATE,
    GetTensor,
    Index,
    Kind,
    Manifest,
    StoredSlice,
    decode,
    kind_of,
    name_in_file,
)
from fullshard.checkpoint.retain import (
    Found,
    candidates,
    check_passed,
    checkpoints_in,
    look_at,
    unusable,
)
from fullshard.checkpoint.storage import StorePath, does_not_answer, read_file, remove_tree
from fullshard.errors import CheckpointError, EngineError, untrusted

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, open for reading.

    Attributes:
        path: Folder of the checkpoint.
        manifest: Its files.
        index: Its tensors.
        state: Content of state.json.
        bytes_read: List with one element: the number of bytes of tensors read so far.
        checked: Whether the checksums of all files were compared; else `read` compares slices.
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
        """Reads the index.

        Args:
            found: The checkpoint.
            checked: Whether the caller has compared all checksums.

        Raises:
            CheckpointError: The checkpoint is not complete, or its index is damaged; at the end of
                the block: it was removed or replaced while it was read.
        """
        path = found.path
        if found.manifest is None:
            raise CheckpointError(
                f"checkpoint '{path}': expected a complete one; {found.why}. Use an older one."
            )
        try:
            index, state = read_tables(found)
            with ExitStack() as closing:
                yield cls(path, found.manifest, index, state, checked=checked, _closing=closing)
            check_stays(found)
        except CheckpointError as error:
            if path.exists():
                raise CheckpointError(_replaced(found) or str(error)) from error
            raise CheckpointError(
                f"checkpoint '{path}': expected it to exist while it is read; it was removed, "
                "maybe by its run (training.save_total_limit). Start again, or read a copy."
            ) from error

    def text(self, name: str) -> str | None:
        """Content of a text file of the checkpoint; None if there is no such file."""
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
        """Fills `out` with elements [start, stop) of a tensor, in its stored dtype.

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
            file = self._file(piece.file, key)
            file.read(name, (start - piece.start) * size, out[:count])
            if not self.checked:
                is_whole = count == (piece.stop - piece.start) * size
                self._compare(key, piece, out[:count] if is_whole else file.whole(name))
            self.bytes_read[0] += count
            out, start, at = out[count:], end, at + 1

    def read_own(
        self, key: str, rank: int, held: tuple[int, int] | None = None
    ) -> tuple[tuple[int, ...], bytearray] | None:
        """Shape and bytes of an opaque tensor as one rank wrote it; None if the rank wrote none.

        Args:
            key: Key of the tensor.
            rank: Rank that wrote it.
            held: Range of the parameter that the rank must have owned, if it has a parameter.

        Raises:
            CheckpointError: The rank owned another range.
        """
        for piece in self.index.tensors[key].slices:
            if piece.rank == rank:
                if held not in (None, (piece.start, piece.stop)):
                    raise CheckpointError(
                        f"{self.path}: expected the same strategy, because {key} belongs to "
                        f"elements {piece.start:,} to {piece.stop:,} of its parameter and cannot "
                        f"be resharded; this rank has {held}. Load under the old strategy."
                    )
                name = name_in_file(key)
                file = self._file(piece.file, key)
                data = file.whole(name)
                self._compare(key, piece, data)
                return file.entries[name][1], data
        return None

    def damaged_tensors(self, file: str) -> list[str]:
        """Keys of tensors whose slices in a file are damaged."""
        tensors, wrong = self.index.tensors.items(), list[str]()
        for key, piece in [(k, p) for k, t in tensors for p in t.slices if p.file == file]:
            name = name_in_file(key)
            data = self._file(file, key).whole(name)
            if xxhash.xxh3_128_hexdigest(data) != piece.checksum:
                wrong.append(key)
        return wrong

    def _compare(self, key: str, piece: StoredSlice, data: memoryview | bytearray) -> None:
        """Compares the checksum of a slice."""
        if xxhash.xxh3_128_hexdigest(data) != piece.checksum:
            raise CheckpointError(
                f"{self.path / piece.file}: expected the bytes of {key} that were written; they "
                "differ. Use another checkpoint; `fullshard ckpt verify` shows all damage."
            )

    def _file(self, name: str, key: str) -> TensorFile:
        if name not in self._files:
            opened = TensorFile.open(self.path / self.manifest.folder / name)
            self._files[name] = self._closing.enter_context(opened)
        dtype = self.index.tensors[key].dtype
        if self._files[name].entries.get(name_in_file(key), ("",))[0] != dtype:
            raise CheckpointError(
                f"{self.path / name}: expected a slice of {key} in {dtype}; there is none. Use "
                "another checkpoint."
            )
        return self._files[name]


def check_stays(found: Found) -> None:
    """Raises CheckpointError if a checkpoint was removed or replaced since it was found."""
    if why := _replaced(found, stays=True):
        raise CheckpointError(why)


def _replaced(found: Found, *, stays: bool = False) -> str:
    """The error if another save took a checkpoint's place while it was read, else an empty text.

    Files of two saves would be read as one. In a store each save has its own names.

    Args:
        found: The checkpoint as it was found.
        stays: It must still be complete, because another save may be about to replace it.
    """
    now = found if isinstance(found.path, StorePath) else look_at(found.path)
    if now.manifest == found.manifest or (now.manifest is None and not stays):
        return ""
    changed = f"it was removed or changed ({now.why})"
    what = changed if now.manifest is None else "another save replaced it"
    return (
        f"checkpoint '{found.path}': expected it to stay unchanged while it is read; {what}. Read "
        "it again; save with step= to keep older ones."
    )


def choose(ranks: Ranks, path: Path, *, whole: bool = True) -> Found:
    """The newest complete and undamaged checkpoint, the same on all ranks. A collective.

    Each rank compares the checksums of a share of the files.

    Args:
        ranks: The processes that load together.
        path: A checkpoint, or a folder of checkpoints.
        whole: Compare the checksums of all files, not only of the tables.

    Raises:
        CheckpointError: There is none; names skipped checkpoints and the reasons.
    """
    skipped: list[str] = []
    found: list[Found] = []  # of the first rank; sent one at a time, because a manifest is large

    def look() -> int:
        found.extend(candidates(path))
        return len(found)

    num_found = ranks.lead(look)
    for at in range(num_found):
        entry: Found = ranks.lead(partial(found.__getitem__, at))
        check_passed([entry], None)
        try:
            ranks.agree(partial(_check, entry, ranks, whole=whole))
            return entry
        except CheckpointError as error:
            skipped.append(f"{entry.path.name}: {error}")
            if ranks.rank == 0 and num_found > 1:
                logger.warning("skipped checkpoint %s: %s", entry.path, error)
    if ranks.lead(lambda: any(map(_has_gone, found))):
        return choose(ranks, path, whole=whole)
    raise unusable(path, skipped)


def _check(entry: Found, ranks: Ranks, *, whole: bool) -> None:
    """Raise CheckpointError if a checkpoint cannot be read; each rank reads a share of it."""
    why = entry.why or why_not(entry, ranks.rank, ranks.world_size * whole)
    if why:
        raise CheckpointError(why)


def _has_gone(found: Found) -> bool:
    """Whether a live run has renamed or removed a folder, so that one must look again."""
    return not isinstance(found.path, StorePath) and not lexists(found.path)


def why_not(found: Found, rank: int = 0, num_ranks: int = 1) -> str:
    """Why a complete checkpoint cannot be read; empty if it can.

    Args:
        found: A complete checkpoint.
        rank: This rank, which compares a share of the files.
        num_ranks: Number of ranks; 0: only the tables are read.
    """
    assert found.manifest is not None
    try:
        if rank == 0:
            read_tables(found)
        for name in sorted(found.manifest.files)[rank::num_ranks] if num_ranks else ():
            if checksum_of(found.files / name) != found.manifest.files[name].checksum:
                return _replaced(found) or f"{name} has other bytes than were written"
    except (OSError, CheckpointError) as error:
        if does_not_answer(found.path, error):
            raise EngineError(
                f"checkpoint: expected to read '{found.path}', got no response from its store: "
                f"{error}. It may be undamaged; start again."
            ) from error
        return _replaced(found) or str(error)
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
        optimizer: Any = state.get("optimizer")
        if optimizer is None:
            optimizer = {"class": "", "groups": [], "scalars": {}}
        tables: list[Any] = [state["state"], state["extra"]]
        tables += [optimizer["groups"], optimizer["scalars"]]
        kinds = ((dict,), (dict,), (list, dict), (dict,))
        if not all(map(isinstance, tables, kinds)) or not isinstance(optimizer["class"], str):
            raise ValueError(f"{STATE} with values that fs.save does not write")
        if state["step"] != manifest.step:
            raise ValueError(f"step {state['step']} in {STATE} and {manifest.step} in {COMPLETE}")
    return index, state


def _read_text(path: Path, name: str, manifest: Manifest) -> str:
    path = path / manifest.folder
    with untrusted(path / name, "a file of a checkpoint"):
        data = read_file(path / name)
        facts = manifest.files.get(name)
        if facts is None or xxhash.xxh3_128_hexdigest(data) != facts.checksum:
            raise CheckpointError(
                f"{path / name}: expected the bytes that were written; they differ. Use another "
                "checkpoint."
            )
        return data.decode()


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged file.

    Attributes:
        file: Name of the file.
        why: Description of the damage.
        tensors: Keys of its damaged tensors; empty if the damage is elsewhere.
    """

    file: str
    why: str
    tensors: list[str]


def find_damage(found: Found, on_bytes: Callable[[int], None]) -> list[Damage]:
    """Reads every byte of a complete checkpoint; `on_bytes` is called with the bytes read.

    Raises:
        CheckpointError: The index itself is damaged, or the checkpoint is not complete.
    """
    damages: list[Damage] = []
    with Checkpoint.open(found) as checkpoint:
        for name, facts in sorted(checkpoint.manifest.files.items()):
            why, tensors = "its bytes differ from those that were written", list[str]()
            try:
                if checksum_of(found.files / name, on_bytes) == facts.checksum:
                    continue
                tensors = checkpoint.damaged_tensors(name)
            except OSError as error:  # a sector that the disk cannot read
                why, tensors = error.strerror or str(error), _keys_in(checkpoint.index, name)
            except CheckpointError:  # the table at its beginning
                why = "its header differs from what was written"
                tensors = _keys_in(checkpoint.index, name)
            damages.append(Damage(name, why, tensors))
        if damages and not found.path.exists():
            raise CheckpointError(damages[0].why)  # `open` reports that the checkpoint was removed
    return damages


def superfluous(folder: Path, keep: int, newest: int | None = None) -> list[Found]:
    """All complete checkpoints except the newest `keep`, and leftovers of interrupted saves.

    A save in progress is newer than any complete checkpoint, and is kept. Damaged checkpoints and
    folders that are not our checkpoints are kept too, and do not count.

    Args:
        folder: Folder of the step-* folders.
        keep: Number to keep, at least 1: the last good checkpoint is never removed.
        newest: Step that was just written: it is known to be undamaged, so no other is read. Later
            steps (damaged, or of a run that resumed from an earlier step) do not count.

    Raises:
        CheckpointError: All are damaged.
    """
    assert keep >= 1, keep
    found = checkpoints_in(folder)
    most = float("inf") if newest is None else newest
    complete = [one for one in found if one.manifest is not None and (one.step or 0) <= most]
    kept: list[Found] = []
    going: list[Found] = []
    damaged: list[str] = []
    for entry in complete:
        is_known = newest is not None and (kept or entry.step == newest)
        if len(kept) == keep:
            going.append(entry)
        elif is_known or not (why := why_not(entry)):
            kept.append(entry)
        elif _has_gone(entry):
            return superfluous(folder, keep, newest)
        else:
            damaged.append(f"{entry.path.name}: {why}")
            logger.warning("%s stays, but does not count: %s", entry.path, why)
    if damaged and not kept:
        raise unusable(folder, damaged)
    last = kept[0].step or 0 if kept else -1
    return going + [entry for entry in found if entry.is_leftover and (entry.step or 0) <= last]


def remove(found: Sequence[Found]) -> None:
    """Removes checkpoints. Of a link, only the link is removed.

    Raises:
        CheckpointError: The file system refused.
    """
    for entry in found:
        # Renamed first, so that no reader mistakes half a folder for a damaged checkpoint; a
        # leftover keeps its name, by which readers, `ckpt ls` and the next save know it.
        name = entry.path.name
        going = entry.path.with_name(name if name.startswith(".") else f".{name}.{OLD}-0")
        with untrusted(entry.path, "to remove a checkpoint", advice="The others are untouched."):
            if entry.path.is_symlink():
                entry.path.unlink()
            elif isinstance(entry.path, StorePath):
                (entry.path / COMPLETE).unlink(missing_ok=True)  # first, for the same reason
                remove_tree(entry.path)
            else:
                remove_tree(going)
                with suppress(FileNotFoundError):  # a run or `ckpt prune` has removed it, too
                    entry.path.rename(going)
                remove_tree(going)


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """All facts about a checkpoint except tensor values, as JSON."""
    index, state = checkpoint.index, checkpoint.state
    optimizer = state.get("optimizer")
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.manifest.step,
        "world_size": index.world_size,
        "num_bytes": sum(facts.size for facts in checkpoint.manifest.files.values()),
        "num_parameters_and_buffers": sum(
            tensor.numel for key, tensor in index.tensors.items() if kind_of(key) is Kind.MODEL
        ),
        "files": {name: facts.size for name, facts in sorted(checkpoint.manifest.files.items())},
        "tied": dict(index.tied),
        "optimizer": None if optimizer is None else optimizer["class"],
        "optimizer_states": _states_of(checkpoint),
        "position": state["state"].get("position"),
        "saved_beside": sorted(state["state"]),
        "tensors": [
            {
                "name": name_in_file(key),
                "kind": kind_of(key),
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "num_slices": len(tensor.slices),
                "num_bytes": _num_bytes(index, key),
                "opaque": tensor.opaque,
            }
            for key, tensor in index.tensors.items()
        ],
    }


def _states_of(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """One row for each kind of optimizer state, summed over parameters."""
    rows: dict[str, dict[str, Any]] = {}
    for key, tensor in checkpoint.index.tensors.items():
        if kind_of(key) is not Kind.OPTIMIZER:
            continue
        state = key.rpartition("/")[2]
        first = {"name": state, "dtype": tensor.dtype, "num_tensors": 0, "num_bytes": 0}
        row = rows.setdefault(state, {**first, "opaque": tensor.opaque})
        row["num_tensors"] += 1
        row["num_bytes"] += _num_bytes(checkpoint.index, key)
    optimizer: dict[str, Any] = checkpoint.state.get("optimizer") or {}
    scalars: dict[str, dict[str, Any]] = optimizer.get("scalars", {})
    for states in scalars.values():
        for state in states:
            first = {"name": state, "dtype": "scalar", "num_tensors": 0, "num_bytes": 0}
            rows.setdefault(state, {**first, "opaque": False})["num_tensors"] += 1
    return list(rows.values())


def _num_bytes(index: Index, key: str) -> int:
    tensor = index.tensors[key]
    return sum(piece.stop - piece.start for piece in tensor.slices) * ITEMSIZE[tensor.dtype]


def _keys_in(index: Index, file: str) -> list[str]:
    return [key for key, t in index.tensors.items() if any(p.file == file for p in t.slices)]
