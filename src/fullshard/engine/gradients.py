"""Gradients from autograd to `p.grad`: collect, reduce, accumulate, settle.

    compute param's .grad --> gradient slot --> reduction --> gradient shard --> p.grad
       (dropped at once)        (numel,)                        (part_numel,)     (views)

[Note: which gradients will come]
At the first hook of a backward the engine asks autograd which accumulation nodes it will reach. A
unit is therefore reduced as soon as its last gradient arrives, also with `backward(inputs=)`, side
losses and unused parameters. A missing gradient is zero in the reduction. The small all-reduce at
the end contains one bit per parameter that shows whether any rank touched it. If none did, its
`.grad` stays None, as in one process (AdamW would otherwise decay it).

[Note: gradients that wait]
A backward under `no_sync` defers its reduction to a later one. Until then `p.grad` is a
`PendingGradient`, which can be dropped but not read, because this rank's part is not a gradient of
the model.

[Note: gradients that are kept]
Each reduction is received in the same memory. In one process a new backward creates new gradients,
so a user who kept the old ones (`kept = [p.grad ...]; zero_grad()`) still has them. The engine
therefore counts references before it receives a reduction. If there are more than its own, it
leaves the memory to the user and allocates new memory. A tensor that the user assigned to `p.grad`
stays there, and the sum is added to it.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, repeat
from operator import gt, is_
from typing import Any

import torch

from fullshard.engine._torch_compat import (
    GRAD,
    foreach_add,
    foreach_copy,
    foreach_zero,
    graph_task_id,
    no_guard,
    storage_use_count,
)
from fullshard.engine.homes import DeviceHomes
from fullshard.engine.norms import Count, GradientNorms, from_host, local_powers, replicas_hash
from fullshard.engine.parameter import PendingGradient, ShardedGradient
from fullshard.engine.unit import Collects, Group, Member, Unit, alive, is_reached
from fullshard.errors import EngineError, UnsupportedModelError
from fullshard.planner.mesh import Mesh
from fullshard.planner.schedule import Sync
from fullshard.planner.units import DtypeContract
from fullshard.transport.base import Home, Hook, Transport, reduce_by, torch_dtype

logger = logging.getLogger(__name__)

MOST_WAITING = 64  # number of small gradients of a unit that are moved together
_ENDED = object()
# kinds of backwards, which ranks compare
_KINDS = {Sync.ALL: "", Sync.INNER: " under no_sync(outer_only)", Sync.NONE: " under no_sync"}


class GradientShard:
    """Sums of a group's gradients on this rank, and the memory of `p.grad`.

    Attributes:
        sums: (part_numel,), accumulate dtype.
        shown: (part_numel,), master dtype, viewed by `p.grad`; the sums themselves if they have
            that dtype.
        partial: (part_numel,), accumulate dtype: summed over shards, not yet over replicas.
        earlier: Which `p.grad` have an earlier gradient, to which the next sum is added; (): none.
        memory: Storage of `shown`.
        references: Reference counts of the memory and of each gradient without the user's.
        disk: File with the sums; None: they are in memory.
        bounds: Where each parameter's gradient is.
        squares: (1,) each: squared norms of gradients that have just been written to disk.
        like: An empty tensor of the dtype and device that reductions are received in.
    """

    def __init__(self, numel: int, dtypes: DtypeContract, homes: DeviceHomes) -> None:
        self._made_with = numel, dtypes, homes
        self.sums = homes.gradients.zeros(numel, torch_dtype(dtypes.accumulate))
        self.shown = self.sums
        if dtypes.master is not dtypes.accumulate:
            self.shown = homes.gradients.zeros(numel, torch_dtype(dtypes.master))
        self.partial: torch.Tensor | None = None
        self.earlier: Sequence[bool] = ()
        self.memory = self.shown.untyped_storage()
        self.references: list[int] = []
        self.is_offloaded = homes.offloads_gradients
        self.disk = homes.gradients.disk
        self.bounds: list[slice] = []
        self.squares: list[torch.Tensor] = []
        self.like = torch.empty(0, dtype=self.sums.dtype, device=homes.device)

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + (0 if self.shown is self.sums else self.shown.nbytes)

    def anew(self) -> GradientShard:
        """Return a zero shard of the same kind, with the sum that waits for replicas."""
        made = GradientShard(*self._made_with)
        made.partial = self.partial
        return made

    def take(self, total: torch.Tensor) -> None:
        """Add a sum over all ranks to the shown gradients, or replace them.

        Args:
            total: (part_numel,), accumulate dtype, divided; `sums` or another buffer.
        """
        if self.earlier:
            self._take_writes()
            self.sums.add_(total)
        elif total is not self.sums:
            self.sums.copy_(total)
        self.show()

    def take_to_host(self, total: torch.Tensor, *room: torch.Tensor) -> None:
        """Queue what `take` does if the sums are in host memory; `show` follows after a wait.

        Args:
            total: (part_numel,), accumulate dtype, divided, on the device.
            room: (part_numel,), on the device, if the sum is added to gradients in memory.
        """
        if self.earlier:
            self._take_writes()
        if self.disk is None:
            for before in room:  # one at most
                total.add_(before.copy_(self.sums, non_blocking=True))
            self.sums.copy_(total, non_blocking=True)
        elif self.earlier:
            self.disk.change(self.sums, lambda x, more: x.add_(more.to(x)), total)
        else:
            self.disk.change(self.sums, torch.Tensor.copy_, total, reads=False)
            if self.shown is self.sums and total.device.type == "cpu":
                parts = [total[bounds] for bounds in self.bounds]
                self.squares = list(local_powers(parts, 2.0, total.device).split(1))

    def take_squares(self) -> list[torch.Tensor | None]:
        """Squared norms that are known since the sums were written, once."""
        found, self.squares = self.squares or [None] * len(self.bounds), []
        return [*found]

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients."""
        self._take_writes()
        factor = factor.to(self.sums)
        if self.disk is None:
            self.sums.mul_(factor)
        else:
            self.disk.change(self.sums, lambda piece: piece.mul_(factor))
        self.show()

    def show(self) -> None:
        """Cast the sums into `shown`."""
        if self.shown is not self.sums:
            self.shown.copy_(self.sums)

    def _take_writes(self) -> None:
        """Copy the user's writes to `p.grad` into the sums; other elements keep their precision."""
        if self.shown is not self.sums:
            wrote = self.shown != self.sums.to(self.shown.dtype)
            self.sums.copy_(torch.where(wrote, self.shown.to(self.sums.dtype), self.sums))


def _at_once(copy: Callable[[], None]) -> Iterator[None]:
    """Copy to the host on a device without streams."""
    copy()
    yield


class Gradients:
    """Gradient bookkeeping of one model on one rank.

    Args:
        transport: Transport over the whole mesh.
        norms: Cache of global norms, filled at the end of each backward.
        divisor: Divisor of sums over ranks.
        on_spill: Called with a unit that got a separate buffer because its slot is in use.
        home: The memory of the model's masters.
    """

    def __init__(
        self,
        transport: Transport,
        norms: GradientNorms,
        divisor: float,
        on_spill: Callable[[Unit], None],
        home: Home,
    ) -> None:
        self.transport = transport
        self.home = home
        self.norms = norms
        self.sync = self._outside = self.inner_sync = Sync.ALL  # see `fs.no_sync(outer_only=True)`
        self._blocks: dict[object, Sync] = {}  # open `no_sync` blocks
        self.synced = Sync.ALL  # `sync` at the start of the last backward
        self.expects_any = False
        self.divisor = divisor
        self.hook: Hook | None = None  # the user's hook, which reduces instead
        self._on_spill = on_spill
        self._slots: dict[tuple[str, int], Unit] = {}  # gradient slots in use
        self._trained: TrainedGradients | None = None
        self._has_added = False  # adds to earlier gradients, in a running backward
        # Whether a shard has new memory since `_trained`, whose references it counted.
        self._has_new_memory = False
        self._theirs: list[tuple[Member, Any]] = []  # the user's tensors in `p.grad`
        self._called: list[tuple[Any, Any]] = []  # parameters and their hooks, in `settle`
        self._landing: list[Iterator[None]] = []  # sums that are not yet in their shards
        self._on_host: list[GradientShard] = []  # shards that the host may not read yet
        # Queues a copy to the host at the first `next`; its buffers are free after the last one.
        self.to_host = _at_once
        self.await_host: Callable[[], None] = lambda: None
        self.finish_reading: Callable[..., None] = home.finish_reading
        self.peak_deferred_bytes = 0

    @contextmanager
    def no_sync(self, sync: Sync) -> Any:
        """Context in which backwards do not reduce gradients, or only not over replicas.

        Blocks may end in any order, because generators keep them open.
        """
        block = object()
        if not self._blocks:
            self._outside = self.sync
        self._blocks[block] = self.sync = sync
        try:
            yield
        finally:
            del self._blocks[block]
            self.sync = next(reversed(self._blocks.values()), self._outside)

    # ---- during backward

    def begin_backward(self, units: Sequence[Unit]) -> list[int]:
        """Ask autograd which gradients will arrive; returns the units that get none."""
        self.norms.mark_changed()
        self.synced = self.sync
        with no_guard():
            for unit in units:
                unit.num_expected = 0
                for member in unit.trained_members:
                    member.expected = is_reached(member)
                    unit.num_expected += member.expected
        nothing = [unit.plan.index for unit in units if unit.num_expected == 0]
        self.expects_any = len(nothing) < len(units)
        self.norms.task = graph_task_id() if self.expects_any else -2
        kind = _KINDS[self.synced] if self.expects_any else " without parameters"
        self.transport.phase.next = f"a backward{kind}"
        return nothing

    def collect(self, unit: Unit, member: Member) -> bool:
        """Move a final gradient to the unit's buffer, now or together with others.

        Returns:
            Whether it was the unit's last one; all are then in the buffer.
        """
        unit.num_expected -= 1
        waiting = unit.waiting
        waiting.append(member)
        if not unit.num_expected or member.is_large or len(waiting) == MOST_WAITING:
            self.move(unit)
        return not unit.num_expected

    def move(self, unit: Unit) -> None:
        """Move all waiting gradients to the unit's buffer in one call."""
        waiting, unit.waiting = unit.waiting, []
        copied: tuple[list[Any], list[Any]] = [], []
        added: tuple[list[Any], list[Any]] = [], []
        get, put, strided = GRAD.__get__, GRAD.__set__, torch.strided
        group: Group | None = None
        buffer: Any = None
        is_slot, (targets, gradients) = True, copied
        with no_guard():  # twice as fast
            found = [get(member.compute) for member in waiting]
            for member in waiting:
                put(member.compute, None)
        for member, gradient in zip(waiting, found, strict=True):
            if gradient is None:
                member.expected = False  # a custom function returned None
                continue
            if member.cut is not None:
                gradient = member.cut.gradient(gradient)
            if gradient.layout is not strided:
                raise UnsupportedModelError(
                    f"{member.piece.name}: expected a dense gradient; got {gradient.layout}. Use "
                    "sparse=False."
                )
            if member.group is not group:
                group = member.group
                buffer = self._buffer(group)
                targets, gradients = added if group.collects is Collects.DEFERRED else copied
                is_slot = group.collects is Collects.SLOT  # the view is made already
            targets.append(member.target if is_slot else member.view(buffer))
            gradients.append(gradient)
            member.touched = True
        if copied[0]:
            foreach_copy(*copied)
        if added[0]:
            foreach_add(*added)

    def _buffer(self, group: Group) -> torch.Tensor:
        """The buffer that collects the group's gradients, chosen at the first one."""
        if group.collected is not None:
            return group.collected
        if self.synced is Sync.NONE:
            dtype = torch_dtype(group.plan.dtypes.accumulate)
            group.collects = Collects.DEFERRED
            group.collected = group.full.new_zeros(group.plan.layout.numel, dtype=dtype)
            return group.collected
        assert group.grad_slot is not None
        if self._slots.setdefault(_slot_of(group), group.unit) is not group.unit:
            group.collects, group.collected = Collects.SPILL, torch.zeros_like(group.grad_slot)
            self._on_spill(group.unit)
            return group.collected
        group.unit.transport.claim(group.grad_slot)
        if group.gaps:
            foreach_zero(group.gaps)
        group.collects, group.collected = Collects.SLOT, group.grad_slot
        return group.collected

    # ---- events

    def reduce(self, unit: Unit) -> None:
        """Zero the missing gradients of a complete unit, and start to sum over ranks."""
        if unit.waiting:
            self.move(unit)
        for group in unit.trained_groups:
            buffer = self._buffer(group)
            if group.collects is not Collects.DEFERRED:
                for member in [m for m in group.members if not m.expected]:
                    member.view(buffer).zero_()
            group.collected = buffer.to(group.reduce_dtype)  # in place if it has that dtype
        fulls = [group.collected for group in unit.trained_groups if group.collected is not None]
        if self.hook is None:
            unit.reduction = unit.transport.reduce(fulls)
        else:
            unit.reduction = reduce_by(self.hook, fulls, unit.plan.mesh.shard)

    def accumulate(self, unit: Unit) -> None:
        """Receive the reduction in the gradient shards, which frees the gradient slots."""
        assert unit.reduction is not None
        scratch = unit.transport.scratch
        waits = self.synced is Sync.INNER
        outs: list[torch.Tensor] = []
        for group in unit.trained_groups:
            adds = not waits and self._keep_earlier(group)
            grads = group.reduced
            self.norms.counts[Count.ADDED] += adds
            self._has_added |= adds
            apart = adds or waits or grads.is_offloaded
            outs.append(scratch.take(grads.like, grads.sums.numel()) if apart else grads.sums)
        unit.reduction.sum_into(outs)
        unit.reduction = None
        self._advance()
        for group, out in zip(unit.trained_groups, outs, strict=True):
            self._start_to_land(unit, group.reduced, out, waits=waits)
            self._forget(group)

    def _keep_earlier(self, group: Group) -> bool:
        """Prepare the gradient shard for a sum: keep what `p.grad` contains, zero the rest.

        Tensors that the user assigned are recorded, and memory that the user kept is replaced; see
        [Note: gradients that are kept].

        Returns:
            Whether the sum is added to earlier gradients; it replaces the shard otherwise.
        """
        with no_guard():
            grads = [member.param.grad for member in group.members]
            is_empty = all(map(is_, grads, repeat(None)))  # the common case
            if is_empty and reference_counts(group) == group.reduced.references:
                group.reduced.earlier = ()
                return False
            shown = list(map(_before, grads))
            ours = list(map(_is_same, shown, group.views))
            found = zip(group.members, shown, ours, strict=True)
            self._theirs += [(m, g) for m, g, is_ours in found if g is not None and not is_ours]
            if _is_referenced(group, ours):
                group.show_in(group.reduced.anew())
                self._has_new_memory = True
            group.reduced.earlier = ours if any(ours) else ()
            if group.reduced.earlier:
                if self.norms.disk is not None and not all(map(is_, shown, group.views)):
                    self.norms.disk.drain()
                for gradient, grad, is_ours in zip(group.views, shown, ours, strict=True):
                    if not is_ours:
                        gradient.zero_()
                    elif grad is not gradient:  # still in the former memory
                        gradient.copy_(grad)
        return bool(group.reduced.earlier)

    def _start_to_land(
        self, unit: Unit, grads: GradientShard, total: torch.Tensor, *, waits: bool
    ) -> None:
        """Start to land a sum over shards, or keep it for a later backward."""
        if grads.partial is not None:
            total.add_(grads.partial)
            grads.partial = None
        if waits:  # nothing lands: the next backward that sums over replicas adds it
            grads.partial = total.clone()
            unit.transport.scratch.give(total)
            return
        steps = self._land(unit, grads, total)
        if next(steps, _ENDED) is not _ENDED:
            self._landing.append(steps)

    def _land(self, unit: Unit, grads: GradientShard, total: torch.Tensor) -> Iterator[None]:
        """Sum over replicas, divide, and add to the gradient shard. Each step starts the next
        messages or copies, which are awaited when the next unit's sum lands."""
        scratch = unit.transport.scratch
        if unit.plan.mesh.replicate > 1 and self.hook is None:
            yield from unit.transport.sum_replicas(total)
        total.div_(self.divisor if unit.divisor is None else unit.divisor)
        if not grads.is_offloaded:
            grads.take(total)
        else:
            adds = grads.earlier and grads.disk is None  # else they are added on disk
            room = [scratch.take(total, total.numel())] if adds else []
            self._on_host.append(grads)
            yield from self.to_host(partial(grads.take_to_host, total, *room))
            scratch.give(*room)
        if total is not grads.sums:
            scratch.give(total)

    def _advance(self) -> None:
        """Advance the sums of all units that are not yet in their shards by one step."""
        self._landing = [s for s in self._landing if next(s, _ENDED) is not _ENDED]

    def _finish_landing(self) -> None:
        """Wait until all sums are in their shards, where the host may read them."""
        while self._landing:
            self._advance()
        if self._on_host:
            self.await_host()
            for grads in self._on_host:
                grads.show()
            self._on_host.clear()

    def _forget(self, group: Group) -> None:
        """Release the buffer of a group whose gradients are reduced or dropped.

        A spill and a buffer that `no_sync` kept have no other owner and are freed.
        """
        if group.collects is Collects.SLOT:
            self._slots.pop(_slot_of(group), None)  # another group may have done so
        group.collects, group.collected = Collects.NOWHERE, None

    def settle(self, units: Sequence[Unit]) -> None:
        """Agree on the touched parameters, set `p.grad`, and cache norms."""
        self._finish_landing()
        self.norms.task = -2
        if self._trained is None or self._has_new_memory:
            self._trained, self._has_new_memory = TrainedGradients.of(units), False
        members = self._trained.members
        if not members:
            return
        bits = [member.touched for member in members]
        squares = self.norms.local_squares(self._trained.plain, self._trained.records, units)
        vector = torch.cat([from_host(bits, squares.device), squares])
        counts = self.norms.counts
        self.norms.finish_checks()
        if self.norms.streams is None:
            mesh = self.transport.axes.mesh
            counts[Count.WEIGHTS] = replicas_hash(units, mesh, counts[Count.STEPS])
        vector = self.norms.all_reduce(vector, "backward", counts, excused=self._is_excused)
        touched, squares = vector.chunk(2)
        squares = squares.clone()
        # the common case: this rank touched all, so some rank touched each
        shown = self._trained.show(None if all(bits) else touched.tolist())
        if self._theirs:
            self._add_to_theirs()
        self.norms.waits = self._has_added = False
        self.finish_reading(settled=True)
        self.norms.keep(squares, shown, self._trained.memory)
        if any(self._trained.hooks):
            found = zip(members, self._trained.hooks, strict=True)
            self._called = [(m.param, hooks) for m, hooks in found if id(m.grad) in shown]

    def call_hooks(self) -> None:
        """Call the user's hooks of the parameters whose gradients were set."""
        called, self._called = self._called, []
        for param, hooks in called:
            for hook in tuple(hooks.values()):
                hook(param)

    def _is_excused(self, wrong: str) -> bool:
        """Whether no rank dropped a gradient that one with elements of it kept. A collective."""
        if wrong != Count.ADDED or self._trained is None:
            return False
        self.norms.counts[Count.ADDED] = 0  # equal again
        found: list[float] = []
        for group in {id(m.group): m.group for m in self._trained.members}.values():
            kept = group.reduced.earlier or [False] * len(group.members)
            for member, is_kept in zip(group.members, kept, strict=True):
                found += [is_kept and member.piece.numel > 0, not is_kept]
        counts = torch.tensor(found, dtype=torch.float64)
        self.transport.all_reduce(counts)
        return not (counts[::2] * counts[1::2]).any()

    def _add_to_theirs(self) -> None:
        """Add to a tensor that the user assigned to `p.grad`, in place as autograd does."""
        theirs, self._theirs = self._theirs, []
        with no_guard():
            for member, grad in theirs:
                grad.add_(member.grad)
                if not isinstance(grad, ShardedGradient):
                    grad = grad.as_subclass(ShardedGradient)  # same memory, with global norms
                    grad.record = replace(member.param.record)
                member.param.grad = grad

    def show_pending(self, units: Sequence[Unit]) -> None:
        """Set `p.grad` to pending gradients after an unreduced backward."""
        self.norms.waits = True
        deferred = sum(t.nbytes for u in units for g in u.trained_groups for t in g.deferred)
        self.peak_deferred_bytes = max(self.peak_deferred_bytes, deferred)
        with no_guard():
            for unit in units:
                for member in unit.trained_members:
                    before = member.param.grad
                    if member.touched and not isinstance(before, PendingGradient):
                        drop = partial(_drop, weakref.ref(member))
                        member.param.grad = PendingGradient.of(member.param, drop)
                        member.param.grad.before = before

    def drop(self, unit: Unit) -> None:
        """Receive and discard a reduction of a backward that raised."""
        assert unit.reduction is not None
        outs = [g.reduced.like.new_empty(g.reduced.sums.numel()) for g in unit.trained_groups]
        unit.reduction.sum_into(outs)
        unit.reduction = None
        self._advance()
        if unit.plan.mesh.replicate > 1 and self.hook is None and self.synced is Sync.ALL:
            # other replicas wait for these sums; as theirs, they end after the next one starts
            sums = map(unit.transport.sum_replicas, outs)
            self._landing += [steps for steps in sums if next(steps, _ENDED) is not _ENDED]
        for group in unit.trained_groups:
            self._forget(group)

    def reset(self, units: Iterable[Unit]) -> None:
        """Discard a backward that did not end."""
        if self.norms.waits or self._has_added:
            logger.warning(
                "fullshard: a backward failed; gradients of earlier micro-batches that no_sync "
                "deferred are lost, and other gradients may contain part of the failed backward. "
                "Call zero_grad() and repeat the whole step."
            )
        self._finish_landing()
        for unit in units:
            unit.num_expected = 0
            unit.waiting.clear()
            if unit.reduction is not None:
                self.drop(unit)
            for group in unit.trained_groups:
                self._forget(group)
                group.reduced.partial, group.reduced.squares = None, []
                for member in group.members:
                    member.touched = member.expected = False
                    GRAD.__set__(member.compute, None)
                    with no_guard():
                        member.param.grad = _before(member.param.grad)
        self._theirs.clear()
        self.norms.waits = self._has_added = False
        self.norms.mark_changed()


def _slot_of(group: Group) -> tuple[str, int]:
    """The slot of a group's gradients, which the other groups of its unit may share."""
    assert group.plan.grad_slot is not None
    return group.plan.grad_slot.ring, group.plan.grad_slot.index


def _before(grad: Any) -> Any:
    """The value of `p.grad` other than pending gradients."""
    return grad.before if isinstance(grad, PendingGradient) else grad


def _is_same(shown: Any, ours: Any) -> bool:
    """Whether `p.grad` is the engine's gradient or an alias, also on ranks without elements."""
    return shown is ours or (shown is not None and shown.is_set_to(ours))


def _is_referenced(group: Group, ours: Sequence[bool]) -> bool:
    """Whether the user keeps earlier gradients that the next reduction would overwrite."""
    known, now = group.reduced.references, reference_counts(group)
    if not known or now == known:
        return False
    dropped = [not is_ours for is_ours in ours]
    return any(map(gt, compress(now[1:], dropped), compress(known[1:], dropped))) or (
        all(dropped) and now[0] > known[0]
    )


def _drop(weak: weakref.ref[Member], *, stays: bool = False) -> None:
    """Drop a parameter's pending gradient; if it stays, it is one of zeros."""
    member = alive(weak, "zero_grad")
    group = member.group
    if group.collects is Collects.DEFERRED and group.collected is not None:
        member.view(group.collected).zero_()
    if group.reduced.partial is not None:
        member.local(group.reduced.partial).zero_()
    member.touched = stays


# ---- the gradients of a step


def reference_counts(group: Group) -> list[int]:
    """Reference counts of the memory of a group's gradients, and of each gradient."""
    return [storage_use_count(group.reduced.memory._cdata), *map(sys.getrefcount, group.views)]


@dataclass(frozen=True)
class TrainedGradients:
    """Trained parameters with their gradients and records, collected once.

    Attributes:
        plain: (n_local,) each: `grads` as plain tensors.
        memory: The buffers that `grads` view, if they have a version counter, with their meshes.
    """

    members: list[Member]
    grads: list[Any]
    by_id: dict[int, Any]
    plain: list[torch.Tensor]
    memory: list[tuple[Mesh, torch.Tensor]]
    records: list[Any]
    hooks: list[Any]

    @classmethod
    def of(cls, units: Sequence[Unit]) -> TrainedGradients:
        """Collect them from all units."""
        members = [member for unit in units for member in unit.trained_members]
        grads = [member.grad for member in members if member.grad is not None]
        records = [member.param.record for member in members]
        hooks = [record.post_accumulate for record in records]
        plain = [grad.to_local() for grad in grads]
        by_id = {id(grad): grad for grad in grads}
        groups = [group for unit in units for group in unit.trained_groups]
        memory = [(group.unit.plan.mesh, group.reduced.shown) for group in groups]
        memory = [(mesh, flat) for mesh, flat in memory if not flat.is_inference()]  # no version
        shown = cls(members, grads, by_id, plain, memory, records, hooks)
        for group in groups:
            group.reduced.references = group.reduced.references or reference_counts(group)
        return shown

    def show(self, touched: Sequence[float] | None) -> dict[int, Any]:
        """Set `p.grad` of parameters that a rank touched (None: all); returns gradients by id."""
        shown: dict[int, Any] = {} if touched is not None else self.by_id
        with no_guard():
            for at, (member, grad) in enumerate(zip(self.members, self.grads, strict=True)):
                member.touched = False
                if touched is None:
                    member.param.grad = grad
                elif touched[at] > 0 or member.param.grad is not None:
                    member.param.grad = shown[id(grad)] = grad
        return shown


# ---- backwards that are refused -----------------------------------------------------------------

REENTRANT = (
    "backward: expected one backward whose gradients autograd knows at its start; got one inside "
    "another that reaches the parameters of {title}, as reentrant activation checkpointing makes. "
    "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or "
    "activation_checkpointing=block. In a hook, call torch.autograd.grad for inputs only, or call "
    "backward() after the first one."
)


def check_graph(cut_anew: str | None) -> None:
    """Check that a backward may begin.

    Args:
        cut_anew: A parameter of which ranks have other elements since the graph was made.

    Raises:
        EngineError: It makes a graph, or reads one of an earlier cut.
    """
    if torch.is_grad_enabled():
        raise EngineError(
            "backward: expected create_graph=False; a second derivative would read slots that "
            "contain other units at that point. For gradients of inputs use torch.autograd.grad "
            "without create_graph (torch.func.grad, vjp and jacrev set it); compute second "
            "derivatives with a model that was not sharded."
        )
    if cut_anew is not None:
        raise EngineError(
            "backward: expected a graph from after the model was sharded again (a change of "
            f"requires_grad, a dtype or a parameter), which gave ranks other elements of "
            f"{cut_anew}. Run backward before the forward that follows the change."
        )
