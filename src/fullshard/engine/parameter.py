"""Sharded parameters: the user's own Parameter objects, which become this rank's shards.

[Note: two objects]
Outside its unit's forward, `module.weight` is a `ShardedParameter`: the user's object with a
changed class, whose `.data` is a view of the unit's flat shard. Inside the unit's forward it is a
second `nn.Parameter` (`Computed`) of full shape, whose `.data` is a view of the unit's slot.
Optimizers, names and identity refer to the first, autograd to the second. Misuse outside the unit
therefore raises an error and never reads another layer's data.

    at rest      weight  ShardedParameter (n_local, 1)  --> flat shard, master dtype
    in forward   weight  nn.Parameter     (out, in)     --> slot, compute dtype
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import nn

from fullshard.engine._torch_compat import call_outside_compile, no_guard, storage_use_count
from fullshard.engine.guard import (
    ALIASES,
    Rule,
    misfit,
    norm_order,
    other_range,
    refusal,
    rule_of,
    set_data,
    written_by,
)
from fullshard.engine.norms import TOLD_BY_NORMS, GradientNorms, Known, by_model, norms_of
from fullshard.engine.record import ShardRecord, before_read, change_memory, freeze, sharing_of
from fullshard.errors import EngineError, ShardedTensorError
from fullshard.planner.layout import clean_name


class Guarded:
    """`__torch_function__` of all shards. See [Note: the guard] in engine/guard.py."""

    record: ShardRecord
    alias_of: Any = None  # the gradient that this aliases: `p.grad.data`
    shares: Any = None  # see `Sharing`
    is_at_rest = False  # a parameter
    known: Known | None = None  # what cached norms determine about this mask or square
    set_ = set_data

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, name = rule_of(func)
        kwargs = kwargs or {}
        if rule is Rule.PLAIN:
            if name == "grad":
                args[0].record.norms.check_read(args[0].record.piece.name)
            with no_guard():
                return func(*args, **kwargs)
        operands = (*args, *kwargs.values()) if kwargs else args
        like = _find_shard(operands)
        if rule is Rule.ELEMENTWISE and like is not None:  # the common case
            return _elementwise(func, name, like, args, kwargs)
        if rule is Rule.MASK and not _is_mask(args):
            rule, name = Rule.REFUSED, "indexing"
        if like is None or rule in (Rule.RANDOM, Rule.AUTOGRAD):
            raise refusal(name, like, rule)
        if rule in (Rule.REFUSED, Rule.NORM, Rule.NUMBER):
            shards = shards_in(operands)
            like = next((shard for shard in shards if shard.record.is_cut), None)
            if like is None:
                if rule is Rule.REFUSED:
                    # it may write any of them, or return a view of one; mostly, it reads
                    _note_writes(shards, counts=False)
                return _call_uncut(func, name, (args, kwargs), shards[0], rule)
        if rule is Rule.REFUSED:
            raise refusal(name, like)
        return _SPECIAL[rule](func, name, like, args, kwargs)

    def to_local(self) -> torch.Tensor:
        """This rank's elements as a plain tensor that shares memory with the shard.

        Gradients may be written through it. Writes to a parameter are not visible to ranks that
        share weights.
        """
        before_read((self,), "to_local")
        with no_guard():
            return self.detach().as_subclass(torch.Tensor)  # type: ignore[attr-defined]

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor as a plain tensor. A collective: call it on every rank.

        A backward through it raises an error, unless every rank stores the whole parameter.
        """
        if self.record.is_cut or self.record.cut is not None:
            before_read((self,))
            _note_sources(self.record.norms, [self])
            whole = self.record.gather(self.to_local().reshape(-1)).view(self.record.shape_of(self))
            return _without_gradient(whole, self, "full_tensor")
        copy: Any = lambda x: x.clone().reshape(self.record.shape_of(self))  # noqa: E731
        return _call_uncut(copy, "full_tensor", ((self,), {}), self, Rule.NUMBER)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if not hasattr(self, "record"):
            return f"{type(self).__name__}(unattached)"
        with no_guard():
            dtype = self.dtype  # type: ignore[attr-defined]
        kind = ShardedParameter if isinstance(self, ShardedParameter) else type(self)
        what = f"{self.record.describe()} on this rank, unit {self.record.unit}"
        return f"{kind.__name__}({what}, {dtype})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.record.is_cut:
            raise refusal("pickling", self)
        return self.to_local().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with no_guard():
            copy = self.detach().clone()  # type: ignore[attr-defined]
            if isinstance(self, nn.Parameter):
                copy = torch.Tensor._make_subclass(ShardedParameter, copy, self.requires_grad)
            else:
                copy = copy.as_subclass(type(self))
        copy.record = self.record
        memo[id(self)] = copy
        return copy


class ShardedTensor(Guarded, torch.Tensor):
    """The result of an elementwise function of a shard: an optimizer state, `p.detach()`."""


class ShardedGradient(Guarded, torch.Tensor):
    """This rank's elements of a reduced gradient. Norms are those of the whole gradient."""

    owner: Any = None  # the GradientShard that owns its memory


class PendingGradient(ShardedGradient):
    """`p.grad` while unreduced gradients of `no_sync` exist.

    `p.grad = None` and `zero_` drop the unreduced gradients, as in one process. All other
    operations raise an error, because this rank's part is not a gradient of the model. The tensor
    has the parameter's shape and one element of memory.

    Attributes:
        before: The value of `p.grad` at the end of the first of these backwards.
        drop: Drops the unreduced gradients.
    """

    before: Any
    drop: Callable[..., None]

    @classmethod
    def of(cls, param: ShardedParameter, drop: Callable[..., None]) -> PendingGradient:
        """Create the pending gradient of a parameter."""
        with no_guard():
            found: Any = param.new_empty(()).expand(param.shape).as_subclass(cls)
        found.record, found.before, found.drop = replace(param.record), None, drop
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, name = rule_of(func)
        if name in ("zero_", "_foreach_zero_"):
            for grad in args[0] if isinstance(args[0], _LISTS) else args:
                if isinstance(grad, cls):
                    grad.drop(stays=grad.before is None)  # other ranks may have none to zero
                    if grad.before is not None:
                        grad.before.zero_()
                else:
                    grad.zero_()
            return args[0]
        if rule is Rule.DETACH:
            return args[0]
        if rule not in (Rule.PLAIN, Rule.GRAPH, Rule.FREEZE):
            raise next(x for x in shards_in(args) if isinstance(x, cls)).refusal(name)
        with no_guard():
            return func(*args, **(kwargs or {}))

    def refusal(self, name: str) -> EngineError:
        """The error of a function that needs the gradient."""
        return EngineError(
            f"{name} of the gradient of {self.record.describe()}: expected a gradient that is "
            "summed over ranks; its backward ran under no_sync, and the next backward outside "
            "sums it. Read, scale or clip gradients and call optimizer.step() afterwards; "
            "zero_grad() drops deferred gradients."
        )

    def to_local(self) -> torch.Tensor:
        """Raises an error, like every read of the gradient."""
        raise self.refusal("to_local")

    full_tensor = to_local

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.refusal("pickling")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise self.refusal("deepcopy")


class _AtRest(type(nn.Parameter)):
    """Makes `isinstance(p, ShardedParameter)` true for both classes of shards."""

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = type(instance)
        return kind is cls or kind is PlacedParameter


class ShardedParameter(Guarded, nn.Parameter, metaclass=_AtRest):
    """A parameter outside forward: this rank's elements, shaped (n_local, 1, ..., 1).

    The number of dimensions is kept, because `p.ndim >= 2` commonly selects weight decay.
    `p.numel()` is local; `fs.sharding(p)` has the global shape.
    """

    is_at_rest = True

    def new_state(self, dtype: torch.dtype) -> torch.Tensor:
        """Allocate (n_local,) plain zeros for an optimizer state of this parameter."""
        if self.record.states is not None:
            return self.record.states.zeros(self.numel(), dtype)
        return torch.zeros(self.numel(), dtype=dtype, device=self.device)

    def as_state(self, local: torch.Tensor) -> ShardedTensor:
        """Wrap (n_local,) plain elements as a state in the shape of this parameter."""
        with no_guard():  # `.data` has a version of its own; ranks may fill `local` in other steps
            state = local.data.view(self.shape).as_subclass(ShardedTensor)
        state.record = self.record
        return state

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Call `hook(param)` after each backward that sets `param.grad` to a reduced gradient."""
        from torch.utils.hooks import RemovableHandle

        handle = RemovableHandle(self.record.post_accumulate)
        self.record.post_accumulate[handle.id] = hook
        return handle

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:  # noqa: ARG002 torch's
        """Raises an error: the hook would receive one rank's unreduced gradient."""
        raise ShardedTensorError(
            f"register_hook on {clean_name(self.record.piece.name)!r}: expected no hook, because "
            "it would see an unreduced gradient. Use register_post_accumulate_grad_hook instead."
        )


class PlacedParameter(Guarded, torch.Tensor):
    """A ShardedParameter that was a DTensor; objects cannot change their memory layout."""

    __slots__ = ("_local_tensor", "_spec")  # a DTensor's local tensor; empty
    _is_param = True  # isinstance(p, nn.Parameter)
    is_at_rest = True
    new_state, as_state = ShardedParameter.new_state, ShardedParameter.as_state
    register_hook = ShardedParameter.register_hook
    register_post_accumulate_grad_hook = ShardedParameter.register_post_accumulate_grad_hook


def _find_shard(values: Any) -> Any:
    return next(_shards(values), None)


def shards_in(values: Any) -> list[Any]:
    """All shards in values and in lists and tuples of them."""
    return list(_shards(values))


def _shards(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Guarded):
            yield value
        elif isinstance(value, _LISTS):
            yield from _shards(value)


def _call_uncut(func: Any, name: str, arguments: Any, like: Any, rule: Rule) -> Any:
    """Call any function on shards of which no rank stores a part alone; the results are plain."""
    before_read(arguments[0], name if rule is Rule.REFUSED else None)
    called = "__setitem__" if func is torch.Tensor.__setitem__ else name
    if _writes_a_graph(called, *arguments):
        return _differentiable(func, name, *arguments)
    with no_guard():
        result = func(*arguments[0], **arguments[1])
    parts = result if isinstance(result, _LISTS) else (result,)  # split, unbind
    if not any(map(_needs_gradient, parts)):
        return result
    change: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach  # a view under no_grad
    if torch.is_grad_enabled():
        try:
            return _differentiable(func, name, *arguments)
        except ShardedTensorError:
            if rule is Rule.REFUSED:
                raise
            change = partial(_without_gradient, like=like, name=name)
    parts = [change(part) if _needs_gradient(part) else part for part in parts]
    return type(result)(parts) if isinstance(result, _LISTS) else parts[0]


def _writes_a_graph(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a trained parameter is written into plain tensors, which records a graph.

    Such a function runs on the compute parameter, because gradients of a shard are not reduced.
    """
    if not torch.is_grad_enabled():
        return False
    written = written_by(name, args, kwargs)
    if not written or any(isinstance(target, Guarded) for target in written):
        return False
    shards = shards_in((*args, *kwargs.values()))
    return any(isinstance(x, ShardedParameter) and x.requires_grad for x in shards)


def _needs_gradient(result: Any) -> bool:
    """Whether a result is a plain tensor with a graph, whose gradient would reach the shards."""
    is_plain = isinstance(result, torch.Tensor) and not isinstance(result, Guarded)
    return is_plain and result.requires_grad


def _differentiable(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of unsharded parameters on compute parameters, so gradients are reduced."""
    with no_guard():
        return func(*_computed(name, args), **{k: _computed(name, v) for k, v in kwargs.items()})


def _computed(name: str, value: Any) -> Any:
    if isinstance(value, _LISTS):
        return type(value)(_computed(name, item) for item in value)
    if not isinstance(value, ShardedParameter) or not value.requires_grad:
        return value
    if value.record.compute is None or value.record.index < 0:
        raise refusal(name, value, Rule.AUTOGRAD)
    compute = value.record.compute()
    return compute if compute.data_ptr() == value.data_ptr() else value  # copies belong to the user


_UNSCALES = "_amp_foreach_non_finite_check_and_unscale_"
_CLIPS = ("_foreach_mul_", "_foreach_clamp_")  # called by torch's clipping


def _elementwise(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an elementwise function; the results are shards."""
    makes_state = name == "zeros_like" and isinstance(like, ShardedParameter)  # by an optimizer
    if makes_state and like.record.states is not None:
        return like.as_state(like.new_state(kwargs.get("dtype") or like.dtype))
    operands = (*args, *kwargs.values()) if kwargs else args
    _refuse_other_ranges(name, like, operands)
    before_read(operands, name)
    if _writes_a_graph(name, args, kwargs):
        if like.record.is_cut:
            raise refusal(name, like, Rule.AUTOGRAD)
        return _differentiable(func, name, args, kwargs)
    written = written_by(name, args, kwargs)
    if written:
        clips = name.startswith(_CLIPS) and isinstance(written[0], ShardedGradient)
        if clips:
            call_outside_compile(written[0].record.norms.begin_clipping, (args[1:], kwargs))
        _note_writes(written, counts=not clips and name != _UNSCALES)  # ranks compare these calls
    result = _call_plain(func, name, like, (args, kwargs), written)
    if _needs_gradient(result) and not like.record.is_cut and not written:
        try:
            return _differentiable(func, name, args, kwargs)
        except ShardedTensorError:
            result = _without_gradient(result, like, name)  # a copy may be kept
    if isinstance(result, _LISTS):
        lists = (x for x in operands if isinstance(x, _LISTS))
        sources = next((x for x in lists if _find_shard(x) is not None), None)
        return _as_shards(result, sources, like, name)
    result = _as_shard(result, like, name)
    is_told = name in TOLD_BY_NORMS and isinstance(result, ShardedGradient)
    if is_told and type(like) is ShardedGradient and not (written or kwargs):
        result.known = like.record.norms.known_of(like, name, args[1:])
    return result


def _cast(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], Guarded):
        return _elementwise(func, name, like, args, kwargs)
    with no_guard():
        return func(*args, **kwargs)


def _call_plain(
    func: Any, name: str, like: Any, arguments: Any, written: Sequence[Any] = ()
) -> Any:
    if written and isinstance(written[0], ShardedGradient) and torch.is_grad_enabled():
        with torch.no_grad():  # p.grad.add_(p): shards have no history
            return _call_plain(func, name, like, arguments)
    args, kwargs = arguments
    try:
        with no_guard():
            return func(*args, **kwargs)
    except RuntimeError as error:
        if name in ("view", "reshape") or _has_misfit((*args, *kwargs.values())):
            raise misfit(name, like, str(error)) from error
        raise


def _note_writes(written: Sequence[Any], *, counts: bool = True) -> None:
    """Tell the models of shards about writes."""
    if set(map(type, written)) == _STATES and not any(map(_SHARES, written)):
        return  # the fast path for optimizer states
    params: list[Any] = []
    for shard in written:
        if isinstance(shard, ShardedGradient):
            shard.record.norms.note_write(shard, counts=counts)
        elif isinstance(shard, Guarded):
            params += params_of(shard)
    for model, ours in by_model(params).items():
        number = ours[0].record.home.before_write()
        if counts:
            for record in map(_RECORD, ours):
                record.last_write = number
                if record.cut is None:
                    model.wrote[id(record)] = record


def params_of(tensor: Any) -> Iterable[Any]:
    """The parameters that have a tensor's memory."""
    if tensor.is_at_rest:
        return (tensor,)
    return () if tensor.shares is None else tensor.shares.params.values()


def _copy(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """p.copy_(average): what becomes of a state that only some ranks wrote is found."""
    for target in shards_in(args[:1])[:1]:
        if params_of(target):
            _note_sources(target.record.norms, (*args[1:], *kwargs.values()))
    return _elementwise(func, name, like, args, kwargs)


def _note_sources(norms: GradientNorms, values: Sequence[Any]) -> None:
    """Note the states that this rank wrote, which are copied or gathered now."""
    for state in _shards(values):
        record, is_own = state.record, type(state) is ShardedTensor and not params_of(state)
        if is_own and record.cut is None and not state.is_inference() and state._version:
            norms.copied[id(record)] = record


def _unscale(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = _elementwise(func, name, like, args, kwargs)
    for norms in by_model(shards_in(args)):
        norms.share_found_inf(args[1], args[2])
    return result


def _compare(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compare two shards: a mask; for torch.testing a plain one of this rank's elements."""
    result = _elementwise(func, name, like, args, kwargs)
    caller: Any = sys._getframe(2)  # frame 1 is __torch_function__
    while caller.f_globals.get("__name__", "").startswith(("torch.utils.", "torch.overrides")):
        caller = caller.f_back  # of a mode, such as torch.device's
    is_test = caller.f_globals.get("__name__", "").startswith("torch.testing")
    return result.to_local() if is_test else result


def _make(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """p.new_zeros(shape): a shard if the shape is p's, otherwise plain (a counter)."""
    if like.record.is_cut and shards_in((*args[1:], *kwargs.values())):
        raise refusal(name, like)  # p.new_tensor(p)
    with no_guard():
        result = func(*args, **kwargs)
    is_like = result.dim() > 1 and result.shape == like.shape  # equal on all ranks
    return _as_shard(result, like, name) if is_like else result


def _assign(_func: Any, _name: str, _like: Any, args: Any, _kwargs: dict[str, Any]) -> None:
    """p.grad = x: a plain tensor becomes a ShardedGradient with global norms."""
    param, value = args if len(args) > 1 else (*args, None)  # del p.grad
    param.record.norms.check_read(param.record.piece.name)
    with no_guard():
        before = param.grad
        if isinstance(before, PendingGradient) and value is not before:
            before.drop()
        if isinstance(value, PendingGradient) and value is not before:
            raise value.refusal("p.grad = ...")
        if isinstance(value, torch.Tensor) and not isinstance(value, ShardedGradient):
            if value.shape != param.shape:
                raise misfit("p.grad = ...", param, f"{tuple(value.shape)}")
            value = value.as_subclass(ShardedGradient)
            value.record = param.record
        param.grad = value


def _node(func: Any, _name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """x.grad_fn: hooks on nodes of a sharded parameter would never be called."""
    with no_guard():
        node = func(*args, **kwargs)
    if node is not None and like.record.is_cut:
        raise refusal("grad_fn", like, Rule.AUTOGRAD)
    return node


def _detach(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """p.grad.detach_(): torch raises an error for views, even without a graph."""
    if like.is_at_rest:
        return like.requires_grad_(False)
    return _elementwise(func, name, like, args, kwargs) if like.requires_grad else like


def _replace(func: Any, _name: str, _like: Any, args: Any, _kwargs: dict[str, Any]) -> None:
    """x.data = ...: copies values, since a gradient must stay a view of the gradient shard."""
    gradient, data = args
    if not isinstance(gradient, ShardedGradient):
        with no_guard():
            func(gradient, data)  # a parameter: detected at the next forward
        has_others = isinstance(data, Guarded) and not isinstance(data, ShardedGradient)
        change_memory(gradient, sharing_of(data, makes=True) if has_others else None)
        return
    if data.dtype is not gradient.dtype or data.shape != gradient.shape:
        raise ShardedTensorError(
            f"p.grad.data = ... of {gradient.record.describe()}: expected {gradient.dtype} of the "
            f"shard's shape {tuple(gradient.shape)}; got {data.dtype} of {tuple(data.shape)}. "
            "Write into p.grad in place; convert the model (.half, .to) before fs.shard."
        )
    with no_guard():
        if data.is_set_to(gradient):  # p.grad.data = p.grad.data.clamp_(...)
            return
    own = gradient.owner
    if own is not None and storage_use_count(own.memory._cdata) > (*own.references, math.inf)[0]:
        raise ShardedTensorError(
            f"p.grad.data = ... of {gradient.record.describe()}: expected no other tensor that "
            "shares the gradient's memory, which is written in place; got one (p.grad.data, "
            "p.grad.detach()). Keep p.grad.clone(), or write p.grad = ..."
        )
    gradient.copy_(data)


def _is_mask(args: Sequence[Any]) -> bool:
    """Whether this is x[mask] = number with a mask that was computed from shards."""
    return isinstance(args[1], Guarded) and not isinstance(args[2], torch.Tensor)


def _refuse_other_ranges(name: str, like: Any, operands: Sequence[Any]) -> None:
    """Raise an error unless all shards have the same elements of tensors of one shape."""
    ones: Sequence[Any] | None = None
    for operand in operands:
        if isinstance(operand, Guarded):
            if operand.record is not like.record:
                _refuse_other_range(name, like, operand)
        elif isinstance(operand, _LISTS) and _find_shard(operand) is not None:
            if ones is not None and not _are_of_one_record(ones, operand):
                for one, two in zip(ones, operand, strict=False):
                    if isinstance(one, Guarded) and isinstance(two, Guarded):
                        _refuse_other_range(name, one, two)
            ones = operand


def _are_of_one_record(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the shards of each pair share a record: the fast path for optimizer lists."""
    try:
        return not any(map(is_not, map(_RECORD, ones), map(_RECORD, others)))
    except AttributeError:  # including plain tensors: parameters left out of sharding
        return False


_RECORD, _SHARES = attrgetter("record"), attrgetter("shares")
_LISTS = (list, tuple)
_STATES = {ShardedTensor}
_SHARDS = {ShardedParameter, PlacedParameter, ShardedTensor, ShardedGradient}


def _refuse_other_range(name: str, one: Any, other: Any) -> None:
    for shard in (one, other):
        if isinstance(shard, PendingGradient):  # with its own record
            raise shard.refusal(name)
    if not one.record.is_cut_like(other.record):
        raise other_range(name, one.record, other.record)


def _has_misfit(operands: Sequence[Any]) -> bool:
    """Whether a plain operand's shape differs from the shards'."""
    tensors = [t for x in operands for t in (x if isinstance(x, _LISTS) else [x])]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    with no_guard():
        shapes = {tensor.shape for tensor in tensors if isinstance(tensor, Guarded)}
        return any(t.numel() != 1 and t.shape not in shapes for t in tensors)


def _as_shards(results: Any, sources: Any, like: Any, name: str) -> Any:
    """Wrap results of a function of lists, or indices of one shard (`torch.where(p > 0)`)."""
    if set(map(type, results)) <= _SHARDS:  # written in place
        return results
    if sources is not None:
        return type(results)(map(_as_shard, results, sources, repeat(name)))
    if like.record.is_cut:
        raise refusal(name, like)
    return results


def _as_shard(result: Any, like: Any, name: str) -> Any:
    """Wrap the result of an elementwise function as a shard."""
    is_made = isinstance(result, torch.Tensor) and not isinstance(result, Guarded)
    if not is_made or not isinstance(like, Guarded):
        return result
    own: Any = like
    kind = ShardedGradient if isinstance(like, ShardedGradient) else ShardedTensor
    is_alias = name in ALIASES  # writes to it are writes to the other
    with no_guard():  # which each attribute of a shard would pass through
        if result.shape != own.shape:
            cut, fits = own.record.is_cut, result.numel() == own.numel()  # rank without elements
            if not fits or (cut and result.shape[1:].numel() != 1):
                if not cut:
                    return result
                raise misfit(name, like, f"the result would be {tuple(result.shape)}")
        shard: Any = result.as_subclass(kind)
        shares = is_alias and kind is ShardedTensor and own.is_contiguous()
    shard.record = own.record
    if shares:
        sharing_of(own, makes=True).add(shard)
    elif is_alias and kind is ShardedGradient:
        shard.alias_of = own if own.alias_of is None else own.alias_of
    return shard


def _norm(_func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else kwargs.get("input", kwargs.get("self", kwargs.get("x")))
    many = isinstance(tensors, _LISTS)
    given: list[Any] = list(tensors) if many else [tensors]  # type: ignore[arg-type]
    order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else None))
    extra = set(kwargs) - {"ord", "p", "input", "x", "self"}
    is_matrix_norm = name == "linalg_norm" and order is not None
    others = (kwargs[key] for key in extra)
    if len(args) > 2 or is_matrix_norm or any(x is not None and x is not False for x in others):
        raise refusal(f"{name} along dimensions", like)
    order = norm_order(order)
    found = iter(norms_of([x for x in given if isinstance(x, Guarded)], order))
    norms = [  # a plain tensor is the gradient of a parameter left out of sharding
        _without_gradient(next(found), x, name)
        if isinstance(x, Guarded)
        else torch.linalg.vector_norm(x, order)
        for x in given
    ]
    return norms if many else norms[0]


def _reduce(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Reduce the whole tensor to a number: `p.grad.abs().mean()`, `p.isnan().any()`."""
    named = {key: value for key, value in kwargs.items() if key not in ("input", "self")}
    if name in ("max", "min") and isinstance(kwargs.get("other", *args[1:2]), torch.Tensor):
        return _elementwise(func, f"{name}imum", like, args, kwargs)
    correction = int(named.pop("correction", named.pop("unbiased", 1)))  # of std and var
    if len(args) > 1 or any(value is not None for value in named.values()):
        raise refusal(f"{name} along dimensions", like)
    known = None if like.known is None else like.known(name)
    with no_guard():
        dtype = getattr(torch.zeros(2, dtype=like.dtype), name)().dtype  # torch's promotion
    value = like.record.norms.reduce(like, name, correction) if known is None else known
    return _without_gradient(value.to(like.device, dtype), like, name)


def _without_gradient(value: torch.Tensor, like: Any, name: str) -> torch.Tensor:
    """A plain result, for logging or as a whole tensor; a backward through it raises an error."""
    value = value.detach()
    if not (torch.is_grad_enabled() and like.requires_grad and value.is_floating_point()):
        return value
    text = str(refusal(name, like, Rule.AUTOGRAD))  # an error's frames would keep the model alive
    return _Refusal.apply(torch.empty(0, requires_grad=True), (value,), text)


class _Refusal(torch.autograd.Function):
    """Raises an error in backward; a tuple hides the tensor from autograd, so nothing is copied."""

    @staticmethod
    def forward(ctx: Any, _needs_grad: torch.Tensor, value: Any, text: str) -> torch.Tensor:
        ctx.text = text
        return value[0]

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        raise ShardedTensorError(ctx.text)


_SPECIAL = {
    Rule.CAST: _cast,
    Rule.COPY: _copy,
    Rule.MASK: _elementwise,
    Rule.COMPARE: _compare,
    Rule.UNSCALE: _unscale,
    Rule.NORM: _norm,
    Rule.NUMBER: _reduce,
    Rule.MAKE: _make,
    Rule.ASSIGN: _assign,
    Rule.REPLACE: _replace,
    Rule.GRAPH: _node,
    Rule.DETACH: _detach,
    Rule.FREEZE: freeze,
}
