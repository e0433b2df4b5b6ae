"""A save over many ranks, of which a reader sees all or nothing.

    rank 0                                        rank k
    claim: folder aside, a token      ----------> join: sees the folder, leaves a note in it
    writes its files, notes "written"             writes its files, notes "written" or its error
    waits for all notes
    index.json, COMPLETE.json, rename
    leaves the verdict                ----------> reads it, takes its note away

Everything goes through the file system, so a background thread may do it while the ranks' groups
are busy with training. Notes have their space from the beginning: a full disk can still say so.

[Note: nothing half]
Until its last file is there, a checkpoint lies in `.NAME.saving-TOKEN`, which no reader opens. A
checkpoint of that name from before is moved aside and removed only once the new one stands; where
a crash falls between these two, the next reader finds the one that is complete (`retain.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullshard.checkpoint.files import Written, sync_folder, write_text
from fullshard.checkpoint.format import (
    COMPLETE,
    INDEX,
    STATE,
    FileFacts,
    Manifest,
    StoredSlice,
    StoredTensor,
    join_slices,
)
from fullshard.errors import CheckpointError, PreemptedError

NOTE_BYTES = 4096
PATIENCE_S = 1800.0  # for ranks that are alive but slow; dead ones are the launcher's affair
FAREWELL_S = 10.0
POLL_S = (0.002, 0.1)
SAVING, OLD, NOTES = "saving", "old", "notes"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one save happens.

    Attributes:
        target: The checkpoint's folder.
        token: Tells this save from all others.
    """

    target: Path
    token: str

    @property
    def aside(self) -> Path:
        return beside(self.target, SAVING, self.token)

    @property
    def notes(self) -> Path:
        return beside(self.target, NOTES, self.token)

    @property
    def verdict(self) -> Path:
        return self.notes / "verdict"

    def note(self, rank: int) -> Path:
        return self.notes / f"rank-{rank:05d}"

    def record(self, rank: int) -> Path:
        return self.notes / f"rank-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class Documents:
    """What the first rank adds to a checkpoint.

    Attributes:
        step: Its step; None where it has none.
        texts: Files by name.
        tied: Further names of parameters: second name -> first name.
    """

    step: int | None
    texts: Mapping[str, str]
    tied: Mapping[str, str]


def beside(target: Path, what: str, token: str) -> Path:
    """The hidden neighbour of a checkpoint's folder."""
    return target.with_name(f".{target.name}.{what}-{token}")


def claim(target: Path) -> Place:
    """Make the folder of a save. On the first rank alone.

    Raises:
        CheckpointError: It cannot be made.
    """
    is_other = target.exists() and not (target / COMPLETE).is_file()
    remains = all((target / name).is_file() for name in (INDEX, STATE))  # a copy without its end
    if is_other and not remains and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"checkpoint '{target}': expected a new folder, an empty one or a checkpoint; it "
            "holds something else, which would be lost. Name another folder."
        )
    place = Place(target, os.urandom(6).hex())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        place.notes.mkdir()
        _make_note(place.verdict)
        place.aside.mkdir()
    except OSError as error:
        abandon(place)
        raise failure(target, 0, error) from error
    return place


def join(place: Place, rank: int) -> None:
    """Leave an empty note.

    Raises:
        CheckpointError: This rank does not see the folder that the first rank made.
    """
    try:
        deadline = time.monotonic() + FAREWELL_S  # network file systems show folders late
        while not place.notes.is_dir() and time.monotonic() < deadline:
            time.sleep(POLL_S[1])
        if not place.notes.is_dir():
            raise CheckpointError(
                f"checkpoint '{place.target}': expected a folder that all ranks share; rank {rank} "
                "does not see what rank 0 made there. Name a folder on a shared file system."
            )
        _make_note(place.note(rank))
    except OSError as error:
        raise failure(place.target, rank, error) from error


def report(place: Place, rank: int, outcome: Sequence[Written] | CheckpointError) -> None:
    """Tell the first rank what this one wrote, or why not."""
    if isinstance(outcome, CheckpointError):
        _fill_note(place.note(rank), str(outcome))
        return
    try:
        record = [asdict(written) for written in outcome]
        write_text(place.record(rank), json.dumps(record))
        _fill_note(place.note(rank), "")
    except OSError as error:
        _fill_note(place.note(rank), str(failure(place.target, rank, error)))


def conclude(place: Place, world_size: int, documents: Documents) -> None:
    """Wait for all ranks, then make the checkpoint complete. On the first rank alone.

    Raises:
        CheckpointError: Some rank could not write; nothing of this save is left.
    """
    try:
        said = [_read_note(place.note(rank), place.target) for rank in range(world_size)]
        wrong = next((text for text in said if text), None)
        if wrong is not None:
            raise CheckpointError(wrong)
        _complete(place, world_size, documents)
    except Exception as error:
        known = failure(place.target, 0, error)
        shutil.rmtree(place.aside, ignore_errors=True)
        _fill_note(place.verdict, str(known))
        if isinstance(error, PreemptedError):
            raise
        raise known from error
    else:
        _fill_note(place.verdict, "")
    finally:
        place.note(0).unlink(missing_ok=True)
        _await_farewells(place, world_size)
        shutil.rmtree(place.notes, ignore_errors=True)


def await_verdict(place: Place, rank: int) -> None:
    """Return when the first rank has made the checkpoint complete.

    Raises:
        CheckpointError: It has not.
    """
    try:
        text = _read_note(place.verdict, place.target)
    finally:
        place.note(rank).unlink(missing_ok=True)
    if text:
        raise CheckpointError(text)


def abandon(place: Place) -> None:
    """Take away what a save that will not be finished has left."""
    for folder in (place.aside, place.notes):
        shutil.rmtree(folder, ignore_errors=True)


def failure(target: Path, rank: int, error: BaseException) -> CheckpointError:
    """What went wrong on a rank, as an error of ours."""
    if isinstance(error, CheckpointError):
        return error
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError):
        what = f"{error.strerror or error} ({error.filename or target})"
    return CheckpointError(
        f"checkpoint '{target}': expected to write it; rank {rank} could not: {what}. Checkpoints "
        "that were complete before are untouched. Make room, or name another folder."
    )


def _complete(place: Place, world_size: int, documents: Documents) -> None:
    files: dict[str, FileFacts] = {}
    tensors: list[tuple[str, StoredTensor]] = []
    for rank in range(world_size):
        for written in _read_record(place.record(rank)):
            tensors += written.tensors.items()
            names = {piece.file for t in written.tensors.values() for piece in t.slices}
            files |= dict.fromkeys(names, written.facts)
    index = join_slices(tensors, documents.tied, world_size)
    for name, text in {**documents.texts, INDEX: index.to_json()}.items():
        files[name] = write_text(place.aside / name, text)
    sync_folder(place.aside)
    write_text(place.aside / COMPLETE, Manifest(documents.step, files).to_json())
    sync_folder(place.aside)
    _put_in_place(place)


def _put_in_place(place: Place) -> None:
    """Rename; a folder of that name from before goes away afterwards."""
    old = beside(place.target, OLD, place.token)
    if place.target.exists():
        place.target.rename(old)
    try:
        place.aside.rename(place.target)
    except OSError:
        if old.exists():
            old.rename(place.target)
        raise
    sync_folder(place.target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _read_record(path: Path) -> list[Written]:
    record: list[Any] = json.loads(path.read_text())
    return [
        Written(
            FileFacts(**entry["facts"]),
            {
                key: StoredTensor(
                    tensor["dtype"],
                    tuple(tensor["shape"]),
                    tuple(StoredSlice(**piece) for piece in tensor["slices"]),
                )
                for key, tensor in entry["tensors"].items()
            },
        )
        for entry in record
    ]


def _make_note(path: Path) -> None:
    """An empty note that needs no more space when it is filled."""
    with path.open("xb") as file:
        file.write(b" " * NOTE_BYTES)


def _fill_note(path: Path, error: str) -> None:
    """`error` is empty where all is well. A note that is gone was given up."""
    text = json.dumps({"error": error[: NOTE_BYTES // 8]}).encode()
    with suppress(FileNotFoundError), path.open("r+b") as file:
        file.write(text.ljust(NOTE_BYTES))


def _read_note(path: Path, target: Path) -> str:
    """Wait until a note is filled; returns its error, or an empty text."""
    deadline, pause = time.monotonic() + PATIENCE_S, POLL_S[0]
    while time.monotonic() < deadline:
        try:
            text = path.read_bytes().strip()
        except FileNotFoundError:
            return (
                f"checkpoint '{target}': expected all ranks to save; another save ended this one."
            )
        if text:
            with suppress(ValueError):  # half a note: look again
                return json.loads(text)["error"]
        time.sleep(pause)
        pause = min(2 * pause, POLL_S[1])
    return (
        f"checkpoint '{target}': expected every rank to write within {PATIENCE_S:g} s; "
        f"{path.name} did not. The checkpoint before this one stands."
    )


def _await_farewells(place: Place, world_size: int) -> None:
    """The other ranks have read the verdict once their notes are gone."""
    deadline = time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline:
        if not any(place.note(rank).exists() for rank in range(1, world_size)):
            return
        time.sleep(POLL_S[0])
