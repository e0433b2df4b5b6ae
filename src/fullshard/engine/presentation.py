"""How a shard is shown: the shape under which the user's parameter appears at rest."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.engine._torch_compat import no_guard
from fullshard.engine.parameter import ShardedParameter
from fullshard.errors import UnsupportedModelError
from fullshard.planner.layout import Slice


def shard_shape(piece: Slice, *, whole: bool) -> tuple[int, ...]:
    """(n_local, 1, ..., 1): the number of dimensions is kept; whole parameters keep their shape."""
    if whole:
        return tuple(piece.shape)
    return (piece.numel, *(1 for _ in piece.shape[1:]))


def present(
    param: nn.Parameter, data: torch.Tensor, piece: Slice, *, whole: bool
) -> ShardedParameter:
    """Turn the user's parameter into its shard, in place: the object stays the same.

    Args:
        param: The whole parameter, or a shard that is cut anew.
        data: (n_local,), master dtype: this rank's elements in the flat shard.
        piece: Which elements these are.
        whole: Whether every rank holds the whole parameter.

    Raises:
        UnsupportedModelError: The object's class cannot be changed (a tensor subclass).
    """
    if type(param) not in (nn.Parameter, ShardedParameter):
        raise UnsupportedModelError(
            f"{piece.name}: expected a plain nn.Parameter; got {type(param).__name__}. "
            "Leave it out of sharding (ignore) or convert it first."
        )
    with no_guard():
        param.grad = None
    shown = data.view(shard_shape(piece, whole=whole))
    if param.is_meta or param.device != data.device:
        _swap(param, nn.Parameter(shown, requires_grad=param.requires_grad), piece)
    param.__class__ = ShardedParameter
    with no_guard():
        param.data = shown
    return param  # type: ignore[return-value]


def _swap(param: nn.Parameter, other: nn.Parameter, piece: Slice) -> None:
    """Move the object to another device, which `.data =` cannot."""
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"{piece.name}: expected a parameter that can move from {param.device} to "
            f"{other.device}; something holds a weak reference to it: {error} Drop that, or move "
            "the model before fs.shard."
        ) from error
