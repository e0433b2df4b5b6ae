"""What a parameter is: the user's own Parameter object, by identity, holding this rank's shard.

[Note: two objects]
At rest and everywhere outside its unit's forward, `module.weight` is a `ShardedParameter`: the
object that the user made, class changed, `.data` a view of the unit's flat shard. Inside the unit's
forward it is a second, plain `nn.Parameter` of full shape whose `.data` is a view of the unit's
slot. The first is what optimizers, names and identity refer to; the second is what autograd sees.
Misuse outside the unit therefore raises, and never reads another layer's data.

    at rest      weight  ShardedParameter (n_local, 1)  --> flat shard, master dtype
    in forward   weight  nn.Parameter     (out, in)     --> slot, compute dtype
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.guard import (
    Rule,
    is_alias,
    misfit,
    norm_order,
    refusal,
    rule_of,
    writes,
)
from fullshard.errors import ShardedTensorError
from fullshard.planner.slices import Slice

if TYPE_CHECKING:
    from fullshard.engine.homes import Residence
    from fullshard.engine.norms import GradientNorms


@dataclass(eq=False, slots=True)
class ShardRecord:
    """What a shard knows of the tensor that it is a part of.

    Attributes:
        piece: Which elements of which parameter.
        unit: Title of the unit that gathers it.
        index: Place among the model's trained parameters, for cached norms.
        is_cut: Whether some rank holds only a part of the parameter.
        copies: Ranks that hold the same elements.
        norms: Global norms of the model's gradients.
        before_write: Returns when no other rank reads these elements.
        gather: Collective: the full tensor of (n_local,) plain elements.
        post_accumulate: The user's hooks, called when the reduced gradient is there.
        states: Where optimizer states that are made after a parameter live; None: beside it.
    """

    piece: Slice
    unit: str
    index: int
    is_cut: bool
    copies: int
    norms: GradientNorms
    before_write: Callable[[], None]
    gather: Callable[[torch.Tensor], torch.Tensor]
    post_accumulate: OrderedDict[int, Callable[[torch.Tensor], None]]
    states: Residence | None = None

    def describe(self) -> str:
        """Name, global shape and range."""
        p = self.piece
        return f"{p.name!r}, global shape {tuple(p.shape)}, elements [{p.start}, {p.stop})"


class _Guarded:
    """`__torch_function__` of all shards. See [Note: the guard]."""

    record: ShardRecord

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, name = rule_of(func)
        kwargs = kwargs or {}
        if rule is Rule.PLAIN:
            with no_guard():
                return func(*args, **kwargs)
        like = _find_shard((*args, *kwargs.values()) if kwargs else args)
        if rule is Rule.ELEMENTWISE and like is not None:  # nearly always
            return _elementwise(func, name, like, args, kwargs)
        if rule is Rule.MASK and not _is_mask(args):
            rule, name = Rule.REFUSED, "indexing"
        if like is None or rule in (Rule.RANDOM, Rule.AUTOGRAD):
            raise refusal(name, like, rule)
        if rule in (Rule.REFUSED, Rule.NORM) and not like.record.is_cut:
            return _call_on_whole(func, name, (args, kwargs), like)
        if rule is Rule.NORM:
            return _norm(name, like, args, kwargs)
        if rule is Rule.REFUSED:
            raise refusal(name, like)
        return _SPECIAL[rule](func, name, like, args, kwargs)

    def to_local(self) -> torch.Tensor:
        """This rank's elements as a plain tensor that shares memory with the shard.

        For reading: neither known norms of gradients nor ranks that share the weights see what is
        written through it.
        """
        with no_guard():
            return self.detach().as_subclass(torch.Tensor)  # type: ignore[attr-defined]

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor on every rank, plain. A collective: call it on every rank."""
        return self.record.gather(self.to_local().reshape(-1))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if not hasattr(self, "record"):
            return f"{type(self).__name__}(unattached)"
        with no_guard():
            dtype = self.dtype  # type: ignore[attr-defined]
        return (
            f"{type(self).__name__}({self.record.describe()} on this rank, "
            f"unit {self.record.unit}, {dtype})"
        )

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


class ShardedTensor(_Guarded, torch.Tensor):
    """What elementwise functions make of a shard: optimizer states, averages, `p.detach()`."""


class ShardedGradient(_Guarded, torch.Tensor):
    """This rank's elements of a reduced gradient. Its norms are those of the whole gradient."""


class ShardedParameter(_Guarded, nn.Parameter):
    """A parameter at rest: this rank's elements, shaped (n_local, 1, ..., 1).

    The number of dimensions is kept, because `p.ndim >= 2` is how people choose weight decay.
    `p.numel()` is local; `fs.sharding(p)` has the global shape.
    """

    def new_state(self, dtype: torch.dtype) -> torch.Tensor:
        """(n_local,) plain zeros where the states of this parameter live."""
        if self.record.states is not None:
            return self.record.states.zeros(self.numel(), dtype)
        return torch.zeros(self.numel(), dtype=dtype, device=self.device)

    def as_state(self, local: torch.Tensor) -> ShardedTensor:
        """A state of this parameter: (n_local,) plain elements, shown in the parameter's shape."""
        with no_guard():
            state = local.view(self.shape).as_subclass(ShardedTensor)
        state.record = self.record
        return state

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Call `hook(param)` whenever the reduced gradient is in `param.grad`."""
        from torch.utils.hooks import RemovableHandle

        handle = RemovableHandle(self.record.post_accumulate)
        self.record.post_accumulate[handle.id] = hook
        return handle

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:  # noqa: ARG002 torch's
        """Refused: it would see an unreduced gradient of one rank."""
        raise ShardedTensorError(
            f"register_hook on {self.record.piece.name!r}: expected a hook that needs one rank's "
            "unreduced gradient nowhere. Use register_post_accumulate_grad_hook, which is called "
            "with the reduced gradient."
        )


def is_guarded(value: Any) -> bool:
    """Whether a value is a shard: a parameter, a gradient or a state."""
    return isinstance(value, _Guarded)


def _find_shard(values: Any) -> Any:
    for value in values:
        if isinstance(value, _Guarded):
            return value
        if isinstance(value, _LISTS):
            found = _find_shard(value)
            if found is not None:
                return found
    return None


def _call_on_whole(func: Any, name: str, arguments: Any, like: Any) -> Any:
    """Where nothing is cut: any function, plain results."""
    if isinstance(like, ShardedGradient):
        like.record.norms.mark_changed()  # it may have been written, through whatever view
    with no_guard():
        result = func(*arguments[0], **arguments[1])
    if isinstance(result, torch.Tensor) and result.requires_grad:
        raise refusal(name, like, Rule.AUTOGRAD)
    return result


def _elementwise(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that treats elements one by one; shards come out."""
    if name == "zeros_like" and like.record.states is not None and type(like) is ShardedParameter:
        # How optimizers make what they keep of a parameter.
        return like.as_state(like.new_state(kwargs.get("dtype") or like.dtype))
    operands = (*args, *kwargs.values()) if kwargs else args
    _refuse_other_ranges(name, like, operands)
    written = _find_shard((kwargs["out"] if "out" in kwargs else operands[0],))
    if written is not None and (writes(name) or "out" in kwargs):
        if isinstance(written, ShardedGradient):
            written.record.norms.note_write(written)
        elif isinstance(getattr(written, "alias_of", written), ShardedParameter):
            written.record.before_write()
    try:
        with no_guard():
            result = func(*args, **kwargs)
    except RuntimeError as error:
        if _has_misfit(operands):
            raise misfit(name, like, str(error)) from error
        raise
    if isinstance(result, _LISTS):
        sources = next(x for x in operands if isinstance(x, _LISTS) and _has_shard(x))
        return type(result)(map(_as_shard, result, sources, [name] * len(result)))
    return _as_shard(result, like, name)


def _unscale(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    result = _elementwise(func, name, like, args, kwargs)
    like.record.norms.share_found_inf(args[1])
    return result


def _compare(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Each rank says of its own elements whether two shards are close."""
    return _elementwise(func, name, like, args, kwargs).to_local()


def _make(func: Any, name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """p.new_zeros(shape): the guard goes along, but not into counters of one element."""
    with no_guard():
        result = func(*args, **kwargs)
    is_like = result.dim() > 1 and result.numel() == like.numel()
    return _as_shard(result, like, name) if is_like else result


def _assign(func: Any, _name: str, _like: Any, args: Any, _kwargs: dict[str, Any]) -> None:
    """p.grad = x: what is plain becomes a gradient of this parameter, with global norms."""
    param, value = args
    with no_guard():
        if isinstance(value, torch.Tensor) and not isinstance(value, ShardedGradient):
            value = value.as_subclass(ShardedGradient)
            value.record = param.record
        func(param, value)


def _replace(func: Any, _name: str, _like: Any, args: Any, _kwargs: dict[str, Any]) -> None:
    """x.data = ... : a gradient stays the view that the next backward fills."""
    gradient, data = args
    if not isinstance(gradient, ShardedGradient):
        with no_guard():
            func(gradient, data)  # of a parameter: noticed at the next forward
        return
    if data.dtype is not gradient.dtype or data.shape != gradient.shape:
        raise ShardedTensorError(
            f"p.grad.data = ... of {gradient.record.describe()}: expected {gradient.dtype} of the "
            f"shard's shape {tuple(gradient.shape)}; got {data.dtype} of {tuple(data.shape)}. "
            "Write into p.grad in place."
        )
    gradient.copy_(data)


def _is_mask(args: Sequence[Any]) -> bool:
    """x[mask] = number, with a mask that was made of shards."""
    _, index, value = args
    return isinstance(index, _Guarded) and not isinstance(value, torch.Tensor)


def _refuse_other_ranges(name: str, like: Any, operands: Sequence[Any]) -> None:
    """Shards that meet must hold the same elements of tensors of one shape."""
    ones: Sequence[Any] | None = None
    for operand in operands:
        if isinstance(operand, _Guarded):
            if operand.record is not like.record:
                _refuse_other_range(name, like, operand)
        elif isinstance(operand, _LISTS) and _has_shard(operand):
            if ones is not None and not _are_of_one_record(ones, operand):
                for one, two in zip(ones, operand, strict=False):
                    if isinstance(one, _Guarded) and isinstance(two, _Guarded):
                        _refuse_other_range(name, one, two)
            ones = operand


def _are_of_one_record(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Pair by pair; the quick answer for the lists of an optimizer."""
    try:
        return not any(map(is_not, map(_RECORD, ones), map(_RECORD, others)))
    except AttributeError:  # plain tensors among them: parameters that are left out of sharding
        return False


_RECORD = attrgetter("record")
_LISTS = (list, tuple)


def _refuse_other_range(name: str, one: Any, other: Any) -> None:
    a, b = one.record.piece, other.record.piece
    if (a.shape, a.start, a.stop) != (b.shape, b.start, b.stop):
        raise ShardedTensorError(
            f"{name}: expected shards of the same range; got {one.record.describe()}, and "
            f"{other.record.describe()}, whose elements do not belong together. Use "
            "p.full_tensor() of both."
        )


def _has_misfit(operands: Sequence[Any]) -> bool:
    """Whether a plain tensor of another shape met the shards."""
    tensors = [t for x in operands for t in (x if isinstance(x, _LISTS) else [x])]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    with no_guard():
        shapes = {tensor.shape for tensor in tensors if isinstance(tensor, _Guarded)}
        return any(t.numel() != 1 and t.shape not in shapes for t in tensors)


def _has_shard(values: Sequence[Any]) -> bool:
    return _find_shard(values) is not None


def _as_shard(result: Any, like: Any, name: str) -> Any:
    """Give the results of an elementwise function the guard of what went in."""
    made = isinstance(result, torch.Tensor) and not isinstance(result, _Guarded)
    guarded = isinstance(like, _Guarded)
    if not made or not guarded:
        return result
    if result.numel() != like.numel():  # type: ignore[attr-defined]
        if not like.record.is_cut:
            return result
        raise misfit(name, like, f"they broadcast to {tuple(result.shape)}")
    kind = ShardedGradient if isinstance(like, ShardedGradient) else ShardedTensor
    with no_guard():
        shard: Any = result.as_subclass(kind)
    shard.record = like.record
    if is_alias(name):
        shard.alias_of = getattr(like, "alias_of", like)  # writes into it are writes into that
    return shard


def _norm(name: str, like: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else kwargs.get("input", kwargs.get("self", kwargs.get("x")))
    many = isinstance(tensors, _LISTS)
    gradients: list[Any] = list(tensors) if many else [tensors]  # type: ignore[arg-type]
    if any(isinstance(x, _Guarded) and not isinstance(x, ShardedGradient) for x in gradients):
        raise refusal(name, like)
    order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else 2.0))
    extra = set(kwargs) - {"ord", "p", "input", "x", "self"}
    if len(args) > 2 or any(not (kwargs[key] is None or kwargs[key] is False) for key in extra):
        raise refusal(f"{name} along dimensions", like)
    order = norm_order(order)
    cut = [x for x in gradients if isinstance(x, _Guarded)]
    found = iter(like.record.norms.of(cut, order))
    norms = [  # a plain tensor is the gradient of a parameter that was left out of sharding
        next(found) if isinstance(x, _Guarded) else torch.linalg.vector_norm(x, order)
        for x in gradients
    ]
    return norms if many else norms[0]


_SPECIAL = {
    Rule.MASK: _elementwise,
    Rule.COMPARE: _compare,
    Rule.UNSCALE: _unscale,
    Rule.MAKE: _make,
    Rule.ASSIGN: _assign,
    Rule.REPLACE: _replace,
}
