"""The torch functions that shards support.

[Note: the guard]
A shard contains some elements of a tensor. Elementwise functions give the same elements on a shard
as on the whole. Any other function would be silently wrong, so it raises an error. The lists below
allow functions; functions on no list are refused, because new torch functions are not elementwise
in general. Without sharding (no_shard, one rank) a shard is the whole tensor. Then only random
fills are refused, which would differ between ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from fullshard.engine._torch_compat import no_guard
from fullshard.errors import EngineError, NotElementwiseError, ShardedTensorError


class Rule(Enum):
    """How the guard handles a function."""

    ELEMENTWISE = auto()  # elementwise: the result is a shard
    PLAIN = auto()  # metadata, or a plain result independent of elements
    NORM = auto()  # of the whole tensor
    NUMBER = auto()  # reductions of the whole tensor: sum, mean, any, all ...
    CAST = auto()  # elementwise of a shard; `x.to(p)` of a plain x uses only p's dtype and device
    COPY = auto()  # elementwise, of a state that ranks should have written alike
    MASK = auto()  # x[mask] = number is elementwise, other indexing is not
    COMPARE = auto()  # elementwise; plain for torch.testing, where each rank compares its own
    REPLACE = auto()  # p.data = x
    ASSIGN = auto()  # p.grad = x
    UNSCALE = auto()  # GradScaler's check: an infinity on any rank counts for all
    REFUSED = auto()  # needs the whole tensor
    RANDOM = auto()  # would differ between ranks
    AUTOGRAD = auto()  # shards have no autograd history
    MAKE = auto()  # p.new_empty(shape): a shard for p's shape, otherwise plain
    GRAPH = auto()  # p.view_as(p).grad_fn: leads to nodes that receive no gradient
    DETACH = auto()  # p.grad.detach_()
    FREEZE = auto()  # p.requires_grad_(); compute parameters follow


UNARY = """abs absolute neg negative positive sqrt rsqrt square exp exp2 expm1 log log2 log10 log1p
sin cos tan sinh cosh tanh asinh acosh atanh sigmoid relu silu softplus sign sgn reciprocal floor
ceil round trunc frac fix erf erfc isnan isinf isfinite isneginf isposinf logical_not bitwise_not
nan_to_num clamp clamp_min clamp_max clip hardtanh threshold"""
BINARY = """add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod
pow addcmul addcdiv lerp maximum minimum fmax fmin where masked_fill eq ne lt le gt ge
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor copysign atan2 hypot xlogy
heaviside nextafter ldexp"""
COPIES = """clone detach contiguous float double half bfloat16 type cpu cuda
zeros_like ones_like empty_like full_like zero fill constant copy data requires_grad __copy__"""
_OPERATORS = """add sub mul truediv floordiv mod pow radd rsub rmul rtruediv rdiv div rpow iadd isub
imul itruediv idiv ipow neg pos abs eq ne lt le gt ge and or xor invert iand ior ixor rand ror"""
PLAIN = """shape dtype device layout ndim names requires_grad grad is_leaf is_cuda is_cpu
is_meta is_sparse is_sparse_csr is_mkldnn is_quantized is_nested is_mps is_xpu is_vulkan is_maia
is_ipu is_mtia itemsize nbytes output_nr _version _backward_hooks _post_accumulate_grad_hooks
volatile retains_grad grad_dtype size numel nelement dim ndimension element_size stride
storage_offset is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_inference
is_same_size get_device is_pinned is_shared is_coalesced has_names dense_dim sparse_dim result_type
can_cast as_subclass retain_grad _is_view is_distributed
_has_compatible_shallow_copy_type"""
RANDOM = """normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ normal
bernoulli rand_like randn_like randint_like multinomial poisson dropout dropout_ alpha_dropout
feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rrelu rrelu_ gumbel_softmax"""
_NORMS = "norm linalg_norm linalg_vector_norm _foreach_norm"
_LAYERS = """linear bilinear embedding embedding_bag prelu conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d layer_norm group_norm rms_norm batch_norm instance_norm
multi_head_attention_forward matmul mm bmm addmm einsum __matmul__ __rmatmul__"""
_NUMBERS = "sum mean max min amax amin any all count_nonzero std var"
# They return a view of the same elements.
ALIASES = frozenset(["data", "detach", "view", "view_as", "reshape", "contiguous"])
# They read no element; an alias is looked at when it is read itself.
READ_NOTHING = ALIASES | {"zeros_like", "ones_like", "empty_like", "full_like"}
_FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_"


def _table() -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for name in f"{UNARY} {BINARY} {COPIES}".split():
        for spelling in (name, name + "_", f"_foreach_{name}", f"_foreach_{name}_"):
            rules[spelling] = Rule.ELEMENTWISE
    rules.update((f"__{name}__", Rule.ELEMENTWISE) for name in _OPERATORS.split())
    lists = {_FUSED: Rule.ELEMENTWISE, _NORMS: Rule.NORM, _NUMBERS: Rule.NUMBER, PLAIN: Rule.PLAIN}
    for names, rule in (lists | {RANDOM: Rule.RANDOM, "to type_as": Rule.CAST}).items():
        rules.update(dict.fromkeys(names.split(), rule))
    rules["_amp_foreach_non_finite_check_and_unscale_"] = Rule.UNSCALE
    rules["copy_"] = rules["_foreach_copy_"] = Rule.COPY
    rules["__setitem__"], rules["isclose"] = Rule.MASK, Rule.COMPARE
    makers = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
    rules.update((name, Rule.MAKE) for name in makers)
    rules["grad_fn"], rules["detach_"], rules["backward"] = Rule.GRAPH, Rule.DETACH, Rule.AUTOGRAD
    rules["data="], rules["grad="] = Rule.REPLACE, Rule.ASSIGN
    rules["requires_grad="] = rules["requires_grad_"] = Rule.FREEZE
    rules["view"] = rules["view_as"] = rules["reshape"] = Rule.ELEMENTWISE  # size is checked
    return rules


_BY_NAME = _table()
_BY_FUNCTION: dict[Any, tuple[Rule, str]] = {}  # a cache, filled on first use


def rule_of(function: Any) -> tuple[Rule, str]:
    """Returns the rule and readable name of a function passed to `__torch_function__`."""
    found = _BY_FUNCTION.get(function)
    if found is None:
        name = getattr(function, "__name__", str(function))
        if name in ("__get__", "__set__", "__delete__"):  # a property of torch.Tensor
            setter = "" if name == "__get__" else "="
            name = getattr(function.__self__, "__name__", name) + setter
        rule = _BY_NAME.get(name, Rule.REFUSED)
        if function is torch.autograd.grad:  # has the name of a property
            rule, name = Rule.AUTOGRAD, "torch.autograd.grad"
        elif getattr(function, "__module__", "") == "torch.nn.init" and rule is Rule.REFUSED:
            rule = Rule.RANDOM
        found = _BY_FUNCTION[function] = (rule, name)
    return found


def set_data(tensor: Any, source: Any) -> Any:
    """`tensor.set_(source)`, for which torch calls no `__torch_function__`."""
    tensor.data = source
    return tensor


def written_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the arguments that a function writes; `x *= 2` arrives as mul_."""
    if "out" in kwargs:
        out = kwargs["out"]
        return out if isinstance(out, list | tuple) else (out,)
    writes = name == "__setitem__" if name.startswith("__") else name[-1] == "_"
    if not (writes and name != "detach_") and not kwargs.get("inplace"):
        return ()
    first = args[0] if args else next(kwargs[k] for k in ("self", "input", "tensor") if k in kwargs)
    if isinstance(first, list | tuple):  # a fused optimizer writes gradients that it unscales
        unscaled = kwargs.get("grad_scale") is not None
        return [*first, *(args[1] if len(args) > 1 else kwargs["grads"])] if unscaled else first
    return (first,)


def norm_order(order: Any) -> float:
    """Returns the order of a norm that can be combined from norms of parts.

    Raises:
        ShardedTensorError: The norm cannot be combined.
    """
    try:
        value = 2.0 if order is None or order == "fro" else float(order)
    except (TypeError, ValueError):
        value = 0.0
    if not value > 0.0:
        raise ShardedTensorError(
            f"norm of gradients: expected an order above 0, or inf; got {order!r}. Use "
            "p.grad.full_tensor() for other norms."
        )
    return value


def refusal(name: str, like: Any, rule: Rule = Rule.REFUSED) -> ShardedTensorError:
    """Returns the error for a function that shards do not support."""
    record = getattr(like, "record", None)
    what = record.describe() if record is not None else "a tensor"
    if rule is Rule.AUTOGRAD:
        return ShardedTensorError(
            f"{name}: expected tensors with autograd history; got {what} outside of a forward. "
            "Compute losses of parameters inside their unit's forward, call backward(), read "
            "p.grad. Instead of backward(inputs=...), freeze the other parameters. For a penalty "
            "(L2, EWC) add its gradient after backward: p.grad.add_(p.detach(), alpha=2 * weight)."
        )
    if rule is Rule.RANDOM:
        return ShardedTensorError(
            f"{name}: expected the same random numbers on every rank; got the shard of {what}, for "
            "which each rank would draw different numbers. Initialise parameters before fs.shard."
        )
    if name.split(".")[-1] in _LAYERS.split() and record is not None:
        return ShardedTensorError(
            f"{name}: expected a call inside the forward of unit {record.unit}; got this rank's "
            f"shard of {what} outside of it. Call the model or the unit; or name the layer's class "
            "in wrap=, because a unit may be called directly, also by methods other than forward. "
            "Put layers that read each other's weights into one unit. In that forward, read the "
            "parameter from its module: lists and closures keep the shard."
        )
    if name in ("pickling", "storage", "untyped_storage", "data_ptr"):
        cure = "Save fs.full_state_dict(model); p.to_local() returns this rank's elements only"
    elif name.split()[0] in ("norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"):
        cure = "Use fs.global_norm(params) for the norm of the whole"
    else:
        cure = "Use p.full_tensor() for the whole, or p.to_local() for this rank's elements only"
    optimizer = _stepping()
    if optimizer is not None:
        return NotElementwiseError(
            f"{optimizer}.step calls {name}: expected an elementwise optimizer, which needs no "
            f"whole tensor; got this rank's shard of {what}. Use fs.owned(model, ...), which gives "
            f"{optimizer} whole tensors, each on one rank. If it combines several tensors (one "
            "rate for all), use strategy no_shard."
        )
    return ShardedTensorError(
        f"{name}: expected a whole tensor; got this rank's shard of {what}. {cure}."
    )


def _stepping() -> str | None:
    """The class name of the optimizer whose step is running; None outside a step."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, torch.optim.Optimizer):
            return type(caller).__name__
        frame = frame.f_back
    return None


def misfit(name: str, like: Any, got: str) -> ShardedTensorError:
    """Returns the error for operands whose shapes differ from the shard's."""
    cure = "Slice them as fs.sharding(p) says, or use p.full_tensor()."
    if not name.endswith("_"):
        cure += (
            " A method other than forward that computes with its module's weights needs a call "
            "from forward, or `with fs.unsharded(model):`."
        )
    return ShardedTensorError(
        f"{name} on the shard of {like.record.describe()}: expected operands of the shard's "
        f"own shape {tuple(like.shape)} or numbers; got others: {got}. {cure}"
    )


def other_range(name: str, one: Any, other: Any) -> ShardedTensorError:
    """The error of a function of two shards whose elements do not correspond, by their records."""
    return ShardedTensorError(
        f"{name}: expected shards of the same range; got {one.describe()}, and "
        f"{other.describe()}, whose elements do not correspond. Use p.full_tensor() of "
        "both. For a copy of the model (EMA, a teacher), shard both alike (freeze parameters "
        "after fs.shard), or copy by load_state_dict, which reshards. Shard twins in one "
        "model (a momentum encoder) separately: fs.shard(model.key)."
    )


def refuse_gradients(param: nn.Parameter) -> None:
    """Refuse gradients of the object itself, which ranks would not sum: forward sees another one.

    A custom function (`torch.autograd.Function`) reads it without the guard.
    """
    if param.requires_grad and not param._backward_hooks:
        with no_guard():
            torch.Tensor.register_hook(param, _refuse_gradient)


def _refuse_gradient(grad: torch.Tensor | None) -> None:
    if grad is not None:
        raise EngineError(
            "backward to a parameter outside of its unit's forward: expected none, because its "
            "gradient would not be reduced over ranks. Put a function and the weight that it "
            "reads into one unit (wrap), train outside of fs.unsharded, and add a penalty's "
            "gradient after backward."
        )


_refuse_gradient.__torch_unserializable__ = True  # type: ignore[attr-defined] no warning
