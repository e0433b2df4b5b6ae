"""On a device with streams, a run reads a step's numbers after it queued the next step."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from fullshard.config.training import TrainingConfig
from fullshard.errors import DivergedError, PreemptedError
from fullshard.run.loop import Keeper
from fullshard.run.optim import build_optimizer
from fullshard.transport import streams
from support.ragged import Rows, make_loop
from support.ranks import on_ranks

NUM_STEPS, SPOILED = 6, 3


class Device(SimpleNamespace):
    """A device whose updates finish when the host waits for them."""

    def __init__(self, seen):
        super().__init__(seen=seen, queued=0)

    def event(self):
        self.queued += 1
        return self.queued

    def finish(self, event):
        self.seen.append(f"waited for {event}")


class Saves(Keeper):
    """A keeper that saves after some steps, and gets a stop request during a step."""

    saves = True

    def __init__(self, seen, due=(), stop=None):
        self.seen, self.due, self.stop = seen, due, stop

    def is_due(self, step):
        return step in self.due

    def asked_to_stop(self):
        return self.stop is not None and f"step {self.stop}" in self.seen

    def keep(self, step, *, stopping, last):
        due = stopping or last or self.is_due(step)
        if due:
            self.seen.append(f"saved {step}")
        if stopping:
            raise PreemptedError("asked to stop")
        return due


def run(
    *, is_device=True, spoiled=(), skips=0, world_size=1, fused=True, optim="adamw_torch", **kept
):
    """Trains some steps; returns the order of events, the rows and the weights."""
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    model, loop, recipe = make_loop(rank, world_size, 2, {}, rows := Rows())
    seen, micro_batches, loss = [], recipe.micro_batches, recipe.loss

    def noted(step):
        seen.append(f"step {step + 1}")
        return micro_batches(step)

    def spoils(model, batch):
        recipe.spoil_step = 0 if seen[-1] in [f"step {step}" for step in spoiled] else -1
        return loss(model, batch)

    recipe.micro_batches, recipe.loss = noted, spoils
    loop.look_ahead = lambda _: None
    loop.trainee.optimizer = build_optimizer(model, TrainingConfig(optim=optim))
    for group in loop.trainee.optimizer.param_groups:
        group["fused"] = fused
    settings = replace(loop.settings, num_steps=NUM_STEPS, max_skipped_steps=skips)
    loop.settings, loop.keeper = settings, Saves(seen, **kept)
    device = Device(seen)
    with patch.object(streams, "of", lambda _: device) if is_device else nullcontext():
        try:
            loop.run()
        except (DivergedError, PreemptedError) as error:
            seen.append(str(error))
    return seen, rows.steps, [param.full_tensor() for param in model.parameters()]


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_step_is_queued_before_the_step_before_it_is_awaited(optim):
    seen, rows, _ = run(optim=optim)
    order = [("step 1",), *((f"step {n}", f"waited for {n - 1}") for n in range(2, NUM_STEPS + 1))]
    assert seen == [*(it for pair in order for it in pair), "waited for 6", "saved 6"]
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]


def test_a_save_waits_for_the_steps_before_it():
    seen, _, _ = run(due=(3,))
    at = seen.index("saved 3")
    assert seen[at - 3 : at + 3] == [
        *("step 3", "waited for 2", "waited for 3"),
        *("saved 3", "step 4", "step 5"),
    ]


def test_a_run_stops_after_the_step_of_the_stop_request():
    seen, rows, _ = run(stop=3)
    assert seen[-3:] == ["waited for 3", "saved 3", "asked to stop"]
    assert [row.step for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
@on_ranks(2)
def test_a_device_skips_infinite_updates_as_if_the_host_waited(optim):
    settings = {"spoiled": (1, 4), "skips": 2, "world_size": 2, "optim": optim}
    _, rows, weights = run(is_device=False, **settings)
    _, others, found = run(**settings)
    torch.testing.assert_close(found, weights, rtol=0, atol=0)
    assert [(row.loss, row.grad_norm) for row in others] == [
        (row.loss, row.grad_norm) for row in rows
    ]
    assert [row.loss is None for row in others] == [True, False, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sgd_of_a_run_updates_every_element(dtype):
    layer = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
    weight = torch.nn.init.ones_(layer.weight)
    weight.grad = torch.ones_like(weight)
    build_optimizer(layer, TrainingConfig(optim="sgd", learning_rate=0.5)).step()
    assert weight.unique().tolist() == [0.5]


@pytest.mark.parametrize("is_device", [True, False])
def test_the_error_names_the_step_that_diverged(is_device):
    seen, rows, _ = run(is_device=is_device, spoiled=(SPOILED,))
    assert seen[-1].startswith(f"loss of step {SPOILED}: expected a finite number, got nan")
    assert [row.step for row in rows] == [1, 2]


def test_the_host_decides_where_the_optimizer_cannot():
    seen, _, _ = run(fused=False)
    assert seen[:4] == ["step 1", "waited for 1", "step 2", "waited for 2"]
