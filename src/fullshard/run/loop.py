"""The training loop. One, for every recipe.

for step in steps:
    for batch in recipe.micro_batches(step):       data_s
        recipe.loss(model, batch)                  forward (sharded units gather themselves)
        backward                                   gradients are reduced unless deferred
    clip, check that all is finite, update
    row = what the step was like, over all ranks   one small exchange
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

import fullshard as fs
from fullshard.config.values import GradSync
from fullshard.errors import DataError, DivergedError
from fullshard.observe.metrics import StepRow
from fullshard.recipes.base import IGNORED, Batch, Recipe, Team, backward_scale, num_label_tokens
from fullshard.run.optim import Average, LossScaler
from fullshard.run.steps import LoopSettings, StepLoop, Watcher, diverged


class Keeper(Protocol):
    """Saves what is trained, where that is due."""

    def asked_to_stop(self) -> bool:
        """Whether somebody has told this rank to save and end."""
        ...

    def keep(self, step: int, *, stopping: bool, last: bool) -> bool:
        """After an update and what belongs to it; all ranks call it together.

        Args:
            step: The update.
            stopping: Some rank was asked to stop.
            last: None follows.

        Returns:
            Whether it was time to save.

        Raises:
            PreemptedError: Some rank was asked to stop; all is saved.
        """
        ...


@dataclass(frozen=True)
class Trainee:
    """A sharded model, what updates it and saves it, and what the loop measures on it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    communication_seconds: Callable[[], float]
    memory_bytes: Callable[[], tuple[int, int]]
    scaler: LossScaler
    keeper: Keeper | None = None  # None: nothing is saved
    average: Average | None = None
    speak: Callable[[int], None] | None = None  # after an evaluation; all ranks call it together


class Loop(StepLoop):
    """Runs a recipe over a number of steps."""

    def __init__(
        self,
        trainee: Trainee,
        recipe: Recipe,
        settings: LoopSettings,
        team: Team,
        watcher: Watcher,
    ) -> None:
        super().__init__(settings, watcher)
        self._trainee = trainee
        self._recipe = recipe
        self._team = team
        self._scaler = trainee.scaler
        self._num_skipped = 0  # in this session
        self._last: Batch | None = None  # stands in where other ranks have more

    def run(self, done: int = 0) -> None:
        """As of every loop, in training mode."""
        self._trainee.model.train()
        super().run(done)

    @property
    def average(self) -> Average | None:
        """Of the weights, where one is kept."""
        return self._trainee.average

    def evaluate(self, step: int) -> None:
        """As of every loop; then the model speaks."""
        super().evaluate(step)
        if self._trainee.speak is not None and not self._stopping:
            self._trainee.speak(step)

    def held_out_loss(self, step: int) -> float | None:
        """In nats a token, the same on all ranks; None where nothing is held out."""
        self._watcher.entered("evaluation", step)
        model = self._trainee.model
        total, count, num_batches = 0.0, 0, 0
        with _evaluating(model):
            for batch in self._recipe.held_out():
                if self._stops_within(step):
                    return None
                batch_total, batch_count = self._recipe.loss(model, batch)
                total, count = total + batch_total.item(), count + batch_count
                num_batches += 1
        if num_batches == 0:
            return None
        parts = self._team.exchange([total, count])
        return sum(part[0] for part in parts) / sum(part[1] for part in parts)

    def _step(self, step: int) -> StepRow:
        """One update and what it was like."""
        trainee, settings = self._trainee, self._settings
        self._watcher.entered("data loading", step)
        began, comm_before = time.perf_counter(), trainee.communication_seconds()
        batches = self._recipe.micro_batches(step - 1)
        data_s = time.perf_counter() - began
        self._watcher.entered("forward and backward", step)
        num_inputs = sum(batch["input_ids"].numel() for batch in batches)
        batches, num_tokens = self._even_out(batches, step)
        learning_rate = settings.schedule.learning_rate(step - 1)
        for group in trainee.optimizer.param_groups:
            group["lr"] = learning_rate
        total = self._accumulate(batches, num_tokens)
        self._watcher.entered("optimizer", step)
        self._scaler.unscale()
        norm = fs.clip_grad_norm_(trainee.model, settings.max_grad_norm or math.inf)
        grad_norm = float(norm)
        finite = math.isfinite(grad_norm)
        if not finite and not self._scaler.enabled:
            self._skip(step, total, num_tokens, grad_norm)
        else:
            self._scaler.step(step)
        if finite and trainee.average is not None:
            trainee.average.update()
        trainee.optimizer.zero_grad(set_to_none=True)
        comm_s = trainee.communication_seconds() - comm_before
        elapsed_s = time.perf_counter() - began
        self._watcher.entered("end of step", step)
        memory = trainee.memory_bytes()
        parts = self._team.exchange(
            [total.item(), elapsed_s, data_s, comm_s, *memory, num_inputs, self._asked_to_stop()]
        )
        self._stopping = any(part[-1] for part in parts)
        loss = self._mean_loss(parts, num_tokens)
        if not math.isfinite(loss) and (finite or self._scaler.enabled):  # no scale mends a loss
            raise DivergedError(diverged("loss", loss, step))
        return self._row(step, loss, grad_norm, parts)

    def _skip(self, step: int, total: torch.Tensor, num_tokens: int, grad_norm: float) -> None:
        """Leave an update out, where that is still allowed.

        Raises:
            DivergedError: It is not.
        """
        self._num_skipped += 1
        if self._num_skipped <= self._settings.max_skipped_steps:
            return
        loss = self._mean_loss(self._team.exchange([total.item()]), num_tokens)
        what, value = ("gradient norm", grad_norm) if math.isfinite(loss) else ("loss", loss)
        raise DivergedError(diverged(what, value, step, self._num_skipped - 1))

    def _keep(self, step: int, *, stopping: bool, last: bool) -> bool:
        keeper = self._trainee.keeper
        return keeper is not None and keeper.keep(step, stopping=stopping, last=last)

    def _on_any_rank(self, flag: float) -> bool:
        return any(part[0] for part in self._team.exchange([flag]))

    def _asked_to_stop(self) -> bool:
        keeper = self._trainee.keeper
        return keeper is not None and keeper.asked_to_stop()

    def _even_out(self, batches: list[Batch], step: int) -> tuple[list[Batch], int]:
        """As many micro-batches on every rank, and N of [Note: global token mean].

        [Note: uneven batches]
        A rank that has fewer micro-batches than another would leave it waiting in a collective. So
        where recipes do not know the counts, ranks exchange them once a step with their label
        tokens, and one that has fewer repeats its last batch with labels that count nothing.

        Raises:
            DataError: No rank has a batch, or this one never had.
        """
        if self._recipe.tokens_per_step is not None:
            return batches, self._recipe.tokens_per_step
        here = sum(num_label_tokens(batch["labels"]) for batch in batches)
        parts = self._team.exchange([here, len(batches)])
        most = int(max(part[1] for part in parts))
        self._last = batches[-1] if batches else self._last
        if self._last is None or most == 0:
            who = "this rank" if most else "all ranks"
            raise DataError(
                f"batches of step {step}: expected at least one; {who} has none. Give every rank "
                "data for the first step at least, and no more steps than there are data for."
            )
        blank = {**self._last, "labels": torch.full_like(self._last["labels"], IGNORED)}
        missing = most - len(batches)
        return batches + [blank] * missing, int(sum(part[0] for part in parts))

    def _accumulate(self, batches: list[Batch], num_tokens: int) -> torch.Tensor:
        """Forward and backward of every micro-batch; returns this rank's summed loss."""
        settings, model = self._settings, self._trainee.model
        scale = backward_scale(num_tokens, self._team.world_size, settings.grad_reduction)
        totals: list[torch.Tensor] = []
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.ExitStack() as around:
                if not last and settings.grad_sync is not GradSync.EVERY_MICRO_BATCH:
                    outer_only = settings.grad_sync is GradSync.LAST_MICRO_BATCH_OUTER
                    around.enter_context(fs.no_sync(model, outer_only=outer_only))
                batch_total, _ = self._recipe.loss(model, batch)
                self._scaler.scale(batch_total * scale).backward()
            totals.append(batch_total.detach())
        return torch.stack(totals).sum(dtype=torch.float64)

    @staticmethod
    def _mean_loss(parts: list[list[float]], num_tokens: int) -> float:
        return sum(part[0] for part in parts) / max(1, num_tokens)

    def _row(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        parts: list[list[float]],
    ) -> StepRow:
        """Joins what the ranks measured: (loss, elapsed, data, communication, memory, ...)."""
        columns = (list(column) for column in zip(*parts, strict=True))
        _, elapsed, data, comm, memory, peak, inputs, _ = columns
        step_time_s = max(elapsed)
        data_s, comm_s = sum(data) / len(data), sum(comm) / len(comm)
        return StepRow(
            step=step,
            epoch=step / self._recipe.steps_per_epoch,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            learning_rate=self._settings.schedule.learning_rate(step - 1),
            tokens_per_s=sum(inputs) / step_time_s,
            samples_per_s=self._recipe.samples_per_step / step_time_s,
            step_time_s=step_time_s,
            data_s=data_s,
            compute_s=max(0.0, step_time_s - data_s - comm_s),
            comm_s=comm_s,
            memory_bytes=int(max(memory)),
            memory_peak_bytes=int(max(peak)),
        )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """Evaluation mode and no gradients, for a while."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
