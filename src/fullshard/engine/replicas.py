"""Checks that ranks have equal weights, at the start and periodically during training.

[Note: a hash of bits]
A tensor's hash is the sum of its elements' bits as integers. It is cheap, equal for equal weights,
and detects a wrong seed, a missed load or an update on one rank. Ranks compute the maximum of their
hashes and of the negated hashes; if these agree, all hashes are equal.

Two checks compare the replicas of a shard, because one is early and the other complete:

    Count.WEIGHTS      a piece of the trained weights in each step, in the sum that ends a backward.
    (engine/norms.py)  An update that differs changes nearly all elements, so the next step shows
                       it. On CPUs only: elsewhere the host would wait for the hash.
    check_replicas     all weights every 100 steps, also frozen ones, on every device.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.engine._torch_compat import plain
from fullshard.engine.cuts import Cut
from fullshard.engine.norms import UNEQUAL_REPLICAS, GradientNorms, bits_hash, from_host
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import ConfigError, EngineError
from fullshard.planner.plan import Plan
from fullshard.transport.base import Transport

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

STEPS = 100  # steps between two checks
_NONE = torch.iinfo(torch.int64).min
_OF_A_RANK = {"wrap", "offload", "poison"}  # in the plan, but for a folder; for debugging


def check_equal_start(
    model: nn.Module, plan: Plan, config: ShardConfig, transport: Transport, device: torch.device
) -> None:
    """Check that all ranks have equal plans, settings and weights. A collective on a device.

    Raises:
        ConfigError: They differ; names the first difference.
    """
    named = ((n, p) for n, p in model.named_parameters() if not isinstance(p, ShardedParameter))
    params = {name: param for name, param in named if not param.is_meta}
    transport.phase.next = "fs.shard"
    told = str({name: value for name, value in vars(config).items() if name not in _OF_A_RANK})
    numbers = [int(plan.digest()[:15], 16), len(params), _schedule_hash(plan)]
    numbers.append(zlib.crc32(told.encode()))
    widest = max((plan.mesh, *(unit.mesh for unit in plan.units)), key=attrgetter("inner"))
    inner, own = widest.inner, widest.place(transport.rank) % widest.inner
    # plans may differ along other axes, if sizes do not divide; schedules may not
    found = _bounds(torch.tensor(numbers, device=device), transport, [own, own, 0, 0], inner)
    if _unequal(found):
        raise ConfigError(
            "fs.shard: expected the same model and the same configuration on every rank; the "
            "ranks' plans or settings differ. Compare fs.plan(...).to_json() of the ranks, and the "
            "arguments of fs.shard (grad_reduction, output_dtype ...). Other axes of the "
            "mesh may cut parameters unevenly if the units have the same slots on every rank."
        )
    cut = {n for unit in plan.units for g in unit.groups for names in g.names for n in names}
    names = [name for name in params if name in cut]
    hashes = [bits_hash(plain(params[name]).detach()) for name in names]
    if not hashes:
        return
    cuts = [Cut.of(params[name]) for name in names]
    parts = [0 if cut is None else cut.part for cut in cuts]
    wrong = _unequal(_bounds(torch.stack(hashes), transport, parts, inner))
    if wrong:
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ConfigError(
            f"{names[wrong[0]]}{others}: expected the same weights on every rank, because each "
            "keeps a part; they differ. Seed all ranks alike (torch.manual_seed) before the model "
            "is built, or call torch.distributed.broadcast(x, 0) for each before fs.shard."
        )


def _schedule_hash(plan: Plan) -> int:
    """A hash of units, slots and events, without sizes."""
    refs = [[ref for g in unit.groups for ref in (g.slot, g.grad_slot)] for unit in plan.units]
    slots = [[(ref.ring, ref.index) if ref else None for ref in unit] for unit in refs]
    events = [(event.kind.value, event.unit) for event in plan.events]
    return zlib.crc32(repr(([unit.name for unit in plan.units], slots, events)).encode())


def check_equal_random(transport: Transport, device: torch.device) -> None:
    """Check that all ranks have equal random states before initialisation. A collective.

    Raises:
        ConfigError: The random states differ.
    """
    code = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if _unequal(_bounds(torch.tensor([code], device=device), transport)):
        raise ConfigError(
            "fs.shard of a model on meta: expected the same random state on every rank, because "
            "each keeps its part of one initialisation; the states differ. Call "
            "torch.manual_seed(SEED) on all ranks before it."
        )


def check_replicas(units: Sequence[Unit], norms: GradientNorms) -> None:
    """Check that replicas of a part have equal bits. A collective.

    Raises:
        EngineError: Replicas differ; names the units. On a GPU, the end of a backward raises it.
    """
    transport = norms.transport
    copied = [unit for unit in units if unit.plan.mesh.replicate > 1 and unit.groups]
    if not copied:
        return
    meshes = [unit.plan.mesh for unit in copied]
    hashes = [torch.stack([bits_hash(g.master) for g in unit.groups]).sum() for unit in copied]
    sets = [mesh.place(transport.rank) % (mesh.shard * mesh.inner) for mesh in meshes]
    num_sets = max(mesh.shard * mesh.inner for mesh in meshes)
    transport.phase.next = "a comparison of replicas"
    values = torch.stack(hashes).to(copied[0].groups[0].full.device)

    def check(bounds: torch.Tensor) -> None:
        wrong = [copied[i].plan.title for i in _unequal(bounds)]
        if wrong:
            others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise EngineError(f"{wrong[0]}{others}: {UNEQUAL_REPLICAS}")

    norms.check_on_host(_bounds(values, transport, sets, num_sets), check)


def _bounds(
    values: torch.Tensor, transport: Transport, sets: Sequence[int] = (), num_sets: int = 1
) -> torch.Tensor:
    """(2, num_sets, n): maxima of int64 values and their negatives over each set of ranks.

    The ranks of a set must have equal values. `sets` has this rank's set for each value.
    """
    at = from_host([*sets] or [0] * len(values), values.device, torch.int64).expand(2, 1, -1)
    bounds = values.new_full((2, num_sets, len(values)), _NONE)
    bounds.scatter_(1, at, torch.stack([values, -values]).unsqueeze(1))
    transport.all_reduce(bounds, maximum=True)
    return bounds


def _unequal(bounds: torch.Tensor) -> list[int]:
    """Which values differ between ranks of one set."""
    return (bounds[0] != -bounds[1]).any(dim=0).nonzero().flatten().tolist()
