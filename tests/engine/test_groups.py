"""Process groups that a rank creates: their number, and options of NCCL's."""

from contextlib import contextmanager
from functools import wraps
from inspect import signature
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.compat import wrapping
from fullshard.config.schema import ShardConfig
from fullshard.config.values import TransportKind
from fullshard.engine.homes import default_device
from fullshard.errors import ConfigError
from fullshard.planner.mesh import Mesh
from fullshard.transport.groups import (
    Exchange,
    all_values,
    make_transport,
    own_group,
    resolve_transport,
)
from support.processes import python

DENSE, ALONE = Mesh(128, 8), Mesh(1, 1024)
FALLING = Mesh(2, 512, tuple(reversed(range(1024))))
EXPERTS = DENSE.of_experts([tuple(range(at, at + 4)) for at in range(0, 1024, 4)])
MADE = {  # one of all ranks; for gathers, reductions and replicas of each mesh
    (ALONE,): 1 + (1 + 1 + 0),
    (DENSE,): 1 + (1 + 1 + 1),
    (FALLING,): 1 + (1 + 1 + 1),
    (DENSE, EXPERTS): 1 + (1 + 1 + 1) + (1 + 1 + 0),  # their replicas are the dense ones
    (DENSE, DENSE.unsharded()): 1 + (1 + 1 + 1) + (0 + 0 + 1),
}
ALL_OF_DENSE = 1 + (128 + 128 + 8)


@contextmanager
def alone(rank):
    """Context in which this process is one of 1,024 ranks; yields its arguments for each group."""
    dist.init_process_group("fake", rank=rank, world_size=1024, store=FakeStore())
    calls, make = [], c10d._new_process_group_helper

    @wraps(make)
    def noted(*args, **kwargs):
        given = signature(make).bind(*args, **kwargs)
        calls.append(SimpleNamespace(**given.arguments))
        return make(*given.args[:6], timeout=given.arguments["timeout"])  # not NCCL's options

    try:
        with patch.object(c10d, "_new_process_group_helper", noted):
            yield calls
    finally:
        dist.destroy_process_group()


def transports(meshes):
    return [make_transport(ShardConfig(transport="c10d"), mesh) for mesh in meshes]


@pytest.mark.parametrize("meshes", MADE, ids=str)
def test_a_rank_creates_only_its_own_groups_and_each_once(meshes):
    named, layouts = {}, set()
    for rank in (0, 1, 777):
        with alone(rank) as calls:
            axes = [found.axes for found in transports(meshes)]
            assert [found.axes for found in transports(meshes)] == axes  # groups of another model
            assert len(calls) == MADE[meshes]
            for own, mesh in zip(axes, meshes, strict=True):
                groups = own.gather_group, own.reduce_group, own.replicate_group
                sizes = [group and dist.get_world_size(group) for group in groups]
                several = [size if size > 1 else None for size in (mesh.shard, mesh.replicate)]
                assert sizes == [several[0], *several]
                assert Exchange.over(mesh, rank).group is own.reduce_group
                if own.gather_group:
                    assert dist.get_process_group_ranks(own.gather_group) == [*own.shard_ranks]
                    assert dist.get_group_rank(own.gather_group, rank) == own.shard_index
        for call in calls:
            ranks = call.global_ranks_in_group
            assert rank in ranks
            # the rendezvous name in the store: one per group, equal on all of its ranks
            assert named.setdefault(call.group_name, ranks) == ranks
        layouts.add(tuple(call.group_name.rpartition("_")[0] for call in calls))
    assert len(layouts) == 1  # all ranks split NCCL's communicator in the same order


def made_again():
    """Exchanges values over a group of the same ranks as a destroyed one."""
    told, names = [], set()
    for purpose in ("first", "second"):
        group = own_group(purpose, [[0, 1]])
        names.add(group.group_name)
        told.append(all_values(dist.get_rank(), group))
        dist.destroy_process_group(group)
    assert len(names) == 2
    return told


def test_a_new_group_does_not_reuse_the_name_of_a_destroyed_one(ranks):
    assert ranks(2)(made_again, timeout=20) == [[[0, 1], [0, 1]]] * 2


def test_groups_that_one_split_would_merge_are_created_one_by_one():
    with patch.object(c10d, "_process_group_color", lambda _: 7):
        for rank in (0, 777):
            with alone(rank) as calls:
                transports([DENSE])
            assert len(calls) == ALL_OF_DENSE


def test_nccl_groups_have_high_priority_streams_and_the_default_time_out():
    nccl, device = SimpleNamespace(Options=SimpleNamespace), torch.device("cuda", 3)
    with (
        alone(0) as calls,
        patch.object(dist, "ProcessGroupNCCL", nccl, create=True),
        patch.object(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl"),
    ):
        dist.group.WORLD.bound_device_id = device
        (transport,) = transports([DENSE])
    assert len(calls) == MADE[DENSE,]
    for call in calls:
        assert call.backend_options.is_high_priority_stream
        assert call.backend_options._timeout == call.timeout == dist.default_pg_timeout
        assert call.device_id == device  # so that NCCL splits
    kinds = transport.axes.gather_group, transport.axes.reduce_group
    assert kinds[0] is not kinds[1]  # so that neither waits for the other's stream
    assert len({id(call.backend_options) for call in calls}) == 4  # torch writes ranks into them


# ---- the device of a rank; torch's answers about GPUs are replaced

ON_BOTH = "cpu:gloo,cuda:nccl"


def resolved(backend, device, transport="auto"):
    config = ShardConfig(transport=TransportKind(transport))
    with patch.object(dist, "get_backend_config", lambda: backend):
        return resolve_transport(config, [Mesh(1, 2)], torch.device(device))


@pytest.mark.parametrize(
    ("backend", "device", "said"),
    [
        ("cuda:nccl", "cpu", r"for cpu; got none\. Initialise it with cpu:gloo,cuda:nccl, or move"),
        ("cpu:gloo,cuda:gloo", "cuda", r"for cuda; got gloo\. Initialise it with nccl, or move"),
        ("cpu:gloo", "cuda", r"for cuda; got none\. Initialise it with nccl, or move"),
    ],
)
def test_a_group_must_serve_the_device_of_the_model(backend, device, said):
    with pytest.raises(ConfigError, match=f"^process group: expected a backend {said}"):
        resolved(backend, device)
    assert resolved(ON_BOTH, "cuda") is TransportKind.C10D


def test_a_model_left_on_the_cpu_of_a_gpu_machine_is_named(caplog):
    with patch.object(dist, "get_rank", lambda: 0):
        assert resolved("cpu:gloo", "cpu", "direct") is TransportKind.DIRECT
        assert not caplog.messages
        assert resolved(ON_BOTH, "cpu", "direct") is TransportKind.DIRECT
    (said,) = caplog.messages
    assert "the model is on the CPU and will be trained there" in said


def test_a_model_on_meta_goes_to_the_device_that_the_group_was_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert default_device() == torch.device("cuda", 0)
    with alone(0):
        assert default_device() == torch.device("cuda", 0)
        dist.group.WORLD.bound_device_id = torch.device("cuda", 3)  # without torch.cuda.set_device
        assert default_device() == torch.device("cuda", 3)


@pytest.mark.parametrize(("device", "kind"), [("cpu", "direct"), ("cuda", "c10d")])
def test_sums_before_the_engine_exists_use_the_group_of_the_device(device, kind):
    made = []
    with patch.object(wrapping, "make_transport", lambda given, _: made.append(given.transport)):
        wrapping.early_transport(Mesh(1, 2), torch.device(device))
    assert made == [TransportKind(kind)]


AT_WORK_AT_EXIT = """
import hashlib, pathlib, threading
from fullshard.transport._torch_compat import await_gloo_at_exit

def free():
    task = pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    task.write_text("pt_gloo_runloop")
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # works without Python's lock
    print("freed", flush=True)

await_gloo_at_exit()
threading.Thread(target=free, daemon=True).start()
"""


def test_a_process_exits_only_when_the_threads_of_gloo_sleep():
    assert python("-c", AT_WORK_AT_EXIT).stdout == "freed\n"
