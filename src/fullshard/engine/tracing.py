"""Traces a micro-batch on the real module: its tensors, its operations, the order of its units.

[Note: traced tensors]
The module's own forward, the loss and autograd's backward run on fake tensors. These have shapes,
dtypes and storages, which are freed with their last tensor, but no memory. A dispatch mode, the
`Ledger`, sees every operation and counts the bytes of the live storages. It therefore counts what
autograd saves, what a recompute allocates again and what backward allocates for a while:

    bytes                     .#.      forward: activations accumulate; a recompute adds more
                         .:#####.      loss: logits and their gradients
            .  :  .:#############:.    backward: gradients come and go, activations are freed
        .:########################:.
        forward -----> loss -> backward

Integers are computed, because models read them to decide what to do (masks, packed sequences).
Weights are not counted, because the plan lists them. Their gradients are counted until the engine
moves them: small gradients wait for the others of their unit (engine/gradients.py).

[Note: traced operations]
The ledger also lists the operations of each unit. An operation belongs to a unit's forward if it
runs between the hooks of that forward. It belongs to a unit's backward if it runs after the
gradient of the unit's outputs and before that of another unit's, as with the engine's own hooks.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.config.schema import ShardConfig
from fullshard.engine._torch_compat import (
    no_torch_function,
    outside_modes,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from fullshard.engine.gradients import MOST_WAITING
from fullshard.engine.model_spec import places_of
from fullshard.engine.modules import apply_dtypes, apply_recompute, cast_tensors, convert_reentrant
from fullshard.engine.unit import LARGE_NUMEL
from fullshard.errors import ConfigError
from fullshard.planner.plan import Plan
from fullshard.planner.schedule import ROOT, nominal_trace
from fullshard.planner.tracing import (
    ATTENTION,
    MATMUL,
    ROWS,
    SHORT_ROW,
    VIEW,
    Moment,
    Operation,
    TensorKind,
    UnitWork,
)
from fullshard.planner.units import UnitPlan
from fullshard.transport.base import torch_dtype

MOST_OPERATIONS = 20_000  # seconds of tracing; loops over tokens, as in Mamba, would need minutes
COMPUTED_BYTES = 16 << 20  # integers above this are fake too: masks of very long sequences

# The shapes of their results depend on values, not only on shapes.
_OF_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

# Forward and loss of a micro-batch: is called with copies of the model and of other models that run
# in its step, and returns the tensor from which backward starts.
Work = Callable[..., torch.Tensor]


def trace_step(
    model: nn.Module,
    plan: Plan,
    config: ShardConfig,
    work: Work,
    beside: Sequence[nn.Module] = (),
    *,
    on_gpu: bool = False,
) -> Ledger:
    """The bytes of temporary tensors, and the operations, of a micro-batch. Runs on the CPU.

    Args:
        model: A model on meta; it is not changed.
        plan: Plan of that model, which decides units and dtypes.
        config: The configuration of the plan, which includes recompute.
        work: Creates inputs and computes the loss.
        beside: Auxiliary models on meta, in their own dtypes, of which `work` gets copies.
        on_gpu: Whether the step will run on a GPU.

    Raises:
        Exception: The error of a model that reads values of fake tensors.
    """
    model, others = copy.deepcopy(model), copy.deepcopy(list(beside))
    groups = {n: group for u in plan.units for group in u.groups for ns in group.names for n in ns}
    ledger = Ledger(1 + max(unit.index for unit in plan.units))  # a part may lack some
    apply_dtypes(model, config)
    apply_recompute(model, plan.recompute, config.activation_checkpointing.kind)
    convert_reentrant(model)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        compute = {name: torch_dtype(g.dtypes.compute) for name, g in groups.items()}
        for one in (model, *others):
            _give_storage(one, compute if one is model else {})
            for tensor in (*one.parameters(), *one.buffers()):
                ledger.leave_out(tensor)
        for unit in plan.units:
            _collect_gradients(model, unit, ledger)
            ledger.watch(model.get_submodule(unit.name), unit.index)
        _watch_edges(model, config, ledger)
        with ledger, Calls(ledger, on_gpu=on_gpu):
            loss = work(model, *others)
            ledger.kind = TensorKind.GRADIENTS
            # With a tensor, backward would be a call that `Calls` runs outside of itself.
            torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
    return ledger


def trace_work(
    model: nn.Module, plan: Plan, config: ShardConfig, work: Work
) -> dict[str, UnitWork]:
    """Operations of every unit in a micro-batch, by the unit's name.

    Args, Raises: As of `trace_step`.
    """
    ledger = trace_step(model, plan, config, work)
    forward, backward = ledger.forward, ledger.backward
    return {unit.name: UnitWork(forward[unit.index], backward[unit.index]) for unit in plan.units}


def _give_storage(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Replace parameters, in the dtypes that forward sees, and buffers by fake ones."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, param in module._parameters.items():
            if param is not None and id(param) not in made:
                dtype = dtypes.get(f"{path}.{leaf}" if path else leaf, param.dtype)
                whole = torch.empty(param.shape, dtype=dtype)
                made[id(param)] = nn.Parameter(whole, requires_grad=param.requires_grad)
            if param is not None:
                module._parameters[leaf] = made[id(param)]
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _collect_gradients(model: nn.Module, unit: UnitPlan, ledger: Ledger) -> None:
    """Free a unit's gradients when the engine would: large ones at once, small ones together."""
    trained = [names[0] for group in unit.groups if group.trainable for names in group.names]
    params = [model.get_parameter(name) for name in trained]
    waiting: list[nn.Parameter] = []
    left = len(params)

    def move(param: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        waiting.append(param)  # type: ignore[arg-type]
        if not left or param.numel() > LARGE_NUMEL or len(waiting) == MOST_WAITING:
            for one in waiting:
                if one.grad is not None:
                    ledger.note(Operation("copy", _dtype(one), (2 * one.nbytes,)))
                one.grad = None
            waiting.clear()

    for param in params:
        param.register_post_accumulate_grad_hook(move)


def _watch_edges(model: nn.Module, config: ShardConfig, ledger: Ledger) -> None:
    """Cast inputs and outputs as the engine does; outputs and later tensors count as logits."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if config.param_dtype is None:
            return None
        dtype = torch_dtype(config.param_dtype)
        return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        ledger.kind = TensorKind.LOGITS
        for leaf in _tensors(output):
            ledger.relabel(leaf)
        if config.output_dtype is None:
            return None
        return cast_tensors(output, torch_dtype(config.output_dtype))

    def at_the_head(_: nn.Module, __: Any) -> None:
        ledger.kind = TensorKind.LOGITS

    model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    model.register_forward_hook(after)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        head.register_forward_pre_hook(at_the_head)


class Ledger(TorchDispatchMode):
    """Records the storages and the operations of a micro-batch.

    Attributes:
        kind: Kind of the tensors that are allocated now.
        moments: Bytes by kind after each operation that allocated a storage.
        forward: Operations of each unit's forward.
        backward: Operations of each unit's backward.
        num_operations: Operations so far.
    """

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.kind = TensorKind.ACTIVATIONS
        self.moments: list[Moment] = []
        self.forward: list[Counter[Operation]] = [Counter() for _ in range(num_units)]
        self.backward: list[Counter[Operation]] = [Counter() for _ in range(num_units)]
        self._alive: dict[int, tuple[TensorKind, int]] = {}
        self._bytes = dict.fromkeys(TensorKind, 0)
        self.num_operations = 0
        self._open: list[int] = [ROOT]  # units whose forwards run
        self._unit = ROOT  # whose backward runs

    def watch(self, module: nn.Module, unit: int) -> None:
        """Note when a unit's forward and backward run."""

        def enter(*_: Any) -> None:
            self._open.append(unit)

        def begin(_: Any) -> None:
            self._unit = unit

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            self._open.pop()
            for leaf in _tensors(output):  # law 5: a unit that passes a tensor on did not make it
                if leaf.requires_grad and not hasattr(leaf, _MADE):
                    setattr(leaf, _MADE, True)
                    leaf.register_hook(begin)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def note(self, operation: Operation) -> None:
        """Note an operation of the unit that runs."""
        if self.kind is TensorKind.GRADIENTS:
            self.backward[self._unit][operation] += 1
        else:
            self.forward[self._open[-1]][operation] += 1

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count a storage."""
        self._alive[storage_key(tensor)] = (self.kind, 0)

    def relabel(self, tensor: torch.Tensor) -> None:
        """Count a tensor as the kind that is allocated now."""
        key = storage_key(tensor)
        kind, num_bytes = self._alive.get(key, (self.kind, 0))
        self._bytes[kind] -= num_bytes
        self._bytes[self.kind] += num_bytes
        self._alive[key] = (self.kind, num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        if func is torch.ops.prim.device.default:  # two of three calls: autograd reads devices
            return func(*args)
        result = self._run(func, args, kwargs or {})
        with no_torch_function():  # `Calls` would see each attribute that is read
            made = [self._count(tensor) for tensor in _tensors(result)]
            if any(made):
                self.moments.append(Moment(*(self._bytes[kind] for kind in TensorKind)))
            if func.namespace == "aten":
                found = _operation(func, args, kwargs or {}, result)
                self.note(found)
                if found.kind == EMBEDDING_BACKWARD:  # also fills rows without a gradient
                    self.note(Operation("fill", found.dtype, (result.nbytes,)))
        return result

    def _count(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return False
        num_bytes = storage.nbytes()
        self._alive[key] = (self.kind, num_bytes)
        self._bytes[self.kind] += num_bytes
        weakref.finalize(storage, self._freed, key)
        return num_bytes > 0

    def _freed(self, key: int) -> None:
        kind, num_bytes = self._alive.pop(key)
        self._bytes[kind] -= num_bytes

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = _tensors((args, kwargs))
        if func is torch.ops.aten._grouped_mm.default and given[0].dtype is not torch.bfloat16:
            return _grouped_product(args, kwargs)
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        if func not in _OF_NUMBERS:
            shapes = func(*args, **kwargs)
            fakes = _tensors(shapes)
            if any(fake.is_floating_point() or fake.nbytes > COMPUTED_BYTES for fake in fakes):
                return shapes
        with outside_modes():
            return func(*args, **kwargs)


class Calls(TorchFunctionMode):
    """Calls of torch's functions from Python.

    Ends a long trace, since torch's C++ code aborts on some errors of dispatch modes. On a GPU,
    attention whose values are narrower than its keys (DeepSeek's) has kernels that store no scores;
    on a CPU, the kernel that the trace runs needs equal widths.
    """

    def __init__(self, ledger: Ledger, *, on_gpu: bool) -> None:
        super().__init__()
        self._ledger = ledger
        self._on_gpu = on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._ledger.num_operations > MOST_OPERATIONS:
            raise RuntimeError(f"more than {MOST_OPERATIONS:,} operations")
        is_attention = func is F.scaled_dot_product_attention and len(args) > 2
        if is_attention and self._on_gpu and args[0].shape[-1] > args[2].shape[-1]:
            query, _, value = args[:3]
            width = value.shape[-1]
            wider = F.pad(value, (0, query.shape[-1] - width))
            return func(*args[:2], wider, *args[3:], **(kwargs or {}))[..., :width]
        return func(*args, **(kwargs or {}))


def _grouped_product(args: Any, kwargs: Any) -> torch.Tensor:
    """Shapes of a grouped product in a dtype that its shape function refuses (2.11 to 2.13)."""
    made = torch.ops.aten._grouped_mm.default(*cast_tensors(args, torch.bfloat16), **kwargs)
    return torch.empty_strided(made.shape, made.stride(), dtype=args[0].dtype, device=made.device)


# ---- operations by unit

EMBEDDING_BACKWARD = "embedding_dense_backward"
COLUMNS = "sum columns"  # all dimensions but the last
# Kinds with their own calibration tables, by torch's name; all others are timed as sums ("add").
KINDS = {
    **dict.fromkeys(("zeros", "ones", "full", "zeros_like", "ones_like", "new_zeros"), "fill"),
    **dict.fromkeys(("full_like", "fill_", "zero_", "nll_loss_backward"), "fill"),
    **dict.fromkeys(("exp", "exp_", "tanh", "sigmoid", "cos", "sin", "erf", "log"), "exp"),
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
# Operations that touch an element for each entry of an argument, by its place.
_CHOSEN = {"scatter_add_": 2, "nll_loss_forward": 1}
_MADE = "_fullshard_made"  # attribute of an output that its unit made
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def _operation(func: Any, args: Any, kwargs: Any, result: Any) -> Operation:
    name = func._schema.name.partition("::")[2]
    given = _tensors((args, kwargs))
    made = _tensors(result)
    if name in _PRODUCTS:
        left, right = _PRODUCTS[name]
        return _product(args[left], args[right])
    if name.startswith(_ATTENTION):
        return _attention(name, args, kwargs)
    theirs = set(map(storage_key, given))
    is_view = not func._schema.is_mutable and theirs.issuperset(map(storage_key, made))
    if is_view or not made:
        return Operation(VIEW, "", ())
    kind, dtype = KINDS.get(name, "add"), _dtype(made[0])
    if name in _CHOSEN:
        return Operation(kind, dtype, (max(1, _touched(args[_CHOSEN[name]])),))
    tensors = made if kind in ("fill", "embedding") else [*given, *made]
    if kind == EMBEDDING_BACKWARD:
        tensors = given
    if (
        name == "sum"
        and len(args) > 1
        and args[1]
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
    """Bytes in memory, however often they are read: expanded tensors are small."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _product(a: torch.Tensor, b: torch.Tensor) -> Operation:
    """The product a b; the matrices of a batch are separate operations."""
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
    """Whether all tensors are contiguous only within short rows."""
    run = min((_run(tensor) for tensor in tensors), default=SHORT_ROW)
    return run < SHORT_ROW and any(tensor.numel() > SHORT_ROW for tensor in tensors)


def _run(tensor: torch.Tensor) -> int:
    """Number of contiguous elements, in the order of the memory."""
    run = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride != run:
            break
        run *= size
    return run if run > 1 else tensor.numel()


# ---- the order of units


def trace_order(model: nn.Module, plan: Plan, sample: Any) -> Plan:
    """Returns the plan in the order in which forward enters its units on a sample.

    Args:
        model: A model that is not sharded yet.
        plan: A plan in registration order.
        sample: Arguments of forward: a mapping of keywords, a sequence, or one value.

    Raises:
        ConfigError: Forward does not run on the sample; its error is the cause.
    """
    forward: list[int] = []
    with ExitStack() as hooks:
        for unit in plan.units:
            hook = partial(_note, forward, unit.index)
            hooks.enter_context(model.get_submodule(unit.name).register_forward_pre_hook(hook))
        try:
            _run_fake(model, sample)
        except Exception as error:
            raise ConfigError(
                f"sample: expected arguments that {type(model).__name__}.forward takes; it raised "
                f"{type(error).__name__}: {error}. Leave sample out to learn the order in step one."
            ) from error
    leaves = [index for what, index in nominal_trace(plan.units, forward) if what == "leave"]
    backward = [index for index in reversed(leaves) if index in plan.order.backward]
    return plan.reordered(forward, backward, learned=False)


def _note(forward: list[int], index: int, *_: Any) -> None:
    forward.append(index)


def _run_fake(model: nn.Module, sample: Any) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # Buffers are replaced too, because running statistics must not change.
    given = sample, places_of(model), dict(nn.Module.named_buffers(model))
    fake, params, buffers = tree_map_only(torch.Tensor, mode.from_tensor, given)
    args: tuple[Any, ...] = (fake,)
    kwargs: dict[str, Any] = {}
    if isinstance(fake, Mapping):
        args, kwargs = (), dict(fake)
    elif isinstance(fake, Sequence) and not isinstance(fake, torch.Tensor | str):
        args = tuple(fake)
    with torch.random.fork_rng(devices=[]), mode, torch.no_grad():
        torch.func.functional_call(model, (params, buffers), args, kwargs)
