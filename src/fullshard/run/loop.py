"""The training loop, the same for every recipe and engine.

for step in steps:
    batches = data.micro_batches(step)             data_s; while the device computes the step before
    trainee.update(step, batches, loop)            forward, backward, clip, update: by the engine
    row = measurements of the step                 one small exchange between all ranks
    evaluate, save, if due

On a GPU and on XLA the host queues a step while the device computes the one before, and then reads
the measurements of that one. Before an evaluation, a save or the end it reads those of both.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fullshard.errors import DivergedError
from fullshard.models.generate import Sample
from fullshard.observe import watchdog
from fullshard.observe.metrics import AnyRow, EvalRow, SaveRow, StepRow
from fullshard.recipes.base import Batch, RankBatches, RowBatches, Team
from fullshard.run.optim import Schedule
from fullshard.saving import SaveSettings

logger = logging.getLogger(__name__)


class Watcher:
    """Receives every row of a run and the loop's current activity; by default it keeps no row."""

    def entered(self, phase: str, step: int) -> None:
        """Set the current activity of this rank."""
        watchdog.phase(phase, step)

    def tell(self, row: AnyRow) -> None: ...

    def misses_evaluation(self, step: int) -> bool:  # noqa: ARG002
        """Whether the held-out loss after a step is due on this rank but was not recorded."""
        return False


class Keeper:
    """Saves the trained state; by default nothing is saved."""

    @property
    def saves(self) -> bool:
        """Whether a run that is asked to stop is saved."""
        return False

    def asked_to_stop(self) -> bool:
        """Whether this rank was asked to save and stop."""
        return False

    def is_due(self, step: int) -> bool:  # noqa: ARG002
        """Whether a checkpoint is due after a step that is not the last."""
        return False

    def keep(self, step: int, *, stopping: bool, last: bool) -> bool:  # noqa: ARG002
        """Saves after a step if a checkpoint is due; all ranks call it together.

        Args:
            step: Number of the finished step.
            stopping: A rank was asked to stop.
            last: No further step follows.

        Returns:
            Whether a checkpoint was due.

        Raises:
            PreemptedError: A rank was asked to stop; the run is saved.
        """
        return False


class Measured(NamedTuple):
    """Measurements of one update on one rank, for which the host waits for the device.

    Attributes:
        total: Loss of this rank, summed over its label tokens.
        grad_norm: Norm of the gradients of all ranks.
        comm_s: Seconds in communication, as measured by the engine.
        is_skipped: The update was skipped because the gradients are not finite.
    """

    total: float
    grad_norm: float
    comm_s: float = 0.0
    is_skipped: bool = False


@dataclass(frozen=True)
class Update:
    """One update on one rank.

    Attributes:
        measured: Returns the measurements; waits until the device has computed the update.
        num_tokens: Label tokens of all ranks.
        memory: Bytes allocated by the process now, and at its peak.
        is_pending: The device may still compute it, so that the next step may be queued first.
    """

    measured: Callable[[], Measured]
    num_tokens: int
    memory: tuple[int, int]
    is_pending: bool = False


@dataclass(frozen=True)
class _Queued:
    """An update whose measurements the ranks have not exchanged yet."""

    step: int
    began: float
    data_s: float
    num_inputs: int
    update: Update


class Trainee(Protocol):
    """A model in training: an engine's updates, evaluations and checkpoints."""

    def update(self, step: int, batches: list[Batch], loop: Loop) -> Update:
        """Forward and backward of this rank's micro-batches, and the update. A collective."""
        ...

    def totals(self, batches: Iterable[Batch], loop: Loop) -> tuple[float, float]:
        """Summed loss and number of label tokens of this rank. A collective."""
        ...

    def evaluated(self, step: int, loop: Loop) -> None:
        """After an evaluation. A collective."""

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """Text files of a checkpoint besides the tokenizer's and config.yaml."""
        return {}

    def save(self, folder: Path, values: dict[str, Any], settings: SaveSettings) -> None:
        """Save the trained state and other values. A collective."""
        ...

    def load(self, path: Path) -> tuple[dict[str, Any], Path]:
        """Loads the newest usable checkpoint; returns its values and its path. A collective."""
        ...


class Side(Trainee, Protocol):
    """The part of a session that depends on the engine, and the trainee that it builds."""

    def explained(self) -> AbstractContextManager[None]:
        """A context that explains errors from the plan, such as running out of memory."""
        return nullcontext()

    def lines(self) -> list[tuple[str, str]]:
        """Labelled lines of the banner about the model and its plan, on rank 0."""
        ...

    def build(self, data: RowBatches) -> Team:
        """Build the trainee; return the team of ranks. A collective."""
        ...

    def utilization(self) -> float | None:
        """Model FLOPs utilization at one token per second; None if it is not known."""
        return None

    def export(self, loop: Loop) -> float | None:
        """Writes the model; returns the held-out loss of averaged weights, if any. A collective."""
        ...

    def sample(self, prompt: str) -> Sample | None:
        """Text sampled from the trained model, at least on rank 0. A collective, after `export`."""
        ...


class Patience:
    """Ends a run early after several evaluations in a row without a better loss.

    Args:
        evaluations: Number of evaluations without improvement; None: never ends the run.
        threshold: How far a loss must be below the best one to count as better, in nats.
    """

    def __init__(self, evaluations: int | None = None, threshold: float = 0.0) -> None:
        self._evaluations = evaluations
        self._threshold = threshold
        self._best = math.inf
        self._waited = 0
        self._step: int | None = 0

    @property
    def is_lost(self) -> bool:
        """Whether the run should end."""
        return self._evaluations is not None and self._waited >= self._evaluations

    def lacks(self, step: int) -> bool:
        """Whether the held-out loss after that step was never counted."""
        return self._evaluations is not None and self._step is not None and self._step < step

    def see(self, loss: float, step: int) -> None:
        """Counts the held-out loss after a step; it is the same on every rank."""
        self._step = step
        if loss < self._best - self._threshold:
            self._best, self._waited = loss, 0
        elif self._evaluations is not None:
            self._waited += 1

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        best = self._best if math.isfinite(self._best) else None
        return {"best": best, "waited": self._waited, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the state from a checkpoint.

        It is empty if the checkpoint is of another run: then no evaluation counts as missing.
        """
        best, step = state.get("best"), state.get("step")
        self._best = math.inf if best is None else float(best)
        self._waited = int(state.get("waited", 0))
        self._step = None if step is None else int(step)


@dataclass(frozen=True)
class LoopSettings:
    """Numbers of the loop.

    Attributes:
        num_steps: Number of updates of the run.
        eval_every: Steps between evaluations; 0: only at the end.
        max_grad_norm: Gradient norm above which gradients are clipped; 0: never.
        schedule: Learning rate of each step.
        max_skipped_steps: Updates with non-finite gradients that may be skipped.
        patience: Ends the run early if evaluations do not improve.
    """

    num_steps: int
    eval_every: int
    max_grad_norm: float
    schedule: Schedule
    max_skipped_steps: int = 0
    patience: Patience = field(default_factory=Patience)


@dataclass(eq=False)
class Loop:
    """Runs a number of steps: the batches of a recipe, the updates of an engine."""

    trainee: Trainee
    data: RankBatches
    settings: LoopSettings
    team: Team
    watcher: Watcher
    keeper: Keeper = field(default_factory=Keeper)
    _stopping: bool = field(default=False, init=False)
    _is_cut: bool = field(default=False, init=False)  # the rest of an evaluation was skipped
    _ahead: list[Batch] | None = field(default=None, init=False)  # batches of the next step
    _data_s: float = field(default=0.0, init=False)  # in the running step
    _ended: float = field(default=0.0, init=False)  # when the last measurements were exchanged

    def run(self, done: int = 0) -> None:
        """Runs the steps after the first `done`, with the evaluations that are due.

        Raises:
            DivergedError: A loss or a gradient norm is not finite; names the step.
            PreemptedError: The run was asked to stop, and is saved.
        """
        num_steps, patience = self.settings.num_steps, self.settings.patience
        # A run that was stopped may lack the evaluation after its last step. A run that was killed
        # after repeating it has the row, but resumes from a checkpoint without it.
        due = done > 0 and self._evaluates_after(done)
        lacks = self.watcher.misses_evaluation(done) or patience.lacks(done)
        if due and self._on_any_rank(lacks):
            self.evaluate(done)
            if self._stopping:  # it was skipped again; its step is saved
                self.keeper.keep(done, stopping=True, last=False)
        queued: list[_Queued] = []
        for step in range(done + 1, num_steps + 1):
            if patience.is_lost:
                return
            queued.append(self._queue(step))
            last, evaluates = step == num_steps, self._evaluates_after(step)
            while queued and (len(queued) > 1 or self._reads_now(queued[0], evaluates=evaluates)):
                self.watcher.tell(self._end(queued.pop(0)))
            if last or (evaluates and not self._stopping):
                self.evaluate(step)
            last = last or patience.is_lost
            stopping = self._stopping and (not last or self._is_cut)
            began = time.perf_counter()
            if self.keeper.keep(step, stopping=stopping, last=last):
                self.watcher.tell(SaveRow(step, time.perf_counter() - began))

    def evaluate(self, step: int) -> None:
        """Compute and record the held-out loss, unless nothing is held out or the run stops.

        Raises:
            DivergedError: The loss is not finite.
        """
        if (loss := self.held_out_loss(step)) is not None:
            if not math.isfinite(loss):
                raise DivergedError(diverged("held-out loss", loss, step))
            self.settings.patience.see(loss, step)
            self.watcher.tell(EvalRow(step, loss))
        if not self._stopping:
            self.trainee.evaluated(step, self)

    def held_out_loss(self, step: int) -> float | None:
        """Held-out loss in nats per token, the same on all ranks; None if nothing is held out."""
        self.watcher.entered("evaluation", step)
        self._is_cut = False
        batches = takewhile(lambda _: not self._stops_within(step), self.data.held_out())
        here = self.trainee.totals(batches, self)
        if self._is_cut:
            return None
        totals, counts = zip(*self.team.exchange(here), strict=True)
        return sum(totals) / sum(counts) if any(counts) else None

    def _queue(self, step: int) -> _Queued:
        """One update, which the device may still compute."""
        began, self._data_s = time.perf_counter(), 0.0
        batches = self._batches(step) if self._ahead is None else self._ahead
        self._ahead = None
        num_inputs = sum(batch["input_ids"].numel() for batch in batches)
        self.watcher.entered("forward and backward", step)
        update = self.trainee.update(step, batches, self)
        return _Queued(step, began, self._data_s, num_inputs, update)

    def _reads_now(self, queued: _Queued, *, evaluates: bool) -> bool:
        """Whether the newest update is measured before the next step."""
        others = not queued.update.is_pending or evaluates or self._stopping
        return others or self.keeper.is_due(queued.step)

    def _end(self, queued: _Queued) -> StepRow:
        """Waits for an update, exchanges its measurements between the ranks and returns them."""
        step, update = queued.step, queued.update
        measured = update.measured()
        now = time.perf_counter()
        elapsed_s, self._ended = now - max(queued.began, self._ended), now
        self.watcher.entered("end of step", step)
        here = [measured.total, elapsed_s, queued.data_s, measured.comm_s, *update.memory]
        parts = self.team.exchange([*here, queued.num_inputs, self.keeper.asked_to_stop()])
        totals, elapsed, data, comm, memory, peak, inputs, asked = zip(*parts, strict=True)
        self._stopping = any(asked)
        if not update.num_tokens:
            logger.warning("step %d has no trained tokens, so its loss is 0", step)
        loss = sum(totals) / max(1, update.num_tokens)
        if not math.isfinite(loss) and not measured.is_skipped:
            raise DivergedError(diverged("loss", loss, step))
        step_time_s = max(elapsed)
        data_s, comm_s = sum(data) / len(data), sum(comm) / len(comm)
        return StepRow(
            step=step,
            epoch=step / self.data.steps_per_epoch,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=measured.grad_norm if math.isfinite(measured.grad_norm) else None,
            learning_rate=self.settings.schedule.learning_rate(step - 1),
            tokens_per_s=sum(inputs) / step_time_s,
            samples_per_s=self.data.samples_per_step / step_time_s,
            step_time_s=step_time_s,
            data_s=data_s,
            compute_s=max(0.0, step_time_s - data_s - comm_s),
            comm_s=comm_s,
            memory_bytes=int(max(memory)),
            memory_peak_bytes=int(max(peak)),
        )

    def look_ahead(self, step: int) -> None:
        """Makes the batches of the following step, and starts their copies to the device.

        A trainee calls it before it waits for the device, which still computes the step. An error
        is raised where the following step begins.
        """
        if step < self.settings.num_steps:
            with suppress(Exception):
                self._ahead = self._batches(step + 1)
            self.watcher.entered("forward and backward", step)

    def _batches(self, step: int) -> list[Batch]:
        self.watcher.entered("data loading", step)
        began = time.perf_counter()
        batches = self.data.micro_batches(step - 1)
        self._data_s += time.perf_counter() - began
        return batches

    def _evaluates_after(self, step: int) -> bool:
        eval_every = self.settings.eval_every
        return step == self.settings.num_steps or bool(eval_every and step % eval_every == 0)

    def _stops_within(self, step: int) -> bool:
        """Whether to skip the rest of an evaluation, so that there is time to save.

        All ranks call it together. The next start makes up for it. A run that never saves finishes
        the evaluation after its last step.
        """
        self._stopping |= self._on_any_rank(self.keeper.asked_to_stop())
        self._is_cut = self._stopping and (self.keeper.saves or step < self.settings.num_steps)
        return self._is_cut

    def _on_any_rank(self, flag: float) -> bool:
        """Whether the flag is set on any rank; all ranks call it together."""
        return any(part[0] for part in self.team.exchange([flag]))


def diverged(what: str, value: float, step: int, num_skipped: int = 0) -> str:
    """The message of a DivergedError."""
    skipped = f" {num_skipped} such step(s) were skipped before." if num_skipped else ""
    advice = "Lower training.learning_rate, raise training.warmup_steps or set max_grad_norm"
    if step == 1 and what != "held-out loss":
        advice = "No update preceded it: check initial weights (also a teacher's) and model.config"
    return f"{what} of step {step}: expected a finite number, got {value}.{skipped} {advice}."
