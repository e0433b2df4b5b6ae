"""Learning rates compared with transformers' schedulers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from fullshard.config.schema import TrainingConfig
from fullshard.config.values import LrSchedule
from fullshard.run.optim import Schedule, plan_steps, warmup_steps


@pytest.mark.parametrize("kind", list(LrSchedule))
@pytest.mark.parametrize(("num_warmup", "num_steps"), [(0, 1), (0, 10), (4, 10), (10, 10), (12, 9)])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_schedule_equals_that_of_transformers(kind, num_warmup, num_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = get_scheduler(kind.value, optimizer, num_warmup, num_steps)
    ours = Schedule(kind, 3e-4, num_warmup, num_steps)
    for finished in range(num_steps + 2):
        assert ours.learning_rate(finished) == pytest.approx(theirs.get_last_lr()[0], abs=1e-18)
        theirs.step()


@pytest.mark.parametrize(
    ("warmup", "ratio", "expected"),
    [(0, 0.0, 0), (7, 0.0, 7), (0.1, 0.0, 11), (0, 0.1, 11), (7, 0.5, 7), (1, 0.0, 1)],
)
def test_warmup_is_counted_in_steps_or_as_a_share(warmup, ratio, expected):
    assert warmup_steps(warmup, ratio, 101) == expected


@pytest.mark.parametrize(("kind", "expected"), [("constant", 0), ("linear", 3)])
def test_a_constant_rate_counts_no_steps_of_warmup(kind, expected):
    facts: Any = SimpleNamespace(
        num_train_sequences=64, mixture=(), shuffle_buffer=0, fingerprint=""
    )
    training = TrainingConfig(lr_scheduler_type=kind, warmup_steps=3, max_steps=9)
    assert plan_steps(training, facts, num_batches=2).num_warmup_steps == expected
