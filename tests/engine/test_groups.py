"""Which process groups a rank asks torch for: their number, and how NCCL's are made."""

from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.config.schema import ShardConfig
from fullshard.planner.mesh import Mesh
from fullshard.transport import _torch_compat
from fullshard.transport.groups import make_transport

DENSE, ALONE = Mesh(128, 8), Mesh(1, 1024)
EXPERTS = DENSE.of_experts([tuple(range(at, at + 4)) for at in range(0, 1024, 4)])
MADE = {  # all ranks; gathers, reductions and replicas of each mesh
    (ALONE,): 1 + (1 + 1 + 0),
    (DENSE,): 1 + (128 + 128 + 8),
    (DENSE, EXPERTS): 1 + (128 + 128 + 8) + (512 + 512 + 0),  # whose replicas are the dense ones
    (DENSE, DENSE.unsharded()): 1 + (128 + 128 + 8) + (0 + 0 + 1),
}


@contextmanager
def alone(rank):
    """Inside, this process is one of 1,024 ranks; yields the calls of `new_group`."""
    dist.init_process_group("fake", rank=rank, world_size=1024, store=FakeStore())
    calls, torchs = [], dist.new_group

    def new_group(ranks, *, timeout, pg_options):
        calls.append((ranks, timeout, pg_options))
        return torchs(ranks)

    try:
        with patch.object(dist, "new_group", new_group):
            yield calls
    finally:
        dist.destroy_process_group()


def transports(meshes):
    return [make_transport(ShardConfig(transport="c10d"), mesh) for mesh in meshes]


@pytest.mark.parametrize("meshes", MADE, ids=str)
def test_a_layout_of_ranks_has_its_groups_made_once_and_alike_on_all_ranks(meshes):
    made = []
    for rank in (0, 777):
        with alone(rank) as calls:
            axes = [found.axes for found in transports(meshes)]
            assert len(calls) == MADE[meshes]
            assert [found.axes for found in transports(meshes)] == axes  # of another model
            assert len(calls) == MADE[meshes]
            made.append([ranks for ranks, *_ in calls])
            for own, mesh in zip(axes, meshes, strict=True):
                groups = own.gather_group, own.reduce_group, own.replicate_group
                sizes = [group and dist.get_world_size(group) for group in groups]
                several = [size if size > 1 else None for size in (mesh.shard, mesh.replicate)]
                assert sizes == [several[0], *several]
    assert made[0] == made[1]  # each is a collective


def test_groups_of_nccl_have_streams_of_high_priority_and_the_time_out_of_all_ranks():
    nccl = SimpleNamespace(Options=SimpleNamespace)
    with (
        alone(0) as calls,
        patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        patch.object(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl"),
        patch.object(_torch_compat, "group_timeout", lambda _: timedelta(seconds=7)),
    ):
        (transport,) = transports([DENSE])
    assert len(calls) == MADE[DENSE,]
    for _, timeout, options in calls:
        assert options.is_high_priority_stream
        assert options._timeout == timeout == timedelta(seconds=7)
    kinds = transport.axes.gather_group, transport.axes.reduce_group
    assert kinds[0] is not kinds[1]  # so that neither waits for the other's stream
    own = {id(options) for ranks, _, options in calls if 0 in ranks}
    assert len(own) == 4  # torch writes a group's ranks into its options
