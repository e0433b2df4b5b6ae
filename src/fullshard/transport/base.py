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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fullshard.config.values import DType
from fullshard.errors import EngineError, HangError
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


class Works:
    """Messages or collectives under way.

    Args:
        works: What torch.distributed returned for each.
    """

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are complete.

        Raises:
            EngineError: Another rank has ended.
            HangError: They took longer than the process group's timeout.
        """
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _failure(error) from error
        self._works = ()


def _failure(error: RuntimeError) -> EngineError | HangError:
    """The typed error for a message that does not arrive."""
    if "imed out" in str(error):
        return HangError(
            "a message: expected one from every rank within the process group's timeout; none "
            "came. Another rank is still computing, or waits for something else."
        )
    return EngineError(
        "a message: expected every rank to take part; one has ended or closed its connection. "
        "Its own output says why."
    )


class Reduction:
    """A sum over the shard axis under way. See [Note: sums have an order].

    Args:
        receive: Waits for the ranks' contributions to this rank's part of each buffer and returns
            them in rank order, (part_numel,) each, reduce dtype. One contribution is the sum.
        release: Called when the contributions have been read.
    """

    __slots__ = ("_receive", "_release")

    def __init__(
        self,
        receive: Callable[[], Sequence[Sequence[torch.Tensor]]],
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self._receive, self._release = receive, release

    def land(self, outs: Sequence[torch.Tensor]) -> None:
        """Write the sums; the reduced buffers may be overwritten afterwards.

        Args:
            outs: (part_numel,) each, accumulate dtype.
        """
        for out, parts in zip(outs, self._receive(), strict=True):
            sum_in_order(parts, out)
        self._release()


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum equal parts into `out` in its dtype, the first rank's first.

    Args:
        parts: (numel,) each, reduce dtype.
        out: (numel,), accumulate dtype; not among the parts.
    """
    if len(parts) > 1 and parts[0].dtype == out.dtype:
        torch.add(parts[0], parts[1], out=out)
        rest = parts[2:]
    else:
        out.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        out.add_(part)


def combine_in_order(vectors: Sequence[torch.Tensor], out: torch.Tensor, *, maximum: bool) -> None:
    """Write the sum of every rank's vector, or the maximum of each element, into `out`.

    Args:
        vectors: (numel,) each, of all ranks in order.
        out: (numel,), of their dtype; not among them.
        maximum: Take the maximum.
    """
    if not maximum:
        sum_in_order(vectors, out)
        return
    out.copy_(vectors[0])
    for vector in vectors[1:]:
        torch.maximum(out, vector, out=out)


Hook = Callable[..., object]


def reduce_by(hook: Hook, fulls: Sequence[torch.Tensor], num_parts: int) -> Reduction:
    """Let a hook of the user's reduce gradients.

        hook(full)         if every rank keeps the whole: (numel,), reduced in place
        hook(full, part)   otherwise: writes the reduced part of this rank, (part_numel,)

    The hook divides as well; nothing is divided after it. It is called in the plan's order, which
    is the same on all ranks, so it may call collectives.

    Args:
        hook: The user's function.
        fulls: (numel,) each, reduce dtype, this rank's unreduced gradients.
        num_parts: Number of ranks that the buffers are sharded over.
    """
    reduced: list[torch.Tensor] = []
    for full in fulls:
        given = full.detach()  # the hook may replace its `.data`
        part = given if num_parts == 1 else given.new_zeros(given.numel() // num_parts)
        hook(*((given,) if num_parts == 1 else (given, part)))
        reduced.append(part)
    return Reduction(lambda: [[part] for part in reduced])


class Scratch:
    """A pool of buffers for collectives in flight.

    Buffers are kept, because fresh memory costs a page fault per page.
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

    def give(self, *buffers: torch.Tensor) -> None:
        """Take buffers back, each in its full length."""
        self._free += [b if b._base is None else b._base for b in buffers]


@dataclass(frozen=True)
class Weights:
    """One group's weights.

    Attributes:
        master: (part_numel,), master dtype: this rank's part.
        full: (numel,), compute dtype: all parts, the masters themselves where dtypes agree.
    """

    master: torch.Tensor
    full: torch.Tensor


class Home:
    """The memory of masters and gradient slots, and when they may be written.

    This class is the memory of one rank, for which nobody waits; see `SharedHome`.

    Attributes:
        wrote: Whether this rank has written shared weights since `publish`.
        num_writes: Number of announced writes into weights.
        place: What the next messages belong to. See [Note: places] in transport/direct.py.
        await_reads: Returns when a device has read the shards that are in host memory.
    """

    wrote = False

    def __init__(self) -> None:
        self.num_writes = 0
        self.place = ""
        self.await_reads: Callable[[], None] | None = None

    def open_weights(self, units: Sequence[UnitPlan]) -> None:
        """Allocate shared weights. A collective."""

    def weights(self, unit: int, group: int) -> Weights | None:  # noqa: ARG002 shared homes use it
        """The shared weights of a group; None if the caller allocates them."""
        return None

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:  # noqa: ARG002
        """Allocate gradient slots that ranks share, by ring. A collective."""
        return {}

    def publish(self) -> None:
        """Return when every rank's weights are written, at the beginning of a forward."""

    def leave(self, *, settled: bool) -> None:
        """This rank has finished reading the weights; `settled`: so have all ranks."""

    def before_write(self) -> None:
        """Return when no rank reads the weights that this rank is about to write."""
        self.num_writes += 1
        if self.await_reads is not None:
            self.await_reads()

    def claim(self, slot: torch.Tensor) -> None:
        """Return when a gradient slot may be filled again."""


class Transport(ABC):
    """Moves the parts of flat buffers.

    Args:
        axes: This rank's place in the mesh.

    Attributes:
        rank: Global rank.
        scratch: Receive buffers.
        home: The memory of weights and gradient slots.
    """

    name: str

    def __init__(self, axes: Axes) -> None:
        self.axes, self.rank = axes, axes.rank
        self.scratch = Scratch()
        self.home = Home()

    @abstractmethod
    def fetch(self, fulls: Sequence[torch.Tensor]) -> Fetch:
        """Start to fill the other ranks' parts of each (numel,); this rank's part is in place."""

    @abstractmethod
    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        """Start to sum each (numel,), reduce dtype, over the shard axis. Unchanged until `land`."""

    @abstractmethod
    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        """Sum (part_numel,), accumulate dtype, over the replicate axis, in place.

        The first `next` starts the messages. Each further one waits for those under way and starts
        the messages that follow from them; the sum is complete when the iterator ends. All ranks
        must take the same number of steps between other messages.
        """

    @abstractmethod
    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        """Sum (or take the maximum of) a small contiguous vector over all ranks, in place."""
