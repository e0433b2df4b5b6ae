"""Updates of state on disk in turns: one thread reads the next turn, another writes the last."""

import time

import pytest
import torch
from torch import nn

from fullshard.engine.disk import PAGE, Disk, Room, put_back, step_in_turns

NUMEL, GRAIN = 8 * PAGE, PAGE
ONE = 3 * 2 * PAGE + 3 * 4 * GRAIN  # bytes of a turn: parameter, gradient, momentum


class Momentum(torch.optim.SGD):
    """Records the number of writes in progress in each step; fails in a given turn."""

    fails = 99

    def __init__(self, params, writing):
        super().__init__(params, lr=0.5, momentum=0.9)
        self.writing, self.seen = writing, []

    def step(self):
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.seen.append((len(self.writing), [p.numel() for p in given]))
        if len(self.seen) == self.fails:
            raise ValueError
        super().step()


@pytest.fixture
def writing(monkeypatch):
    """Yields the writes in progress, each of which is slow."""
    under_way, write = [], Room.write

    def slow(*args):
        under_way.append(args)
        time.sleep(0.02)
        write(*args)
        under_way.pop()

    monkeypatch.setattr(Room, "write", slow)
    return under_way


def on_disk(disk, numel):
    param = nn.Parameter(disk.zeros(numel, torch.float32, "parameters"))
    param.grad = disk.zeros(numel, torch.float32, "gradients")
    param.grad.copy_(torch.arange(numel))
    return param


def update(optimizer, disk):
    pairs = step_in_turns(optimizer, disk, ONE, GRAIN)
    put_back(pairs)


def test_a_turn_is_read_after_its_buffer_is_written(tmp_path, writing):
    disk = Disk(str(tmp_path))
    param = on_disk(disk, NUMEL)
    optimizer = Momentum([param], writing)
    for _ in range(2):
        update(optimizer, disk)
    assert len(optimizer.seen) == 1 + NUMEL // GRAIN
    assert torch.allclose(param.detach(), -1.45 * torch.arange(NUMEL))


def test_an_optimizer_uses_mappings_only_between_writes(tmp_path, writing):
    """It uses them when it creates a parameter's states, and after an error."""
    disk = Disk(str(tmp_path))
    old, new = on_disk(disk, NUMEL), on_disk(disk, PAGE // 2)
    optimizer = Momentum([old], writing)
    update(optimizer, disk)
    optimizer.add_param_group({"params": [new]})
    optimizer.seen.clear()
    update(optimizer, disk)
    *turns, last = optimizer.seen
    assert max(num for num, _ in turns) > 0
    assert last == (0, [GRAIN, PAGE // 2])
    optimizer.fails = len(optimizer.seen) + 4
    with pytest.raises(ValueError):  # noqa: PT011
        update(optimizer, disk)
    assert not writing
