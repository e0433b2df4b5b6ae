"""The operations of a micro-batch by unit, from the trace that also counts activations.

What a unit computes in forward is what runs between its forward's hooks; in backward, what runs
from the gradient of its outputs on until another unit's come, as the engine's own hooks have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.engine._torch_compat import tree_leaves
from fullshard.engine.activations import Ledger, Work, trace_step
from fullshard.planner.plan import Plan
from fullshard.planner.schedule import ROOT
from fullshard.planner.tracing import (
    ATTENTION,
    MATMUL,
    ROWS,
    SHORT_ROW,
    VIEW,
    Kind,
    Operation,
    UnitWork,
)

EMBEDDING_BACKWARD = "embedding_dense_backward"
COLUMNS = "sum columns"  # all dimensions but the last
# Kinds that have tables of their own, by torch's name; what is not here goes at the rate of a sum.
KINDS = {
    **dict.fromkeys(("zeros", "ones", "full", "zeros_like", "ones_like", "new_zeros"), "fill"),
    **dict.fromkeys(("full_like", "fill_", "zero_", "nll_loss_backward"), "fill"),
    **dict.fromkeys(("exp", "tanh", "sigmoid", "cos", "sin", "erf", "log"), "exp"),
    **dict.fromkeys(("mean", "sum", "amax", "max"), "sum"),
    **dict.fromkeys(("clone", "copy_", "cat", "_to_copy", "slice_backward", "stack"), "copy"),
    **dict.fromkeys(("embedding", "index", "index_select", "gather"), "embedding"),
    **{
        name: name.strip("_")
        for name in (
            *("silu", "silu_backward", "gelu", "gelu_backward", EMBEDDING_BACKWARD),
            *("native_layer_norm", "native_layer_norm_backward"),
            *("_softmax", "_softmax_backward_data"),
            *("_log_softmax", "_log_softmax_backward_data"),
        )
    },
}
_WITH_ROWS = frozenset(("add", "copy"))
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
_MADE = "_fullshard_made"  # on the outputs of the units that made them
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Census(Ledger):
    """A ledger that also notes every operation.

    Attributes:
        forward: By unit.
        backward: By unit.
    """

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.forward: list[Counter[Operation]] = [Counter() for _ in range(num_units)]
        self.backward: list[Counter[Operation]] = [Counter() for _ in range(num_units)]
        self._open: list[int] = [ROOT]
        self._unit = ROOT  # whose backward is under way

    def watch(self, model: nn.Module, plan: Plan) -> None:
        for unit in plan.units:
            module = model.get_submodule(unit.name)
            module.register_forward_pre_hook(self._entering(unit.index))
            module.register_forward_hook(self._leaving(unit.index))

    def _entering(self, index: int) -> Callable[..., None]:
        return lambda *_: self._open.append(index)

    def _leaving(self, index: int) -> Callable[..., None]:
        def begin(_: Any) -> None:
            self._unit = index

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self._open.pop()
            for leaf in _tensors(output):  # law 5: who hands a tensor on did not make it
                if leaf.requires_grad and not hasattr(leaf, _MADE):
                    setattr(leaf, _MADE, True)
                    leaf.register_hook(begin)

        return leave

    def write(self, gy: torch.Tensor, x: torch.Tensor) -> None:
        self._note_operation(_product(gy.t(), x))

    def move(self, param: torch.Tensor) -> None:
        if param.grad is not None:
            self._note_operation(Operation("copy", _dtype(param), (2 * param.nbytes,)))

    def _note_operation(self, operation: Operation) -> None:
        if self.kind is Kind.GRADIENTS:
            self.backward[self._unit][operation] += 1
        else:
            self.forward[self._open[-1]][operation] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "aten":
            found = _operation(func, args, kwargs or {}, result)
            self._note_operation(found)
            if found.kind == EMBEDDING_BACKWARD:  # the rows without a gradient too
                self._note_operation(Operation("fill", found.dtype, (result.nbytes,)))
        return result


def trace_work(
    model: nn.Module, plan: Plan, config: ShardConfig, work: Work
) -> dict[str, UnitWork]:
    """What every unit computes in a micro-batch, by its name.

    Args, Raises: As of `trace_step`.
    """
    census = Census(len(plan.units))
    trace_step(model, plan, config, work, census)
    found = zip(plan.units, census.forward, census.backward, strict=True)
    return {unit.name: UnitWork(first, then) for unit, first, then in found}


def _operation(func: Any, args: Any, kwargs: Any, result: Any) -> Operation:
    name = func._schema.name.partition("::")[2]
    given = _tensors((args, kwargs))
    made = _tensors(result)
    if name in _PRODUCTS:
        left, right = _PRODUCTS[name]
        return _product(args[left], args[right])
    if name.startswith(_ATTENTION):
        return _attention(name, args, kwargs)
    theirs = {tensor.untyped_storage()._cdata for tensor in given}
    is_view = not func._schema.is_mutable and all(
        tensor.untyped_storage()._cdata in theirs for tensor in made
    )
    if is_view or not made:
        return Operation(VIEW, "", ())
    kind = KINDS.get(name, "add")
    dtype = _dtype(made[0])
    tensors = made if kind in ("fill", "embedding") else [*given, *made]
    if kind == EMBEDDING_BACKWARD:
        tensors = given
    if (
        name == "sum"
        and len(args) > 1
        and given[0].dim() - 1 not in (d % given[0].dim() for d in args[1])
    ):
        kind = COLUMNS
    size = max(1, sum(map(_touched, tensors)))
    if kind in _WITH_ROWS and _row([t for t in tensors if t.numel() >= made[0].numel() / 2]):
        kind = f"{kind} {ROWS}"
    return Operation(kind, dtype, (size,))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _touched(tensor: torch.Tensor) -> int:
    """Bytes that are there, however often they are read: expanded tensors are small."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _product(a: torch.Tensor, b: torch.Tensor) -> Operation:
    """a b; matrices of a batch one after the other."""
    times = a.shape[0] if a.dim() == 3 else 1
    letters = "".join("n" if factor.stride(-1) == 1 else "t" for factor in (a, b))
    kind = f"{MATMUL} {'tn' if letters == 'tt' else letters}"
    size = (a.shape[-2], a.shape[-1], b.shape[-1])
    return Operation(kind, _dtype(a), tuple(max(1, n) for n in size), times)


def _attention(name: str, args: Any, kwargs: Any) -> Operation:
    is_backward = name.endswith("backward")
    query, key = args[1:3] if is_backward else args[:2]
    place = 7 if is_backward else 4
    is_causal = args[place] if len(args) > place else kwargs.get("is_causal", False)
    kind = f"{ATTENTION}{' causal' if is_causal else ''}{' backward' if is_backward else ''}"
    batch, heads, length, width = query.shape
    return Operation(kind, _dtype(query), (length * key.shape[2], width), batch * heads)


def _row(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what lies together in memory in all of them are short rows."""
    run = min((_run(tensor) for tensor in tensors), default=SHORT_ROW)
    return run < SHORT_ROW and any(tensor.numel() > SHORT_ROW for tensor in tensors)


def _run(tensor: torch.Tensor) -> int:
    """Elements that lie together; the order of dimensions is that of the memory."""
    run = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride != run:
            break
        run *= size
    return run if run > 1 else tensor.numel()
