"""Slots in symmetric memory: all ranks register the same slots in one order, each once."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.compat.fsdp2 import fully_shard
from fullshard.compat.wrapping import record_of
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError
from fullshard.planner.units import SlotRef
from fullshard.transport import c10d
from support.experts import cut_as_transformers, qwen
from support.models import Chain, chain, mean_square, perturbed, vectors
from support.ranks import on_ranks


class Memory:
    """Stands for torch's symmetric memory, with a pool in CPU memory; records registrations."""

    def __init__(self):
        self.is_inside, self.made, self.registered = False, set(), []
        self.connected, self._all_reduce = set(), dist.all_reduce

    @contextmanager
    def pool(self, _):
        self.is_inside = True
        yield
        self.is_inside = False

    def zeros(self, *args, **kwargs):
        made = torch.empty(*args, **kwargs).zero_()
        if self.is_inside:
            self.made.add(made.data_ptr())
        return made

    def all_reduce(self, values, *args, group=None, **kwargs):
        self.connected.add((group.group_name, values.device))
        return self._all_reduce(values, *args, group=group, **kwargs)

    def rendezvous(self, slot, group_name):
        assert slot.data_ptr() in self.made
        # NCCL makes a communicator in the first collective of its device
        assert (group_name, slot.device) in self.connected
        self.registered.append((slot.data_ptr(), slot.numel(), str(slot.dtype), group_name))

    @contextmanager
    def in_place(self):
        """Context in which slots are registered with it."""
        found = (self, self, torch.device("cpu"))
        with (
            patch.object(c10d, "symmetric_memory", lambda: found),
            patch.object(torch.cuda, "use_mem_pool", self.pool),
            patch.object(torch, "zeros", self.zeros),
            patch.object(dist, "all_reduce", self.all_reduce),
        ):
            yield


def slots_of(model):
    engine = engine_of(model)
    return {
        ring.name: [
            engine.rings.view(SlotRef(ring.name, at, 0), 1).data_ptr() for at in range(ring.count)
        ]
        for ring in engine.plan.rings
    }


def registered(settings):
    """Returns a rank's registrations at sharding, and after the order was learned."""
    memory, settings = Memory(), {"transport": "c10d", "symmetric_memory": True, **settings}
    with memory.in_place():
        model = fs.shard(perturbed(Chain(4, (3, 2, 1, 0))).float(), wrap=["Block"], **settings)
        transport, first = engine_of(model).transport, slots_of(model)
        begun = list(memory.registered)
        for step in range(3):
            mean_square(model(vectors(step, dist.get_rank())["x"].float())).backward()
            model.zero_grad()
    names = [
        transport.axes.reduce_group if name.endswith(".grad") else transport.axes.gather_group
        for name in first
        for _ in first[name]
    ]
    slots = [slot for name in first for slot in first[name]]
    expected = [(slot, group.group_name) for slot, group in zip(slots, names, strict=True) if group]
    assert [(slot, group) for slot, _, _, group in begun] == expected
    assert engine_of(model).runtime.agreed
    again = [slot for slot, *_ in memory.registered]
    assert len(set(again)) == len(again)  # equal rings are reused
    assert {slot for slots in slots_of(model).values() for slot in slots} <= set(again)
    return [found[1:] for found in memory.registered]


@pytest.mark.parametrize("settings", [{}, {"param_dtype": "bf16", "forward_prefetch": 2}], ids=str)
def test_each_slot_is_registered_once_and_in_one_order(ranks, settings):
    one, two = ranks(2)(registered, settings)
    assert one == two
    assert len(one) >= 5


def registered_experts(settings):
    """Returns slots and meshes of a model whose experts have their own mesh."""
    memory, model = Memory(), qwen()
    with memory.in_place():
        mesh = cut_as_transformers(model, 2)["fsdp"]
        fs.shard(model, mesh=mesh, transport="c10d", symmetric_memory=True, **settings)
    engine, found = engine_of(model), [(slot, group) for slot, *_, group in memory.registered]
    assert len(set(found)) == len(found)
    for unit in engine.units:
        axes = unit.transport.axes
        for group in unit.groups:
            for ref, own in (
                (group.plan.slot, axes.gather_group),
                (group.plan.grad_slot, axes.reduce_group),
            ):
                slot = slots_of(model)[ref.ring][ref.index]
                assert (slot, own.group_name) in found, (unit.plan.title, ref)
    assert memory.made == {slot for slot, _ in found}
    assert len(found) == len(memory.made)  # no slot belongs to two meshes
    return len(found), len({unit.plan.mesh for unit in engine.units})


@pytest.mark.short(1)
@pytest.mark.parametrize(
    "settings", [{}, {"wrap": ["Qwen3MoeAttention", "Qwen3MoeExperts"]}], ids=str
)
def test_slots_of_experts_are_registered_with_the_groups_of_experts(ranks, settings):
    (count, num_meshes), *others = ranks(4)(registered_experts, settings)
    assert others == [(count, num_meshes)] * 3
    assert num_meshes == 2


@on_ranks(2)
def test_symmetric_slots_change_no_bit():
    memory = Memory()
    trained = []
    for is_symmetric in (False, True):
        with memory.in_place():
            model = fs.shard(chain().float(), transport="c10d", symmetric_memory=is_symmetric)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                mean_square(model(vectors(step, dist.get_rank())["x"].float())).backward()
                optimizer.step()
                optimizer.zero_grad()
        trained.append([param.to_local().clone() for param in model.parameters()])
    assert memory.registered
    assert [
        at for at, (a, b) in enumerate(zip(*trained, strict=True)) if not torch.equal(a, b)
    ] == []


def as_fully_shard_does():
    memory = Memory()
    with memory.in_place():
        model = perturbed(Chain(3)).float()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        for module in (model, *model.blocks):
            module.set_symm_mem_for_comm()
        record_of(model).options["transport"] = "c10d"  # as on NCCL
        mean_square(model(vectors(0, dist.get_rank())["x"].float())).backward()
    return len(memory.registered)


def test_set_symm_mem_for_comm_registers_the_slots(ranks):
    one, two = ranks(2)(as_fully_shard_does)
    assert one == two > 0


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("direct", r"transport c10d on NCCL; got direct\.$"),
        ("c10d", "torch 2.11 or newer with symmetric"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_symmetric_is_refused(transport, said):
    with pytest.raises(ConfigError, match=f"^symmetric_memory: expected {said}"):
        fs.shard(chain().float(), symmetric_memory=True, transport=transport)


def test_another_backend_of_symmetric_memory_is_refused():
    model = fully_shard(perturbed(Chain(2)).float())
    with pytest.raises(ValueError, match="expected backend NCCL; got CUDA"):
        model.set_symm_mem_for_comm("CUDA")
