"""The memory of ranks between steps is the planned memory, as the system counts it."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.bench.measurement import proportional_bytes, return_free_memory
from fullshard.engine.engine import engine_of

WIDTH, NUM_BLOCKS = 4096, 7
TOLERANCE = 0.02
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "full_shard": (2, {}),
    "shard_grad_op": (2, {}),
    "no_shard": (2, {}),
    "hybrid_shard": (4, {"replicate": 2}),
    "hybrid_shard_zero2": (4, {"replicate": 2}),
}


class Block(nn.Module):
    """A matrix, and a buffer that is not sharded."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.utils.skip_init(nn.Linear, width, width)
        nn.init.constant_(self.linear.weight, 1e-3)  # random numbers would need most of the time
        nn.init.zeros_(self.linear.bias)
        self.register_buffer("scale", torch.ones(width, width // 8))

    def forward(self, x):
        return x + self.linear(x).tanh() * self.scale.mean(1)


def train(width, num_blocks, strategy, sizes):
    """Shards a model with a frozen first block, takes two steps, and returns its state."""
    model = nn.Sequential(*[Block(width) for _ in range(num_blocks)])
    model[0].requires_grad_(False)
    fs.shard(model, strategy=strategy, wrap=["Block"], **sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(1, width)).square().sum().backward()
        optimizer.step()
    return model, optimizer  # keeps gradients, which are in the plan


def held_bytes(strategy, sizes):
    """Growth of this rank's memory, the plan's rows and the number of parameters."""
    train(64, 2, strategy, sizes)  # libraries loaded at first use are not state
    gc.collect()  # complete cycles: a model, its hooks and its engine
    return_free_memory()
    torch.distributed.barrier()
    before = proportional_bytes()
    kept = train(WIDTH, NUM_BLOCKS, strategy, sizes)
    return_free_memory()
    torch.distributed.barrier()
    growth = proportional_bytes() - before
    torch.distributed.barrier()  # no rank leaves while shared pages are counted
    plan = engine_of(kept[0]).plan
    return growth, {row.name: row.num_bytes for row in plan.memory}, plan.num_parameters


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(name, marks=pytest.mark.long if name == "full_shard" else pytest.mark.slow)
        for name in STRATEGIES
    ],
)
def test_planned_and_measured_state_bytes_agree(ranks, strategy):
    world_size, sizes = STRATEGIES[strategy]
    results = ranks(world_size)(held_bytes, strategy, sizes, timeout=240)
    _, rows, num_parameters = results[0]
    assert num_parameters >= 100_000_000
    measured = sum(growth for growth, *_ in results)
    planned = world_size * sum(rows.values())
    print(f"{strategy}: planned {planned:,}, measured {measured:,}, {measured / planned - 1:+.2%}")
    assert measured == pytest.approx(planned, rel=TOLERANCE), (strategy, measured / planned, rows)
