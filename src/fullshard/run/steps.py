"""When steps, evaluations and checkpoints follow each other, whatever engine takes the steps."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from fullshard.config.values import GradReduction, GradSync
from fullshard.errors import DivergedError
from fullshard.observe.metrics import EvalRow, SaveRow, StepRow
from fullshard.run.patience import Patience
from fullshard.run.schedule import Schedule


class Watcher(Protocol):
    """Told of every step and evaluation, and of what the loop does now."""

    def entered(self, phase: str, step: int) -> None: ...

    def stepped(self, row: StepRow) -> None: ...

    def evaluated(self, row: EvalRow) -> None: ...

    def saved(self, row: SaveRow) -> None: ...

    def misses_evaluation(self, step: int) -> bool:
        """Whether this rank should have the held-out loss after a step, and has not."""
        ...


@dataclass(frozen=True)
class LoopSettings:
    """Numbers of the loop.

    Attributes:
        num_steps: Updates of the whole run.
        eval_every: Steps between evaluations; 0: at the end alone.
        max_grad_norm: Clip above this; 0: never.
        schedule: The learning rate.
        grad_sync: Which micro-batches reduce.
        grad_reduction: What the engine makes of the ranks' gradients.
        max_skipped_steps: Updates that may be left out since their gradient is not finite.
        patience: Ends the run before its last step.
    """

    num_steps: int
    eval_every: int
    max_grad_norm: float
    schedule: Schedule
    grad_sync: GradSync = GradSync.EVERY_MICRO_BATCH
    grad_reduction: GradReduction = GradReduction.MEAN
    max_skipped_steps: int = 0
    patience: Patience = field(default_factory=Patience)


class StepLoop(ABC):
    """The order of a run: an engine adds how a step is taken, evaluated and saved."""

    def __init__(self, settings: LoopSettings, watcher: Watcher) -> None:
        self._settings = settings
        self._watcher = watcher
        self._stopping = False

    def run(self, done: int = 0) -> None:
        """The steps after the first `done`, the evaluations between them and one after the last.

        Raises:
            DivergedError: A loss or a gradient norm is not finite; names the step.
            PreemptedError: The run was asked to stop, and is saved.
        """
        num_steps, patience = self._settings.num_steps, self._settings.patience
        due = done > 0 and self._evaluates_after(done)  # and it may have been stopped before it
        # Or killed after it was made up for: the rows have it, but the checkpoint is older.
        lacks = self._watcher.misses_evaluation(done) or patience.lacks(done)
        if due and self._on_any_rank(lacks):
            self.evaluate(done)
            if self._stopping:  # it was left once more, and its step is saved
                self._keep(done, stopping=True, last=False)
        for step in range(done + 1, num_steps + 1):
            if patience.is_lost:
                return
            self._watcher.stepped(self._step(step))
            last = step == num_steps
            if last or (self._evaluates_after(step) and not self._stopping):
                self.evaluate(step)
            last = last or patience.is_lost
            began = time.perf_counter()
            if self._keep(step, stopping=self._stopping and not last, last=last):
                self._watcher.saved(SaveRow(step, time.perf_counter() - began))

    def _evaluates_after(self, step: int) -> bool:
        eval_every = self._settings.eval_every
        return step == self._settings.num_steps or bool(eval_every and step % eval_every == 0)

    def _stops_within(self, step: int) -> bool:
        """Whether to leave an evaluation: it may last longer than the time there is to save.

        All ranks call it together. The last step's evaluation is always finished.
        """
        self._stopping |= self._on_any_rank(self._asked_to_stop())
        return self._stopping and step < self._settings.num_steps

    def evaluate(self, step: int) -> None:
        """Tells the held-out loss; without held-out data, or when the run stops, nothing happens.

        Raises:
            DivergedError: It is not finite.
        """
        loss = self.held_out_loss(step)
        if loss is None:
            return
        if not math.isfinite(loss):
            raise DivergedError(diverged("held-out loss", loss, step))
        self._settings.patience.see(loss, step)
        self._watcher.evaluated(EvalRow(step, loss))

    @abstractmethod
    def held_out_loss(self, step: int) -> float | None:
        """In nats a token, the same on all ranks; None where nothing is held out."""

    @abstractmethod
    def _step(self, step: int) -> StepRow:
        """One update and what it was like."""

    @abstractmethod
    def _on_any_rank(self, flag: float) -> bool:
        """Whether it is not zero on some rank; all ranks call it together."""

    @abstractmethod
    def _asked_to_stop(self) -> bool:
        """Whether this rank was told to save and end."""

    @abstractmethod
    def _keep(self, step: int, *, stopping: bool, last: bool) -> bool:
        """Saves where that is due; returns whether it was."""


def diverged(what: str, value: float, step: int, num_skipped: int = 0) -> str:
    """What DivergedError says."""
    skipped = f" {num_skipped} such step(s) were skipped before." if num_skipped else ""
    return (
        f"{what} of step {step}: expected a finite number, got {value}.{skipped} "
        "Lower training.learning_rate, raise training.warmup_steps, or set training.max_grad_norm."
    )
