"""Which checkpoints a folder has: the newest complete one, what was skipped and why, what to prune.

checkpoints/
  step-00000050/     complete
  step-00000100/     complete                 <- a restart takes this one
  .step-00000150.saving-3f2a/                 a crash ended it: skipped
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.commit import NOTES, OLD, SAVING, beside
from fullshard.checkpoint.format import COMPLETE, Manifest
from fullshard.errors import CheckpointError

IN_RUN = "checkpoints"  # where a run's folder has them

_STEP = re.compile(r"step-(\d+)")
_LEFT = re.compile(rf"\.(.+)\.({SAVING}|{OLD}|{NOTES})-[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Found:
    """A folder that is, or should be, a checkpoint.

    Attributes:
        path: Its folder.
        step: From its name; None where the name says none.
        manifest: What its last file says; None where it is not complete.
        why: Why it is not complete.
    """

    path: Path
    step: int | None
    manifest: Manifest | None
    why: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(f.size for f in self.manifest.files.values()) if self.manifest else 0


def look_at(path: Path) -> Found:
    """What one folder is. Sizes are compared, checksums are not."""
    match = _STEP.search(path.name)
    step = int(match[1]) if match else None
    last = path / COMPLETE
    try:
        manifest = Manifest.from_json(last.read_text(encoding="utf-8"), str(last))
    except FileNotFoundError:
        return Found(path, step, None, f"it has no {COMPLETE}: it was never finished")
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        return Found(path, step, None, str(error))
    for name, facts in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            return Found(path, step, None, f"{name}: {error.strerror}")
        if size != facts.size:
            why = f"{name} has {size:,} bytes of {facts.size:,}"
            return Found(path, step, None, why)
    return Found(path, step if manifest.step is None else manifest.step, manifest)


def steps_folder(path: Path) -> Path:
    """The folder of step-* folders: this one, or a run's `checkpoints`."""
    return path / IN_RUN if (path / IN_RUN).is_dir() else path


def checkpoints_in(folder: Path) -> list[Found]:
    """All checkpoints of a folder, the newest first, also those that are not complete."""
    folder = steps_folder(folder)
    if not folder.is_dir():
        return []
    names = {path.name for path in folder.iterdir()}
    found: list[Found] = []
    for path in folder.iterdir():
        left = _LEFT.fullmatch(path.name)
        if left is not None and _are_steps(left[1]) and left[2] != NOTES:
            entry = look_at(path)
            # Complete, and its place is empty: a crash fell between two renames.
            if entry.manifest is None or left[1] in names:
                entry = Found(path, entry.step, None, "a crash or a kill ended its save")
            found.append(entry)
        elif _STEP.fullmatch(path.name) and path.is_dir():
            found.append(look_at(path))
    return sorted(found, key=lambda f: (f.step or -1, f.path.name), reverse=True)


def candidates(path: Path) -> Iterator[Found]:
    """What `load` may take: the checkpoint itself, or those of a folder or run, the newest first.

    Raises:
        CheckpointError: There is nothing of the kind.
    """
    if (path / COMPLETE).is_file():
        yield look_at(path)
        return
    for what in (SAVING, OLD):  # of a checkpoint without a step, see [Note: nothing half]
        for left in sorted(path.parent.glob(beside(path, what).name)):
            if not path.exists() and (left / COMPLETE).is_file():
                yield look_at(left)
                return
    found = checkpoints_in(path)
    if not found:
        there = "which has none" if path.is_dir() else "which does not exist"
        raise CheckpointError(
            f"checkpoint: expected a checkpoint or a folder of step-* folders; got '{path}', "
            f"{there}. `fullshard ckpt ls` shows what a folder has."
        )
    yield from found


def newest_complete(path: Path) -> Found:
    """The checkpoint itself, or what a restart would take, by names and sizes.

    Raises:
        CheckpointError: None is complete; says why.
    """
    skipped: list[str] = []
    for found in candidates(path):
        if found.manifest is not None:
            return found
        skipped.append(f"{found.path.name}: {found.why}")
    raise CheckpointError(
        f"checkpoint: expected a complete one in '{path}'; skipped {'; '.join(skipped)}. "
        "Take another folder."
    )


def tidy(target: Path) -> None:
    """Remove what saves that a crash ended have left where `target` will be saved.

    Only who has the folder to itself may call it. Where a crash fell between the two renames of
    [Note: nothing half], what it left is the last good checkpoint, and gets its name back.
    """
    for left in sorted(target.parent.glob(".*.*-*")):
        match = _LEFT.fullmatch(left.name)
        if match is None or not (match[1] == target.name or _are_steps(match[1], target.name)):
            continue
        place = left.with_name(match[1])
        if match[2] != NOTES and not place.exists() and look_at(left).manifest is not None:
            left.rename(place)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _are_steps(*names: str) -> bool:
    return all(_STEP.fullmatch(name) for name in names)


def superfluous(folder: Path, keep: int) -> list[Found]:
    """All complete checkpoints but the newest `keep`, and what crashes left behind.

    What is being saved right now is newer than any complete one, and stays.

    Args:
        folder: Of step-* folders.
        keep: At least 1: the last good one is never removed.
    """
    assert keep >= 1, keep
    found = checkpoints_in(folder)
    complete = [entry for entry in found if entry.manifest is not None]
    last = complete[0].step if complete else None
    return complete[keep:] + [
        entry
        for entry in found
        if entry.manifest is None and last is not None and (entry.step or -1) <= last
    ]


def prune(folder: Path, keep: int, newest: int | None = None) -> list[Path]:
    """Remove all complete checkpoints but the newest `keep`, and what crashes left behind.

    What is being saved right now is newer than any complete one, and stays. So does whatever is no
    checkpoint of ours.

    Args:
        folder: Of step-* folders.
        keep: At least 1: the last good one is never removed.
        newest: The step that counts as the newest. Later ones (damaged, or of a run that went on
            from an earlier step) neither count nor go.

    Returns:
        What was removed.
    """
    assert keep >= 1, keep
    found = checkpoints_in(folder)
    complete = [
        entry
        for entry in found
        if entry.manifest is not None and (newest is None or (entry.step or 0) <= newest)
    ]
    last = complete[0].step if complete else None
    removed = complete[keep:] + [
        entry
        for entry in found
        if entry.manifest is None
        and entry.path.name.startswith(".")
        and last is not None
        and (entry.step or -1) <= last
    ]
    for entry in removed:
        # The name goes first, so that no reader takes half a folder for a damaged checkpoint.
        going = entry.path.with_name(f".{entry.path.name.lstrip('.')}.{OLD}-0")
        shutil.rmtree(going, ignore_errors=True)
        entry.path.rename(going)
        shutil.rmtree(going, ignore_errors=True)
    return [entry.path for entry in removed]
