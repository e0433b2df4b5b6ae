"""A run's checkpoints: what is saved when, and how a run resumes.

[Note: data position]
state.json holds {global_batch, samples_seen, epoch, seed, data}. Which samples a step sees depends
on the global batch, the seed and the step alone (see data/order.py), so "step" is the whole
position: no sample is seen twice or left out, whatever number of ranks resumes. `data` is the
checksum of the tokens: a run does not resume from a checkpoint that was trained on others.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fullshard import saving
from fullshard.checkpoint.storage import StorePath
from fullshard.config.environment import read_launch_environment
from fullshard.data.dataset import tokenizer_texts
from fullshard.errors import CheckpointError, PreemptedError
from fullshard.launch.run_lock import is_holder
from fullshard.observe.hang import watchdog
from fullshard.run.folder import HOLDS, LAST_SAVED, RunFolder
from fullshard.run.loop import Keeper, Patience, Trainee
from fullshard.run.resume import POSITION, Resume, check_data
from fullshard.run.schedule import StepPlan
from fullshard.saving import SaveSettings

logger = logging.getLogger(__name__)

SCALER, PATIENCE = "scaler", "patience"


@dataclass
class RunCheckpoints(Keeper):
    """Saves a run's checkpoints in the background.

    Attributes:
        folder: Folder of the run.
        trainee: What is saved; with the tokenizer's files a checkpoint can be exported.
        steps: Steps with a checkpoint.
        limit: Number of complete checkpoints to keep; None: all.
        caught: Signals that ask this rank to save and stop.
        patience: State of early stopping, saved with the run.
    """

    folder: RunFolder
    trainee: Trainee
    steps: StepPlan
    limit: int | None
    caught: list[int]
    patience: Patience
    _saving: int | None = field(default=None, init=False)  # a save whose end is not recorded yet

    def __post_init__(self) -> None:
        self._texts = {**tokenizer_texts(self.folder.data), **self.trainee.texts}
        launch = read_launch_environment()
        self._is_first = launch is None or launch.rank == 0

    def asked_to_stop(self) -> bool:
        """Whether this rank was asked to save and stop."""
        return bool(self.caught)

    def keep(self, step: int, *, stopping: bool, last: bool) -> bool:
        """Saves if a checkpoint is due; returns whether it was.

        Raises:
            CheckpointError: The save could not begin, or the save before it failed.
            PreemptedError: The run was asked to stop. It is saved, unless it never saves.
        """
        saving.SAVES.check()
        self._record_saved()
        every = self.steps.save_every
        due = every is not None and (stopping or last or step % every == 0)
        if due:
            watchdog.phase("saving", step)
            self._save(step, wait=stopping or last)
        if stopping:
            way_out = (
                "which is saved. Start it again to resume."
                if every is not None
                else "and saved nothing (save_strategy: no). The next start begins at "
                "step 0; leave save_strategy out to be able to resume."
            )
            raise PreemptedError(
                f"run: expected to reach step {self.steps.num_steps}, was asked to stop after "
                f"step {step}, {way_out}"
            )
        return due

    def resume(self, resume: Resume) -> int:
        """Loads the newest usable checkpoint; returns the number of finished steps. A collective.

        A run without a checkpoint to resume from has no path, and begins at step 0.

        Raises:
            CheckpointError: None can be read, or it is of another model or optimizer.
            ConfigError: The run asks for no more steps than the checkpoint has, or has other data.
        """
        if resume.path is None:
            return 0
        state, path = self.trainee.load(resume.path)
        check_data(resume, state.get(POSITION), self.steps)
        # Losses of another run do not count: it may have had other data.
        self.patience.load_state_dict((resume.in_place and state.get(PATIENCE)) or {})
        if self._is_first:
            logger.info("resumed after step %s from %s", state["step"], path)
        resume.check_steps(int(state["step"] or 0), path, self.steps.num_steps)
        return int(state["step"] or 0)

    def _save(self, step: int, *, wait: bool) -> None:
        texts = dict(self._texts)
        if self.folder.config.is_file():
            texts[self.folder.config.name] = self.folder.config.read_text(encoding="utf-8")
        if self._is_first:
            check_lock(self.folder)
        values = {POSITION: self._position(step), PATIENCE: self.patience.state_dict()}
        settings = SaveSettings(step=step, wait=wait, keep=self.limit, texts=texts)
        self.trainee.save(self.folder.checkpoints, values, settings)
        self._saving = step
        self._record_saved()

    def _record_saved(self) -> None:
        """Records the step of a save that has ended, without which a start cannot be refused."""
        if self._saving is not None and not saving.SAVES.under_way:
            saving.SAVES.wait()  # raises the error of a save that failed: nothing was saved
            if self._is_first:
                self.folder.update_record(**{LAST_SAVED: self._saving})
            self._saving = None

    def _position(self, step: int) -> dict[str, Any]:
        """See [Note: data position]."""
        order = self.steps.order
        return {
            "global_batch": order.shape.global_batch,
            "samples_seen": step * order.shape.global_batch,
            "epoch": step / order.steps_per_epoch,
            "seed": order.seed,
            "data": self.steps.data,
        }


def check_lock(folder: RunFolder) -> None:
    """Raises CheckpointError if another run has taken the store's place of the checkpoints."""
    place = folder.checkpoints
    if not isinstance(place, StorePath) or place.parts[0] == "memory:":  # each process has its own
        return
    with suppress(OSError):  # no answer says nothing about the lock
        if not is_holder(place, str(folder.read_record().get(HOLDS))):
            raise CheckpointError(
                f"training.checkpoint_dir: expected '{place}' to be this run's until its end; "
                "another run began there while this one did not answer. This run saves nothing "
                "more: end one of them."
            )
