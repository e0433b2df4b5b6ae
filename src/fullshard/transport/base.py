"""The interface between the engine and a transport.

    fetch(fulls)    every rank's part of each flat buffer to every rank, in place
    reduce(fulls)   this rank's part of each sum over the shard axis
    sum_replicas(x) the sum of a part over the replicate axis, asynchronously
    all_reduce(x)   small vectors: bits, squared norms

The buffers of a call differ in dtype or trained parameters.

[Note: sums have an order]
Gradients are summed in promote(float32, master dtype) and in rank order, so that `direct`,
`shared` and `fake` give the same bits as each other at any world size, and `c10d` too with
`reduction: ordered`. The native reduction of c10d gives the same bits on two ranks, and differs by
rounding on more.

[Note: phases]
gloo aborts the process if a message is longer than its receiver expects, and confuses messages of
equal length. A rank that skips a backward would send messages of its forward to ranks in backward.
Ranks therefore compare their phases (a forward, a backward, a sum) before the first message of
each, and the unit of every gather. Both have one tag: a rank that gathers once more than another
compares its unit with the other's phase. NCCL neither aborts nor needs it.

[Note: forked processes]
A child that a rank forks has the rank's connections and shared memory. Its messages would reach
peers in place of the rank's own, and its writes would change the weights of all ranks. Every
message and every announced write therefore raises an error in a child. The child cannot access
shared memory: reading its shards raises an error, too; reading an older alias of them ends it by a
signal (SIGSEGV).

[Note: the fake transport]
A single process simulates one rank of any world, without communication. Simulated peers have zeros
as their parts of the weights, and this rank's gradients. A reduction is therefore a sum of equal
values in rank order, with the bits that equal ranks would get. It serves tests of bookkeeping and
host time at large world sizes; training is meaningless.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fullshard.config.values import DType
from fullshard.errors import EngineError, HangError
from fullshard.planner.mesh import Mesh
from fullshard.planner.slots import Ring
from fullshard.planner.units import UnitPlan

TAGS_A_MODEL = 8
PHASE_TAG = 0  # over all models, since ranks may run different ones
PHASE_BYTES = 96
CURE = (
    "One of them skipped or added a forward, a backward, a unit's call or a reduction over all "
    "ranks (p.norm(), p.grad.mean()), or caught an error. All ranks must make the same calls. If "
    "a rank has no loss, multiply one by zero; make ranks agree on a branch (dist.broadcast) and "
    "on whether gradients pass through frozen units; make a recomputed block whose parts differ "
    "per rank one unit (wrap)."
)
Slots = dict[str, list[torch.Tensor]]  # (numel,) each, by ring


def check_process(own: int) -> None:
    """Raise an error in another process than this one. See [Note: forked processes]."""
    if os.getpid() != own:
        raise EngineError(
            "a sharded model in a forked process: expected the rank's own process, because "
            "connections and memory are those of all ranks; got a child of it. Start the child "
            "before fs.shard or with spawn, and give it fs.full_state_dict(model)."
        )


def torch_dtype(dtype: DType) -> torch.dtype:
    """Returns torch's dtype of a name."""
    return getattr(torch, dtype.value)


@dataclass(frozen=True, slots=True)
class Axes:
    """This rank's coordinates in the mesh and its process groups (None for axes of size 1).

    Attributes:
        shard_ranks: Global ranks that share one copy, including this one.
        replicate_ranks: Global ranks with the same part.
        shard_index: Index of this rank in `shard_ranks`.
        replicate_index: Index of this rank in `replicate_ranks`.
        gather_group: Group of all-gathers over the shard axis.
        reduce_group: Separate group of reductions over the shard axis, so that the order of gathers
            and reductions may differ between ranks, and NCCL runs both concurrently.
        replicate_group: Group of reductions over the replicate axis.
        world_group: Group of all ranks of the mesh, for small vectors.
        first_tag: First tag of this model's messages; tags are unique per model.
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

    @classmethod
    def of(cls, mesh: Mesh, rank: int, **groups: Any) -> Axes:
        """Returns the coordinates of a rank, with these process groups and first tag."""
        replicate_index, shard_index = mesh.coordinates(rank)
        shards = next(ranks for ranks in mesh.shard_groups() if rank in ranks)
        replicas = next(ranks for ranks in mesh.replicate_groups() if rank in ranks)
        indices = shard_index, replicate_index
        return cls(mesh, rank, tuple(shards), tuple(replicas), *indices, **groups)


class Works:
    """Running messages or collectives.

    Args:
        works: torch.distributed's work of each.
        phase: The phase that they belong to, for errors.
        first: Called at the first wait: compares what ranks sent, or does all the work.
    """

    __slots__ = ("_first", "_phase", "_works")

    def __init__(
        self, works: Sequence[Any], phase: str = "", first: Callable[[], object] | None = None
    ) -> None:
        self._works, self._phase, self._first = works, phase, first

    def wait(self) -> None:
        """Wait until all are complete. After an error, a further call returns at once.

        Raises:
            EngineError: Another rank has ended.
            HangError: The process group's time-out has passed.
        """
        works, first = self._works, self._first
        self._works, self._first = (), None  # gloo waits forever for messages that have arrived
        if first is not None:
            first()
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise failed_message(error, self._phase or "a message") from error


_CLOSED = ("connection closed", "connection reset", "broken pipe", "connection refused", "abort")


def failed_message(error: RuntimeError, phase: str) -> EngineError | HangError:
    """Returns the typed error for a message that does not arrive."""
    if "imed out" in str(error) or "timeout" in str(error):
        return HangError(
            f"{phase}: expected a message from every rank within the process group's timeout; none "
            "came. Another rank computes or waits elsewhere; all ranks must make the same calls."
        )
    if any(sign in str(error).lower() for sign in _CLOSED):
        return EngineError(
            f"{phase}: expected every rank to take part; one has ended or closed its connection. "
            "See its output."
        )
    return EngineError(f"{phase}: expected a message from every rank; got: {error}")


class Reduction:
    """A running sum over the shard axis. See [Note: sums have an order].

    Args:
        receive: Waits for the ranks' contributions to this rank's part of each buffer and returns
            them in rank order, (part_numel,) each, reduce dtype. One contribution is the sum.
        release: Called after the contributions were read.
        divided: Divisor of contributions in float16, which keeps them from overflowing.
    """

    __slots__ = ("_divided", "_receive", "_release")

    def __init__(
        self,
        receive: Callable[[], Sequence[Sequence[torch.Tensor]]],
        release: Callable[[], object] = lambda: None,
        divided: int = 1,
    ) -> None:
        self._receive, self._release, self._divided = receive, release, divided

    def sum_into(self, outs: Sequence[torch.Tensor]) -> None:
        """Wait for the contributions and write their sums; the buffers may be overwritten then.

        Args:
            outs: (part_numel,) each, accumulate dtype.
        """
        for out, parts in zip(outs, self._receive(), strict=True):
            sum_in_order(parts, out)
            if self._divided > 1 and parts[0].dtype is torch.float16:
                out.mul_(self._divided)
        self._release()


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum parts into `out`, in its dtype and in rank order.

    Args:
        parts: (numel,) each, reduce dtype.
        out: (numel,), accumulate dtype; not one of the parts.
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
    if maximum:
        out.copy_(torch.stack([*vectors]).amax(0))
    else:
        sum_in_order(vectors, out)


Hook = Callable[..., object]


def reduce_by(hook: Hook, fulls: Sequence[torch.Tensor], num_parts: int) -> Reduction:
    """Reduce gradients with a user's hook.

        hook(full)         if every rank keeps the whole: (numel,), reduced in place
        hook(full, part)   otherwise: writes the reduced part of this rank, (part_numel,)

    The hook must also divide. It is called in the plan's order, which is equal on all ranks, so it
    may call collectives.

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

    Buffers are reused, because new memory costs a page fault per page.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self.num_bytes = 0  # of all buffers, including those in use

    def take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns (numel,) uninitialised elements like `like`, from the smallest sufficient
        buffer."""
        sizes = {i: len(free) for i, free in enumerate(self._free) if free.dtype is like.dtype}
        fitting = [i for i, size in sizes.items() if size >= numel]
        if fitting:
            return self._free.pop(min(fitting, key=sizes.__getitem__))[:numel]
        buffer = like.new_empty(numel)
        self.num_bytes += buffer.nbytes
        return buffer

    def give(self, *buffers: torch.Tensor) -> None:
        """Return buffers to the pool, each in its full length."""
        self._free += [b if b._base is None else b._base for b in buffers]


@dataclass(frozen=True)
class Weights:
    """The weights of a group.

    Attributes:
        master: (part_numel,), master dtype: this rank's part.
        full: (numel,), compute dtype: all parts; the masters themselves if the dtypes are equal.
    """

    master: torch.Tensor
    full: torch.Tensor


class Home:
    """The memory of masters and gradient slots, and the rules for writing it.

    This class is the private memory of one rank, which waits only for copies to a device; see
    `SharedHome`. If units have
    several meshes, one home consists of those of the meshes.

    Args:
        parts: The homes that it consists of, by mesh.

    Attributes:
        wrote: Whether this rank has written shared weights since `publish`.
        num_writes: Number of announced writes to weights.
        await_reads: Waits until a device has read the shards in host memory.
    """

    wrote = False

    def __init__(self, parts: Mapping[Mesh, Home] | None = None) -> None:
        self._parts = parts or {}
        self.num_writes = 0
        self.await_reads: Callable[[], None] | None = None

    def open_weights(self, units: Sequence[UnitPlan]) -> None:
        """Allocate shared weights. A collective."""
        for mesh, part in self._parts.items():
            part.open_weights([unit for unit in units if unit.mesh == mesh])

    def weights(self, unit: int, group: int) -> Weights | None:
        """Returns the shared weights of a group; None if the caller allocates them."""
        found = (part.weights(unit, group) for part in self._parts.values())
        return next(filter(None, found), None)

    def open_slots(self, units: Sequence[UnitPlan], rings: Sequence[Ring]) -> Slots:  # noqa: ARG002
        """Allocate slots that ranks share, by ring, for the units of one mesh. A collective."""
        return {}

    def publish(self) -> None:
        """Wait until all ranks have written their weights, at the beginning of a forward."""
        self.wrote = False
        for part in self._parts.values():
            part.publish()

    def finish_reading(self, *, settled: bool) -> None:
        """Note that this rank has finished reading the weights; `settled`: all ranks have."""
        for part in self._parts.values():
            part.finish_reading(settled=settled)

    def before_write(self) -> int:
        """Wait until no rank reads the weights that this rank is about to write.

        Returns:
            The number of the write.
        """
        self.num_writes += 1
        if self.await_reads is not None:
            self.await_reads()
        for part in self._parts.values():
            part.before_write()
            self.wrote |= part.wrote
        return self.num_writes

    def claim(self, slot: torch.Tensor) -> None:
        """Wait until no rank reads a slot, which may then be overwritten."""

    def is_read(self, slot: torch.Tensor) -> bool:  # noqa: ARG002 shared homes use it
        """Whether another rank reads this rank's part of a slot."""
        return False


@dataclass
class ComparedPhase:
    """The state that a model's ranks compare. See [Note: phases].

    Attributes:
        next: The phase of the next messages, until ranks have compared it.
        running: The phase of the running messages.
        error: The error that ranks in different phases raised.
    process: The id of the rank's process.
    """

    next: str = ""
    running: str = ""
    error: str = ""
    process: int = field(default_factory=os.getpid)


class Transport(ABC):
    """Communicates the parts of flat buffers.

    Args:
        axes: This rank's coordinates and groups.

    Attributes:
        rank: Global rank.
        scratch: Receive buffers.
        home: The memory of weights and gradient slots.
        phase: The same for all transports of a model.
    """

    name: str

    def __init__(self, axes: Axes) -> None:
        self.axes, self.rank = axes, axes.rank
        self.scratch = Scratch()
        self.home = Home()
        self.phase = ComparedPhase()

    @abstractmethod
    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Works:
        """Start to fill the other ranks' parts of (numel,) buffers that contain this rank's part.

        Once waited for, the buffers are complete, and this rank's parts may be overwritten.

        Args:
            fulls: The buffers.
            unit: The title of their unit, which ranks compare where messages could be mixed up.
        """

    @abstractmethod
    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        """Start to sum (numel,) buffers over the shard axis.

        They must not be written before `Reduction.sum_into` returns.
        """

    def claim(self, slot: torch.Tensor) -> None:
        """Wait until a slot may be overwritten."""
        self.home.claim(slot)

    @abstractmethod
    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        """Sum (part_numel,), accumulate dtype, over the replicate axis, in place.

        The first `next` starts the messages. Each further `next` waits for the running messages and
        starts the following ones; the sum is complete when the iterator ends. All ranks must take
        equal numbers of steps between other messages.
        """

    @abstractmethod
    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        """Sum (or take the maximum of) a small contiguous vector over all ranks, in place."""


def home_of(transports: Mapping[Mesh, Transport]) -> Home:
    """The home of all units of a model: that of its mesh, or one that consists of several.

    Args:
        transports: By mesh, in an order that is equal on all ranks.
    """
    homes = {mesh: transport.home for mesh, transport in transports.items()}
    return Home(homes) if len(homes) > 1 else next(iter(homes.values()))


class MessageTransport(Transport):
    """A transport that compares phases. See [Note: phases].

    Without a first tag it sends no messages and compares nothing.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        number = axes.first_tag // TAGS_A_MODEL
        self._model = f" (sharded model {number})" if number > 1 else ""
        self._compares = axes.first_tag > 0
        self._everyone = range(axes.mesh.world_size)

    def _exchange(
        self,
        sends: Sequence[torch.Tensor],
        receives: Sequence[torch.Tensor],
        ranks: Sequence[int],
        tag: int,
    ) -> list[Any]:
        """Exchange a tensor with each of the other ranks, as bytes, since gloo lacks dtypes."""
        group, works = self.axes.world_group, []
        tag = tag + self.axes.first_tag if tag != PHASE_TAG else tag
        try:
            for rank, send, receive in zip(ranks, sends, receives, strict=True):
                if rank != self.rank and send.numel():
                    works.append(dist.isend(send.view(torch.uint8), rank, group=group, tag=tag))
                if rank != self.rank and receive.numel():
                    works.append(dist.irecv(receive.view(torch.uint8), rank, group=group, tag=tag))
        except RuntimeError as error:  # gloo knows already that a rank has ended
            raise failed_message(error, self.phase.running or "a message") from error
        return works

    def _compare_phases(self, ranks: Sequence[int]) -> None:
        """Check that all ranks are in the same phase. See [Note: phases].

        Raises:
            EngineError: Ranks are, or were, in different phases; or this is a forked process.
        """
        phase = self.phase
        if len(ranks) > 1:
            check_process(phase.process)
        if len(ranks) == 1 or not (phase.next or phase.error) or not self._compares:
            return
        phase.running, phase.next = f"{phase.next}{self._model}", ""
        self._start_comparison(phase.running, self._everyone)()

    def _compare_units(self, unit: str) -> Callable[[], None]:
        """Compare phases, and start to compare units of a gather; the result raises an error."""
        self._compare_phases(self.axes.shard_ranks)
        if not unit or not self._compares:
            return lambda: None
        gather = f"{self.phase.running}, a gather of {unit}"
        return self._start_comparison(gather, self.axes.shard_ranks)

    def _start_comparison(self, own: str, ranks: Sequence[int]) -> Callable[[], None]:
        """Send this rank's phase to others; the result raises an error if one of theirs differs."""
        if self.phase.error:
            raise EngineError(self.phase.error)
        size = len(ranks)
        text = bytearray(own.encode()[-PHASE_BYTES:].ljust(PHASE_BYTES) * size)
        sent, texts = bytes(text), torch.frombuffer(text, dtype=torch.uint8).split(PHASE_BYTES)
        works = self._exchange([texts[ranks.index(self.rank)]] * size, texts, ranks, PHASE_TAG)

        def compare() -> None:
            Works(works, own).wait()
            if text == sent:  # nearly always
                return
            parts = [text[at : at + PHASE_BYTES] for at in range(0, len(text), PHASE_BYTES)]
            phases = [part.decode(errors="replace").strip() for part in parts]
            here = phases[ranks.index(self.rank)]
            found = [f"rank {r} is at {p}" for r, p in zip(ranks, phases, strict=True) if p != here]
            if found:
                self.phase.error = (
                    f"{here}: expected every rank to come here; {', '.join(found)}. {CURE}"
                )
                raise EngineError(self.phase.error)

        return compare


# ---- a transport without peers -------------------------------------------------------------------


class FakeTransport(Transport):
    """A transport without peers."""

    name = "fake"

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Works:  # noqa: ARG002
        for full in fulls:
            for index, part in enumerate(full.chunk(self.axes.mesh.shard)):
                if index != self.axes.shard_index:
                    part.zero_()
        return Works(())

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        shard, index = self.axes.mesh.shard, self.axes.shard_index
        return Reduction(lambda: [[full.chunk(shard)[index]] * shard for full in fulls])

    def sum_replicas(self, values: torch.Tensor) -> Iterator[None]:
        sum_in_order([values.clone()] * self.axes.mesh.replicate, values)
        yield

    def all_reduce(self, values: torch.Tensor, *, maximum: bool = False) -> None:
        if not maximum:
            values.mul_(self.axes.mesh.world_size)
