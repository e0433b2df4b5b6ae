"""Weight gradients of plain linear layers, written straight into the gradient slot.

[Note: written gradients]
autograd computes a weight's gradient into fresh memory; from there it would be copied into the
slot and freed. For a plain `nn.Linear` the matrix product writes into the slot itself:

    d loss / d weight = gy^T x          gy: (tokens, out), x: (tokens, in)  -->  slot (out, in)

Autograd is told that there is no gradient, and still says when all uses of the weight are done: the
hook is on the node that would accumulate it. A weight that is used twice is written once and added
to afterwards; what reaches it on other ways (a tied embedding) is added at the end. Wherever
something else than autograd looks on (autocast, compilation, functorch, tensor subclasses) or the
slot has another dtype, the ordinary function runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fullshard.engine._torch_compat import is_transforming
from fullshard.engine.runtime import Runtime
from fullshard.engine.unit import Group, Member, Unit

Write = Callable[[torch.Tensor, torch.Tensor], bool]


def write_gradients_in_place(runtime: Runtime, units: Iterable[Unit]) -> None:
    """Let the plain linear layers among the units' modules write into gradient slots."""
    for unit in units:
        groups = {id(member): group for group in unit.trained for member in group.members}
        for swap in unit.swaps:
            group = groups.get(id(swap.member))
            plain = type(swap.module) is nn.Linear and "forward" not in vars(swap.module)
            if group is not None and plain and swap.name == "weight":
                write = _writer(runtime, unit, group, swap.member)
                swap.module.forward = _forward(swap.module, swap.member, write)


def _forward(module: nn.Module, member: Member, write: Write) -> Callable[..., torch.Tensor]:
    """The layer's forward; the arguments' name is torch's."""
    weak, inside = weakref.ref(module), weakref.ref(member)

    def forward(input: torch.Tensor) -> torch.Tensor:
        layer: Any = weak()
        weight, bias = layer.weight, layer.bias
        if torch.compiler.is_compiling() or not _fits(input, weight, inside()):
            return functional.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias, write)  # pyright: ignore[reportReturnType]

    return forward


def _fits(x: torch.Tensor, weight: torch.Tensor, member: Member | None) -> bool:
    return (
        torch.is_grad_enabled()
        and member is not None
        and weight is member.compute
        and weight.requires_grad
        and type(x) is torch.Tensor
        and x.dtype is weight.dtype
        and x.dim() > 1
        and not torch.is_autocast_enabled(x.device.type)
        and not is_transforming()
    )


def _writer(runtime: Runtime, unit: Unit, group: Group, member: Member) -> Write:
    """Holds nothing: the way from a graph to its functions leads through C++."""
    weak = [weakref.ref(thing) for thing in (runtime, unit, group, member)]

    def write(gy: torch.Tensor, x: torch.Tensor) -> bool:
        alive, *of = [ref() for ref in weak]
        return alive is not None and alive.write_gradient(*of, gy, x)  # type: ignore[union-attr]

    return write


class _Linear(torch.autograd.Function):
    """x weight^T + bias; see [Note: written gradients]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, write: Write
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.write, ctx.has_bias = write, bias is not None
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows = gy.reshape(-1, gy.shape[-1])
        gx = gw = gb = None
        if ctx.needs_input_grad[0]:
            gx = rows.mm(weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            inputs = x.reshape(-1, x.shape[-1])
            if torch.is_grad_enabled() or not ctx.write(rows, inputs):
                gw = rows.t().mm(inputs)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            gb = rows.sum(0)
        return gx, gw, gb, None
