"""Full parameters: compute parameters of a forward, kept ones after it, and gathered single ones.

[Note: versions]
Autograd records the version of every tensor that it saves for backward, and raises an error if the
version has changed when it reads the tensor. Slots and shards are written without autograd's
knowledge. The engine therefore sets the version counters of compute parameters itself, so that
every stale read is an error:

    slot may contain another unit    a different value, until the unit is gathered again
    shard was written                incremented: an older graph would read overwritten weights,
                                     like a second backward after optimizer.step() in one process

[Note: kept views]
A forward may leave views of its weights in a list (`seen.append(module.weight.t())`). Such views
would read another unit's weights once the slot is refilled. Until the unit is gathered again, they
get a class that raises an error, like the unit's compute parameters. The search uses the garbage
collector's list, which contains all tensors that Python objects keep; a tensor's address identifies
its memory. Without a graph, the search is skipped if the number of tensors that share the slot's
memory shows that there are none. Graphs share the memory too, so forwards with a graph search young
objects until ranks have agreed on the order, in the first step, and a unit continues to search
while its last search found views. A hook that starts to keep views later is not detected before the
next evaluation. The list also contains tensors that only autograd keeps, such as `weight.t()` of
`x @ weight.t()`. torch has one reference to them, and they do not count as kept views.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import chain
from sys import getrefcount
from typing import Any
from weakref import ref

import torch
from torch import nn

from fullshard.engine._torch_compat import GRAD, current_node, is_compiling, no_guard, tree_leaves
from fullshard.engine.guard import Rule, rule_of
from fullshard.errors import ShardedTensorError
from fullshard.planner.layout import FlatLayout, Slice
from fullshard.transport.base import Transport

TRAINED: Any = torch.Tensor.requires_grad
DATA: Any = torch.Tensor.data
SENT_BYTES = 1 << 20  # size of the message buffer that gathers a parameter


class Computed(nn.Parameter):
    """The full parameter that forward sees. Writes into its `.data` are detected.

    torch's `.data` has a separate version counter, which `Unit.check_writes` would miss. In a
    forward `.grad` is that of the shard. Autograd and the compiler have their own.
    """

    __slots__ = ("member",)

    def shard(self) -> Any:
        """The shard; None of a copy, or if the model was deleted."""
        member = getattr(self, "member", lambda: None)()
        return None if member is None else member.param

    def _read_grad(self) -> Any:
        member = getattr(self, "member", lambda: None)()
        stored = GRAD.__get__(self)
        # A hook of tensor parallelism on this weight sums the gradient that autograd stored.
        if member is None or is_compiling() or current_node() is (member.node or self):
            return stored
        with no_guard():
            has_none = stored is None and not member.touched and member.param.grad is None
        return None if has_none else member.param.grad  # an error in a backward that changes it

    def _write_grad(self, value: Any) -> None:
        shard = self.shard()
        if shard is None:
            GRAD.__set__(self, value)
        else:
            shard.grad = value

    def _write_data(self, value: torch.Tensor) -> None:
        DATA.__set__(self, value)
        member = getattr(self, "member", lambda: None)()
        if member is not None:
            member.group.unit.has_replaced = True

    def _write_trained(self, value: Any) -> None:
        shard = self.shard()
        if shard is None:
            TRAINED.__set__(self, value)
        else:
            shard.requires_grad = value

    def requires_grad_(self, requires_grad: Any = True) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: FBT002
        """Freezes the shard, which this follows."""
        self._write_trained(requires_grad)
        return self

    def detach_(self) -> Any:
        """Freezes the parameter, as of any leaf."""
        return self.requires_grad_(False)

    data = property(torch.Tensor.detach, _write_data)  # type: ignore[assignment]
    requires_grad = property(TRAINED.__get__, _write_trained)  # type: ignore[assignment]
    grad = property(_read_grad, _write_grad, lambda self: self._write_grad(None))  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


class Released:
    """Weights of a unit, and views of them, while its slot may contain another unit.

    Their values cannot be read. Users see only those that they kept, in a list that a hook fills or
    in a cache.
    """

    __slots__ = ()


def released(kind: type, unit: Any) -> type:
    """The class that a unit's tensors of a class have while its slot may contain another unit."""
    weak = ref(unit)

    def refuse(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG001
        rule, name = rule_of(func)
        if rule not in (Rule.PLAIN, Rule.ASSIGN) and name not in ("__repr__", "data_ptr"):
            kept = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Released))
            unit = weak()
            of = "a weight" if unit is None else repr(unit.name_at(kept))
            inside = "its unit; the model was deleted" if unit is None else unit.plan.title
            raise ShardedTensorError(
                f"{name} of {of}, kept from its unit's forward: expected it to be used inside "
                f"{inside} only; its slot is reused. Keep a copy (weight.clone()), compute "
                "penalties in the hook that sees the weight, or read the model's p.full_tensor()."
            )
        with no_guard():
            return func(*args, **(kwargs or {}))

    body = {"__slots__": (), "__torch_function__": classmethod(refuse)}
    return type(kind)("Released", (Released, kind), body)


def kept_tensors(
    generations: Sequence[int], wanted: Callable[[torch.Tensor], bool]
) -> list[torch.Tensor]:
    """Plain tensors that Python objects keep, by generation of the garbage collector."""
    each = chain.from_iterable(map(gc.get_objects, generations))
    found = [t for t in each if type(t) in (torch.Tensor, nn.Parameter) and wanted(t)]
    found.append(torch.empty(0))  # referenced by the list only
    # All references of autograd count as one.
    numbers = [getrefcount(tensor) - (tensor._use_count() > 1) for tensor in found]
    return [tensor for tensor, number in zip(found, numbers, strict=True) if number > numbers[-1]]


def gather_piece(
    transport: Transport, layout: FlatLayout, piece: Slice, local: torch.Tensor
) -> torch.Tensor:
    """Gathers one parameter of a flat buffer into new memory. A collective of the shard axis.

    The message buffer has at most 1 MiB, or a sixteenth of a large parameter; larger parameters
    need several messages.

    Args:
        transport: Gathers over the shard axis.
        layout: Layout of the buffer.
        piece: Which elements of the parameter this rank has.
        local: (n_local,), the elements of this range.
    """
    count, placement = layout.num_parts, next(p for p in layout.placements if p.name == piece.name)
    holders = layout.holders(placement)
    most = max((stop - start for _, start, stop in holders), default=0)
    width = min(most, max(SENT_BYTES // local.itemsize, placement.numel // 16) // count + 1)
    whole, parts = local.new_empty(placement.numel), local.new_zeros(count, width)
    for at in range(0, most, max(1, width)):
        mine = local[at : at + width]
        parts[transport.axes.shard_index, : mine.numel()].copy_(mine)
        transport.fetch([parts.view(-1)]).wait()
        for part, start, stop in holders:
            received = whole[start + at : min(start + at + width, stop)]
            received.copy_(parts[part, : received.numel()])
    return whole.view(placement.shape)
