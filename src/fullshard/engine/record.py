"""The record of a shard: the tensor of which it is a part, and its range."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        aliases: Weak references to tensors that share its memory, such as `old = p.data`.
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
    aliases: list[weakref.ref[torch.Tensor]] = field(default_factory=list[Any])

    def add_alias(self, alias: torch.Tensor) -> None:
        """Note a tensor that shares the shard's memory, for as long as it is alive."""
        self.aliases = [*map(weakref.ref, self.alive_aliases()), weakref.ref(alias)]

    def alive_aliases(self) -> list[Any]:
        """Tensors that may share the shard's memory."""
        return [alias for known in self.aliases if (alias := known()) is not None]

    def move_aliases(self, before: torch.Tensor, after: torch.Tensor, of: Any) -> None:
        """Let tensors that share memory with `before` share that of `after`. Outside the guard.

        Args:
            before: Contiguous.
            after: Has as many elements, in the same order; the caller has copied them.
            of: The shard that has the memory of `after`; None if it has not.
        """
        for alias in self.alive_aliases():
            at = alias.data_ptr() - before.data_ptr()
            if 0 <= at < before.nbytes and alias.dtype is before.dtype:
                at = after.storage_offset() + at // before.element_size()
                alias.data = after.as_strided(alias.shape, alias.stride(), at)
                alias.record, alias.alias_of = self, of

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
