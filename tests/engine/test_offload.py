"""State whose home is the host: the same bits, and the planned bytes in the planned place.

Here the host computes as well; tests/gpu has the copies between host and device.
"""

from __future__ import annotations

import pytest
import torch

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError
from support.models import CASES, Chain
from support.parity import assert_parity, assert_planned_events

KINDS = {
    "parameters": ("parameter shards", "parameter_shards"),
    "gradients": ("gradient shards", "gradient_shards"),
}


def check(name, settings):
    case = CASES[name]
    model = assert_parity(case.build, case.work, {**settings, "offload": "cpu"})
    assert_planned_events(model, 1)
    plan, stats = engine_of(model).plan, fs.memory_stats(model)
    rows = {row.name: row for row in plan.memory}
    for planned, measured in KINDS.values():
        assert rows[planned].place == "host"
        assert rows[planned].num_bytes == stats[measured]["now"]
    assert rows["slots"].place == "device"
    assert rows["slots"].num_bytes == stats["slots"]["now"] > 0
    assert rows["communication buffers"].num_bytes == stats["communication_buffers"]["now"]
    assert plan.peak_bytes["host"] > 0


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloaded_state_trains_as_in_one_process(ranks, world_size, strategy):
    ranks(world_size)(check, "tied llama", {"strategy": strategy}, timeout=100)


def test_offloaded_state_trains_on_a_hybrid_mesh(ranks):
    ranks(4)(check, "chain", {"strategy": "hybrid_shard", "replicate": 2}, timeout=100)


def test_parts_of_the_state_alone_are_refused():
    with pytest.raises(ConfigError, match=r"offload: .*optimizer: device.*Write offload: cpu"):
        fs.shard(Chain(3), offload={"parameters": "cpu", "gradients": "cpu"})


def test_disks_are_not_yet_supported():
    with pytest.raises(ConfigError, match="offload: 'nvme' is not yet supported"):
        fs.shard(Chain(3), offload="nvme")


def test_an_evaluation_reads_offloaded_weights():
    model = Chain(3).double()
    x = torch.randn(4, 12, dtype=torch.float64)
    wanted = model(x).detach()
    fs.shard(model, offload="cpu", poison=True)
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
