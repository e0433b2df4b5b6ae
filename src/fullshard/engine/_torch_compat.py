"""Every private or renamed torch name that the engine uses, with versions and fallbacks.

Checked with torch 2.11 and 2.13; written for 2.8 and newer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

# torch 2.13 renamed the single-tensor collectives and warns about the old names.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather_many(fulls: Sequence[Any], parts: Sequence[Any], group: Any) -> Any:
    """All-gather several buffers in one collective; the work to wait for."""
    if len(fulls) == 1:
        return all_gather_single(fulls[0], parts[0], group=group, async_op=True)
    gather = _coalesced(group, "all_gather_single", "allgather_into_tensor")
    as_bytes = [[t.view(torch.uint8) for t in tensors] for tensors in (fulls, parts)]
    return gather(*as_bytes)  # gloo joins the buffers of one call, and takes one dtype for all


def reduce_scatter_many(parts: Sequence[Any], fulls: Sequence[Any], group: Any) -> list[Any]:
    """Reduce-scatter several buffers, those of one dtype in one collective; works to wait for."""
    works: list[Any] = []
    for dtype in dict.fromkeys(full.dtype for full in fulls):
        outs, ins = ([t for t in many if t.dtype is dtype] for many in (parts, fulls))
        if len(ins) == 1:
            works.append(reduce_scatter_single(outs[0], ins[0], group=group, async_op=True))
        else:
            scatter = _coalesced(group, "reduce_scatter_single", "reduce_scatter_tensor")
            works.append(scatter(outs, ins))
    return works


def _coalesced(group: Any, new: str, old: str) -> Callable[..., Any]:
    """A process group's own call for lists of tensors: dist has no public name for it."""
    return getattr(group, f"{new}_coalesced", None) or getattr(group, f"{old}_coalesced")


def group_timeout(group: Any) -> Any:
    """The time-out (a timedelta) that a process group was made with; None where it has none."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)


# The norms of many tensors at once; public only as a step of torch.nn.utils.get_total_norm.
foreach_norm: Callable[..., Any] = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
foreach_zero: Callable[..., Any] = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]
foreach_copy: Callable[..., Any] = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_add: Callable[..., Any] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]

# How many tensors and storage objects share a storage.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count

# Turns __torch_function__ of tensor subclasses off for a block (public as
# torch._C.DisableTorchFunctionSubclass since 2.0; there is no name outside torch._C).
no_guard = torch._C.DisableTorchFunctionSubclass


@_disable_dynamo
def call_outside_compile(function: Callable[..., Any], *args: Any) -> Any:
    """Call a hook that torch.compile shall neither trace nor compile.

    Public as torch.compiler.disable, which imports the compiler at once (a second), this one at the
    first call.
    """
    return function(*args)


def unless_compiling(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A hook that compiled code does without: calling it would cut the graph in two.

    No `partial`: its arguments differ from layer to layer, and each would compile code of its own.
    """

    def hook(*more: Any) -> Any:
        return None if torch.compiler.is_compiling() else function(*args, *more)

    return hook


# What the engine does is no part of a user's dispatch modes (selective recompute counts calls).
@contextmanager
def outside_modes() -> Generator[None]:
    """Outside of dispatch modes and of the transformations of torch.func."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def has_modes() -> bool:
    """Whether dispatch or function modes are on: turning them off costs five microseconds."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return bool(modes) or is_transforming()


def replays_operations() -> bool:
    """Whether a selective recompute is under way, which must make the operations of its forward."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    from torch.utils.checkpoint import _CachedTorchDispatchMode

    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, _CachedTorchDispatchMode) for mode in modes)


def is_profiling() -> bool:
    """Whether a profiler of torch's listens."""
    return torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]


def is_transforming() -> bool:
    """Whether a transformation of torch.func (vmap, grad, jvp) is under way."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def apply_untransformed(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for where no transformation of torch.func is under way.

    The public one looks for such in each of its arguments, which takes longer than the call.
    """
    return super(torch.autograd.Function, function).apply  # pyright: ignore


def saved_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """A module's own buffers that a state dict has. Asking a state dict would call users' hooks."""
    left_out = module._non_persistent_buffers_set
    return [b for name, b in module._buffers.items() if b is not None and name not in left_out]


# Nested lists, mappings and model outputs (public only as torch.utils._pytree).
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves
tree_map_only: Callable[..., Any] = _pytree.tree_map_only


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all tensors that share memory, also on meta, where there is no address."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


# Identity of the backward that runs on this thread; -1 outside of one. Called in the hot path,
# hence no function of our own around it (the same holds for the next two).
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Whether the running backward will reach an autograd node; a RuntimeError where the node is a leaf
# that `torch.autograd.grad` was asked for.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Say how often the tensors were written: autograd refuses what it kept of another number."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)  # pyright: ignore


def queue_callback(function: Callable[[], None]) -> None:
    """Call `function` when the running backward is done."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# The number that the next autograd node of this thread will get.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore


def is_alive(group: Any) -> bool:
    """Whether a process group was not destroyed yet (torch has no public question for it)."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def register_guard_types(*types: type) -> Callable[[], None]:
    """Let optimizers and clipping use their foreach and fused paths; returns what undoes it."""
    import torch.optim.optimizer as optimizer
    from torch.utils import _foreach_utils

    tables: list[list[Any]] = [
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    ]

    def undo() -> None:
        for supported in tables:
            supported[:] = [kind for kind in supported if kind not in types]

    undo()
    for supported in tables:
        supported += types
    return undo
