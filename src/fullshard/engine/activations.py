"""What computing a micro-batch holds beside the plan's own buffers, traced on the real module.

[Note: traced activations]
The module's own forward, the loss and autograd's backward run on fake tensors: they have shapes,
dtypes and storages that are freed when the last tensor lets go of them, and no memory. Every
operation passes a dispatch mode that notes the storages alive, so what autograd saves, what a
recompute brings back and what backward makes on its way are counted as they come and go:

    bytes                     .#.      forward: activations pile up, inside a recompute for a while
                         .:#####.      the loss: logits and theirs
            .  :  .:#############:.    backward: gradients come and go, activations go
        .:########################:.
        forward -----> loss -> backward

Integers are computed, since models look at them to decide what to do (masks, packed sequences).
Weights are not counted: the plan has them. Their gradients are, as long as the engine leaves them
where autograd put them: plain linear layers write theirs into the slot (engine/linear.py), others
wait for their unit's rest if they are small (engine/gradients.py).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.config.schema import ShardConfig
from fullshard.engine._torch_compat import outside_modes, tree_leaves
from fullshard.engine.gradients import MOST_WAITING
from fullshard.engine.linear import pretend_to_write
from fullshard.engine.precision import apply_dtypes, cast_tensors
from fullshard.engine.recompute import apply_recompute, convert_reentrant
from fullshard.engine.unit import LARGE_NUMEL
from fullshard.planner.plan import Plan
from fullshard.planner.tracing import Kind, Moment
from fullshard.planner.units import UnitPlan
from fullshard.transport.base import torch_dtype

MOST_OPERATIONS = 20_000  # seconds of tracing; loops over tokens, as in Mamba, would take minutes
COMPUTED_BYTES = 16 << 20  # integers above this are fake too: masks of very long sequences

# What these make depends on numbers, not on shapes alone.
_OF_NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

# Forward and loss of a micro-batch: calls the model that it is given (and others that run inside of
# its step), returns what backward starts from.
Work = Callable[..., torch.Tensor]


def trace_step(
    model: nn.Module,
    plan: Plan,
    config: ShardConfig,
    work: Work,
    ledger: Ledger | None = None,
    beside: Sequence[nn.Module] = (),
) -> list[Moment]:
    """Bytes alive after each operation of a micro-batch that made some, computed on the CPU.

    Args:
        model: On meta; left as it is.
        plan: Plan of that model, whose units and dtypes count.
        config: That it was planned with, and the recompute.
        work: Makes its inputs and computes the loss.
        ledger: Sees every operation. None: one that counts bytes alone.
        beside: Other models on meta, in their own dtypes, that the work is given copies of.

    Raises:
        Exception: What the model raises where it wants to look at numbers that nobody has.
    """
    model, others = copy.deepcopy(model), copy.deepcopy(list(beside))
    groups = {
        name: group for u in plan.units for group in u.groups for n in group.names for name in n
    }
    ledger = Ledger() if ledger is None else ledger
    reduced = {name: torch_dtype(g.dtypes.reduce) for name, g in groups.items()}
    pretend_to_write(model, reduced, ledger.write)
    apply_dtypes(model, config)
    apply_recompute(model, plan.recompute, config.activation_checkpointing.kind)
    convert_reentrant(model)
    rng = torch.get_rng_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            compute = {name: torch_dtype(g.dtypes.compute) for name, g in groups.items()}
            for one in (model, *others):
                _give_storage(one, compute if one is model else {})
                for tensor in (*one.parameters(), *one.buffers()):
                    ledger.leave_out(tensor)
            for unit in plan.units:
                _collect_gradients(model, unit, ledger)
            ledger.watch(model, plan)
            _watch_edges(model, config, ledger)
            with ledger:
                loss = work(model, *others)
                ledger.kind = Kind.GRADIENTS
                loss.backward()
    finally:
        torch.set_rng_state(rng)
    return ledger.moments


def _give_storage(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Parameters as forward sees them and buffers, inside the fake mode."""
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
    """Let a unit's gradients go when the engine would: large ones at once, small ones together."""
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
                ledger.move(one)
                one.grad = None
            waiting.clear()

    for param in params:
        param.register_post_accumulate_grad_hook(move)


def _watch_edges(model: nn.Module, config: ShardConfig, ledger: Ledger) -> None:
    """Cast what goes in and out as the engine does; what comes out is logits, and what follows."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if config.param_dtype is None:
            return None
        dtype = torch_dtype(config.param_dtype)
        return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        ledger.kind = Kind.LOGITS
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                ledger.relabel(leaf)
        if config.output_dtype is None:
            return None
        return cast_tensors(output, torch_dtype(config.output_dtype))

    model.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    model.register_forward_hook(after)


class Ledger(TorchDispatchMode):
    """Notes the storages that operations make, and when they are freed.

    Attributes:
        kind: What is made now.
        moments: Bytes by kind after each operation that made a storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = Kind.ACTIVATIONS
        self.moments: list[Moment] = []
        self._alive: dict[int, tuple[Kind, int]] = {}
        self._bytes = dict.fromkeys(Kind, 0)
        self._num_operations = 0

    def watch(self, model: nn.Module, plan: Plan) -> None:
        """The model that will be traced is there."""

    def write(self, gy: torch.Tensor, x: torch.Tensor) -> None:
        """A linear layer writes its weight's gradient gy^T x where the engine collects it."""

    def move(self, param: torch.Tensor) -> None:
        """The gradient of a parameter goes where the engine collects it."""

    def leave_out(self, tensor: torch.Tensor) -> None:
        """This storage is somebody else's."""
        self._alive[_storage_key(tensor)] = (self.kind, 0)

    def relabel(self, tensor: torch.Tensor) -> None:
        """A tensor is of the kind that is made now."""
        key = _storage_key(tensor)
        kind, num_bytes = self._alive.get(key, (self.kind, 0))
        self._bytes[kind] -= num_bytes
        self._bytes[self.kind] += num_bytes
        self._alive[key] = (self.kind, num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num_operations += 1
        if self._num_operations > MOST_OPERATIONS:
            raise RuntimeError(f"more than {MOST_OPERATIONS:,} operations")
        result = self._run(func, args, kwargs or {})
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        made = [self._note(tensor) for tensor in tensors]
        if any(made):
            self.moments.append(Moment(*(self._bytes[kind] for kind in Kind)))
        return result

    def _note(self, tensor: torch.Tensor) -> bool:
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
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten._grouped_mm.default and given[0].dtype is not torch.bfloat16:
            return _grouped_product(args, kwargs)
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        if func not in _OF_NUMBERS:
            shapes = func(*args, **kwargs)
            fakes = [leaf for leaf in tree_leaves(shapes) if isinstance(leaf, torch.Tensor)]
            if any(fake.is_floating_point() or fake.nbytes > COMPUTED_BYTES for fake in fakes):
                return shapes
        with outside_modes():
            return func(*args, **kwargs)


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _grouped_product(args: Any, kwargs: Any) -> torch.Tensor:
    """Shapes of a grouped product in another dtype than its shape function takes (2.11 to 2.13)."""
    low = [
        a.to(torch.bfloat16) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in args
    ]
    made = torch.ops.aten._grouped_mm.default(*low, **kwargs)
    return torch.empty_strided(made.shape, made.stride(), dtype=args[0].dtype, device=made.device)
