"""A run's loop on the device, for run.py. It needs yaml and rich."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gpu_checks
import torch

import fullshard as fs
from fullshard.config.values import LrSchedule
from fullshard.engine.engine import engine_of
from fullshard.recipes.base import RankTeam, Seat
from fullshard.run.loop import Loop, LoopSettings, Update
from fullshard.run.on_torch import TorchTrainee
from fullshard.run.optim import Schedule
from support.ragged import Rows

NUM_STEPS, NUM_LEARNING = 6, 3  # in the first steps the order of units is learned
Around = Callable[[], AbstractContextManager[Any]]


def train(free: Around | None) -> list[tuple[float, float]]:
    """Returns the losses and norms of a run.

    Args:
        free: Context for the later updates, which are queued; None: the host awaits each update.
    """
    keys = ("input_ids", "labels")
    batches = [dict(zip(keys, gpu_checks.batch(at, 0), strict=True)) for at in range(NUM_STEPS)]
    model = fs.shard(gpu_checks.build(), wrap=["Block"])
    trainee = TorchTrainee(model, torch.optim.AdamW(model.parameters(), fused=True), lambda: (0, 0))
    data: Any = SimpleNamespace(
        micro_batches=lambda step: [batches[step]],
        loss=lambda model, batch: (model(batch["input_ids"], batch["labels"]), 1),
        tokens_per_step=1,
        samples_per_step=gpu_checks.CASE.batch,
        steps_per_epoch=1,
        held_out=lambda: [],
    )
    rows, update = Rows(), trainee.update

    def checked(step: int, batches: list[Any], loop: Loop) -> Update:
        with free() if free is not None and step > NUM_LEARNING else nullcontext():
            made = update(step, batches, loop)
        assert made.is_pending == (free is not None)
        return made

    rates = Schedule(LrSchedule.CONSTANT, 1e-3, 0, NUM_STEPS)
    settings = LoopSettings(NUM_STEPS, 0, gpu_checks.MAX_NORM, rates)
    team = RankTeam(engine_of(model).transport, Seat(0, 1, gpu_checks.DEVICE))
    loop = Loop(trainee, data, settings, team, rows)
    awaits = patch.object(TorchTrainee, "is_left_out_by_device", lambda *_: False)
    with nullcontext() if free is not None else awaits:
        with patch.object(trainee, "update", checked), patch.object(loop, "look_ahead"):
            loop.run()
    return [(row.loss, row.grad_norm) for row in rows.steps]
