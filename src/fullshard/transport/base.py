"""What the engine asks of a transport.

    fetch(fulls)    every rank's part of each flat buffer to every rank, in place
    reduce(fulls)   this rank's part of each sum over the shard axis
    sum_replicas(x) a part's sum over the replicate axis, beside what follows
    all_reduce(x)   small vectors: bits, squared norms

Buffers of one call differ in dtype or in what is trained; they travel in one collective.

[Note: sums have an order]
Gradients are summed in promote(float32, master dtype) and in rank order, so that `direct`,
`shared` and `fake` give the same bits as each other at any world size, and `c10d` too with
`reduction: ordered`. The native reduction of c10d is equal at two ranks and within rounding above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fullshard.config.values import DType
from fullshard.planner.mesh import Mesh
from fullshard.planner.slots import Ring
from fullshard.planner.units import UnitPlan

TAGS_A_MODEL = 8
Slots = dict[str, list[torch.Tensor]]  # (numel,) each, by ring


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's dtype of that name."""
    return getattr(torch, dtype.value)


@dataclass(frozen=True, slots=True)
class Axes:
    """This rank's place in the mesh and its process groups (None where the axis has size 1).

    Attributes:
        shard_ranks: Global ranks that share one copy, this one among them.
        replicate_ranks: Global ranks that hold the same part.
        shard_index: Index of this rank in `shard_ranks`.
        replicate_index: Index of this rank in `replicate_ranks`.
        gather_group: Carries all-gathers over the shard axis.
        reduce_group: Carries reductions over the shard axis, so that the order of the two kinds
            need not agree between ranks, and NCCL runs them side by side.
        replicate_group: Carries the outer reduction.
        world_group: All ranks of the mesh, for small vectors.
        first_tag: Messages between ranks are numbered from here: each model has tags of its own.
    """

    mesh: Mesh
    rank: int
    shard_ranks: tuple[int, ...]
    replicate_ranks: tuple[int, ...]
    shard_index: int = 0
    replicate_index: int = 0
    gather_group: Any = None
    reduce_group: Any = None
    replicate_group: Any = None
    world_group: Any = None
    first_tag: int = 0


class Fetch(Protocol):
    """An all-gather under way."""

    def wait(self) -> None:
        """Return when the buffers are whole and may be read, and this rank's parts rewritten."""
        ...


class Reduction(Protocol):
    """A reduction under way."""

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        """Write the sums over the shard axis of this rank's parts; the inputs are then free.

        Args:
            outs: (part_numel,) each, accumulate dtype.
        """
        ...


Hook = Callable[..., object]


class HookedReduction:
    """A reduction that the caller brings and has made.

        hook(full)         where every rank keeps the whole: (numel,) becomes what is accumulated
        hook(full, part)   else: part, (part_numel,), becomes this rank's part of it

    The hook divides as well; nothing is divided after it. It is called in the plan's order, which
    is the same on all ranks, so that it may call collectives.

    Args:
        hook: The caller's.
        fulls: (numel,) each, reduce dtype, this rank's unreduced gradients.
        num_parts: Ranks that they are cut over.
    """

    def __init__(self, hook: Hook, fulls: Sequence[torch.Tensor], num_parts: int) -> None:
        self._made: list[torch.Tensor] = []
        for full in fulls:
            given = full.detach()  # its `.data` is the hook's to replace
            made = given
            if num_parts == 1:
                hook(given)
            else:
                made = given.new_zeros(given.numel() // num_parts)
                hook(given, made)
            self._made.append(made)

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        """Write what was made into the parts that accumulate."""
        for out, made in zip(outs, self._made, strict=True):
            out.copy_(made)


class Scratch:
    """Buffers lent for the time of one collective; the pool grows to what is in flight at most.

    They are kept, because fresh memory costs a page fault a page.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self.num_bytes = 0  # of all buffers, lent ones too

    def take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """(numel,) uninitialised, dtype and device of `like`; the smallest free one that fits."""
        fitting = [
            i
            for i, free in enumerate(self._free)
            if free.numel() >= numel and free.dtype is like.dtype
        ]
        if fitting:
            best = min(fitting, key=lambda i: self._free[i].numel())
            return self._free.pop(best)[:numel]
        buffer = like.new_empty(numel)
        self.num_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back, whole."""
        whole = buffer if buffer._base is None else buffer._base
        self._free.append(whole)


@dataclass(frozen=True)
class Weights:
    """One group's weights.

    Attributes:
        master: (part_numel,), master dtype: this rank's part.
        full: (numel,), compute dtype: all parts, the masters themselves where dtypes agree.
    """

    master: torch.Tensor
    full: torch.Tensor


class Home(Protocol):
    """Where masters and gradient slots are, and when they may be written.

    Attributes:
        wrote: Whether this rank has written weights that others compute with since `publish`.
        num_writes: How often this rank was about to write weights.
        place: What the next messages belong to, where ranks compare that. See [Note: places].
    """

    wrote: bool
    num_writes: int
    place: str

    def open_weights(self, units: Sequence[UnitPlan]) -> None:
        """Take the memory of the weights. A collective."""
        ...

    def weights(self, unit: int, group: int) -> Weights | None:
        """A group's weights; None where they are this rank's own business."""
        ...

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:
        """Take the memory of gradient slots, by ring; others are the caller's. A collective."""
        ...

    def publish(self) -> None:
        """A forward of the whole model begins: return when every rank's weights are there."""
        ...

    def leave(self, *, settled: bool) -> None:
        """This rank has read the weights; `settled`: so have all."""
        ...

    def before_write(self) -> None:
        """Return when no rank reads what this one is about to write."""
        ...

    def claim(self, slot: torch.Tensor) -> None:
        """Return when a gradient slot may be filled again."""
        ...


class OwnHome:
    """Every rank for itself: nothing is shared, and nothing is waited for."""

    wrote = False
    place = ""

    def __init__(self) -> None:
        self.num_writes = 0
        self.await_reads: Callable[[], None] | None = None  # by a device, of shards on the host

    def open_weights(self, units: Sequence[UnitPlan]) -> None:
        """Nothing."""

    def weights(self, unit: int, group: int) -> Weights | None:  # noqa: ARG002 the protocol's
        return None

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:  # noqa: ARG002
        return {}

    def publish(self) -> None:
        """Nothing."""

    def leave(self, *, settled: bool) -> None:
        """Nothing."""

    def before_write(self) -> None:
        self.num_writes += 1
        if self.await_reads is not None:
            self.await_reads()

    def claim(self, slot: torch.Tensor) -> None:
        """Nothing."""


class Transport(Protocol):
    """Moves the parts of flat buffers.

    Attributes:
        home: Where weights and gradient slots are, and when they may be written.
    """

    name: str
    rank: int
    scratch: Scratch
    home: Home

    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        """Fill the other ranks' parts of each (numel,); this rank's part is in place."""
        ...

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        """Sum each (numel,), reduce dtype, over the shard axis. Unchanged until `land`."""
        ...

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        """Sum (part_numel,), accumulate dtype, over the replicate axis, in place.

        The first `next` starts the messages. Each further one waits for those under way and starts
        the messages that follow from them; the sum is complete when the iterator ends. All ranks
        must take the same number of steps between other messages.
        """
        ...

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        """Sum (or take the maximum of) a small contiguous vector over all ranks, in place."""
        ...
