"""Weight gradients of plain linear layers, written straight into the gradient slot.

[Note: written gradients]
autograd computes a weight's gradient into fresh memory; from there it would be copied into the
slot and freed. For a plain `nn.Linear` the matrix product writes into the slot itself:

    d loss / d weight = gy^T x          gy: (tokens, out), x: (tokens, in)  -->  slot (out, in)

Autograd is told that there is no gradient, and still says when all uses of the weight are done: the
hook is on the node that would accumulate it. A weight that is used twice is written once and added
to afterwards; what reaches it on other ways (a tied embedding) is added at the end. Wherever
something else than autograd looks on (autocast, compilation, functorch, tensor subclasses) or the
slot has another dtype, the ordinary function runs. So it does for small weights, whose copy is
cheap: a Function costs more in forward than it saves in backward.

The layer's output is watched here too (see [Note: watched outputs]), which spares it a module hook:
its backward itself says when it begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fullshard.engine._torch_compat import (
    apply_untransformed,
    graph_task_id,
    is_transforming,
    replays_operations,
)
from fullshard.engine.step import Runtime
from fullshard.engine.unit import LARGE_NUMEL, Group, Member, Unit

Write = Callable[[torch.Tensor, torch.Tensor], bool]


def write_gradients_in_place(
    runtime: Runtime, units: Iterable[Unit], owners: Mapping[int, int], refuse: object
) -> set[int]:
    """Let the plain linear layers among the units' modules write into gradient slots.

    Args:
        runtime: Watches their outputs.
        units: In plan order.
        owners: By the id of a module, the unit that watches its output.
        refuse: Raises where a layer is copied: the copy would compute with this one's weights.

    Returns:
        Ids of the layers that see to their own outputs being watched.
    """
    found = set()
    for unit in units:
        groups = {id(member): group for group in unit.trained for member in group.members}
        for swap in unit.swaps:
            group, module = groups.get(id(swap.member)), swap.module
            plain = type(module) is nn.Linear and "forward" not in vars(module)
            if group is not None and plain and swap.name == "weight":
                index = owners[id(module)]
                if swap.member.is_large:
                    write = _writer(runtime, unit, group, swap.member)
                    module.forward = _forward(runtime, index, module, swap.member, write)
                else:
                    module.forward = _small_forward(runtime, index, module)
                vars(module)["__deepcopy__"] = refuse
                found.add(id(module))
    return found


def pretend_to_write(
    model: nn.Module,
    dtypes: Mapping[str, torch.dtype],
    told: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Let plain linear layers of a model that is traced make no gradient where they would write it.

    Args:
        model: Not sharded.
        dtypes: Dtypes of the slots for gradients, by parameter.
        told: Called with gy and x whose product would be written.
    """
    for path, module in model.named_modules():
        dtype = dtypes.get(f"{path}.weight" if path else "weight")
        plain = type(module) is nn.Linear and "forward" not in vars(module)
        if plain and dtype is not None and module.weight.numel() > LARGE_NUMEL:  # type: ignore
            module.forward = _traced_forward(module, dtype, told)  # type: ignore[assignment]


def _traced_forward(
    module: nn.Linear, dtype: torch.dtype, told: Callable[[torch.Tensor, torch.Tensor], None]
) -> Callable[..., torch.Tensor]:
    def write(gy: torch.Tensor, x: torch.Tensor) -> bool:
        if gy.dtype is dtype:
            told(gy, x)
        return gy.dtype is dtype

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight, bias = module.weight, module.bias
        fits = torch.is_grad_enabled() and weight.requires_grad and input.dtype is weight.dtype
        if not fits or input.dim() < 2:
            return functional.linear(input, weight, bias)
        return _product(input, weight, bias, write, None)

    return forward


def give_back_forward(module: nn.Module) -> None:
    """Undo `write_gradients_in_place`; what someone else put around the forward stays."""
    own = vars(module)
    if own.pop("__deepcopy__", None) is not None and not hasattr(own["forward"], "__wrapped__"):
        del own["forward"]


def _forward(
    runtime: Runtime, index: int, module: nn.Module, member: Member, write: Write
) -> Callable[..., torch.Tensor]:
    """The layer's forward; the arguments' name is torch's."""
    table, inside, weak = module._parameters, weakref.ref(member), weakref.ref(runtime)

    def forward(input: torch.Tensor) -> torch.Tensor:
        weight, bias = table["weight"], table["bias"]
        assert weight is not None
        if torch.compiler.is_compiling():  # see [Note: watched outputs]
            return functional.linear(input, weight, bias)
        watching = weak()
        assert watching is not None
        if not _fits(input, weight, inside()):
            output = functional.linear(input, weight, bias)
            watching.watch(index, (output,))
            return output
        return _product(input, weight, bias, write, watching.trigger(index))

    return forward


def _small_forward(runtime: Runtime, index: int, module: nn.Module) -> Callable[..., torch.Tensor]:
    """The forward of a layer that does no more than begin its unit's backward."""
    table, weak = module._parameters, weakref.ref(runtime)

    def forward(input: torch.Tensor) -> torch.Tensor:
        output = functional.linear(input, table["weight"], table["bias"])  # type: ignore[arg-type]
        if torch.compiler.is_compiling():  # see [Note: watched outputs]
            return output
        node, watching = output.grad_fn, weak()
        assert watching is not None
        if is_transforming():
            watching.watch(index, (output,))
        elif node is not None:
            begin = watching.trigger(index)
            if begin is not None:
                node.register_prehook(begin)
        return output

    return forward


def _fits(x: torch.Tensor, weight: torch.Tensor, member: Member | None) -> bool:
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()  # in which torch.enable_grad() changes nothing
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
    run, of = weakref.ref(runtime), weakref.ref(unit)
    within, which = weakref.ref(group), weakref.ref(member)

    def write(gy: torch.Tensor, x: torch.Tensor) -> bool:
        alive = run()
        return alive is not None and alive.write_gradient(of(), within(), which(), gy, x)  # type: ignore[arg-type]

    return write


class _Linear(torch.autograd.Function):
    """x weight^T + bias; see [Note: written gradients].

    `begin` is called before anything is read: the weight may be there only afterwards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        write: Write,
        begin: Callable[[Any], None] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)  # as torch's
        ctx.write, ctx.begin = write, begin
        output = functional.linear(x, weight, bias)
        # A view that a Function returns may not be written in place; `.data` is none.
        return output if output._base is None else output.data

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.begin is not None:
            ctx.begin(None)
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        is_matrix = gy.dim() == 2
        rows = gy if is_matrix else gy.reshape(-1, gy.shape[-1])
        gx = gw = None
        if wants_x:
            gx = rows.mm(weight)
            gx = gx if is_matrix else gx.view(x.shape)
        if wants_weight:
            inputs = x if is_matrix else x.reshape(-1, x.shape[-1])
            if torch.is_grad_enabled() or not ctx.write(rows, inputs):
                gw = rows.t().mm(inputs)
        return gx, gw, rows.sum(0) if wants_bias else None, None, None


class _Again(_Linear):
    """What a recompute hands to autograd, before anything is computed.

    torch ends a recompute as soon as it has every tensor that backward wants, and of the last layer
    these are its inputs: what it makes of them is not made again. torch's own linear saves its
    inputs first, a Function saves after its forward; so the forward of this one does nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,  # noqa: ARG004 backward asks whether it wants a gradient
        write: Write,
        begin: Callable[[Any], None] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)  # as torch's
        ctx.write, ctx.begin = write, begin
        return x.new_empty(1).expand(*x.shape[:-1], weight.shape[0]).data  # takes no memory


_linear, _again = apply_untransformed(_Linear), apply_untransformed(_Again)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    write: Write,
    begin: Callable[[Any], None] | None,
) -> torch.Tensor:
    if begin is not None or graph_task_id() == -1 or replays_operations():
        return _linear(x, weight, bias, write, begin)
    output = _again(x, weight, bias, write, None)  # a recompute may end here
    with torch.no_grad():
        output.data = functional.linear(x, weight, bias)
    return output
