"""Faults that `verify --inject` makes outside the engine, to prove that verify detects them.

name                where                  effect
skipped_reduction   transport              one unit's gradients stay each rank's own
wrong_divisor       transport              every reduction is W times too large
stale_slot          hook on a module       a unit computes with the weights of the step before
missed_gather       transport              one gather brings nothing
lost_tie            loading of weights     tied weights are loaded as two
repeated_data       data loader            the last rank is given rank 0's batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.config.values import Choice, TransportKind
from fullshard.engine.engine import engine_of
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError

Tensors = Sequence[torch.Tensor]


class Fault(Choice):
    """Faults of a sharded step that raise no error."""

    SKIPPED_REDUCTION = "skipped_reduction"
    WRONG_DIVISOR = "wrong_divisor"
    STALE_SLOT = "stale_slot"
    MISSED_GATHER = "missed_gather"
    LOST_TIE = "lost_tie"
    REPEATED_DATA = "repeated_data"


# Faults of gathered weights. Ranks of one host, which would share one copy, gather for them.
NEEDS_GATHERS = (Fault.STALE_SLOT, Fault.MISSED_GATHER)


class Injection:
    """The actions of a rank for a fault; without a fault there are none.

    Attributes:
        fault: The fault.
        step: The step, from 0, whose data was requested last.
    """

    def __init__(self, fault: str | None = None) -> None:
        self.fault = None if fault is None else Fault(fault)
        self.step = 0

    def sharding(self, asked: ShardConfig, device: torch.device) -> ShardConfig:
        """The sharding of the model, in which transport auto means direct if gathers are needed.

        Raises:
            ConfigError: The requested transport gathers nothing, and the fault needs a gather.
        """
        if self.fault not in NEEDS_GATHERS:
            return asked
        if asked.transport is TransportKind.SHARED:
            raise ConfigError(
                "--inject: expected a transport that gathers, for a fault of gathered weights; "
                "got sharding.transport='shared'. Remove it, or use direct."
            )
        auto = asked.transport is TransportKind.AUTO and device.type == "cpu"
        return ShardConfig.of(asked, transport=TransportKind.DIRECT) if auto else asked

    def loaded(self, model: nn.Module) -> None:
        """Called after the full weights are loaded, before the model is sharded."""
        if self.fault is Fault.LOST_TIE:
            _lose_ties(model)

    def attach(self, model: nn.Module) -> None:
        """Called after the model is sharded."""
        if self.fault in _ATTACHED:
            _ATTACHED[self.fault](model, self)

    def source(self, batch: int, num_batches: int) -> int:
        """Which batches a rank of `batch` is given."""
        is_last = batch == num_batches - 1
        return 0 if is_last and self.fault is Fault.REPEATED_DATA else batch


class _Wrapped:
    """A unit's transport, with another way to gather or reduce."""

    def __init__(self, transport: Any, **replaced: Any) -> None:
        self._transport = transport
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Landing:
    """A reduction whose result is changed once it is written."""

    def __init__(self, reduction: Any, change: Callable[[Tensors], None]) -> None:
        self._reduction, self._change = reduction, change

    def sum_into(self, outs: Tensors) -> None:
        """Sum and change."""
        self._reduction.sum_into(outs)
        self._change(outs)


def _skip_reduction(model: nn.Module, _: Injection) -> None:
    """The reductions of the middle unit return this rank's own gradients."""
    unit = _middle([unit for unit in engine_of(model).units if unit.trained_groups])
    real, shard = unit.transport, unit.plan.mesh.shard

    def reduce(fulls: Tensors) -> _Landing:
        own = [full.chunk(shard)[unit.shard_index].clone() for full in fulls]
        return _Landing(real.reduce(fulls), lambda outs: _copy(own, outs))

    def sum_replicas(values: torch.Tensor) -> Iterator[None]:
        own = values.clone()
        yield from real.sum_replicas(values)
        values.copy_(own)

    unit.transport = _Wrapped(real, reduce=reduce, sum_replicas=sum_replicas)


def _sum_for_mean(model: nn.Module, _: Injection) -> None:
    """Every reduction returns the sum instead of the mean."""
    engine = engine_of(model)
    num_batches = engine.plan.mesh.num_copies

    def multiply(outs: Tensors) -> None:
        for out in outs:
            out.mul_(num_batches)

    def reduce(real: Callable[[Tensors], Any], fulls: Tensors) -> _Landing:
        return _Landing(real(fulls), multiply)

    for unit in engine.units:
        real = unit.transport
        wrapped: Any = _Wrapped(real, reduce=partial(reduce, real.reduce))
        unit.transport = wrapped


def _miss_gather(model: nn.Module, injection: Injection) -> None:
    """In the second step's forward, the gather of the middle unit does not fill its slot."""
    unit = _middle([unit for unit in engine_of(model).units if _gathers(unit)])
    real, missed = unit.transport, False

    def fetch(fulls: Tensors, unit: str) -> Any:
        nonlocal missed
        if injection.step == 1 and not missed:
            missed = True
            return SimpleNamespace(wait=lambda: None)
        return real.fetch(fulls, unit)

    unit.transport = _Wrapped(real, fetch=fetch)


def _keep_slot(model: nn.Module, injection: Injection) -> None:
    """From the second step on, a unit's forward computes with the weights of the first step."""
    chosen = _middle([u for u in engine_of(model).units if u.trained_groups and _gathers(u)])
    kept: dict[str, torch.Tensor] = {}

    def before_forward(*_: Any) -> None:
        for member in chosen.members:  # in the slot, since writes into parameters raise errors
            name, weights = member.piece.name, member.view(member.group.full)
            if injection.step == 0:
                kept[name] = weights.clone()
            elif name in kept:
                weights.copy_(kept[name])

    model.get_submodule(chosen.plan.name).register_forward_pre_hook(before_forward)


def _lose_ties(model: nn.Module) -> None:
    """Like a loader that assigns every name in the file and does not tie weights."""
    seen: set[int] = set()
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if id(param) in seen:
            path, _, attribute = name.rpartition(".")
            copy = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
            setattr(model.get_submodule(path), attribute, copy)
        seen.add(id(param))


def _gathers(unit: Unit) -> bool:
    return any(group.gathers for group in unit.groups)


def _middle(units: Sequence[Unit]) -> Any:
    return units[len(units) // 2]


def _copy(sources: Tensors, targets: Tensors) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


_ATTACHED: dict[Fault | None, Callable[[nn.Module, Injection], None]] = {
    Fault.SKIPPED_REDUCTION: _skip_reduction,
    Fault.WRONG_DIVISOR: _sum_for_mean,
    Fault.STALE_SLOT: _keep_slot,
    Fault.MISSED_GATHER: _miss_gather,
}
