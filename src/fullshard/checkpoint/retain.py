"""Finds the checkpoints of a folder: the newest complete one, and which are skipped and why.

checkpoints/
  step-00000050/     complete
  step-00000100/     complete                 <- a restart loads this one
  .step-00000150.saving-3f2a/                 a crash ended it: skipped
  step-00000150/files-3f2a/                   the same in an object store: no COMPLETE.json
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from os.path import realpath
from pathlib import Path
from shlex import quote

from fullshard.checkpoint.format import (
    COMPLETE,
    FILES,
    INDEX,
    NOTES,
    OLD,
    SAVING,
    STATE,
    ForeignError,
    Manifest,
)
from fullshard.checkpoint.storage import (
    StorePath,
    does_not_answer,
    read_file,
    remove_tree,
    sizes_in,
    storage_path,
)
from fullshard.config.regular_files import did_you_mean_path
from fullshard.config.values import nearest
from fullshard.errors import CheckpointError, ConfigError, untrusted

logger = logging.getLogger(__name__)

_BEGIN_ANEW = "`fullshard train --resume never` moves this run aside and starts again."

IN_RUN = "checkpoints"  # where a run's folder has them
ELSEWHERE = "checkpoints.txt"  # names another place, where there is one (training.checkpoint_dir)

LOOKS = 20  # at a folder whose names change meanwhile

_INTERRUPTED = (
    "a crash or a kill interrupted its save or removal; a later save there, or `fullshard ckpt "
    "prune`, removes it"
)
_STEP = re.compile(r"step-(\d+)")
_LEFT = re.compile(rf"\.(.+)\.({SAVING}|{OLD}|{NOTES})-[0-9a-f]+")
_IN_STORE = re.compile(rf"{COMPLETE}|({FILES}|{NOTES})-[0-9a-f]{{12}}")


@dataclass(frozen=True, slots=True)
class Found:
    """A folder that is, or should be, a checkpoint.

    Attributes:
        path: Folder of the checkpoint.
        step: Step in its name; None if the name contains none.
        manifest: Its COMPLETE.json; None if it is not complete.
        why: Why it is not complete.
        is_foreign: Whether a later version or another program wrote it: it is neither read,
            replaced nor removed.
        is_unfinished: Whether it is a name in a store under which no save was completed.
    """

    path: Path
    step: int | None
    manifest: Manifest | None
    why: str = ""
    is_foreign: bool = False
    is_unfinished: bool = False

    @property
    def files(self) -> Path:
        """Folder of the checkpoint's files."""
        return self.path / (self.manifest.folder if self.manifest else "")

    @property
    def is_leftover(self) -> bool:
        """Whether it is the leftover of an interrupted save."""
        hidden = self.path.name.startswith(".") or self.is_unfinished
        return self.manifest is None and not self.is_foreign and hidden

    @property
    def num_bytes(self) -> int:
        """Bytes of its files, also if it is not complete; 0 if they cannot be listed."""
        if self.manifest is not None:
            return sum(f.size for f in self.manifest.files.values())
        with suppress(OSError):
            return sum(sizes_in(self.path).values())
        return 0


def look_at(path: Path) -> Found:
    """Examines one folder. Compares sizes, but not checksums."""
    path = storage_path(path)
    match = _STEP.search(path.name)
    step = int(match[1]) if match else None
    last = path / COMPLETE
    try:
        manifest = Manifest.from_json(read_file(last), str(last))
    except ForeignError as error:
        return Found(path, step, None, str(error), is_foreign=True)
    except (OSError, CheckpointError) as error:
        if does_not_answer(path, error):
            raise  # the folder's contents are unknown
        missing = isinstance(error, FileNotFoundError)
        why = f"it has no {COMPLETE}, so its save never finished" if missing else str(error)
        other = _files_of_others(path)
        unfinished = missing and isinstance(path, StorePath)
        return Found(path, step, None, other or why, bool(other), unfinished)
    try:
        sizes = sizes_in(path / manifest.folder)
    except OSError as error:
        return Found(path, step, None, f"{manifest.folder or path.name}: {error.strerror}")
    for name, facts in manifest.files.items():
        if sizes.get(name) != facts.size:
            why = f"{name} has {sizes[name]:,} bytes of {facts.size:,}" if name in sizes else ""
            return Found(path, step, None, why or f"{name}: {os.strerror(errno.ENOENT)}")
    return Found(path, step if manifest.step is None else manifest.step, manifest)


def _files_of_others(path: Path) -> str:
    """Describe the files in a folder without a readable COMPLETE.json that no save of ours left."""
    if _LEFT.fullmatch(path.name) or all((path / name).is_file() for name in (INDEX, STATE)):
        return ""
    with suppress(OSError):  # what cannot be listed is not replaced either
        names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else [path.name]
        if isinstance(path, StorePath) and names and all(map(_IN_STORE.fullmatch, names)):
            return ""
        if path.exists() and names:
            return f"it contains {names[0]}, but no {INDEX} and {STATE} of a checkpoint"
    return ""


def steps_folder(path: Path) -> Path:
    """The folder of step-* folders: this one, or that of a run."""
    path = storage_path(path)
    in_run = checkpoints_of(path)
    return in_run if in_run.is_dir() else path


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints, which is elsewhere with training.checkpoint_dir."""
    link = run / ELSEWHERE
    if isinstance(run, StorePath) or not link.is_file():
        return run / IN_RUN
    return storage_path(read_file(link).decode().strip())


def checkpoints_in(folder: Path) -> list[Found]:
    """All checkpoints of a folder, the newest first, also those that are not complete.

    A link to another entry is that entry under one more name, and is not listed. If a live run
    renames folders meanwhile, they are looked at again: each of them may have been passed over.
    """
    folder = steps_folder(folder)
    if not folder.is_dir():
        return []
    found: list[Found] = []
    for _ in range(LOOKS):
        found = _found_in(folder, names := _names_in(folder))
        if isinstance(folder, StorePath) or names == _names_in(folder):
            break
    return sorted(found, key=lambda f: (f.step or -1, f.path.name), reverse=True)


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _found_in(folder: Path, names: set[str]) -> list[Found]:
    """The checkpoints with some names, in no order."""
    found: list[Found] = []
    real: set[str] = set()  # a folder counts once, by its own name where that is step-*
    places = map(folder.__truediv__, names)
    for path in sorted(places, key=lambda p: (p.name.startswith("."), p.is_symlink(), p.name)):
        left = _LEFT.fullmatch(path.name)
        is_left = left is not None and _are_steps(left[1]) and left[2] != NOTES
        is_step = bool(_STEP.fullmatch(path.name))  # also a link that leads to nothing
        if not (is_left or is_step) or (place := realpath(path)) in real:
            continue
        real.add(place)
        entry = look_at(path)
        # Complete, and its place is empty: a crash fell between two renames.
        is_taken = entry.manifest is None or (left is not None and left[1] in names)
        if is_left and is_taken and not entry.is_foreign:
            entry = Found(path, entry.step, None, _INTERRUPTED)
        found.append(entry)
    return found


def candidates(path: Path) -> list[Found]:
    """Checkpoints that `load` may read: the path itself, or those of a folder or run, newest first.

    Raises:
        CheckpointError: There is no checkpoint.
    """
    path = storage_path(path)
    with untrusted(f"checkpoint '{path}'", "a checkpoint or a folder of step-* folders"):
        if (path / COMPLETE).is_file():
            return [look_at(path)]
        # Of a checkpoint without a step ([Note: nothing half] in commit.py); stores rename nothing.
        for what in () if isinstance(path, StorePath) else (SAVING, OLD):
            for left in sorted(path.parent.glob(f".{escape(path.name)}.{what}-*")):
                if not path.exists() and (left / COMPLETE).is_file():
                    return [look_at(left)]
        found = checkpoints_in(path)
        if not found:
            there = "holds none" if path.exists() else "does not exist"
            raise CheckpointError(
                f"checkpoint: expected a checkpoint or a folder of step-* folders; got '{path}', "
                f"which {there}. " + (did_you_mean_path(path) or _way_in(path))
            )
    return found


def path_to_resume(asked: str, key: str = "--resume") -> Path | None:
    """The path that `--resume` names; None for auto and never. Imports no torch.

    Args:
        asked: auto, never or a path.
        key: Where the user wrote it, for errors.

    Raises:
        CheckpointError: The path has no checkpoint.
        ConfigError: It looks like a misspelt word.
    """
    if asked in ("auto", "never"):
        return None
    meant = None if Path(asked).exists() else nearest(asked, ("auto", "never"))
    if meant is not None or not asked:  # such as an unset variable of a shell
        raise ConfigError(
            f"{key}: expected auto, never or the path of a checkpoint, got '{asked}'. "
            f"Did you mean '{meant or 'auto'}'?"
        )
    path = storage_path(Path(asked).expanduser())
    try:
        candidates(path)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {str(error).removeprefix('checkpoint: ')}") from error
    return path


def _way_in(path: Path) -> str:
    """The remedy for a path without a checkpoint of ours."""
    if not path.exists():
        return "Pass a run's folder."
    words = f"{quote(str(path))} {quote(f'{path}-imported')}"
    return f"If another tool wrote it, convert it: `fullshard ckpt import {words}`."


def newest_complete(path: Path, *, warns: bool = False) -> Found:
    """The checkpoint itself, or the one that a restart loads, by names and sizes.

    Args:
        path: A checkpoint, a folder of checkpoints, or a run.
        warns: Whether to warn about newer checkpoints that are skipped.

    Raises:
        CheckpointError: None is complete; names the reasons.
    """
    found = candidates(path)
    complete = next((entry for entry in found if entry.manifest is not None), None)
    check_passed(found, complete)
    if complete is None:
        raise unusable(path, [f"{entry.path.name}: {entry.why}" for entry in found])
    for entry in found[: found.index(complete)]:
        if warns and not entry.is_leftover:
            logger.warning("skipped %s: %s; using %s", entry.path, entry.why, complete.path.name)
    return complete


def check_passed(found: Sequence[Found], taken: Found | None) -> None:
    """Checks that no folder that is passed over was written by a later version or another program.

    A run that resumes before a foreign folder would reach its step and write there.

    Args:
        found: Checkpoints of a folder, the newest first.
        taken: The one to load; None if none can be loaded.

    Raises:
        CheckpointError: There is such a folder, newer than the one to load.
    """
    for entry in found[: None if taken is None else found.index(taken)]:
        if entry.is_foreign:
            raise CheckpointError(
                f"checkpoint '{entry.path}': expected a folder that this version of fullshard "
                f"wrote; got another one ({entry.why.rstrip('.')}). Use the version or the tool "
                "that wrote it, or move the folder away to resume from an older checkpoint; "
                f"{_BEGIN_ANEW}"
            )


def unusable(path: Path, skipped: Sequence[str]) -> CheckpointError:
    """The error for a folder in which no checkpoint can be read."""
    reasons = "; ".join(reason.rstrip(".") for reason in skipped)
    return CheckpointError(
        f"checkpoint: expected a complete one in '{path}'; skipped {reasons}. Use another folder; "
        f"{_BEGIN_ANEW}"
    )


def tidy(target: Path) -> None:
    """Remove leftovers of interrupted saves next to `target`, where the next save will be.

    The caller must have the folder to itself. If a crash interrupted the two renames of
    [Note: nothing half] in commit.py, the leftover is the last good checkpoint, and gets its name
    back.
    """
    if isinstance(target, StorePath):
        _tidy_store(target)
        return
    for left in sorted(target.parent.glob(".*.*-*")):
        match = _LEFT.fullmatch(left.name)
        if match is None or not (match[1] == target.name or _are_steps(match[1], target.name)):
            continue
        place = left.with_name(match[1])
        if realpath(place) == realpath(left):  # a link to a folder that would be removed
            continue
        there = look_at(left)
        if match[2] != NOTES and not place.exists() and there.manifest is not None:
            left.rename(place)
        elif not there.is_foreign:
            remove_tree(left)


def _tidy_store(target: StorePath) -> None:
    """Remove files that `target`'s COMPLETE.json does not name, and unfinished steps next to it."""
    there = look_at(target)
    if there.is_unfinished and not there.is_foreign:
        remove_superseded(target)
    elif there.manifest is not None and there.manifest.folder:  # not one that was copied there
        remove_superseded(target, there.manifest.folder)
    for found in checkpoints_in(target.parent) if _are_steps(target.name) else ():
        if found.is_leftover:
            remove_tree(found.path)


def remove_superseded(target: Path, *kept: str) -> None:
    """Removes what saves left in a checkpoint of a store, except COMPLETE.json and some folders."""
    with suppress(FileNotFoundError):
        for entry in target.iterdir():
            if entry.name not in (COMPLETE, *kept):
                remove_tree(entry)


def _are_steps(*names: str) -> bool:
    return all(_STEP.fullmatch(name) for name in names)
