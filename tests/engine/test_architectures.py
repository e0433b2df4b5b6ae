"""Hugging Face architectures with default settings train as in one process, under every strategy.

Float64, every weight perturbed, three steps of AdamW with clipping, released slots poisoned. One
process runs the ranks' batches one after another (tests/support/reference.py).
"""

import pytest
import torch.distributed as dist

from support.architectures import ARCHITECTURES
from support.parity import assert_parity, assert_planned_events

FLAT = ("full_shard", "shard_grad_op", "no_shard")
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
FAST = ("gpt2", "gemma2", "qwen3_moe", "mamba", "bart", "clip", "swin")


def check(name):
    """Checks every strategy that this number of ranks supports."""
    case = ARCHITECTURES[name]
    hybrid = dist.get_world_size() == 4
    for strategy in HYBRID if hybrid else FLAT:
        settings = {"strategy": strategy, **({"replicate": 2} if hybrid else {})}
        model = assert_parity(
            case.build, case.work, settings, kinds=("adamw",), tolerance=case.tolerance
        )
        for step in (1, 2):  # the first step learns the order
            assert_planned_events(model, step)


@pytest.mark.short(1)
@pytest.mark.parametrize("name", FAST)
def test_architecture_trains_as_in_one_process(ranks, name):
    ranks(2)(check, name, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_trains_as_in_one_process(ranks, name, world_size):
    ranks(world_size)(check, name, timeout=110)
