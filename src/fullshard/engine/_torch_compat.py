"""Every private or renamed torch name that the engine uses, with versions and fallbacks.

Those of torch.distributed are in transport/_torch_compat.py.

Checked with torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

# The norms of many tensors at once; public only as a step of torch.nn.utils.get_total_norm.
foreach_norm: Callable[..., Any] = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
foreach_zero: Callable[..., Any] = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]
foreach_copy: Callable[..., Any] = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
foreach_add: Callable[..., Any] = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]

# How many tensors and storage objects share a storage.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count

GRAD: Any = torch.Tensor.grad  # the slot of `.grad`, for tensors that show another one

# Turns __torch_function__ of tensor subclasses off for a block (public as
# torch._C.DisableTorchFunctionSubclass since 2.0; there is no name outside torch._C).
no_guard = torch._C.DisableTorchFunctionSubclass


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a hook of autograd from torch.compile, also in a backward that compiled code calls.

    torch.compiler.disable does so for 0.3 us per call, which is 4 % of a unit of 48 parameters.
    """
    skip: Any = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


# Public as torch.compiler.disable, which imports the compiler at once (a second), this one at the
# first call.
@_disable_dynamo
def call_outside_compile(function: Callable[..., Any], *args: Any) -> Any:
    """Call a hook that torch.compile shall neither trace nor compile."""
    return function(*args)


def unless_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that compiled code does without: calling it would cut the graph in two.

    A `partial` would not work: its arguments differ from layer to layer, and each would compile
    code of its own.
    """

    def hook(*args: Any) -> Any:
        return None if torch.compiler.is_dynamo_compiling() else function(*args)

    return hook


# The engine's calls must bypass a user's dispatch modes (selective recompute counts calls).
@contextmanager
def outside_modes() -> Generator[None]:
    """Outside of dispatch modes and of the transformations of torch.func."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def has_modes() -> bool:
    """Whether dispatch or function modes are on: turning them off costs five microseconds."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return bool(modes or is_transforming())


def is_tracing() -> bool:
    """Whether torch.jit.trace, make_fx or torch.export records what runs."""
    proxy = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return proxy is not None or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


# Whether a profiler of torch's listens.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled  # type: ignore[attr-defined]

# The transformation of torch.func (vmap, grad, jvp) that is under way, or None.
is_transforming: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore


def unwrapped(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors, and those that transforms of torch.func wrapped to make them."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    for tensor in tensors:
        yield tensor
        inner = tensor
        while functorch.is_functorch_wrapped_tensor(inner):
            inner = functorch.get_unwrapped(inner)
            yield inner


def saved_buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    """A module's own buffers that a state dict has. Asking a state dict would call users' hooks."""
    left_out = module._non_persistent_buffers_set
    return [b for name, b in module._buffers.items() if b is not None and name not in left_out]


# Nested lists, mappings and model outputs (public only as torch.utils._pytree).
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves
tree_map_only: Callable[..., Any] = _pytree.tree_map_only


def local_tensor(tensor: Any) -> torch.Tensor:
    """The local tensor object of a DTensor; since 2.13 a parameter's `to_local` makes another."""
    return tensor._local_tensor


def params_of_ddp() -> list[torch.nn.Parameter]:
    """Parameters of the DistributedDataParallel whose forward is running (torch 2.0 and later)."""
    module = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return [] if module is None else module._module_parameters


def is_distributed(tensor: Any) -> bool:
    """Whether it is a DTensor. Who has made none does not pay for the import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def mesh_without_groups(axis: str, size: int) -> Any:
    """A DeviceMesh of one axis without process groups, as its first rank sees it (torch 2.13)."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.arange(size)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=(axis,), _init_backend=False, _rank=0)
    mesh._thread_id = -1  # or DTensor's caches return it in place of an equal mesh with groups
    return mesh


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor; any other tensor as it is."""
    return local_tensor(tensor).detach() if is_distributed(tensor) else tensor


# Inside of it no mode and no subclass sees calls of torch's functions.
no_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


def storage_key(tensor: torch.Tensor) -> int:
    """The same for all tensors that share memory, also on meta, where there is no address."""
    with no_torch_function():
        return tensor.untyped_storage()._cdata


# Identity of the backward that runs on this thread; -1 outside of one. Called in the hot path,
# hence no function of our own around it (the same holds for the next two).
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id


def has_version(tensor: torch.Tensor) -> bool:
    """Whether it has a version: tensors made in inference_mode have none, and get no gradient."""
    try:
        return tensor._version >= 0
    except RuntimeError:  # is_inference() is wrong after `.data` was set
        return False


def is_compiling() -> bool:
    """Whether the compiler runs, which looks at all attributes of tensors."""
    return torch._guards.TracingContext.try_get() is not None  # pyright: ignore


# Turns gradients on or off, as torch.no_grad does in a microsecond.
enable_gradients: Callable[[bool], None] = torch._C._set_grad_enabled

# Whether the running backward keeps its graph (retain_graph=True).
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]

# Whether the running backward will reach an autograd node; a RuntimeError where the node is a leaf
# that `torch.autograd.grad` was asked for.
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


class NodeHook:
    """Calls a function before autograd nodes, like `Tensor.register_hook` of their first outputs.

    That and `register_prehook` create a dict and a handle for each node (1.2 us). Nodes take the
    function by `node._register_hook_dict(hook.holder)`.
    """

    def __init__(self) -> None:
        self.holder = torch.empty(0, device="cpu")  # torch takes the hooks of a tensor

    def call(self, function: Callable[[Any], None] | None) -> None:
        """Set the function for nodes that are added from now on; None: no function."""
        self.holder._backward_hooks = None if function is None else {0: function}


# The autograd node that this thread computes, also while its hooks are called.
current_node: Callable[[], Any] = torch._C._current_autograd_node  # type: ignore[attr-defined]


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Set version counters: autograd refuses tensors that it saved at another version."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)  # pyright: ignore


def queue_callback(function: Callable[[], None]) -> None:
    """Call `function` when the running backward is done."""
    call = functools.partial(call_outside_compile, function)
    torch.autograd.Variable._execution_engine.queue_callback(call)


# The number that the next autograd node of this thread will get.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore


def before_state_dicts(call: Callable[[Any], None]) -> Callable[[], None]:
    """Calls `call` with each optimizer before its `state_dict()`; returns what undoes it.

    torch has a hook for the steps of all optimizers, but none for their state dicts.
    """
    kept = torch.optim.Optimizer.state_dict

    @functools.wraps(kept)
    def state_dict(optimizer: Any) -> dict[str, Any]:
        call(optimizer)
        return kept(optimizer)

    def undo() -> None:
        if torch.optim.Optimizer.state_dict is state_dict:  # nobody replaced it since
            setattr(torch.optim.Optimizer, "state_dict", kept)  # noqa: B010

    setattr(torch.optim.Optimizer, "state_dict", state_dict)  # noqa: B010
    return undo


def register_guard_types(*types: type) -> Callable[[], None]:
    """Let optimizers and clipping use their foreach and fused paths; returns what undoes it.

    torch.compile does not trace these types: a compiled `optimizer.step` runs as it is.
    """
    import torch._dynamo.config as compiler
    import torch.optim.optimizer as optimizer
    from torch.utils import _foreach_utils

    homes: Any = (optimizer, _foreach_utils)
    tables: list[list[Any]] = [home._foreach_supported_types for home in homes]

    def undo() -> None:
        for supported in tables:
            supported[:] = [kind for kind in supported if kind not in types]
        compiler.nontraceable_tensor_subclasses -= set(types)

    undo()
    compiler.nontraceable_tensor_subclasses |= set(types)
    for supported in tables:
        supported += types
    return undo
