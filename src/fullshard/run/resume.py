"""What becomes of a run that is already where a new one shall lie.

--resume        an unfinished run there    a finished one, more steps asked    a finished one
auto            goes on                    goes on                             moved to .1, .2
never           moved                      moved                               moved
PATH            moved; the new run begins with the model, optimizer and position of PATH

A run that ended early (early_stopping_patience) is a finished one, however many steps are asked.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from fullshard.checkpoint.format import STATE, natural
from fullshard.checkpoint.read import read_tables
from fullshard.checkpoint.retain import checkpoints_in, newest_complete
from fullshard.config.load import Resolved, load_config
from fullshard.config.values import nearest
from fullshard.data.dataset import FACTS, DatasetFacts, read_facts
from fullshard.errors import ConfigError, untrusted
from fullshard.run.folder import RunFolder, RunStatus

POSITION = "position"  # under which a checkpoint's state has [Note: data position]
# What a run that goes on must share with what it was: its data and its model.
SAME = ("data", "model", "freeze", "lora")


@dataclass(frozen=True)
class Resume:
    """What a run goes on from.

    Attributes:
        path: A checkpoint, or a folder of them; None: from the beginning.
        global_batch: Samples of a step, which are kept; None: the configuration says.
        in_place: Whether the folder's own run goes on, rather than a new one.
        required: Whether it is an error if there is nothing at `path`: somebody named it.
    """

    path: Path | None = None
    global_batch: int | None = None
    in_place: bool = False
    required: bool = False

    def as_json(self) -> dict[str, Any]:
        """For run.json, where the ranks find it."""
        return {**asdict(self), "path": str(self.path) if self.path is not None else None}

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> Resume:
        """What `as_json` wrote."""
        value = dict(record.get("resume") or {})
        path = value.pop("path", None)
        return cls(Path(path) if path else None, **value)

    def sentence(self, output_dir: Path) -> str:
        """What it means for the run that is asked for, and for one that is there."""
        if self.path is not None:
            found = newest_complete(self.path)
            what = "the run there resumes" if self.in_place else "a new run begins"
            return f"{what} with the model and optimizer of step {found.step} in {found.path}"
        is_there = RunFolder(output_dir).record.is_file() and not self.in_place
        return f"begins at step 0{'; the run there is moved aside' if is_there else ''}"

    def moved(self, old: Path, new: Path | None) -> Resume:
        """The same after the folder that holds the checkpoint was moved."""
        if new is None or self.path is None or not self.path.is_relative_to(old.resolve()):
            return self
        return replace(self, path=new.resolve() / self.path.relative_to(old.resolve()))


def find_resume(asked: str, output_dir: Path) -> Resume:
    """What `--resume` means here, before it is known how many steps are asked for.

    Raises:
        CheckpointError: PATH holds no checkpoint.
    """
    if asked == "never":
        return Resume()
    if asked != "auto":
        meant = None if Path(asked).exists() else nearest(asked, ("auto", "never"))
        if meant is not None:
            raise ConfigError(
                f"--resume: expected auto, never or the path of a checkpoint, got '{asked}'. "
                f"Did you mean '{meant}'?"
            )
        return _from_path(Path(asked))
    folder = RunFolder(output_dir)
    return own_resume(folder) if folder.record.is_file() else Resume()


def own_resume(folder: RunFolder) -> Resume:
    """What a run in its own folder goes on from.

    Until it has a checkpoint of its own, that is what it began from.
    """
    record = folder.read_record()
    with _readable(folder):
        first = Resume.of_record(record)
        batch = record.get("planned", {}).get("samples_per_step") or first.global_batch
        batch = batch and natural(batch)
    if any(not found.is_leftover for found in checkpoints_in(folder.checkpoints)):
        return Resume(folder.checkpoints, batch, in_place=True)
    return replace(first, in_place=True) if first.required else Resume(None, batch, in_place=True)


def goes_on(resume: Resume, output_dir: Path, num_steps: int) -> bool:
    """Whether the folder's own run goes on, now that the steps are known."""
    if not resume.in_place:
        return False
    record = RunFolder(output_dir).read_record()
    if record.get("status") != RunStatus.FINISHED:
        return True
    with _readable(RunFolder(output_dir)):
        measured = record.get("measured", {})
        more = num_steps > measured.get("num_steps", 0) and not measured.get("stopped_early")
        return resume.path is not None and more


def _readable(folder: RunFolder) -> AbstractContextManager[None]:
    """For what is read of a record that something else than fullshard may have written."""
    advice = "Use --resume never, or another output_dir."
    return untrusted(folder.record, "the record of a run", ConfigError, advice)


def check_same(
    resolved: Resolved, output_dir: Path, checkpoints: Path, facts: DatasetFacts
) -> None:
    """A run that goes on has a complete checkpoint, and keeps its data and its model.

    Raises:
        CheckpointError: There are checkpoints, and none is complete: they are not trained over.
        ConfigError: Data or model changed; names the key.
    """
    newest_complete(checkpoints)
    folder = RunFolder(output_dir)
    before = load_config(folder.config, []).config
    keys = [*SAME, "training.max_seq_length", "training.seed"]
    for key in keys:
        one, other = (attrgetter(key)(config) for config in (before, resolved.config))
        if one != other:
            raise ConfigError(
                f"{key}: expected what it was in the run that goes on in '{output_dir}' ({one}); "
                f"got {other}. Use --resume never, or another output_dir."
            )
    if not (folder.data / FACTS).is_file():
        return
    with untrusted(folder.data / FACTS, "facts of the run's data", ConfigError, "Remove it."):
        trained = read_facts(folder.data)[1]
    if trained.fingerprint and trained.fingerprint != facts.fingerprint:
        raise ConfigError(
            f"data.path: expected the tokens of the run that goes on in '{output_dir}' "
            f"({trained.num_train_tokens:,} from {trained.origin}); got other ones "
            f"({facts.num_train_tokens:,} from {facts.origin}), or the order of another version. "
            "Bring the old data and tokenizer (or fullshard) back, use --resume never, or --resume "
            "PATH with another output_dir."
        )


def _from_path(path: Path) -> Resume:
    found = newest_complete(path)
    with untrusted(found.path / STATE, "the data position of a run"):
        position = read_tables(found)[1]["state"].get(POSITION) or {}
        batch = natural(position["global_batch"]) if "global_batch" in position else None
    return Resume(path.resolve(), batch, required=True)
