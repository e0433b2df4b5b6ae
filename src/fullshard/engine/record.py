"""The record of a shard: the tensor of which it is a part, and its range.

[Note: shared memory]
`old = p.data` shares the memory of a shard, and `p.data = value` that of a value. In one process
they go on sharing it. Here a shard that was moved is copied back to its place in a flat buffer, so
whatever shares memory with either must move as well: with the value into the buffer, or out of the
buffer before it is overwritten. Such tensors are noted where they begin to share (an alias that is
made, shards on both sides of `x.data = y`), and found by their addresses.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.engine.guard import misfit
from fullshard.planner.layout import Slice, clean_name

if TYPE_CHECKING:
    from fullshard.engine.cuts import Cut
    from fullshard.engine.homes import Residence
    from fullshard.engine.norms import GradientNorms


@dataclass(eq=False, slots=True)
class Elements:
    """This rank's elements of a parameter.

    Attributes:
        piece: Name of the parameter and the range of its elements.
        cut: Placement on other axes of the mesh; `piece` then refers to the local tensor.
    """

    piece: Slice
    cut: Cut | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(self.piece.shape) if self.cut is None else self.cut.shape

    def local_of(self, whole: torch.Tensor) -> torch.Tensor:
        """(n_local,): this rank's elements of a tensor of the global shape."""
        local = whole if self.cut is None else self.cut.local_of(whole)
        return local.detach().reshape(-1)[self.piece.start : self.piece.stop]


@dataclass(eq=False, slots=True)
class ShardRecord(Elements):
    """The record of a shard: the tensor of which it is a part, and its range.

    Attributes:
        unit: Title of the unit that gathers it.
        index: Index among the model's trained parameters, for cached norms; -1 if frozen.
        is_cut: Whether some rank stores only a part of the parameter.
        copies: Number of ranks with the same elements.
        holders: (part, start, stop) of each part of the (local) tensor; the same on every rank.
        norms: Global norms of the model's gradients.
        before_write: Waits until no other rank reads these elements; returns the write's number.
        gather: Gathers the full tensor from (n_local,) plain elements. A collective.
        post_accumulate: The user's hooks, called with the reduced gradient.
        states: Allocates optimizer states; None if they are on the device of the parameter.
        compute: Returns the compute parameter if it shares memory with the whole parameter.
        last_write: Number of the last write into it.
    """

    unit: str
    index: int
    is_cut: bool
    copies: int
    holders: Sequence[tuple[int, int, int]]
    norms: GradientNorms
    before_write: Callable[[], int]
    gather: Callable[[torch.Tensor], torch.Tensor]
    post_accumulate: OrderedDict[int, Callable[[torch.Tensor], None]]
    states: Residence | None = None
    compute: Callable[[], nn.Parameter] | None = None
    last_write: int = 0

    def __reduce__(self) -> Any:
        return type(None), ()  # a whole parameter may be pickled inside forward

    def is_cut_like(self, other: ShardRecord) -> bool:
        """Whether every rank has the same elements of both. Equal on all ranks."""
        one, two = self.piece, other.piece
        is_alike = (one.shape, self.cut, self.copies) == (two.shape, other.cut, other.copies)
        return is_alike and self.holders == other.holders

    def shape_of(self, shard: Any) -> tuple[int, ...]:
        """The global shape of a shard with this record, which is flat for `p.view(-1)`.

        Raises:
            ShardedTensorError: It was viewed with another number of dimensions.
        """
        shape, dims = self.shape, shard.dim()
        if not self.is_cut and self.cut is None:
            return tuple(shard.shape)
        if dims in (len(shape), max(1, len(shape))):
            return shape
        if dims == 1 or len(shape) <= 1:
            return (math.prod(shape), *(1 for _ in range(dims - 1)))
        raise misfit("full_tensor", shard, f"a view of {dims} dimensions")

    def describe(self) -> str:
        """Name, global shape and range."""
        p, of = self.piece, ""
        if self.cut is not None:
            of = f", cut to {tuple(p.shape)} by {self.cut.describe()}"
        where = f"elements [{p.start}, {p.stop})"
        return f"{clean_name(p.name)!r}, global shape {self.shape}{of}, {where}"


_NOTED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by id


def _noted(tensors: Any = _NOTED) -> list[Any]:
    """The tensors of a weak dictionary, in one step: another thread may note more."""
    return [x for weak in tensors.valuerefs() if (x := weak()) is not None] if tensors else []


def owner_of(tensor: Any) -> Any:
    """The tensor whose memory this one shares, or the tensor itself."""
    while (source := getattr(tensor, "alias_of", None)) is not None:
        tensor = source
    return tensor


def follow(tensor: Any, source: Any) -> None:
    """Let a tensor be an alias of another; None: of none."""
    tensor.alias_of = source
    if source is not None:
        if source.aliases is None:
            source.aliases = weakref.WeakValueDictionary()
        source.aliases[id(tensor)] = tensor


def note_sharing(tensor: Any) -> None:
    """Note that a tensor shares memory with others. See [Note: shared memory]."""
    _NOTED[id(tensor)] = tensor


def forget_sharing(tensor: Any) -> None:
    """Drop the weak reference, with which torch does not swap tensors."""
    _NOTED.pop(id(tensor), None)


def end_aliases(params: Sequence[Any]) -> None:
    """Let aliases of shards that were moved since be aliases of one another.

    All ranks decide alike, also those without elements, whose tensors have no address.
    """
    ids = set(map(id, params))
    firsts: dict[tuple[int, int], Any] = {}
    for tensor in _noted():
        if id(of := tensor.alias_of) in ids:
            if tensor.num_moves != of.num_moves:
                first = firsts.setdefault((id(of), tensor.num_moves), tensor)
                follow(tensor, None if first is tensor else first)
            elif of.record.is_cut_like(tensor.record):
                tensor.record = of.record


def leave_aliases(tensor: Any) -> None:
    """Let the aliases of a tensor that gets other memory be those of the first of them."""
    aliases = [x for x in _noted(tensor.aliases) if x.alias_of is tensor]
    for alias in aliases[1:]:
        follow(alias, aliases[0])
    for alias in aliases[:1]:
        follow(alias, tensor.alias_of)
        alias.num_moves = tensor.num_moves


def sharing(memory: Sequence[torch.Tensor]) -> list[tuple[Any, int, int]]:
    """Noted tensors that share memory with some of these. Outside the guard.

    Args:
        memory: Flat, contiguous tensors.

    Returns:
        Of each: the tensor, the index of the memory, and its first element there.
    """
    begins = sorted((flat.data_ptr(), which) for which, flat in enumerate(memory) if flat.numel())
    found: list[tuple[Any, int, int]] = []
    for tensor in _noted() if begins else ():
        address = tensor.data_ptr()
        begin, which = begins[bisect_right(begins, (address, len(memory))) - 1]
        flat = memory[which]
        if 0 <= address - begin < flat.nbytes and tensor.dtype is flat.dtype:
            found.append((tensor, which, (address - begin) // flat.element_size()))
    return found


def move_into(tensor: Any, flat: torch.Tensor, at: int) -> None:
    """Let a tensor share other memory, from an element on. Outside the guard.

    Args:
        tensor: Its elements were copied there.
        flat: The memory.
        at: The tensor's first element in it.
    """
    at += int(flat.storage_offset())
    tensor.data = flat.as_strided(tensor.shape, tensor.stride(), at)
