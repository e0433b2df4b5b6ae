"""A unit on one rank: its shards, its slots, its two kinds of parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from operator import is_not
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, increment_version

from fullshard.engine._torch_compat import (
    has_version,
    local_tensor,
    no_guard,
    plain,
    set_versions,
    storage_use_count,
    uncompiled,
    will_execute,
)
from fullshard.engine.computed import DATA, Computed, Released, gather_piece, kept_tensors, released
from fullshard.engine.cuts import Cut
from fullshard.engine.disk import Disk
from fullshard.engine.norms import Count
from fullshard.engine.parameter import Guarded, ShardedGradient
from fullshard.engine.record import before_read, follow_freezing
from fullshard.errors import EngineError
from fullshard.planner.layout import FlatLayout, Slice, clean_name
from fullshard.planner.units import GroupPlan, UnitPlan
from fullshard.transport.base import Reduction, Transport, Works

if TYPE_CHECKING:
    from fullshard.engine.gradients import GradientShard
    from fullshard.engine.parameter import ShardedParameter
    from fullshard.engine.placing import Rings

AWAY = 1 << 20  # added to the version of weights whose slot contains another unit
LARGE_NUMEL = 16_384
ZEROED_BYTES = 8192  # in the time of a call
MAX_VAIN = 5  # searches for kept views that find none
Pair = tuple[nn.Parameter, torch.Tensor]  # a shard and its compute parameter
T = TypeVar("T")


@dataclass(eq=False, slots=True, weakref_slot=True)
class Member:
    """One parameter of a group.

    Attributes:
        param: The user's own object, the shard.
        piece: Range of this rank's elements of the parameter.
        compute: The full parameter that forward sees; its `.data` is a view of the slot.
        offset: Where the parameter begins in the flat buffer, in elements.
        cut: Placement of the parameter on other axes of the mesh; `compute` is a DTensor then.
        is_large: Whether its gradient is moved immediately, to save memory rather than calls.
        grad: The object that `param.grad` returns, a view of the gradient shard (None if frozen).
        node: The autograd node that accumulates into `compute`.
        expected: Whether the running backward, or the last one, reaches the parameter on this rank.
        touched: Whether it has a gradient on this rank that is not settled yet.
        target: The parameter's place in the gradient slot (None if frozen).
    """

    param: ShardedParameter
    piece: Slice
    compute: nn.Parameter
    offset: int
    cut: Cut | None = None
    group: Group = field(init=False, repr=False)
    numel: int = field(init=False)
    is_large: bool = field(init=False)
    grad: ShardedGradient | None = None
    node: Any = None
    expected: bool = False
    touched: bool = False
    target: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.numel = math.prod(self.piece.shape)
        self.is_large = self.numel > LARGE_NUMEL

    def bind(self, slot: torch.Tensor, *, trainable: bool) -> None:
        """Make the compute parameter, a view of a (numel,) slot; keep one that a forward hooked.

        It is created empty and its `.data` is set. A parameter created *from* a slot view would
        share the slot's version counter, and the first refill would be an autograd error.
        """
        view = self.view(slot)
        if type(self.compute) is not nn.Parameter:
            DATA.__set__(self.tensors()[-1], view)
            return increment_version(self.tensors())  # graphs may have used its other slot
        compute = view.new_empty(0)
        if self.cut is not None:
            compute = self.cut.show(view.new_empty(1).expand(view.shape))
        self.compute = Computed(compute, requires_grad=trainable)
        self.tensors()[-1].data = view
        if isinstance(self.compute, Computed):  # no DTensor
            self.compute.member = weakref.ref(self)
        if trainable:
            self.node = get_gradient_edge(self.compute).node
            self.node.register_hook(gradient_hook(self))  # also called without a gradient
            with no_guard():  # may have been frozen since it was sharded
                nn.Parameter.requires_grad_(self.compute, self.param.requires_grad)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The compute parameter and the local tensor in it; each has a version."""
        compute = self.compute
        return (compute,) if self.cut is None else (compute, local_tensor(compute))

    def view(self, full: torch.Tensor) -> torch.Tensor:
        """View the parameter in a (numel,) flat buffer, in its own shape."""
        return full[self.offset : self.offset + self.numel].view(self.piece.shape)

    def local(self, part: torch.Tensor) -> torch.Tensor:
        """(n_local,): this rank's elements of the parameter in a (part_numel,) buffer."""
        return part[self.piece.offset : self.piece.offset + self.piece.numel]

    def gather_whole(self, local: torch.Tensor, what: str = "") -> torch.Tensor:
        """The whole parameter, over all axes of the mesh, newly allocated. A collective.

        Args:
            local: (n_local,), this rank's elements of the parameter, its gradient or a state.
            what: Name that must be equal on all ranks; "": the parameter's.
        """
        unit, layout = self.group.unit, self.group.plan.layout
        unit.compare(self.param, what or repr(self.piece.name))
        full = gather_piece(unit.transport, layout, self.piece, local.to(self.group.full.device))
        return full if self.cut is None else self.cut.whole_of(full)


class Collects(Enum):
    """Where a group collects the gradients of a backward."""

    NOWHERE = auto()  # no gradient has arrived since the last reduction
    SLOT = auto()  # in its gradient slot
    SPILL = auto()  # in a buffer of its own, because another group uses the slot
    DEFERRED = auto()  # in a buffer that `no_sync` keeps: (numel,), accumulate dtype


@dataclass(eq=False)
class Group:
    """One flat buffer on this rank.

    Attributes:
        master: (part_numel,), master dtype: this rank's stored parameters.
        full: (numel,): the slot; on a shared home the mapping of all ranks' parts; the master
            itself if neither is needed.
        part: (part_numel,): this rank's part of the slot, compute dtype; empty without a slot.
        members: The group's parameters, in the layout's order.
        reduce_dtype: Dtype in which gradients are reduced.
        cast: (part_numel,), master dtype, on the device: where an offloaded master is cast on its
            way to the slot; None if the slot has the master's dtype, or nothing is offloaded.
        disk: The files with the master; None: the master is in memory.
        grads: Reduced gradients; None if frozen.
        grad_slot: (numel,), reduce dtype: the group's gradient slot.
        gaps: Padding of the gradient slot; all of a small slot, which is zeroed in one call.
        collects: Where unreduced gradients are.
        collected: (numel,): unreduced gradients; during a reduction, in the reduce dtype.
        addresses: Where each shard was placed; see `address_of`.
        views: `p.grad` of each parameter, views of the reduced gradients.
        trained: `requires_grad` of each shard when its compute parameter last followed it.
    """

    plan: GroupPlan
    master: torch.Tensor
    full: torch.Tensor
    part: torch.Tensor
    members: list[Member]
    reduce_dtype: torch.dtype
    unit: Unit = field(init=False, repr=False)
    cast: torch.Tensor | None = None
    disk: Disk | None = None
    grads: GradientShard | None = None
    grad_slot: torch.Tensor | None = None
    gaps: list[torch.Tensor] = field(default_factory=list)
    collects: Collects = Collects.NOWHERE
    collected: torch.Tensor | None = None
    addresses: list[int] = field(default_factory=list)
    views: list[ShardedGradient] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._shards = [member.param for member in self.members]

    def is_in_place(self) -> bool:
        """Whether all shards are in place and trained as when sharded. Outside the guard."""
        dtype, shards = self.master.dtype, self._shards
        _kept = self.master.untyped_storage()  # else each empty shard makes this object anew
        return (
            [x.data_ptr() or x.untyped_storage().data_ptr() for x in shards] == self.addresses
            and (self.plan.layout.num_parts > 1 or all(x.is_contiguous() for x in shards))
            and [shard.dtype for shard in shards] == [dtype] * len(shards)
            and self.is_trained_as_before()
        )

    def is_trained_as_before(self) -> bool:
        """Whether `requires_grad` of all shards is as in the last forward. Outside the guard."""
        return [shard.requires_grad for shard in self._shards] == self.trained

    def follow_freezing(self) -> None:
        """Copy `requires_grad` from shards to compute parameters. Outside the guard.

        Raises:
            EngineError: A parameter that was frozen when it was sharded is now trained.
        """
        if not self.is_trained_as_before():
            for member in self.members:
                follow_freezing(member)
            trained = [shard.requires_grad for shard in self._shards]
            num_changed = sum(map(is_not, trained, self.trained))
            self.members[0].param.record.norms.counts[Count.FREEZINGS] += num_changed
            self.trained = trained

    def bind(self, rings: Rings, shard_index: int) -> None:
        """Point the compute parameters and gradients at the group's slots."""
        plan, numel = self.plan, self.plan.layout.numel
        if plan.slot is not None:
            self.full = rings.view(plan.slot, numel)
            self.part = self.full.chunk(plan.layout.num_parts)[shard_index]
            if self.full.dtype is not self.master.dtype:
                self.cast = rings.cast(plan.dtypes.master, plan.layout.part_numel)
        if plan.grad_slot is not None:
            slot = self.grad_slot = rings.view(plan.grad_slot, numel)
            gaps = [slot[start:stop] for start, stop in _padding(plan.layout)]
            self.gaps = [slot] if slot.nbytes < ZEROED_BYTES * len(gaps) else gaps
        is_whole = plan.layout.num_parts == 1 and not self.gathers
        for member in self.members:
            if member.node is None or self.gathers:
                member.bind(self.full, trainable=plan.trainable)
            member.target = None if self.grad_slot is None else member.view(self.grad_slot)
            compute = partial(_current, weakref.ref(member)) if is_whole else None
            member.param.record.compute = compute
        self.trained = []  # to be compared anew

    def load(self) -> Future[None] | None:
        """Copy the master to this rank's part of the slot.

        Returns:
            The read from disk, if it runs in the background; None if the copy is issued.
        """
        source = self.master
        if self.disk is not None:
            if self.cast is None or self.cast.device.type == "cpu":
                return self.disk.load(source, self.part)
            self.disk.read(source, self.cast)
            source = self.cast
        elif self.cast is not None:
            source = self.cast.copy_(source, non_blocking=True)
        self.part.copy_(source, non_blocking=True)  # also casts
        return None

    def unbind(self) -> None:
        """Drop all views of slots."""
        if self.gathers:
            self.full = self.part = self.full.new_empty(0)
        self.grad_slot, self.cast, self.gaps = None, None, []
        for member in self.members:
            member.target = None
            if self.gathers:
                DATA.__set__(member.tensors()[-1], self.full)

    def show_in(self, grads: GradientShard) -> None:
        """Make `p.grad` views of these gradients."""
        self.grads, self.views = grads, []
        ends = [(m.piece.offset, m.piece.offset + m.piece.numel) for m in self.members]
        grads.bounds = [slice(*both) for both in ends]
        for member in self.members:
            with no_guard():
                local = member.local(grads.shown).view(member.param.shape)
                member.grad = local.as_subclass(ShardedGradient)
            member.grad.record, member.grad.owner = member.param.record, grads
            self.views.append(member.grad)

    def gather_master(self) -> torch.Tensor:
        """(numel,), master dtype: the whole flat buffer, newly allocated. A collective."""
        before_read([member.param for member in self.members])
        layout = self.plan.layout
        self.unit.compare(self.members[0].param, self.unit.plan.title)
        full = torch.empty(layout.numel, dtype=self.master.dtype, device=self.full.device)
        full.chunk(layout.num_parts)[self.unit.shard_index].copy_(self.master)
        self.unit.transport.fetch([full]).wait()
        return full

    @property
    def deferred(self) -> list[torch.Tensor]:
        """Sums that wait for a later backward."""
        deferred = self.collected if self.collects is Collects.DEFERRED else None
        return [x for x in (deferred, self.grads and self.grads.partial) if x is not None]

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the gradients that found their slot in use."""
        spill = self.collected if self.collects is Collects.SPILL else None
        return 0 if spill is None else spill.nbytes

    @property
    def reduced(self) -> GradientShard:
        """`grads` of a trained group."""
        assert self.grads is not None
        return self.grads

    @property
    def gathers(self) -> bool:
        """Whether the slot is a buffer other than the master."""
        return self.plan.slot is not None


@dataclass(eq=False)
class Swap:
    """An entry of a parameter in a module: `module._parameters[name]`."""

    module: nn.Module
    name: str
    member: Member


class Versions:
    """Versions of one unit's compute parameters.

    Args:
        unit: The unit; None without parameters.
        slots: Shards and compute parameters that are views of slots.
        own: Shards and compute parameters that are views of the shards.
    """

    def __init__(
        self, unit: Unit | None = None, slots: Sequence[Pair] = (), own: Sequence[Pair] = ()
    ) -> None:
        with no_guard():
            shards = [shard for shard, _ in (*slots, *own)]
            self._shards = shards if all(map(has_version, shards)) else []
            self._written = [shard._version for shard in self._shards]
        self._slots = tuple(compute for _, compute in slots)
        self._own = tuple(compute for _, compute in own)
        # Classes of tensors while the slots may contain other units.
        self._closed = {kind: released(kind, unit) for kind in set(map(type, self._slots))}
        kinds = [type(tensor) for tensor in self._slots]
        self._kinds = {True: kinds, False: [self._closed[kind] for kind in kinds]}
        self._views: dict[weakref.ref[Any], tuple[type, type]] = {}  # kept, with their classes
        may_write_own = unit is not None and unit.plan.mesh.world_size == 1
        self._checked = self._slots if may_write_own else (*self._slots, *self._own)
        self._is_open = True
        self._expect([tensor._version for tensor in (*self._slots, *self._own)])

    def mark(self, *, is_open: bool) -> None:
        """Let autograd read saved views of slots, or refuse: they may contain other units."""
        if self._is_open is not is_open:
            self._is_open = is_open
            set_versions(self._slots, self._marks[is_open])
            for own, kind in zip(self._slots, self._kinds[is_open], strict=True):
                own.__class__ = kind
            for weak, kinds in self._views.items():
                tensor = weak()
                if tensor is not None:
                    tensor.__class__ = kinds[is_open]

    def release(self) -> None:
        """Let the compute parameters get other slots; kept views of these stay refused."""
        self._views.clear()
        self.mark(is_open=True)

    def add(self, views: Sequence[torch.Tensor], unit: Any) -> None:
        """Refuse reads of these views of slots, too. See [Note: kept views] in computed.py."""
        self._views = {weak: kinds for weak, kinds in self._views.items() if weak() is not None}
        for kind in set(map(type, views)) - set(self._closed):
            self._closed[kind] = released(kind, unit)  # freed by the garbage collector only
        self._views |= {weakref.ref(view): (self._closed[type(view)], type(view)) for view in views}

    def see_writes(self) -> None:
        """Refuse graphs and autocast's casts from before the last writes. Outside of the guard."""
        written = [shard._version for shard in self._shards]
        if written != self._written:
            wrote = [new != old for new, old in zip(written, self._written, strict=True)]
            self._written = written
            self._expect([at + is_new for at, is_new in zip(self._expected, wrote, strict=True)])
            self._restore()
            torch.clear_autocast_cache()  # one torch.autocast may be around several steps

    def unexpected(self) -> set[int]:
        """Ids of the compute parameters that a forward wrote into, each reported once."""
        versions = [tensor._version for tensor in self._checked]
        if versions == self._expected[: len(versions)]:
            return set()
        self._restore()
        found = zip(self._checked, versions, self._expected, strict=False)
        return {id(tensor) for tensor, version, expected in found if version != expected}

    def _expect(self, versions: list[int]) -> None:
        """The versions of all tensors while autograd may read them."""
        at = len(self._slots)
        self._expected = versions
        self._at_own = tuple(versions[at:])
        self._marks = {True: tuple(versions[:at]), False: tuple(v + AWAY for v in versions[:at])}

    def _restore(self) -> None:
        set_versions(self._slots, self._marks[self._is_open])
        set_versions(self._own, self._at_own)


class Unit:
    """A unit on one rank.

    Attributes:
        swapped: Number of forwards and backwards in which the modules show compute parameters.
        num_expected: Number of gradients still expected in this backward.
        waiting: Parameters with final gradients that are not moved yet.
        slot_storages: Ids of the storages of its slots.
        entries: Table, name, shard and compute parameter of each swap.
        divisor: Divisor of its gradients' sums, which FSDP2's interface sets (compat/fsdp2/); None:
            the model's.
    """

    def __init__(self, plan: UnitPlan, groups: list[Group], transport: Transport) -> None:
        self.plan = plan
        self.index = plan.index
        self._title = plan.title
        self.groups = groups
        self.members = [member for group in groups for member in group.members]
        self.trained_groups = [group for group in groups if group.grads is not None]
        self.frozen_groups = [group for group in groups if group.grads is None]
        self.trained_members = [member for group in self.trained_groups for member in group.members]
        self.gathered = [group for group in groups if group.gathers]
        for group in groups:
            group.unit = self
            for member in group.members:
                member.group = group
        self.transport: Transport = transport
        self.shard_index = plan.mesh.coordinates(transport.rank)[1]
        self.fetch: Works | None = None
        self.reduction: Reduction | None = None
        self.swaps: list[Swap] = []
        self.slot_storages: set[int] = set()
        self.entries: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._has_cuts = False  # whether compute parameters are DTensors
        self._bound: list[tuple[Member, torch.Tensor, int]] = []  # local tensors and addresses
        self.has_replaced = False  # whether data of its compute parameters was set
        self._spans: list[tuple[int, int]] = []  # addresses that this rank shares with others
        self.has_kept_views = False  # when last searched
        self.own_views: set[int] = set()  # ids of the engine's plain views of slots
        self._num_vain = 0  # searches for kept views that found none
        self.swapped = 0
        self.divisor: float | None = None
        self.versions = Versions()
        self.num_expected = 0
        self.waiting: list[Member] = []
        self.on_gradient: Callable[[Member], None]  # set by `bind`

    def compare(self, param: ShardedParameter, what: str) -> None:
        """Check that all ranks gather the same tensor, which all or none wrote. A collective."""
        if self.plan.mesh.shard * self.plan.mesh.inner > 1:
            counts: dict[str, int] = {Count.WRITES: 0, Count.SOURCES: 0}
            param.record.norms.compare(f"the whole of {what}", counts)

    def start_gather(self) -> None:
        """Copy this rank's part to the slot and start to fetch the other parts."""
        disk = self.gathered[0].disk if self.gathered else None
        if disk is not None:
            disk.begin()  # before `claim`, where a peer that waits for it does not come
        for group in self.gathered:
            self.transport.claim(group.full)
        loads = [load for group in self.gathered if (load := group.load()) is not None]
        if self.gathered:
            fulls = [group.full for group in self.gathered]
            fetch = partial(self.transport.fetch, fulls, self._title)
            self.fetch = disk.gather(loads, fetch) if disk is not None and loads else fetch()

    def wait(self) -> None:
        """Wait until the slot contains the whole unit."""
        if self.fetch is not None:
            self.fetch.wait()
            self.fetch = None

    def poison(self) -> None:
        """Fill the slot with NaN, so that stale reads are visible (law 2).

        Peers copy this rank's part of a slot in shared memory. One that does not enter the unit may
        do so much later, and wait for this rank meanwhile.
        """
        for group in self.gathered:
            for at, part in enumerate(group.full.chunk(group.plan.layout.num_parts)):
                if at != self.shard_index or not self.transport.home.is_read(group.full):
                    part.fill_(float("nan"))

    def check_params(self) -> None:
        """Check that the modules have the parameters with which they were sharded.

        Raises:
            EngineError: A module has another object, which the forward would not use.
        """
        if self.swapped == 0:
            for table, name, param, _ in self.entries:
                if (found := table.get(name)) is not param:
                    if getattr(found, "__dict__", None) is vars(param):  # see `swap_in`
                        raise EngineError(
                            f"{param.record.piece.name}: expected a backward over graphs of one "
                            "sharding; this one also reaches a graph from before the model was "
                            "sharded again (a change of requires_grad, a dtype or a parameter). "
                            "Run backward on the graphs one after another."
                        )
                    raise EngineError(
                        f"{param.record.piece.name}: expected the parameter that fs.shard cut; its "
                        "module has another (an assignment, functional_call), which forward does "
                        "not use. Write into the shard, or change parameters before fs.shard."
                    )

    def check_frozen(self) -> None:
        """Check that no shard is trained that was frozen when it was sharded."""
        for group in self.frozen_groups:
            with no_guard():
                group.follow_freezing()

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of weights whose memory will be reused."""
        kind = type(tensor)
        if issubclass(kind, (Guarded, Released)):  # isinstance would call Python code
            return False  # another unit's, or one kept in a list
        try:
            at = (tensor if kind is torch.Tensor else plain(tensor)).data_ptr()
        except RuntimeError:  # wrappers of torch.func have no memory
            return False
        for start, stop in self._spans:  # noqa: SIM110  in the hot path
            if start <= at < stop:
                return True
        return False

    def find_views(self, units: Sequence[Unit], num_before: int | None) -> None:
        """Find views of the weights that somebody keeps. See [Note: kept views] in computed.py.

        Args:
            units: All units, whose own views of the slots are none.
            num_before: `num_views` before the forward; None if it makes a graph.
        """
        if (
            num_before is not None
            and not self.has_kept_views  # else a view may replace a known one
            and (self._num_vain > MAX_VAIN or self.num_views() <= num_before)
        ):
            return
        for generations in ((0, 1),) if num_before is None else ((0, 1), (2,)):
            found = kept_tensors(generations, self.shares_memory)
            found = [t for t in found if not any(id(t) in unit.own_views for unit in units)]
            self.has_kept_views = bool(found)
            if found:
                self.versions.add(found, self)
                return
        self._num_vain += num_before is not None

    def num_views(self) -> int:
        """Number of tensors that share its slots, including those that graphs saved."""
        return sum(map(storage_use_count, self.slot_storages))

    def name_at(self, kept: Any) -> str:
        """The name of the parameter whose memory a tensor shares."""
        at = getattr(kept, "_local_tensor", kept).data_ptr()
        found = (m for m, view, start in self._bound if 0 <= at - start < view.nbytes)
        return next((clean_name(m.piece.name) for m in found), self.plan.title)

    def swap_in(self) -> None:
        """Show the compute parameters in the modules. Calls are counted, since they nest."""
        self.swapped += 1
        if self.swapped == 1:
            for table, name, param, compute in self.entries:
                table[name] = compute
                compute.__dict__ = param.__dict__  # both share attributes that the user sets

    def check_writes(self) -> None:
        """Check that a forward did not write parameters: the next gather would undo it.

        Raises:
            EngineError: A parameter was written.
        """
        with no_guard():  # twice as fast
            written = self.versions.unexpected()
            if not (written or self.has_replaced or self._has_cuts):
                return
        for member, view, address in self._bound:
            if view.data_ptr() != address or any(id(t) in written for t in member.tensors()):
                raise EngineError(
                    f"{member.piece.name}: expected a forward that does not modify its parameters; "
                    "it wrote into this parameter (max_norm, clamp_, weight averaging, "
                    "p.data.copy_ ...) or replaced its data (p.data = ..., .float(); dtype now "
                    f"{view.dtype}). Write into the shards between steps, after fs.reset(model) if "
                    "a KeyboardInterrupt left a forward; for another dtype name its module in "
                    "fp32_modules, or leave param_dtype out."
                )
        self.has_replaced = False

    def swap_out(self) -> None:
        """Show the user's parameters in the modules again, once calls are balanced."""
        self.swapped -= 1
        if self.swapped == 0:
            self.show_shards()

    def show_shards(self) -> None:
        """Restore the user's parameters at once, whatever is open.

        Parameters that a forward replaced stay, so that `check_params` finds them.
        """
        for table, name, param, compute in self.entries:
            if table.get(name) is compute:
                table[name] = param
            if self._has_cuts:  # a forward may have frozen the DTensor alone
                param.requires_grad_(compute.requires_grad)
            compute.__dict__ = {}  # autograd's node must not keep the record

    def unbind(self) -> None:
        """Drop all views of slots."""
        self.versions.release()
        self.entries, self._bound, self.versions = [], [], Versions()
        for group in self.groups:
            group.unbind()

    def bind(self, rings: Rings, on_gradient: Callable[[Member], None]) -> None:
        """Point the compute parameters at their slot, and hook their gradients."""
        self.on_gradient = on_gradient
        for group in self.groups:
            group.bind(rings, self.shard_index)
        self.entries = [
            (swap.module._parameters, swap.name, swap.member.param, swap.member.compute)
            for swap in self.swaps
        ]
        for member in self.members:
            vars(member.param).update(vars(member.compute))  # marks a DTensor as a parameter
        self._has_cuts = any(member.cut is not None for member in self.members)
        self._bound = [(m, m.tensors()[-1], m.tensors()[-1].data_ptr()) for m in self.members]
        slots, own = ([m for m in self.members if m.group.gathers is yes] for yes in (True, False))
        pairs = ([(m.param, t) for m in many for t in m.tensors()] for many in (slots, own))
        self.versions = Versions(self, *pairs)
        self.own_views = {id(t) for g in self.groups for t in (g.full, g.part, g.full._base)}
        self.own_views |= {id(m.tensors()[-1]) for m in self.members}
        self.slot_storages = {g.full.untyped_storage()._cdata for g in self.gathered}
        shared = [group.full for group in self.groups if group.gathers or group.plan.shared]
        self._spans = [(full.data_ptr(), full.data_ptr() + full.nbytes) for full in shared]


def is_reached(member: Member) -> bool:
    """Whether the running backward computes the node."""
    try:
        reached = will_execute(member.node)  # one that was frozen since may be trained in a hook
    except RuntimeError as error:
        raise EngineError(
            "torch.autograd.grad: expected inputs that are not parameters; got the compute "
            f"parameter of {member.piece.name!r}. Call backward() and read p.grad."
        ) from error
    if reached and not issubclass(type(member.param), Guarded):
        raise EngineError(
            f"backward inside fs.unsharded: expected {member.piece.name!r} as a shard; gradients "
            "of whole parameters cannot be stored in shards. Train outside of the block."
        )
    return reached


def alive(weak: weakref.ref[T], what: str) -> T:
    """Returns the referent of a weak reference.

    Objects that C++ owns (gradients, hooks of autograd nodes) must refer to the engine weakly. The
    garbage collector does not see cycles through C++, so the model would never be freed.

    Raises:
        EngineError: The object was deleted.
    """
    found = weak()
    if found is None:
        raise EngineError(f"{what}: expected the sharded model to exist; it was deleted.")
    return found


def _current(weak: weakref.ref[Member]) -> nn.Parameter:
    """Returns a compute parameter, with its version updated for earlier writes."""
    member = alive(weak, "a parameter")
    with no_guard():
        member.group.unit.versions.see_writes()
    return member.compute


def gradient_hook(member: Member) -> Callable[..., None]:
    """Makes the hook that a compute parameter's node calls with its final gradient."""
    return partial(_on_gradient, weakref.ref(member))


@uncompiled
def _on_gradient(weak: weakref.ref[Member], *_: Any) -> None:
    """The hook of a compute parameter's node, which autograd calls with the final gradient."""
    member = weak() or alive(weak, "backward")
    member.group.unit.on_gradient(member)


def _padding(layout: FlatLayout) -> list[tuple[int, int]]:
    """Ranges of the flat buffer that belong to no parameter."""
    ends = [0, *(placement.stop for placement in layout.placements)]
    starts = [*(placement.offset for placement in layout.placements), layout.numel]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
