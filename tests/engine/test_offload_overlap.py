"""Copies of offloaded state run beside compute: streams played on a CPU, with given times."""

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.engine.engine import engine_of
from support.streams import Played

WIDTH, NUM_BLOCKS, NUM_RANKS = 136, 24, 4
HIDDEN = 0.9
COMPUTE_PER_COPY = 1.1  # of a block's forward


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.relu(self.up(x))


class Times:
    """What operations take: products a constant, copies between host and device their bytes."""

    def __init__(self, *, moves):
        self._moves, self.moved = moves, 0

    def __call__(self, name, tensors, crosses):
        if name in ("mm", "addmm"):
            return int(COMPUTE_PER_COPY * 4 * WIDTH * WIDTH // NUM_RANKS)
        if not crosses:
            return 0
        assert len({t.dtype for t in tensors}) == 1  # CUDA would cast in unplanned memory
        self.moved += tensors[0].nbytes
        return tensors[0].nbytes if self._moves else 0


def step_time(*, moves, num_batches, **settings):
    """When a step of the steady state is done, and how long its copies take."""
    times, start, moved = Times(moves=moves), 0, 0
    with Played(times).device() as played:
        model = fs.shard(
            nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))),
            transport="fake",
            shard=NUM_RANKS,
            wrap=["Block"],
            offload="cpu",
            **settings,
        )
        played.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        with played:
            for _ in range(3):
                start, moved = played.time, times.moved
                for _ in range(num_batches):
                    model(torch.randn(3, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert not played.races
        assert engine_of(model).runtime.observed.done
    return played.time - start, times.moved - moved


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"param_dtype": "bf16"}], ids=str)
def test_copies_between_host_and_device_hide_behind_compute(settings, num_batches):
    without, _ = step_time(moves=False, num_batches=num_batches, **settings)
    with_copies, copying = step_time(moves=True, num_batches=num_batches, **settings)
    shard = 4 * WIDTH * WIDTH // NUM_RANKS * NUM_BLOCKS
    times = 3 * num_batches + num_batches - 1  # in, in again, out; and the sums of before
    assert 0.95 * times * shard < copying < 1.05 * times * shard  # the last block is kept
    hidden = 1 - (with_copies - without) / copying
    assert hidden >= HIDDEN, f"{hidden:.3f} of {copying} bytes are hidden"
