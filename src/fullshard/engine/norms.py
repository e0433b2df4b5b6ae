"""Small sums over all ranks: the norms of gradients, and comparisons of what ranks did.

`GradientNorms` does both, because every norm is such a sum, and every sum carries a comparison.

[Note: cached norms]
After a backward every rank has the squared 2-norm of every parameter's whole gradient, from one
small all-reduce. torch's own clipping therefore works, and a norm that only one rank logs cannot
hang. After a gradient was modified in place, the next norm is a collective again.

[Note: counts of ranks]
If a rank skipped a backward, a step or a norm, its later sums would be combined with different sums
of other ranks. A separate comparison would cost a second collective and could be skipped as well.
Each sum therefore begins with integers that must be equal on all ranks: a hash of
the sum's name, counters of steps and a hash of the gathers. The all-reduce compares them: n numbers
are equal exactly if n times the sum of their squares is the square of their sum.

Replicas of a hybrid mesh gather separately, so their hashes must be equal only among the ranks of
each replica. The first of its n ranks counts n - 1 times, the others -1 times, so the sum is 0. A
factor for each replica keeps differences in two replicas from adding up to 0. Hashes of weights
are added up in the same way among the ranks that have the same part, and settings and numbers of
optimizer states among the ranks with elements of one parameter.

A rank without elements of a parameter may leave its gradient out of zero_grad. If the numbers of
kept gradients differ, ranks therefore compare which gradients they are, and who has elements.

Ranks may legitimately make different numbers of writes, because an optimizer may skip an empty
shard. The sum therefore counts the ranks that wrote into parameters of which every rank has
elements, and the ranks that wrote into none; one of the two counts must be 0. Writes into averages
are compared in the same way when these become parameters or whole tensors. Writes of optimizers are
not counted, because ranks compare their steps.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from fullshard.engine._torch_compat import foreach_norm, graph_task_id, no_guard
from fullshard.engine.disk import Disk
from fullshard.engine.record import ShardRecord, before_read
from fullshard.errors import EngineError
from fullshard.planner.layout import clean_name
from fullshard.planner.mesh import Mesh
from fullshard.transport import streams
from fullshard.transport.base import Axes, Transport

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit


Written = dict[int, "ShardRecord"]  # by id
Memory = Sequence[tuple[Mesh, torch.Tensor]]  # buffers, each with its mesh
_FINITE = {"isnan": False, "isinf": False, "isfinite": True}  # their results for finite numbers
_SQUARED = {"square": (), "pow": (2,), "__pow__": (2,)}  # with these further arguments
# Answers a reduction of a function of a gradient without communication, if cached norms can.
Known = Callable[[str], torch.Tensor | None]
TOLD_BY_NORMS = {*_FINITE, *_SQUARED}  # functions of a gradient


def _from_norm(record: Any, name: str, squares: torch.Tensor, kind: str) -> torch.Tensor | None:
    """Sum, mean, any or all of a function of a gradient; None if its norm does not determine it."""
    square = squares[record.index]
    if name in _SQUARED:
        return {"sum": square, "mean": square / math.prod(record.shape)}.get(kind)
    if kind in ("any", "all") and square.isfinite():
        return torch.tensor(_FINITE[name])
    if (name, kind) == ("isnan", "any"):
        return square.isnan()  # not infinities or overflowing sums
    if (name, kind) == ("isfinite", "all") and square.isnan():
        return torch.tensor(data=False)
    return None


class Count(StrEnum):
    """Counters that must be equal on all ranks of a model."""

    STEPS = "optimizer steps"
    FORWARDS = "forwards that train"  # without deferred gradients
    ADDED = "gradients that were there before a backward"
    CLIPPINGS = "clippings"
    LOADS = "tensors in load_state_dict"
    FREEZINGS = "changes of requires_grad"
    GATHERS = "gathers"  # not a number but a hash: of which units, in which order
    REPLICAS = "gathers of each replica"  # of units on the model's hybrid mesh
    WRITES = "writes into parameters"  # in place, by users
    SOURCES = "writes into tensors that were copied into parameters or gathered"  # averages
    GRADIENTS = "writes into gradients"  # in place, after backward
    VALUES = "values"  # a hash of whole tensors that were given to load_state_dict
    SETTINGS = "settings"  # a hash of those of clippings, and of groups of which all have elements
    LISTED = "parameters of groups"  # a hash of them; a rank may leave out empty shards
    STATES = "optimizer states"  # a hash of their number and settings, by parameter; the sum is 0
    GROUPS = "settings of groups"  # a hash of those of all groups, if ranks list the same shards
    OWNED = "gradients of fs.owned"  # a hash of which there are
    WEIGHTS = "weights of replicas"  # a hash of some of them, other ones at each step


class GradientNorms:
    """The squared 2-norms of a model's gradients, by parameter index, and what its ranks compare.

    Every shard's record refers to it, so it also has what a shard must know of its model: `waits`,
    `task` and `disk`.

    Args:
        transport: Sums over ranks.
        device: Device of collectives.

    Attributes:
        counts: Counts so far. See [Note: counts of ranks].
        wrote: Parameters that this rank wrote since ranks compared it.
        copied: Parameters whose averages it wrote before it copied or gathered them.
        edited: Parameters whose gradients it wrote.
        disk: The files with state of the model; None: its state is in memory.
        rows: Shards that rows of state dicts follow, by id, in the same order on all ranks.
        waits: Whether gradients that `no_sync` deferred wait for a reduction.
        task: Id of the running backward, which will set gradients; -2: none.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport = transport
        self.device = device
        self.streams = streams.of(device)  # None: the host reads tensors without waiting
        self.counts: Counter[str] = Counter(dict.fromkeys(Count, 0))
        self.wrote: Written = {}
        self.copied: Written = {}
        self.edited: Written = {}
        self.disk: Disk | None = None
        self.rows: dict[int, Any] = {}
        self.waits = False
        self.task = -2
        self._arriving: list[tuple[Any, ...]] = []  # see `check_on_host`
        self._squares: torch.Tensor | None = None
        self._shown: dict[int, Any] = {}  # ids of the cached gradients
        self._memory: Memory = ()  # of these gradients
        self._places: set[int] = set()  # addresses of that memory
        self._versions: list[int] = []  # of that memory, when the norms were computed

    def keep(self, squares: torch.Tensor, shown: dict[int, Any], memory: Memory) -> None:
        """Cache the squared norms of this backward's gradients.

        Args:
            squares: (num_params,), global sums of squares.
            shown: The gradient objects that they belong to, by id.
            memory: The buffers that these are views of, whose versions count writes, each with its
                mesh.
        """
        if memory is not self._memory:
            self._places = {flat.untyped_storage().data_ptr() for _, flat in memory}
        self._squares, self._shown, self._memory = squares, shown, memory
        self._versions = [flat._version for _, flat in memory]

    def _valid_squares(self) -> torch.Tensor | None:
        """The cached squares, unless a gradient was written through `to_local()`."""
        if self._squares is not None and [f._version for _, f in self._memory] != self._versions:
            self.mark_changed()
        return self._squares

    def _squares_of(self, gradients: Sequence[Any]) -> torch.Tensor:
        assert self._squares is not None
        at = [gradient.record.index for gradient in gradients]
        if at == list(range(len(self._squares))):  # nearly always
            return self._squares
        return self._squares[from_host(at, self._squares.device, torch.int64)]

    def knows(self, gradient: Any) -> bool:
        """Whether the cache has this gradient, or the one that it aliases (`.data`)."""
        source = gradient.alias_of
        return id(gradient if source is None else source) in self._shown

    def known_of(self, gradient: Any, name: str, others: Sequence[Any]) -> Known | None:
        """The cached result of `isnan(gradient)` and similar functions.

        Args:
            gradient: The function's argument.
            name: Name of the function.
            others: Further arguments of the function.
        """
        squares = self._valid_squares()
        if squares is None or not self.knows(gradient):
            return None
        is_number = not any(isinstance(other, torch.Tensor) for other in others)
        if not is_number or tuple(others) != _SQUARED.get(name, ()):
            return None
        return partial(_from_norm, gradient.record, name, squares)

    def note_write(self, gradient: Any, *, counts: bool) -> None:
        """Note that this rank wrote into a gradient.

        Args:
            gradient: The gradient, a copy of one or a state of its class.
            counts: Whether ranks compare that they wrote, where it is neither copy nor state.
        """
        for one in (gradient, gradient.alias_of):
            if one is not None:
                one.known = None
        if self.knows(gradient):
            self.mark_changed()
        record = gradient.record
        if not counts or record.cut is not None:
            return
        if id(record) not in self.edited:
            with no_guard():
                if gradient.untyped_storage().data_ptr() in self._places:
                    self.edited[id(record)] = record

    def mark_changed(self) -> None:
        """Drop the cache, after a gradient was modified in place or a backward began."""
        self._squares, self._shown = None, {}

    def scale(self, factor: torch.Tensor) -> None:
        """Note that all gradients were multiplied by a factor."""
        if self._squares is not None:
            self._squares = self._squares * factor.to(self._squares) ** 2
            self._versions = [flat._version for _, flat in self._memory]

    def check_read(self, name: str) -> None:
        """Check that no running backward will set a parameter's gradient, which is read."""
        if self.task == graph_task_id():
            raise EngineError(
                f"{clean_name(name)}.grad inside a backward: expected it to be used after "
                "backward(); it is not reduced over ranks yet. Read, write and step after "
                "backward(), or in register_post_accumulate_grad_hook, not in other hooks."
            )

    # ---- norms and other reductions of whole tensors

    def powers(self, shards: Sequence[Any], order: float) -> torch.Tensor:
        """(len(shards),): sums of |x|^order over all ranks, or maxima for inf.

        A collective unless the cache knows them (2-norms of unchanged gradients).
        """
        if order == 2.0 and self._valid_squares() is not None and all(map(self.knows, shards)):
            return self._squares_of(shards)
        before_read(shards)
        powers = local_powers([shard.to_local() for shard in shards], order, self.device)
        if not any(shard.record.is_cut for shard in shards):
            return powers  # replicated: no communication needed
        what = f"norm of {clean_name(shards[0].record.piece.name)!r}"
        if order == math.inf:
            return self.maxima(powers, what)
        return self.all_reduce(self._share(powers, [s.record for s in shards]), what)

    def local_squares(
        self,
        tensors: Sequence[torch.Tensor],
        records: Sequence[ShardRecord],
        units: Sequence[Unit],
    ) -> torch.Tensor:
        """(len(tensors),): this rank's share of the squared norms, to be summed over ranks.

        Args:
            tensors: Plain local parts of all trained parameters' gradients.
            records: Records of their shards.
            units: All units of the model.
        """
        groups = [group for unit in units for group in unit.trained_groups]
        disk = groups[0].reduced.disk
        if disk is None:
            return self._share(local_powers(tensors, 2.0, self.device), records)
        known = [power for group in groups for power in group.reduced.take_squares()]
        unread = [x for x, power in zip(tensors, known, strict=True) if power is None]
        read = (local_powers([x], 2.0, self.device) for x in disk.stream(unread))
        powers = [next(read) if power is None else power for power in known]
        return self._share(torch.cat(powers), records)

    def _share(self, powers: torch.Tensor, records: Sequence[ShardRecord]) -> torch.Tensor:
        """Divide by the number of ranks with the same elements, so that sums are correct."""
        counts = [record.copies for record in records]
        return powers / from_host(counts, self.device) if max(counts, default=1) > 1 else powers

    def reduce(self, shard: Any, name: str, correction: int = 1) -> torch.Tensor:
        """A reduction of the whole tensor to a plain scalar: float64 or int64. A collective.

        Args:
            shard: The part of the tensor that this rank has.
            name: sum, mean, max, min, amax, amin, any, all, count_nonzero, std or var.
            correction: Subtracted from the count in std and var.
        """
        before_read((shard,))
        local, record = shard.to_local(), shard.record
        count, what = math.prod(record.shape), f"{name} of {clean_name(record.piece.name)!r}"
        if name.endswith(("max", "min")):
            sign = 1 if name.endswith("max") else -1
            return sign * self._largest(sign * local, what)
        if name in ("any", "all", "count_nonzero"):
            found = self._sum((local != 0).double(), shard, what)
            return found if name == "count_nonzero" else found > (0 if name == "any" else count - 1)
        local = local.double()
        total = self._sum(local, shard, what)
        if name in ("std", "var"):
            squares = self._sum((local - total / count) ** 2, shard, what)
            total = squares / max(count - correction, 0)
            return total.sqrt() if name == "std" else total
        return total if name == "sum" else total / count

    def _sum(self, local: torch.Tensor, shard: Any, what: str) -> torch.Tensor:
        own = local.sum() / shard.record.copies
        return self.all_reduce(own.view(1).to(self.device), what)[0]

    def _largest(self, local: torch.Tensor, what: str) -> torch.Tensor:
        """The maximum over all ranks; NaN if any element is NaN."""
        lowest = torch.full((1,), -math.inf, dtype=torch.float64, device=local.device)
        own = torch.cat([lowest, local.reshape(-1).double()]).max().to(self.device)
        return self.maxima(own.view(1), what)[0]

    # ---- clipping and loss scaling

    def begin_clipping(self, limit: Any) -> None:
        """Count a clipping, and drop the cache if a rank wrote into its gradients since then.

        A collective where the host can read its result without waiting for a device.

        Args:
            limit: Settings of the clipping, which must be equal on all ranks.

        Raises:
            EngineError: Only some of the replicas of a shard were written.
        """
        self.counts[Count.CLIPPINGS] += 1
        self.counts[Count.SETTINGS] += hash_of(limit)
        if self.streams is not None:
            return
        wrote, sizes = [float(self._valid_squares() is None)], [1]
        both = zip(self._memory, self._versions, strict=True)
        written = {mesh for (mesh, flat), version in both if flat._version != version}
        for mesh in dict(self._memory):  # that of experts may have no replicas
            by_shard = [0.0] * (mesh.shard * mesh.inner)
            by_shard[mesh.place(self.transport.rank) % len(by_shard)] = mesh in written
            wrote += by_shard
            sizes += [mesh.replicate] * len(by_shard)
        counts: dict[str, int] = {Count.SETTINGS: self.counts[Count.SETTINGS]}
        found = self.all_reduce(from_host(wrote, self.device), "a clipping", counts).tolist()
        if found[0]:
            self.mark_changed()
        if any(count % size for count, size in zip(found, sizes, strict=True)):
            raise EngineError(
                "clipping: expected the same gradients on all replicas; some ranks wrote into "
                "theirs after backward (p.grad.mul_). Write on every rank or on none."
            )

    def share_found_inf(self, found_inf: torch.Tensor, factor: torch.Tensor) -> None:
        """Share an infinity of any rank, so that all ranks step or skip together.

        Args:
            found_inf: 1 if this rank found one, otherwise 0; receives the maximum of all ranks.
            factor: By which gradients were multiplied, which must be the same on every rank.

        Raises:
            EngineError: The factors differ. On a GPU, the end of the next backward raises it.
        """
        own = torch.stack([found_inf.view(()), factor.view(()), -factor.view(())])
        shared = self.all_reduce(own.to(self.device), "GradScaler.unscale_", maximum=True)
        found_inf.copy_(shared[0])
        self.check_on_host(shared[1:], _check_factors)

    # ---- sums over all ranks, and what ranks compare

    def compare(self, what: str, counts: Mapping[str, int] | None = None) -> None:
        """Check that all ranks request the same quantity here, with these counts. A collective."""
        self.all_reduce(torch.zeros(1, device=self.device), what, counts)

    def maxima(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """(n,), float64: the maxima of all ranks' values; NaN where a rank has NaN."""
        nan = values.isnan()
        both = torch.cat([values.masked_fill(nan, -math.inf), nan.to(values)])
        largest, nan = self.all_reduce(both, what, maximum=True).chunk(2)
        return largest.masked_fill(nan > 0, math.nan)

    def all_reduce(
        self,
        values: torch.Tensor,
        what: str,
        counts: Mapping[str, int] | None = None,
        *,
        maximum: bool = False,
        excused: Callable[[str], bool] = lambda _: False,
    ) -> torch.Tensor:
        """The sum or the maximum of all ranks' values: (n,), float64. A collective.

        See [Note: counts of ranks].

        Args:
            values: (n,); without NaN if `maximum`.
            what: Name of the quantity, which must be the same on every rank.
            counts: Counts that must be equal on every rank, by name.
            maximum: Return the maximum instead of the sum.
            excused: Whether a count may differ; called on all ranks.

        Raises:
            EngineError: Ranks request different quantities, or their counts differ. On a GPU, the
                end of the next backward raises it.
        """
        axes = self.transport.axes
        counts = {"": zlib.crc32(f"{what} {len(values)}".encode()), **(counts or {})}
        numbers = {count: float(number % MOST) for count, number in counts.items()}
        pairs = {count: (x, -x if maximum else x * x) for count, x in numbers.items()}
        if Count.REPLICAS in counts and self.transport.name != "fake":
            pairs |= _pairs_of_replicas(counts, axes)
            pairs[Count.STATES] = numbers[Count.STATES], 0.0
        for count, written in zip(_WRITTEN, (self.wrote, self.copied, self.edited), strict=True):
            if count in counts:
                pairs[count] = _pair_of_writes(written, axes.mesh)
                counts[count] = wrote = bool(pairs[count][0])
                if wrote or count != Count.SOURCES:  # tensors are gathered one by one
                    written.clear()
        if Count.GROUPS in counts:
            self.counts[Count.LISTED] = self.counts[Count.GROUPS] = 0
        head = from_host([1.0, *chain.from_iterable(pairs.values())], values.device)
        vector = torch.cat([head, values.double()])
        self.transport.phase.next = f"a sum ({what})"
        self.transport.all_reduce(vector, maximum=maximum)
        head, values = vector[: len(head)], vector[len(head) :]
        self.check_on_host(head, partial(self._check, what, counts, excused, maximum))
        return values

    def _check(self, what: str, own: Any, excused: Any, maximum: Any, head: torch.Tensor) -> None:
        """Raise the error of a count that differs between ranks."""
        differing = differing_counts(head, own, maximum=maximum)
        for wrong in differing:
            if wrong == Count.LISTED or (wrong == Count.GROUPS and Count.LISTED in differing):
                continue  # a rank left out empty shards
            if self.streams is None and excused(wrong):
                continue
            if wrong in _UNLIKE:
                raise EngineError(f"{what}: {_UNLIKE[wrong]}")
            found = f"this rank has {own[wrong]}, other ranks differ"
            if self.streams is None:
                found = _table(self.transport, own[wrong])
            raise EngineError(
                f"{what}: expected as many {wrong} on every rank; {found}. Every rank must make "
                "each backward, optimizer.step(), zero_grad() (with one set_to_none), clipping "
                "and load_state_dict(), and freeze the same parameters. If a rank has no loss, "
                "use zero; evaluate under no_grad()."
            )

    def check_on_host(self, values: torch.Tensor, check: Callable[[torch.Tensor], None]) -> None:
        """Call `check` with values on the host; if it would wait for a device, one step later.

        All ranks call it in the same order, so that they raise errors together.
        """
        device = self.streams
        if device is None:
            check(values)
            return
        if len(self._arriving) == MOST_ARRIVING:
            self.finish_checks()
        copy = to_host(values)
        self._arriving.append((device, device.event(), check, copy))

    def finish_checks(self) -> None:
        """Run the checks that `check_on_host` deferred, at the end of a backward."""
        arriving, self._arriving = self._arriving, []
        for device, copied, check, copy in arriving:
            device.finish(copied)
            check(copy)


def local_powers(
    tensors: Sequence[torch.Tensor], order: float, device: torch.device
) -> torch.Tensor:
    """(len(tensors),), float64: this rank's sums of |x|^order (maxima for inf)."""
    at = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    powers = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    if not at:
        return powers
    norms = foreach_norm([tensors[index] for index in at], order)
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        norms = [norm.to(device, torch.float64) for norm in norms]
    values = torch.stack(norms).to(device, torch.float64)
    values = values if order == math.inf else values**order
    if len(at) == len(tensors):
        return values
    return powers.index_copy_(0, from_host(at, device, torch.int64), values)


def by_model(shards: Iterable[Any]) -> dict[GradientNorms, list[Any]]:
    """The shards of each model, in order."""
    found: dict[GradientNorms, list[Any]] = {}
    for shard in shards:
        found.setdefault(shard.record.norms, []).append(shard)
    return found


def norms_of(shards: Sequence[Any], order: float) -> list[torch.Tensor]:
    """The norm of each whole tensor, of one model or several: plain scalars in its dtype."""
    found = {
        id(shard): norm
        for norms, ours in by_model(shards).items()
        for shard, norm in zip(ours, _root(norms.powers(ours, order), order).unbind(), strict=True)
    }
    with no_guard():
        return [found[id(shard)].to(shard) for shard in shards]


def total_norm(shards: Sequence[Any], order: float) -> torch.Tensor:
    """The norm of all shards together, a plain float64 scalar.

    A collective unless the caches know it (2-norms of unchanged gradients).
    """
    parts = [norms.powers(ours, order) for norms, ours in by_model(shards).items()]
    none = torch.zeros(0, dtype=torch.float64)
    powers = torch.cat([part.to(parts[0].device) for part in parts] or [none])
    if order == math.inf:
        return powers.max() if powers.numel() else powers.sum()
    return _root(powers.sum(), order)


def _root(powers: torch.Tensor, order: float) -> torch.Tensor:
    return powers if order == math.inf else powers ** (1.0 / order)


# ---- small sums over all ranks

_WRITTEN = (Count.WRITES, Count.SOURCES, Count.GRADIENTS)
_BITS = {1: torch.int8, 2: torch.int16}  # sums of 64-bit integers would overflow
MOST_ARRIVING = 16  # values that the host reads later; evaluations add to them without a backward
SAMPLED = 1 << 14  # elements of a group that are checked at each step
HASHED = 1 << 20  # elements that are added up at once
PRIME = (1 << 31) - 1  # a power of 2 would not see that 16,384 elements were doubled
MOST = 1 << 20  # of a count: sums of squares stay exact in float64
UNEQUAL_REPLICAS = (
    "expected the same weights on all replicas; they differ, so one rank updated its copy "
    "differently (another learning rate, a skipped step, a gradient that was not reduced, other "
    "random numbers). All ranks must run the same optimizer steps."
)


_ORDER = (
    "expected every rank to call the same units in the same order; ranks gathered different units "
    "since the last backward or evaluation, so weights of one unit were used as those of another, "
    "and later results are wrong. Make all ranks agree on a branch or a number of calls first "
    "(dist.broadcast, dist.all_reduce)."
)
_SETTINGS = (
    "expected optimizers and clipping with the same numbers on every rank (lr, weight_decay, "
    "betas, max_norm, a GradScaler's scale, the steps in states ...); a rank used others since the "
    "last backward, so parts of the model were updated differently. A schedule that follows the "
    "loss needs the loss of all ranks (dist.all_reduce); clipping needs empty shards, too, and no "
    "parameters made after sharding (in a first forward), whose gradients are of one rank."
)
_UNLIKE = {  # errors of hashes that differ between ranks
    "": "expected the same call on every rank; another rank made another call, and their numbers "
    "would have been combined. Call it on every rank and log it on one; p.to_local() returns "
    "this rank's elements.",
    Count.VALUES: "expected load_state_dict() with the same values on every rank; a rank loaded "
    "others, so the model has parts of several. Load one file on every rank, or rank 0's with "
    "fs.load_full_state(model, state, from_rank0=True).",
    Count.SETTINGS: _SETTINGS,
    Count.STATES: _SETTINGS,
    Count.GROUPS: _SETTINGS,
    Count.WEIGHTS: UNEQUAL_REPLICAS,
    Count.OWNED: "expected gradients of the same parameters on every rank; they differ. Set "
    "p.grad, or None, on all ranks alike.",
    Count.GATHERS: _ORDER,
    Count.REPLICAS: _ORDER,
}


def _pairs_of_replicas(counts: Mapping[str, int], axes: Axes) -> dict[str, tuple[float, float]]:
    """Hashes with weights whose sum is 0 over the ranks that must have equal hashes."""
    replica, part, mesh = axes.replicate_index, axes.shard_index, axes.mesh
    weights = {
        Count.REPLICAS: (1 + replica) * (-1 if part else mesh.shard - 1),
        Count.WEIGHTS: (1 + part) * (-1 if replica else mesh.replicate - 1),
    }
    return {count: (weight * counts[count], 0.0) for count, weight in weights.items()}


def _pair_of_writes(written: Written, mesh: Mesh) -> tuple[float, float]:
    """Whether this rank wrote a parameter of which all ranks have elements; whether it wrote none.

    The ranks with elements of some parameters are those with their parts, times their copies.
    """
    parts: dict[int, set[int]] = {}  # by the number of copies
    for record in written.values():
        parts.setdefault(record.copies, set()).update(part for part, *_ in record.holders)
    return float(any(n * len(at) == mesh.world_size for n, at in parts.items())), float(not parts)


def hash_of(settings: Any) -> int:
    """A hash of the numbers in settings, to six digits, without tensors of a device."""
    return zlib.crc32(" ".join([f"{number:.6g}" for number in _numbers_in(settings)]).encode())


def _numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(item)
    elif type(value) is torch.Tensor and value.numel() == 1 and is_at_hand(value.device):
        yield value.item()


def is_at_hand(device: torch.device) -> bool:
    """Whether the host can read a device's tensors without waiting."""
    return streams.of(device) is None


def from_host(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """(len(numbers),): copy numbers to a device without waiting for it."""
    held = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host without waiting for its device; readable after a later event."""
    copy = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
    return copy.copy_(values, non_blocking=True)


def replicas_hash(units: Sequence[Unit], mesh: Mesh, step: int) -> int:
    """A hash of a piece of each group that a mesh replicates; another piece at each step."""
    copied = [unit for unit in units if unit.plan.mesh == mesh and mesh.replicate > 1]
    total = 0
    for master in (group.master for unit in copied for group in unit.trained_groups):
        at = step % max(1, -(-len(master) // SAMPLED)) * SAMPLED
        total += int(bits_hash(master[at : at + SAMPLED]))
    return total % PRIME


def bits_hash(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an int64 scalar. See [Note: a hash of bits] in engine/replicas.py."""
    bits = tensor.contiguous().view(-1).view(_BITS.get(tensor.element_size(), torch.int32))
    # a sum of other integers copies them to int64 first
    return torch.stack([x.sum(dtype=torch.int64) for x in bits.split(HASHED)]).sum()


def sample_hash(tensor: torch.Tensor) -> int:
    """A hash of the first, the middle and the last elements, which reads little of a file."""
    flat = tensor.detach().reshape(-1)
    ends = {SAMPLED, len(flat) // 2, len(flat)}
    return sum(int(bits_hash(flat[max(0, end - SAMPLED) : end])) for end in ends)


def _check_factors(factors: torch.Tensor) -> None:
    largest, lowest = factors.tolist()
    if largest != -lowest:
        raise EngineError(f"GradScaler.unscale_: {_SETTINGS}")


def differing_counts(head: torch.Tensor, counts: Iterable[str], *, maximum: bool) -> list[str]:
    """Names of the counts that differ between ranks."""
    ranks, *sums = head.tolist()
    found = []
    for what, total, other in zip(counts, sums[::2], sums[1::2], strict=True):
        differs = (total != -other) if maximum else (ranks * other != total * total)
        differs = differs and (what != Count.STATES or total % MOST != 0)
        found += [what] * bool((total and other) if what in _WRITTEN else differs)
    return found


def _table(transport: Transport, number: int) -> str:
    """The ranks of each count. A collective, after all ranks have found a difference."""
    table = torch.zeros(transport.axes.mesh.world_size, dtype=torch.float64)
    table[transport.rank] = number
    transport.all_reduce(table)
    counts = [int(count) for count in table.tolist()]
    usual = Counter(counts).most_common(1)[0][0]
    strange = [f"rank {rank} has made {n}" for rank, n in enumerate(counts) if n != usual]
    return f"{', '.join(strange)}, the others {usual}"
