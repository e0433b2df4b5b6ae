"""Commits a save of many ranks: a reader sees all of it or nothing.

    rank 0                                        rank k
    claim: temporary folder, token    ----------> join: sees the folder, creates a note in it
    writes its files and its note                 writes its files and its note, or its error
    waits for all notes
    index.json, COMPLETE.json, rename
    writes the verdict                ----------> reads it, removes its note

All messages are files, so a background thread can save while the process groups are used by
training. Notes are created with their full size, so that a full disk can still be reported.

[Note: no rename]
In an object store the files of a save are under the checkpoint's own name, in `files-TOKEN/`, and
stay there: COMPLETE.json, which names that folder, is the commit. It replaces an older
COMPLETE.json in one request. The files of the older one are removed afterwards.

[Note: nothing half]
Until its last file is written, a checkpoint is in `.NAME.saving-TOKEN`, which readers skip. An
older checkpoint of the same name is renamed and removed only after the new one is complete. If a
crash interrupts this, the next reader finds the complete one (`retain.py`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.files import Written, sync_folder, write_text
from fullshard.checkpoint.format import (
    COMPLETE,
    FILES,
    INDEX,
    NOTES,
    OLD,
    SAVING,
    FileFacts,
    Index,
    Manifest,
    StoredTensor,
    join_slices,
)
from fullshard.checkpoint.retain import look_at, remove_superseded
from fullshard.checkpoint.storage import StorePath, remove_tree, sizes_in
from fullshard.errors import CheckpointError, cure_of

NOTE_BYTES = 4096
PATIENCE_S = 1800.0  # for slow ranks; the launcher handles dead ones
FAREWELL_S = 10.0
POLL_S = (0.002, 0.1)
POLLS_PER_S = 4000  # of all ranks together: a store answers some thousand requests per second
READERS = 32  # threads that read notes: a store needs tens of milliseconds per note


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths of one save.

    Attributes:
        target: Folder of the checkpoint.
        token: Unique identifier of this save.
    """

    target: Path
    token: str

    @property
    def aside(self) -> Path:
        if isinstance(self.target, StorePath):
            return self.target / f"{FILES}-{self.token}"
        return beside(self.target, SAVING, self.token)

    @property
    def notes(self) -> Path:
        if isinstance(self.target, StorePath):
            return self.target / f"{NOTES}-{self.token}"
        return beside(self.target, NOTES, self.token)

    @property
    def verdict(self) -> Path:
        return self.notes / "verdict"

    def note(self, rank: int) -> Path:
        return self.notes / f"rank-{rank:05d}"

    def record(self, rank: int) -> Path:
        return self.notes / f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class Ranks:
    """The processes that save or load together.

    Attributes:
        rank: This process.
        world_size: Number of processes.
        lead: Collective that calls a function on the first rank only and returns its result on all
            ranks; an error is raised on all.
        agree: Collective that returns a function's result; if it fails on one rank, it raises
            on all.
    """

    rank: int
    world_size: int
    lead: Callable[[Callable[[], Any]], Any]
    agree: Callable[[Callable[[], Any]], Any]


ALONE = Ranks(0, 1, lambda do: do(), lambda do: do())


@dataclass(frozen=True, slots=True)
class Documents:
    """The files and values that the first rank adds to a checkpoint.

    Attributes:
        step: Step of the checkpoint, or None.
        texts: Contents of further files by name.
        tied: Further names of parameters: second name -> first name.
        check: Called before the checkpoint gets its name; raises if it must not.
    """

    step: int | None
    texts: Mapping[str, str]
    tied: Mapping[str, str]
    check: Callable[[], None] = lambda: None


def beside(target: Path, what: str, token: str) -> Path:
    """A hidden folder next to the folder of a checkpoint."""
    return target.with_name(f".{target.name}.{what}-{token}")


def claim(target: Path) -> Paths:
    """Creates the temporary folder of a save. Called on the first rank only.

    Raises:
        CheckpointError: It cannot be made.
    """
    _check_ours(target)
    place = Paths(target, os.urandom(6).hex())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place.notes.mkdir()
        make_note(place.verdict)
        place.aside.mkdir()
    except BaseException as error:
        abandon(place)
        if isinstance(error, OSError):
            raise failure(target, 0, error) from error
        raise
    return place


def _check_ours(target: Path) -> None:
    """Raise CheckpointError if a save would replace files that fullshard did not write."""
    there = look_at(target)
    if there.is_foreign:
        raise CheckpointError(
            f"checkpoint '{target}': expected a new folder, an empty one or a checkpoint of this "
            f"version; it contains other files, which would be lost ({there.why.rstrip('.')}). Use "
            "another folder."
        )


def join(place: Paths, rank: int) -> None:
    """Creates an empty note.

    Raises:
        CheckpointError: This rank does not see the folder that the first rank made.
    """
    try:
        if not _wait_for(place.verdict.exists):  # network file systems show folders late
            raise CheckpointError(
                f"checkpoint '{place.target}': expected a folder that all ranks share; rank {rank} "
                "does not see what rank 0 created there. Use a folder on a shared file system."
            )
        make_note(place.note(rank))
    except OSError as error:
        raise failure(place.target, rank, error) from error


def report(place: Paths, rank: int, outcome: Sequence[Written] | CheckpointError) -> None:
    """Write the note of this rank: its files, or its error."""
    if isinstance(outcome, CheckpointError):
        fill_note(place.note(rank), str(outcome))
        return
    try:
        files = {written.name: [written.facts.size, written.facts.checksum] for written in outcome}
        tensors = {key: tensor for written in outcome for key, tensor in written.tensors.items()}
        index = Index(world_size=0, tensors=tensors).to_json()
        write_text(place.record(rank), json.dumps({"files": files, "index": index}))
        fill_note(place.note(rank), "")
    except OSError as error:
        fill_note(place.note(rank), str(failure(place.target, rank, error)))


def conclude(place: Paths, world_size: int, documents: Documents) -> None:
    """Waits for all ranks, then completes the checkpoint. Called on the first rank only.

    Raises:
        CheckpointError: A rank could not write; the save is removed.
    """
    try:
        said = _at_once(lambda rank: _read_note(place.note(rank), place.target), world_size)
        wrong = next((text for text in said if text), None)
        if wrong is not None:
            raise CheckpointError(wrong)
        _complete(place, world_size, documents)
    except BaseException as error:
        known = failure(place.target, 0, error)
        discard(place)
        fill_note(place.verdict, str(known))
        if not isinstance(error, Exception):
            raise
        raise known from error
    else:
        fill_note(place.verdict, "")
    finally:
        with suppress(OSError):  # the verdict is known
            _wait_for(lambda: _is_over(place))
            place.note(0).unlink(missing_ok=True)


def await_verdict(place: Paths, rank: int, world_size: int = 1) -> None:
    """Waits until the first rank has completed the checkpoint.

    A rank that was stopped for longer than the first rank waits for farewells still finds the
    verdict: after the first rank has finished, the last one to finish removes it.

    Raises:
        CheckpointError: The first rank could not complete it.
    """
    try:
        text = _read_note(place.verdict, place.target, world_size / POLLS_PER_S)
    finally:
        with suppress(OSError):
            place.note(rank).unlink(missing_ok=True)
            if not place.note(0).exists():
                _is_over(place)
    if text:
        raise CheckpointError(text)


def abandon(place: Paths) -> None:
    """Removes the files of a save that will not be finished."""
    discard(place)
    remove_tree(place.notes)


def discard(place: Paths) -> None:
    """Removes the files of a save that was not committed."""
    if isinstance(place.target, StorePath):
        try:  # a request that failed or was interrupted may have been carried out
            if f'"{place.aside.name}"' in (place.target / COMPLETE).read_text():
                return
        except FileNotFoundError:
            pass
        except OSError:  # the next save there removes them
            return
    remove_tree(place.aside)


def failure(target: Path, rank: int, error: BaseException) -> CheckpointError:
    """Converts an error of a rank into a CheckpointError."""
    if isinstance(error, CheckpointError):
        return error
    what = f"{type(error).__name__}: {error}"
    cure = cure_of(error, "Make room, correct the path or its permissions")
    if isinstance(error, OSError):
        what = f"{error.strerror or error} ({error.filename or target})"
    return CheckpointError(
        f"checkpoint '{target}': expected to write it; rank {rank} could not: {what}. Earlier "
        f"complete checkpoints are untouched. {cure}, or use another folder."
    )


def _complete(place: Paths, world_size: int, documents: Documents) -> None:
    files: dict[str, FileFacts] = {}
    tensors: list[tuple[str, StoredTensor]] = []
    for text in _at_once(lambda rank: place.record(rank).read_text(), world_size):
        record: Any = json.loads(text)
        files |= {name: FileFacts(*facts) for name, facts in record["files"].items()}
        tensors += Index.from_json(record["index"], "a rank's record", whole=False).tensors.items()
    index = join_slices(tensors, documents.tied, world_size)
    for name, text in {**documents.texts, INDEX: index.to_json()}.items():
        files[name] = write_text(place.aside / name, text)
    sync_folder(place.aside)
    documents.check()
    if isinstance(place.target, StorePath):
        _commit_in_store(place, Manifest(documents.step, files, place.aside.name))
        return
    _check_ours(place.target)  # it may have appeared since the save began
    write_text(place.aside / COMPLETE, Manifest(documents.step, files).to_json())
    sync_folder(place.aside)
    if world_size == 1:  # no rank waits for a verdict, and no later save may remove it
        remove_tree(place.notes)
    put_in_place(place)


def _commit_in_store(place: Paths, manifest: Manifest) -> None:
    """See [Note: no rename].

    Raises:
        CheckpointError: Objects are missing, which another save removed.
    """
    sizes = sizes_in(place.aside)
    if any(sizes.get(name) != facts.size for name, facts in manifest.files.items()):
        raise CheckpointError(
            f"checkpoint '{place.target}': expected all files that its ranks wrote; another save "
            "removed some. Only one run at a time may save there."
        )
    write_text(place.target / COMPLETE, manifest.to_json())
    remove_superseded(place.target, place.aside.name, place.notes.name)


def _at_once(read: Callable[[int], str], world_size: int) -> list[str]:
    """Results of reading each rank's note; after an error here, waiting readers find no notes."""
    pool = ThreadPoolExecutor(min(READERS, world_size), "fullshard-notes")
    try:
        return list(pool.map(read, range(world_size)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def put_in_place(place: Paths) -> None:
    """Renames the temporary folder; removes an older folder of that name afterwards."""
    old = beside(place.target, OLD, place.token)
    if place.target.exists():
        remove_tree(old)  # a kill left it
        place.target.rename(old)
    try:
        place.aside.rename(place.target)
    except OSError:
        if old.exists():
            old.rename(place.target)
        raise
    sync_folder(place.target.parent)
    remove_tree(old)


def make_note(path: Path) -> None:
    """Creates an empty note of full size."""
    if isinstance(path, StorePath):
        path.write_bytes(b" ")
        return
    with path.open("xb") as file:
        file.write(b" " * NOTE_BYTES)


def fill_note(path: Path, error: str) -> None:
    """Writes a note; `error` is empty on success. Ignores a note that was removed."""
    text = json.dumps({"error": error[: NOTE_BYTES // 8]}).encode()
    if isinstance(path, StorePath):
        if path.exists():
            path.write_bytes(text)
        return
    with suppress(FileNotFoundError), path.open("r+b") as file:
        file.write(text.ljust(NOTE_BYTES))


def _read_note(path: Path, target: Path, least_s: float = 0.0) -> str:
    """Waits until a note is written; returns its error, or an empty text.

    Args:
        path: The note.
        target: The checkpoint, for errors.
        least_s: Pause between two looks, once it has grown.
    """
    deadline, pause = time.monotonic() + PATIENCE_S, POLL_S[0]
    while time.monotonic() < deadline:
        try:
            text = path.read_bytes().strip()
        except FileNotFoundError:
            return (
                f"checkpoint '{target}': expected all ranks to save; another save or a user "
                "removed the temporary files of this save."
            )
        if text:
            with suppress(ValueError):  # half a note: look again
                return json.loads(text)["error"]
        time.sleep(pause)
        pause = min(2 * pause, max(POLL_S[1], least_s))
    return (
        f"checkpoint '{target}': expected every rank to write within {PATIENCE_S:g} s; {path.name} "
        "did not. The previous checkpoint is untouched."
    )


def _is_over(place: Paths) -> bool:
    """Whether no rank but the first needs the verdict any longer; it is removed then."""
    if any(note != place.note(0) for note in place.notes.glob("rank-?????")):
        return False
    remove_tree(place.notes)
    return not place.notes.exists()


def _wait_for(condition: Callable[[], bool]) -> bool:
    """Waits a while for a condition; returns whether it is met."""
    deadline, pause = time.monotonic() + FAREWELL_S, POLL_S[0]
    while not (is_met := condition()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, POLL_S[1])
    return is_met
