"""A run's checkpoints on XLA: the same files at the same steps as on torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import optax

from fullshard.launch.signals import Caught
from fullshard.run.checkpoints import PATIENCE, SCALER, RunCheckpoints
from fullshard.run.patience import Patience
from fullshard.run.resume import Resume
from fullshard.run.schedule import Schedule, StepPlan
from fullshard.xla.plan import XlaPlan
from fullshard.xla.step import State
from fullshard.xla_state import read, write


@dataclass(frozen=True)
class XlaKept:
    """What a checkpoint of a run holds beside its state.

    Attributes:
        plan: Plan of the state.
        groups: Groups of torch's optimizer, with their parameters' names.
        schedule: Schedule of the learning rate, which the groups show.
        tied: Further names of parameters.
        texts: Files of the tokenizer.
    """

    plan: XlaPlan
    groups: Sequence[Mapping[str, Any]]
    schedule: Schedule
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    texts: Mapping[str, str] = field(default_factory=dict[str, str])


class XlaCheckpoints(RunCheckpoints):
    """Saves a run's checkpoints in the background.

    Attributes:
        state: What is saved next.
    """

    def __init__(
        self,
        folder: Path,
        kept: XlaKept,
        steps: StepPlan,
        limit: int | None,
        caught: Caught,
        patience: Patience,
    ) -> None:
        super().__init__(folder, cast("Any", kept), steps, limit, caught, patience)
        self._plan = kept.plan
        self.state: State | None = None

    def load(
        self, resume: Resume, fresh: Callable[[], State], tx: optax.GradientTransformation
    ) -> tuple[State, int]:
        """The state to go on from, and its number of finished steps; as `resume`. A collective."""
        if resume.path is None:
            return fresh(), 0
        state, beside = read.load(self._plan, resume.path, tx)
        self._patience.load_state_dict((resume.in_place and beside.values.get(PATIENCE)) or {})
        done = self._check_done(int(state.step), resume.path, resume)
        if jax.process_index() == 0:
            logging.getLogger(__name__).info("resumed after step %d from %s", done, resume.path)
        return state, done

    def _save(self, step: int, *, wait: bool) -> None:
        assert self.state is not None, "the loop sets it before it asks to keep"
        kept = cast("XlaKept", self._kept)
        rate = kept.schedule.learning_rate(step - 1)
        groups = [{**group, "lr": rate} for group in kept.groups]
        values = {**self._values(step), SCALER: {}}
        settings = self._settings(step, kept.texts, wait=wait)
        write.save(self._folder, self.state, settings, write.Beside(groups, values, kept.tied))
