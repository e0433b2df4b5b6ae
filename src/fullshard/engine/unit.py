"""A unit on one rank: its shards, its slots, its two kinds of parameters."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from fullshard.engine._torch_compat import local_tensor, no_guard, will_execute
from fullshard.engine.cuts import Cut, is_distributed, plain
from fullshard.engine.homes import DeviceHomes
from fullshard.engine.parameter import PlacedParameter, ShardedGradient, ShardedParameter
from fullshard.engine.versions import Versions
from fullshard.errors import EngineError, UnsupportedModelError
from fullshard.planner.layout import Slice
from fullshard.planner.slots import Ring
from fullshard.planner.units import DtypeContract, GroupPlan, SlotRef, UnitPlan
from fullshard.transport import Fetch, Reduction, Transport, Weights
from fullshard.transport.base import Hook, HookedReduction, torch_dtype

LARGE_NUMEL = 16_384

OnGradient = Callable[["Unit", "Group", "Member"], None]


class Computed(nn.Parameter):
    """The full parameter that forward sees. What is written into its `.data` counts as written.

    torch's own `.data` has a version of its own, so that `Unit.check_writes` would miss it.
    """

    data = property(torch.Tensor.detach, torch.Tensor.data.__set__)  # type: ignore[assignment]


@dataclass(eq=False)
class Member:
    """One parameter of a group.

    Attributes:
        param: The user's own object, the shard.
        piece: Which elements it holds.
        compute: The full parameter that forward sees; its `.data` is a view of the slot.
        grad: What `param.grad` shows: a view of the gradient shard (None where frozen).
        node: The autograd node that accumulates into `compute`.
        expected: Whether the running backward will reach it on this rank.
        touched: Whether it got a gradient since the last reduction on this rank.
        target: The parameter's place in the gradient slot (None where frozen).
        cut: How other axes have cut it: `compute` is a DTensor then.
        address: Where the shard was cut; see `address_of`.
    """

    param: ShardedParameter
    piece: Slice
    compute: nn.Parameter
    offset: int
    grad: ShardedGradient | None = None
    node: Any = None
    expected: bool = False
    touched: bool = False
    target: torch.Tensor | None = None
    cut: Cut | None = None
    address: int = 0

    def show(self, view: torch.Tensor, *, trainable: bool) -> nn.Parameter:
        """Make what forward sees of a view of the slot.

        It is made of nothing and gets its `.data`: a parameter made *of* a slot view would share
        the slot's version counter, and autograd would object to the first refill.
        """
        compute = view.new_empty(0)
        if self.cut is not None:
            compute = self.cut.show(view.new_empty(1).expand(view.shape))
        self.compute = Computed(compute, requires_grad=trainable)
        self.tensors()[-1].data = view
        return self.compute

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What forward sees, and the local tensor in it; each has a version."""
        compute = self.compute
        return (compute,) if self.cut is None else (compute, local_tensor(compute))

    @cached_property
    def numel(self) -> int:
        return math.prod(self.piece.shape)

    @cached_property
    def is_large(self) -> bool:
        """Whether its gradient is moved at once: memory counts more than a call."""
        return self.numel > LARGE_NUMEL


class GradientShard:
    """A group's reduced gradients on this rank.

    Attributes:
        sums: (part_numel,), accumulate dtype.
        shown: (part_numel,), master dtype, what `p.grad` views; the sums themselves where these
            have that dtype.
        held: (part_numel,), accumulate dtype: summed over shards, not yet over replicas.
        carries: Whether what is shown stays in the next sum.
        memory: What `shown` lies in.
    """

    def __init__(self, numel: int, dtypes: DtypeContract, homes: DeviceHomes) -> None:
        self._made_with = numel, dtypes, homes
        self.sums = homes.gradients.zeros(numel, torch_dtype(dtypes.accumulate))
        self.shown = self.sums
        if dtypes.master is not dtypes.accumulate:
            self.shown = homes.gradients.zeros(numel, torch_dtype(dtypes.master))
        self.held: torch.Tensor | None = None
        self.carries = False
        self.memory = self.shown.untyped_storage()
        self.holders: list[int] = []  # of the memory and of each gradient, the engine's own
        self.lands_aside = homes.lands_aside
        self._landing = torch.empty(0, dtype=self.sums.dtype, device=homes.device)

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + (0 if self.shown is self.sums else self.shown.nbytes)

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the dtype and device that reductions land in."""
        return self._landing

    def anew(self) -> GradientShard:
        """Another one of the same kind, zero."""
        return GradientShard(*self._made_with)

    def take(self, landed: torch.Tensor, divisor: float) -> None:
        """Add what a reduction brought, or replace what was there; show it.

        Args:
            landed: (part_numel,), accumulate dtype: the sum over ranks; the sums themselves, or a
                buffer of its own.
            divisor: What sums are divided by.
        """
        landed.div_(divisor)
        if self.carries:
            self._take_writes()
            self.sums.add_(landed.to(self.sums.device))
        elif landed is not self.sums:
            self.sums.copy_(landed)  # and wait: the host reads it next
        self.show()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients."""
        self._take_writes()
        self.sums.mul_(factor.to(self.sums))
        self.show()

    def show(self) -> None:
        """Cast the sums once into what `p.grad` shows."""
        if self.shown is not self.sums:
            self.shown.copy_(self.sums)

    def _take_writes(self) -> None:
        """What the user wrote into `p.grad` counts; the rest keeps its finer sum."""
        if self.shown is not self.sums:
            wrote = self.shown != self.sums.to(self.shown.dtype)
            self.sums.copy_(torch.where(wrote, self.shown.to(self.sums.dtype), self.sums))


@dataclass(eq=False)
class Group:
    """One flat buffer on this rank.

    Attributes:
        master: (part_numel,), master dtype: the only copy at rest, where the plan has its home.
        part: (part_numel,): this rank's part of the slot, compute dtype.
        full: (numel,): the slot, or the master itself where nothing is gathered.
        wire: The dtype that gradients are reduced in.
        grads: Reduced gradients; None where frozen.
        views: What `p.grad` shows of them, parameter by parameter.
        grad_full: (numel,), reduce dtype: where gradients are collected now.
        deferred: (numel,), accumulate dtype: unreduced gradients kept under `no_sync`.
    """

    plan: GroupPlan
    master: torch.Tensor
    full: torch.Tensor
    part: torch.Tensor
    members: list[Member]
    wire: torch.dtype
    grads: GradientShard | None = None
    grad_slot: torch.Tensor | None = None
    grad_full: torch.Tensor | None = None
    deferred: torch.Tensor | None = None
    padding: list[tuple[int, int]] = field(default_factory=list)
    gaps: list[torch.Tensor] = field(default_factory=list)
    views: list[ShardedGradient] = field(default_factory=list)

    def is_in_place(self) -> bool:
        """Whether all shards are where they were cut, and train as they did. Outside the guard."""
        members, dtype = self.members, self.master.dtype
        return (
            [address_of(m.param) for m in members] == [m.address for m in members]
            and all(m.param.dtype is dtype for m in members)
            and all(m.param.requires_grad is m.compute.requires_grad for m in members)
        )

    def hold(self, grads: GradientShard) -> None:
        """Keep reduced gradients there from now on; `p.grad` will view them."""
        self.grads, self.views = grads, []
        for member in self.members:
            local = grads.shown[member.piece.offset : member.piece.offset + member.piece.numel]
            with no_guard():
                member.grad = local.view(member.param.shape).as_subclass(ShardedGradient)
            member.grad.record, member.grad.home = member.param.record, grads
            self.views.append(member.grad)

    @property
    def gathers(self) -> bool:
        """Whether the slot is another buffer than the master."""
        return self.plan.slot is not None

    @property
    def is_common(self) -> bool:
        """Whether what is computed with is no memory of this rank's alone, or a copy."""
        return self.gathers or self.plan.shared


@dataclass(eq=False)
class Swap:
    """Where a parameter stands in a module: `module._parameters[name]`."""

    module: nn.Module
    name: str
    member: Member


class Unit:
    """A unit on one rank."""

    def __init__(self, plan: UnitPlan, groups: list[Group], transport: Transport) -> None:
        self.plan = plan
        self.index = plan.index
        self.groups = groups
        self.trained = [group for group in groups if group.grads is not None]
        self.gathered = [group for group in groups if group.gathers]
        self.transport: Transport = transport
        self.part = plan.mesh.coordinates(transport.rank)[1]
        self.fetch: Fetch | None = None
        self.reduction: Reduction | None = None
        self.reduce_hook: Hook | None = None
        self.swaps: list[Swap] = []
        self.trainees = [member for group in self.trained for member in group.members]
        # What the hot path needs of members and swaps, so that it need not look it up.
        self.places: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._bound: list[torch.Tensor] = []  # what forward sees, and where that lies
        self._addresses: list[int] = []
        self._common: list[torch.Tensor] = []
        self._attributes: list[dict[str, Any]] = []  # of the shards: "record", and the user's
        self._lent: list[dict[str, Any]] = []  # of the compute parameters: the user's
        self._versions: list[int] = []
        self._spans: list[tuple[int, int]] = []  # of addresses that are not this rank's alone
        self.swapped = 0  # forwards and backwards that see the compute parameters
        self.in_backward = False
        self.versions = Versions()
        self.left = 0  # gradients still expected in this backward
        self.waiting: list[tuple[Group, Member]] = []  # whose gradients are final and not moved
        self.on_gradient: OnGradient = _unbound

    def gather(self) -> None:
        """Place this rank's part in the slot and start to fetch the others'."""
        for group in self.gathered:
            group.part.copy_(group.master, non_blocking=True)  # casts in the same write
        if self.gathered:
            self.fetch = self.transport.fetch([group.full for group in self.gathered])

    def wait(self) -> None:
        """Return when the slot holds the whole unit."""
        if self.fetch is not None:
            self.fetch.wait()
            self.fetch = None

    def reduce(self, fulls: Sequence[torch.Tensor]) -> None:
        """Start to sum gradients over ranks."""
        if self.reduce_hook is None:
            self.reduction = self.transport.reduce(fulls)
        else:
            self.reduction = HookedReduction(self.reduce_hook, fulls, self.plan.mesh.shard)

    def poison(self) -> None:
        """Fill the slot with NaN, so that reading it now is seen (law 2)."""
        for group in self.gathered:
            group.full.fill_(float("nan"))

    def check_params(self) -> None:
        """The modules must hold what they held when they were sharded.

        Raises:
            EngineError: One holds another object, which the forward would not see.
        """
        if self.swapped == 0:
            for table, name, param, _ in self.places:
                if table.get(name) is not param:
                    raise EngineError(
                        f"{param.record.piece.name}: expected the parameter that fs.shard cut; its "
                        "module holds another object (an assignment, functional_call), which the "
                        "forward would not see. Write into the shard in place, or change "
                        "parameters before fs.shard."
                    )

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with weights that will not stay as they are."""
        if type(tensor) in (ShardedParameter, PlacedParameter):  # isinstance runs Python
            return False  # at rest: another unit's, or kept in a list
        try:
            at = plain(tensor).data_ptr()
        except RuntimeError:  # a wrapper of torch.func has no memory
            return False
        for start, stop in self._spans:  # noqa: SIM110  in the hot path
            if start <= at < stop:
                return True
        return False

    def swap_in(self) -> None:
        """Let the modules see the compute parameters. Counted: forwards and backwards nest."""
        self.swapped += 1
        if self.swapped == 1:
            for table, name, _, compute in self.places:
                table[name] = compute
            if sum(map(len, self._attributes)) > len(self._attributes):
                for own, lent in zip(self._attributes, self._lent, strict=True):
                    lent.update(own)
                    del lent["record"]

    def begin_forward(self) -> None:
        """The modules see the compute parameters, whose versions are noted."""
        self.swap_in()
        self._versions = [compute._version for compute in self._common]

    def check_writes(self) -> None:
        """A forward may not write into parameters: the slot's next fill would undo it.

        Raises:
            EngineError: It did.
        """
        if [tensor._version for tensor in self._common] == self._versions and [
            tensor.data_ptr() for tensor in self._bound
        ] == self._addresses:
            return
        before = dict(zip(map(id, self._common), self._versions, strict=True))
        members = [member for group in self.groups for member in group.members]
        for member, bound, address in zip(members, self._bound, self._addresses, strict=True):
            wrote = any(before.get(id(t), t._version) != t._version for t in member.tensors())
            if wrote or bound.data_ptr() != address:
                raise EngineError(
                    f"{member.piece.name}: expected a forward that leaves its parameters alone; it "
                    "wrote into this one (max_norm, clamp_, weight averaging, p.data.copy_ ...), "
                    "which the next gather would undo, or other ranks would see or miss; or it "
                    f"gave it other memory, of {bound.dtype} now (p.data = ..., module.to, "
                    ".float()), while its slot stays as it is. Write into the shards between "
                    "steps; for another dtype name its module in fp32_modules, or leave "
                    "param_dtype out."
                )

    def swap_out(self) -> None:
        """Let the modules show the user's parameters again."""
        self.swapped -= 1
        if self.swapped == 0:
            self.show_shards()

    def show_shards(self) -> None:
        """Put the user's parameters back, whatever is open.

        What a forward put in their place stays there, for `check_params` to find.
        """
        for table, name, param, compute in self.places:
            if table.get(name) is compute:
                table[name] = param
        if any(self._lent):  # forward may have set some
            for own, lent in zip(self._attributes, self._lent, strict=True):
                own.update(lent)
                lent.clear()

    def unbind(self) -> None:
        """Hold no slots."""
        self.places, self._bound, self._common, self.versions = [], [], [], Versions()
        for group in self.gathered:
            group.full = group.part = group.full.new_empty(0)
        for group in self.trained:
            group.grad_slot, group.gaps = None, []
        for member in (member for group in self.groups for member in group.members):
            member.compute, member.node, member.target = nn.Parameter(torch.empty(0)), None, None

    def bind(self, rings: Rings, on_gradient: OnGradient) -> None:
        """Point the compute parameters at their slot, and listen for their gradients."""
        self.on_gradient = on_gradient
        for at, group in enumerate(self.groups):
            numel = group.plan.layout.numel
            if group.plan.slot is not None:
                group.full = rings.view(group.plan.slot, numel)
                group.part = group.full.chunk(group.plan.layout.num_parts)[self.part]
            if group.plan.grad_slot is not None:
                slot = group.grad_slot = rings.view(group.plan.grad_slot, numel)
                group.gaps = [slot[start:stop] for start, stop in group.padding]
            for index, member in enumerate(group.members):
                stop = member.offset + member.numel
                view = group.full[member.offset : stop].view(member.piece.shape)
                compute = member.show(view, trainable=group.plan.trainable)
                is_whole = group.plan.layout.num_parts == 1 and not group.gathers
                of_unit = partial(_current, weakref.ref(self), weakref.ref(compute))
                member.param.record.compute = of_unit if is_whole else None
                if group.grad_slot is not None:
                    target = group.grad_slot[member.offset : stop]
                    member.target = target.view(member.piece.shape)
                if group.plan.trainable:
                    member.node = get_gradient_edge(compute).node
                    hook = _gradient_hook(self, at, index)
                    member.node.register_hook(hook)  # also where autograd brings no gradient
                    with no_guard():  # it may be frozen since it was sharded
                        compute.requires_grad_(member.param.requires_grad)
        self.places = [
            (swap.module._parameters, swap.name, swap.member.param, swap.member.compute)
            for swap in self.swaps
        ]
        members = [member for group in self.groups for member in group.members]
        self._bound = [member.tensors()[-1] for member in members]
        self._addresses = [tensor.data_ptr() for tensor in self._bound]
        self._attributes = [vars(member.param) for member in members]
        self._lent = [vars(member.compute) for member in members]
        lent = [(m.param, t) for g in self.gathered for m in g.members for t in m.tensors()]
        rest = [m for g in self.groups if not g.gathers for m in g.members]
        own = [(m.param, tensor) for m in rest for tensor in m.tensors()]
        self.versions = Versions(lent, own)
        self._spans = [
            (group.full.data_ptr(), group.full.data_ptr() + group.full.nbytes)
            for group in self.groups
            if group.is_common
        ]
        is_copied = self.plan.mesh.world_size > 1
        common = [group for group in self.groups if group.is_common or is_copied]
        self._common = [t for group in common for m in group.members for t in m.tensors()]


def expect(members: Sequence[Member]) -> int:
    """Note which of them the running backward will reach; returns how many."""
    left = 0
    for member in members:
        member.expected = is_reached(member)
        left += member.expected
    return left


def is_reached(member: Member) -> bool:
    """Whether the running backward brings it a gradient."""
    try:
        return member.compute.requires_grad and will_execute(member.node)
    except RuntimeError as error:
        raise EngineError(
            "torch.autograd.grad: expected inputs that are not parameters; got the compute "
            f"parameter of {member.piece.name!r}. Call backward() and read p.grad."
        ) from error


def _unbound(*_: Any) -> None:
    raise AssertionError("a unit that is not bound to slots gets no gradients")


def _current(unit: weakref.ref[Unit], compute: weakref.ref[nn.Parameter]) -> nn.Parameter:
    """A compute parameter whose version says what was written since."""
    alive, found = unit(), compute()
    if alive is None or found is None:
        raise EngineError("a parameter: expected the sharded model to exist; it was deleted.")
    with no_guard():
        alive.versions.see_writes()
    return found


def _gradient_hook(unit: Unit, group: int, member: int) -> Callable[[torch.Tensor], None]:
    """What a compute parameter calls when its gradient is final.

    It must not hold the unit: the way from a parameter to its hook leads through C++, where the
    garbage collector sees no cycle, and no model would ever be freed.
    """
    weak = weakref.ref(unit)

    def hook(*_: Any) -> None:
        alive = weak()
        if alive is None:
            raise EngineError("backward: expected the sharded model to exist; it was deleted.")
        at = alive.groups[group]
        alive.on_gradient(alive, at, at.members[member])

    return hook


# ---- from whole parameters to shards


def address_of(shard: torch.Tensor) -> int:
    """Where a shard's elements lie; where a rank has none, its storage does. Outside the guard.

    So what moves a parameter is noticed on all ranks, also on those that hold no element of it.
    """
    return shard.data_ptr() or shard.untyped_storage().data_ptr()


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
    is_placed = is_distributed(param)
    if type(param) not in (nn.Parameter, ShardedParameter, PlacedParameter) and not is_placed:
        raise UnsupportedModelError(
            f"{piece.name}: expected a plain nn.Parameter; got {type(param).__name__}. "
            "Leave it out of sharding (ignore) or convert it first."
        )
    with no_guard():
        param.grad = None
    shown = data.view(shard_shape(piece, whole=whole))
    if is_placed:
        placed: Any = torch.Tensor._make_subclass(PlacedParameter, shown, param.requires_grad)
        _swap(param, placed, piece)
    elif param.is_meta or param.device != data.device:
        _swap(param, nn.Parameter(shown, requires_grad=param.requires_grad), piece)
    if not isinstance(param, ShardedParameter):
        param.__class__ = ShardedParameter
    with no_guard():
        param.data = shown
    return param  # type: ignore[return-value]


def _swap(param: nn.Parameter, other: nn.Parameter, piece: Slice) -> None:
    """Give the object another's device or kind, which `.data =` cannot."""
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"{piece.name}: expected a parameter that can move from {param.device} to "
            f"{other.device}; something holds a weak reference to it: {error} Drop that, or move "
            "the model before fs.shard."
        ) from error


def cut_group(
    plan: GroupPlan,
    params: Sequence[nn.Parameter],
    part: int,
    homes: DeviceHomes,
    shared: Weights | None,
) -> Group:
    """Cut a group's parameters: keep this rank's part, free the rest.

    Args:
        plan: The group's layout.
        params: The user's parameters in the layout's order: whole, or on meta or shards already,
            which become zero.
        part: Index of this rank on the shard axis.
        homes: Where things live.
        shared: The memory of the weights; None where it is this rank's own.
    """
    layout = plan.layout
    dtypes = plan.dtypes
    if shared is None:
        master = homes.parameters.zeros(layout.part_numel, torch_dtype(dtypes.master))
    else:
        master = shared.master
    members = []
    whole = layout.num_parts == 1
    for param, placement, piece in zip(params, layout.placements, layout.slices(part), strict=True):
        local = slice(piece.offset, piece.offset + piece.numel)
        if not param.is_meta and not isinstance(param, ShardedParameter):
            with torch.no_grad():
                master[local].copy_(plain(param).reshape(-1)[piece.start : piece.stop])
        cut = Cut.of(param)
        sharded = present(param, master[local], piece, whole=whole)
        compute = nn.Parameter(torch.empty(0, device=homes.device), requires_grad=False)
        with no_guard():
            at = address_of(sharded)
        members.append(Member(sharded, piece, compute, placement.offset, cut=cut, address=at))
    empty = torch.empty(0, dtype=torch_dtype(dtypes.compute), device=homes.device)
    full = master if plan.slot is None else empty
    full = full if shared is None else shared.full
    group = Group(plan, master, full, empty, members, torch_dtype(dtypes.reduce))
    if plan.trainable:
        group.grads = GradientShard(layout.part_numel, dtypes, homes)
    group.padding = _padding(plan)
    return group


def _padding(plan: GroupPlan) -> list[tuple[int, int]]:
    """Ranges of the flat buffer that belong to no parameter."""
    gaps, end = [], 0
    for placement in plan.layout.placements:
        if placement.offset > end:
            gaps.append((end, placement.offset))
        end = placement.stop
    if plan.layout.numel > end:
        gaps.append((end, plan.layout.numel))
    return gaps


# ---- slots


class Rings:
    """Slots by ring name and index: flat buffers whose addresses never change.

    Args:
        rings: What the plan lists.
        given: Slots whose memory is somebody else's, by ring.
        device: Device of all others.
        poison: Fill them with NaN.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        given: Mapping[str, list[torch.Tensor]],
        device: torch.device,
        *,
        poison: bool,
    ) -> None:
        self._buffers: dict[str, list[torch.Tensor]] = {}
        self._rings = rings
        for ring in rings:
            dtype = torch_dtype(ring.dtype)
            slots = given.get(ring.name)
            if slots is None:
                make = partial(torch.zeros, ring.numel, dtype=dtype, device=device)
                slots = [make() for _ in range(ring.count)]
            if poison:
                for slot in slots:
                    slot.fill_(float("nan"))
            self._buffers[ring.name] = slots

    def give(self, rings: Sequence[Ring]) -> dict[str, list[torch.Tensor]]:
        """Give away the slots of rings that are alike, and drop all others."""
        held, self._buffers = self._buffers, {}
        return {ring.name: held[ring.name] for ring in rings if ring in self._rings}

    def view(self, ref: SlotRef, numel: int) -> torch.Tensor:
        """(numel,): a group's part of its slot."""
        return self._buffers[ref.ring][ref.index][ref.base : ref.base + numel]

    def num_bytes(self, *, gradients: bool) -> int:
        """Bytes of the rings of gradients, or of all others."""
        return sum(
            slot.nbytes
            for name, slots in self._buffers.items()
            if name.endswith(".grad") is gradients
            for slot in slots
        )
