"""The engine of a sharded model on this rank: plan, units, slots, hooks, and their lifetime.

[Note: parameters that come later]
The plan contains the parameters that the model had in `fs.shard`. A parameter that is added later
would train separately on each rank. The objects in all modules' tables are therefore compared at
every step. If they changed, every parameter outside the plan is checked.

[Note: parts of the root]
`generate` calls the encoder of a T5 or the base of a PEFT model, not the sharded module. When a
module of the root unit is called from outside, the root unit is therefore entered before the
module's forward and left after it. A weight that is tied to another unit belongs to a unit around
both, which is entered when one of them is called directly.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.config.values import GradReduction
from fullshard.engine._torch_compat import (
    call_outside_compile,
    graph_task_id,
    is_tracing,
    no_guard,
    outside_modes,
    params_of_ddp,
    unless_compiling,
)
from fullshard.engine.attributes import ModuleTensors, own_modules, tensors_in
from fullshard.engine.gradients import Gradients
from fullshard.engine.guard import refuse_gradients
from fullshard.engine.model_spec import places_of
from fullshard.engine.modules import cast_tensors, convert_reentrant
from fullshard.engine.norms import Count, GradientNorms, from_host
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.placing import Masters, Rings, cut_group
from fullshard.engine.record import ShardRecord, address_of, check_fresh
from fullshard.engine.replicas import STEPS, check_replicas
from fullshard.engine.step import Runtime
from fullshard.engine.streamed import StreamedRuntime
from fullshard.engine.unit import Group, Member, Swap, Unit, alive
from fullshard.errors import EngineError, ShardedTensorError, raise_together
from fullshard.planner.mesh import Mesh
from fullshard.planner.plan import Plan
from fullshard.planner.schedule import Event, EventKind, Recorder, Sync
from fullshard.planner.units import UnitPlan, ancestors_of
from fullshard.transport import streams
from fullshard.transport.base import Hook, Slots, Transport, torch_dtype
from fullshard.transport.groups import all_values, first_value, own_group

T = TypeVar("T")
_CALL = nn.Module._call_impl.__code__
ATTRIBUTE = "_fullshard"  # attribute of a sharded model that refers to its engine
NO_DDP = (
    "DistributedDataParallel of a sharded model: expected an unsharded model; fs.shard already "
    "sums gradients over the ranks. Remove DistributedDataParallel."
)
_TRACED = (
    "tracing of a sharded model: expected a whole model; a trace (torch.jit.trace, make_fx, "
    "torch.export) would keep one rank's gathers. Trace a model that was not sharded, with the "
    "weights of fs.full_state_dict(model)."
)


class Engine:
    """The state and hooks that `fs.shard` adds to a model.

    Args:
        model: The user's module, whole parameters.
        plan: The plan to run.
        config: The configuration that the plan was made with.
        transports: One transport for each mesh of the plan.
        recorder: Records every event.
        masters: Allocates the shards, and reads initial values.
    """

    _compared_at = -1  # step of the last comparison of replicas
    _most_spilled = 0  # bytes
    replaced: Iterable[Engine] = ()  # earlier engines that are alive, for their graphs

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        config: ShardConfig,
        transports: dict[Mesh, Transport],
        recorder: Recorder,
        masters: Masters,
    ) -> None:
        transport = transports[plan.mesh]
        for other in transports.values():
            other.phase = transport.phase
        self.plan = plan
        self.config = config
        self.transport = transport
        self.home = masters.home
        self.transports = transports
        self.recorder = recorder
        self.unsharded = 0  # open `fs.unsharded` blocks
        self.rank = transport.rank
        params = places_of(model)
        self.device = masters.homes.device
        self.norms = GradientNorms(transport, self.device)
        self.units: list[Unit] = []
        self._num_trained = 0
        for unit_plan in plan.units:  # one by one: a whole parameter is freed before the next
            self.units.append(self._cut(model, unit_plan, params, masters))
        self.groups = [group for unit in self.units for group in unit.groups]
        self.members = [member for unit in self.units for member in unit.members]
        divisor = plan.mesh.num_copies if config.grad_reduction is GradReduction.MEAN else 1
        self.gradients = Gradients(transport, self.norms, divisor, self._on_spill, self.home)
        if any(unit.plan.mesh.replicate > 1 for unit in self.units):
            self.gradients.inner_sync = Sync.INNER
        made = streams.of(self.device)
        kind = Runtime if made is None else partial(StreamedRuntime, made, plan.homes)
        self.runtime = kind(
            self.units, plan.scheduler(), self.gradients, recorder, poison=config.poison
        )
        self.norms.disk, disk = masters.homes.disk, masters.homes.gradients.disk
        if disk is not None and made is None:
            self.gradients.to_host = disk.to_disk
        self.runtime.before_step = self._before_step
        self.runtime.agree_on_frozen = partial(_agree_on_frozen, self.runtime)
        self.rings = self._bind({})
        self.handles: list[Any] = []  # of hooks, removed when the model is sharded again
        self.index_of: dict[int, int] = {}  # units by their module's id
        self.entered_part = 0  # id of the module through which the root unit was entered
        # By unit: units around it with a weight tied inside it, and those that each call entered.
        self.around: dict[int, list[int]] = {}
        self.entered: dict[int, list[list[int]]] = {}
        self._hook(model)
        self._root = weakref.ref(model)
        self._inventory = Inventory(model, [p[:2] for unit in self.units for p in unit.entries])
        self.on_change: Callable[[nn.Module], Engine | None] | None = None

    def __reduce__(self) -> Any:
        raise ShardedTensorError(
            "deepcopy or pickling of a sharded model: expected whole parameters; a copy would "
            "share this model's slots and hooks. Save fs.full_state_dict(model); copy the model "
            "before fs.shard and shard both; or average its shards: {name: p.detach().clone() for "
            "name, p in model.named_parameters()}."
        )

    # ---- building

    def _cut(
        self, model: nn.Module, plan: UnitPlan, params: dict[str, nn.Parameter], masters: Masters
    ) -> Unit:
        """Shard the parameters of a unit, and record every module entry that refers to them."""
        part = plan.mesh.coordinates(self.rank)[1]
        firsts = [[params[names[0]] for names in group.names] for group in plan.groups]
        groups = [cut_group(plan, at, own, part, masters) for at, own in enumerate(firsts)]
        unit = Unit(plan, groups, self.transports[plan.mesh])
        for group in groups:
            layout = group.plan.layout
            for member, at, names in zip(
                group.members, layout.placements, group.plan.names, strict=True
            ):
                parts = member.cut.num_parts if member.cut is not None else 1
                member.param.record = ShardRecord(
                    piece=member.piece,
                    unit=plan.title,
                    index=self._num_trained if group.grads is not None else -1,
                    is_cut=layout.num_parts * parts > 1,
                    copies=plan.mesh.replicate * plan.mesh.inner // parts,
                    holders=layout.holders(at),
                    norms=self.norms,
                    address=address_of(member.local(group.master)),
                    home=self.home,
                    gather=partial(_gather_whole, weakref.ref(member)),
                    member=weakref.ref(member),
                    post_accumulate=_taken_hooks(member.param),
                    states=masters.homes.states,
                    cut=member.cut,
                )
                self._num_trained += group.grads is not None
                if member.cut is None and plan.mesh.world_size > 1:
                    refuse_gradients(member.param)
                for name in names:
                    path, _, attribute = name.rpartition(".")
                    unit.swaps.append(Swap(model.get_submodule(path), attribute, member))
            if group.grads is not None:
                group.show_in(group.grads)
        return unit

    def _bind(self, kept: Slots) -> Rings:
        """Create the plan's rings, except kept ones, and bind the units to them."""
        shared: Slots = {}
        for mesh, transport in self.transports.items():
            units = [unit for unit in self.plan.units if unit.mesh == mesh]
            slots = [s for u in units for g in u.groups for s in (g.slot, g.grad_slot) if s]
            used = {slot.ring for slot in slots}
            rings = [ring for ring in self.plan.rings if ring.name in used]
            shared |= transport.home.open_slots(units, rings)
        poison = self.config.poison
        rings = Rings(self.plan.rings, shared, self.device, poison=poison, kept=kept)
        for unit in self.units:
            unit.bind(rings, self.runtime.on_gradient)
        return rings

    def _hook(self, model: nn.Module) -> None:
        modules = [model.get_submodule(unit.plan.name) for unit in self.units]
        for index, module in enumerate(modules):
            before = partial(call_outside_compile, self._pre_forward, index)
            after = partial(call_outside_compile, self._post_forward, index)
            self.index_of[id(module)] = index
            first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            self.handles += [first, module.register_forward_hook(after, always_call=True)]
        others = set(self.index_of)
        self.runtime.attributes = [ModuleTensors(own_modules(module, others)) for module in modules]
        self._watch_exits()
        for unit, module in zip(self.units, modules, strict=True):
            inside = set(map(id, module.modules()))
            around = [self.units[at] for at in sorted(ancestors_of(self.plan.units, unit.plan))]
            tied = [u.index for u in around if any(id(swap.module) in inside for swap in u.swaps)]
            if tied:
                self.around[unit.index], self.entered[unit.index] = tied, []
        for part in own_modules(model, others)[1:]:
            first = part.register_forward_pre_hook(
                unless_compiling(self._enter_part), prepend=True, with_kwargs=True
            )
            last = part.register_forward_hook(unless_compiling(self._leave_part), always_call=True)
            self.handles += [first, last]
        for unit in self.units:
            for swap in unit.swaps:
                vars(swap.module)["__reduce_ex__"] = self.__reduce_ex__  # hooks cannot be copied

    def _watch_exits(self) -> None:
        """Watch outputs of modules with parameters inside units.

        Compiled code skips these hooks: it is one autograd node, and a hook would split its graph.
        A module with frozen parameters is watched there too, because frozen parameters have no
        gradient hook that could detect a stale slot.
        """
        swaps = [(unit.plan.index, swap) for unit in self.units for swap in unit.swaps]
        frozen = {id(swap.module) for _, swap in swaps if swap.member.grad is None}
        for key, (index, swap) in {id(swap.module): (i, swap) for i, swap in swaps}.items():
            if key not in self.index_of:
                hook: Callable[..., Any] = unless_compiling(partial(self._watch, index))
                if key in frozen:
                    hook = partial(call_outside_compile, self._watch, index)
                self.handles.append(swap.module.register_forward_hook(hook))

    # ---- hooks, with torch's signatures

    def begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a unit's pre-forward if its hooks were registered too late for the current call."""
        index = self.index_of.get(id(module))
        if index is None:
            return self._enter_part(module, args, kwargs)
        return self._pre_forward(index, module, args, kwargs)

    def _enter_part(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Handle a call of a module of the root unit; see [Note: parts of the root]."""
        if self.units[0].swapped:
            self.runtime.follow_writes()
            return None
        self.entered_part = id(module)
        return self._pre_forward(0, module, args, kwargs)

    def _leave_part(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002 torch's
        if self.entered_part != id(module):
            return None
        self.entered_part = 0
        return None if self.unsharded else self.runtime.leave(0, output)

    def _pre_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.unsharded:
            if torch.is_grad_enabled():
                raise EngineError(
                    "forward inside fs.unsharded: expected torch.no_grad(); gradients of whole "
                    "parameters cannot be stored in shards. Train outside of the block."
                )
            return None
        is_root, runtime = _is_root(self, index, module), self.runtime
        is_outermost = (is_root or not runtime.stack) and not runtime.is_in_backward()
        if is_outermost:
            if is_tracing():
                raise EngineError(_TRACED)
            root = _root_in(self, index, module)
            changed = None if self.on_change is None else self.on_change(root)
            if changed is not None:
                unit = root.get_submodule(self.units[index].plan.name)  # not a shallow copy
                return changed.begin_call(module if self.entered_part else unit, args, kwargs)
            if root.training and torch.is_grad_enabled():
                self.norms.counts[Count.FORWARDS] += self.gradients.sync is Sync.ALL
            if not self.runtime.agreed:
                convert_reentrant(root)  # checkpointing may have been enabled since fs.shard
        for number, at in enumerate(_to_enter(self, index) if index in self.around else (index,)):
            self.runtime.enter(at, is_outermost=is_outermost and not number)
        if is_outermost and self.config.param_dtype is not None:
            dtype = torch_dtype(self.config.param_dtype)
            return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        return None

    def _post_forward(self, index: int, *module_args_output: Any) -> Any:
        output = module_args_output[-1]
        if self.unsharded:
            return None
        output = self.runtime.leave(index, output)
        for around in reversed(self.entered[index].pop() if self.entered.get(index) else []):
            output = self.runtime.leave(around, output)
        if index == 0 and self.config.output_dtype is not None:
            return cast_tensors(output, torch_dtype(self.config.output_dtype))
        return output

    def _watch(self, index: int, module: nn.Module, _args: Any, output: Any) -> None:
        if self.home.num_writes != self.runtime.num_followed:
            check_fresh(self.units[index], self.home, self.runtime.num_followed, module)
        if torch.is_grad_enabled() and not self.unsharded:
            tensors = (output,) if type(output) is torch.Tensor else tensors_in(output)
            self.runtime.watch(index, tensors)

    def _on_spill(self, unit: Unit) -> None:
        self.recorder.record(Event(EventKind.SPILL, unit.plan.index), self.runtime.step)
        spilled = sum(group.spilled_bytes for group in self.groups)
        self._most_spilled = max(self._most_spilled, spilled)

    def reduce_with(self, hook: Hook) -> None:
        """Make a hook reduce gradients from the next backward on; see `reduce_by`."""
        self.gradients.divisor, self.gradients.hook = 1, hook

    # ---- between steps

    def check_params(self) -> None:
        """Check that all shards are in place.

        Raises:
            EngineError: A shard was moved or converted since the last step.
        """
        with no_guard():
            for group in self.groups:
                if not group.is_in_place():
                    self._check_params(group)

    def _before_step(self) -> None:
        self.check_params()
        self._inventory.check(alive(self._root, "forward"))
        if any(isinstance(param, ShardedParameter) for param in params_of_ddp()):
            raise EngineError(
                f"{NO_DDP} It copied rank 0's shards to all ranks: load the weights again. Around "
                "other modules too, call its _set_params_and_buffers_to_ignore_for_model first."
            )
        if not torch.is_grad_enabled():
            return  # one replica may evaluate alone, so no collective here
        if self.runtime.step % STEPS == 1 and self.runtime.step != self._compared_at:
            self._compared_at = self.runtime.step
            check_replicas(self.units, self.norms)
        if self.runtime.observed.done and not self.runtime.agreed:
            # slots created now may outlive the block, or a transformation of torch.func
            with outside_modes(), torch.inference_mode(mode=False):
                self._agree_on_order()

    def _check_params(self, group: Group) -> None:
        """Check one group's shards; `requires_grad` may have been turned off. Outside the guard."""
        group.follow_freezing()
        for member, address in zip(group.members, group.addresses, strict=True):
            param = member.param
            if address_of(param) != address or param.dtype is not group.master.dtype:
                raise EngineError(
                    f"{member.piece.name}: expected its shard where fs.shard put it; it was "
                    "moved or converted (.to, .double, .data = ...). Convert the model before "
                    "fs.shard, and write into shards in place (p.data.copy_)."
                )

    def _agree_on_order(self) -> None:
        """After the first step, compare the order of units over ranks and with the plan (law 6)."""
        observed, order = self.runtime.observed, self.plan.order
        seen = f"{observed.forward}{observed.backward}".encode()
        code, waits = float(zlib.crc32(seen)), float(self.runtime.has_graph())
        for unit in self.units:  # prefetched and never entered; peers read slots until then
            unit.wait()
        bounds = torch.tensor([code, -code, waits], dtype=torch.float64, device=self.device)
        bounds = self.norms.all_reduce(bounds, "the order of units", maximum=True)
        plan = self.plan.reordered(observed.forward, observed.backward)  # also of unused units
        switches = bounds[0] == -bounds[1] and plan.order != replace(order, learned=True)
        if switches and bounds[2]:  # a graph uses the current slots: retry at the next forward
            return
        self.runtime.agreed = True
        if bounds[0] != -bounds[1]:  # ranks run different parts, so all issue every planned event
            assert set(observed.forward) <= set(order.forward), observed.forward
            self.runtime.scheduler.follow(replace(self.runtime.scheduler.order, learned=True))
        elif plan.order != replace(order, learned=True):
            self._switch_to(plan)
        else:
            self.runtime.scheduler.follow(replace(order, learned=True))

    def _switch_to(self, plan: Plan) -> None:
        """Use another plan of the same units and shards from the next forward on.

        Compute parameters are bound to new slots. No live graph needs the old ones.
        """
        self.plan = plan
        for unit, unit_plan in zip(self.units, plan.units, strict=True):
            unit.plan = unit_plan
            for group, group_plan in zip(unit.groups, unit_plan.groups, strict=True):
                group.plan = group_plan
        for unit in self.units:
            unit.unbind()
        if (device := streams.of(self.device)) is not None:
            device.finish(device.event())  # which reads slots that are freed
        self.rings = self._bind(self.rings.give(plan.rings))
        self.runtime.scheduler = plan.scheduler()
        self.runtime.actions.filling.clear()  # units may have other slots

    # ---- outside of training

    def memory_stats(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank by kind: {"now", "peak"}; "total" is the sum.

        Kinds: parameter_shards, gradient_shards, shared_weights_to_compute_with, slots,
        gradient_slots, communication_buffers, deferred_gradients, spilled_gradients, buffers.
        Shared memory counts by this rank's part.
        """
        groups, root = self.groups, alive(self._root, "memory_stats")
        fixed = {
            "parameter_shards": sum(group.master.nbytes for group in groups),
            "gradient_shards": sum(g.grads.nbytes for g in groups if g.grads is not None),
            "shared_weights_to_compute_with": sum(
                group.full.nbytes // group.plan.layout.num_parts
                for group in groups
                if group.plan.shared and group.full.dtype is not group.master.dtype
            ),
            "slots": self.rings.num_bytes(gradients=False),
            "gradient_slots": self.rings.num_bytes(gradients=True),
            "communication_buffers": sum(t.scratch.num_bytes for t in self.transports.values()),
            "buffers": sum(buffer.nbytes for buffer in root.buffers()),
        }
        rows = {kind: {"now": size, "peak": size} for kind, size in fixed.items()}
        deferred = sum(kept.nbytes for group in groups for kept in group.deferred)
        peak = max(deferred, self.gradients.peak_deferred_bytes)
        rows["deferred_gradients"] = {"now": deferred, "peak": peak}
        spilled = sum(group.spilled_bytes for group in groups)
        rows["spilled_gradients"] = {"now": spilled, "peak": self._most_spilled}
        rows["total"] = {when: sum(row[when] for row in rows.values()) for when in ("now", "peak")}
        return rows

    def communication_seconds(self) -> float:
        """Seconds that this rank issued and awaited collectives, since fs.shard.

        On a device with streams: the waits of the step's stream that have finished.
        """
        return self.runtime.actions.seconds()

    def all_values(self, value: T) -> list[T]:
        """Returns the values of all ranks, in rank order. A collective.

        Raises:
            EngineError: There are no other ranks (transport fake).
        """
        if self._num_failed(error=None) is None:
            return [value]
        return all_values(value, own_group("all", [range(self.plan.mesh.world_size)]))

    def lead(self, do: Callable[[], T]) -> T:
        """Return the result of `do`, which only rank 0 calls. A collective.

        Raises:
            FullshardError: Rank 0's error.
        """
        result: Any = self.agree(lambda: do() if self.rank == 0 else None)
        return first_value(result, own_group("all", [range(self.plan.mesh.world_size)]))

    def agree(self, do: Callable[[], T]) -> T:
        """Returns the result of `do`. If it fails on one rank, all raise. A collective.

        Without a failure the ranks exchange one number.

        Raises:
            FullshardError: This rank's error, or that of the first rank that failed.
        """

        def exchange(failure: Any) -> list[Any]:
            return self.all_values(failure) if self._num_failed(error=failure) else []

        return raise_together(exchange, self.rank, do)

    def _num_failed(self, *, error: Any) -> float | None:
        """Number of ranks with an error; None without other ranks. No rank may be in a step."""
        world_size = self.plan.mesh.world_size
        if world_size == 1:
            return None
        if self.transport.name == "fake":
            raise EngineError(
                f"expected {world_size} real ranks; transport fake has one. "
                "Set sharding.transport to auto and start the ranks."
            )
        flag = torch.tensor([float(error is not None)], device=self.device)
        what = "errors of all ranks (fs.save, fs.load, fs.owned)"
        return self.norms.all_reduce(flag, what).item()


def _agree_on_frozen(runtime: Runtime) -> None:
    """Plan the backward of frozen units that any rank enters in the first step.

    The plan has none for units before the first trained one, through which gradients of other
    units' parameters may pass on some ranks only. A collective if there are such units.
    """
    scheduler, norms = runtime.scheduler, runtime.gradients.norms
    found = scheduler.unplanned()
    waits = {unit: float(yes) for unit, yes in found.items() if runtime.units[unit].gathered}
    is_apart = norms.transport.axes.mesh.replicate > 1 and runtime.gradients.sync is not Sync.ALL
    if not waits or is_apart:  # replicas may differ in deferred backwards
        return
    phase = norms.transport.phase
    pending, bits = phase.next, from_host([*waits.values()], norms.device)
    with outside_modes():
        bits = norms.all_reduce(bits, "frozen units in backward", maximum=True)
    phase.next = pending
    entered = (unit for unit, bit in zip(waits, bits.tolist(), strict=True) if bit)
    order = scheduler.order
    scheduler.follow(replace(order, backward=(*order.backward, *entered)))


def _gather_whole(weak: weakref.ref[Member], local: torch.Tensor | None) -> torch.Tensor:
    """Calls `member.gather_whole` with a weak reference to the model."""
    member = alive(weak, "full_tensor")
    return member.gather_whole(member.local(member.group.master) if local is None else local)


def _to_enter(engine: Engine, index: int) -> list[int]:
    """A unit, after the units around it that are not open and own weights inside it."""
    closed = [at for at in engine.around[index] if not engine.units[at].swapped]
    engine.entered[index].append(closed)
    return [*closed, index]


def _is_root(engine: Engine, index: int, module: nn.Module) -> bool:
    """Whether the model itself is called, and not inside a part of the root unit."""
    if index == 0 and engine.entered_part not in (0, id(module)):
        close_interrupted(engine, engine.entered_part)
    return index == 0 and not engine.entered_part


def _root_in(engine: Engine, index: int, module: nn.Module) -> nn.Module:
    """The model; once it is deleted, the first shallow copy of it that runs."""
    if engine._root() is None and index == 0 and not engine.entered_part:
        engine._root = weakref.ref(module)
        engine.index_of[id(module)] = 0
        object.__setattr__(module, ATTRIBUTE, engine)
    return alive(engine._root, "forward")


def close_interrupted(engine: Engine, part: int = 0) -> None:
    """Close a forward that a KeyboardInterrupt left open, for which torch calls no hook.

    Modules would keep their compute parameters. A forward that still runs has a frame.

    Args:
        engine: The engine of the model.
        part: Id of the module through which a forward began; 0: of any module.
    """
    if not engine.runtime.stack or graph_task_id() != -1:
        return
    modules = {part} if part else {*engine.index_of, engine.entered_part}
    for top in sys._current_frames().values():  # another thread may run it
        frame: Any = top
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals.get("self")) in modules:
                return
            frame = frame.f_back
    engine.entered_part = 0
    engine.runtime.close_interrupted()


def is_sharded(model: nn.Module) -> bool:
    """Whether fs.shard was called on it."""
    return isinstance(getattr(model, ATTRIBUTE, None), Engine)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a sharded model.

    Raises:
        EngineError: The model was not sharded.
    """
    engine = getattr(model, ATTRIBUTE, None)
    if not isinstance(engine, Engine):
        got = f"expected a model that was sharded by fs.shard; got {type(model).__name__}"
        params = model.parameters() if isinstance(model, nn.Module) else ()
        if any(isinstance(param, ShardedParameter) for param in params):
            got += (
                ", which has shards. Pass the module that was sharded. In the interfaces of FSDP1 "
                "and FSDP2 it has a plan after its first forward or state_dict()"
            )
        raise EngineError(f"{got}.")
    close_interrupted(engine)
    return engine


def _taken_hooks(param: Any) -> OrderedDict[int, Any]:
    """Takes the user's hooks of a parameter before it is sharded; the engine calls them.

    Autograd would not call them, because it accumulates into the compute parameter. The dict itself
    is kept, so that the user's handles still remove hooks.
    """
    if hasattr(param, "record"):  # sharded before
        return param.record.post_accumulate
    hooks = param._post_accumulate_grad_hooks
    return OrderedDict() if hooks is None else hooks


# ---- modules and parameters that are added after sharding


class Inventory:
    """The parameters of a model. See [Note: parameters that come later].

    Args:
        model: The model, just sharded.
        tables: `_parameters` and name of every place of the plan's parameters.
    """

    def __init__(self, model: nn.Module, tables: Iterable[tuple[dict[str, Any], str]]) -> None:
        known = [(table, name) for table, name in tables]
        self._places = {(id(table), name) for table, name in known}
        self._own = {id(table[name]) for table, name in known}
        self._left_out = {id(p): p for p in model.parameters() if id(p) not in self._own}
        self._frozen: list[nn.Parameter] = []  # added later, without need for reduction
        self._tables: list[dict[str, Any]] = []
        self._objects: list[Any] = []

    def check(self, model: nn.Module) -> None:
        """Look for parameters that were added after `fs.shard`.

        Raises:
            EngineError: An added parameter is trained, or is a planned one in another place.
        """
        now = list(chain.from_iterable(map(dict.values, self._tables)))
        same = len(now) == len(self._objects) and all(map(is_, now, self._objects))
        if same and self._objects and not any(param.requires_grad for param in self._frozen):
            return
        self._frozen = []
        named = [x for x in model.named_modules() if not isinstance(x[1], torch.jit.ScriptModule)]
        for path, module in named:
            for name, param in module._parameters.items():
                if param is not None and (id(module._parameters), name) not in self._places:
                    self._check(f"{path}.{name}" if path else name, param)
        self._tables = [t for _, m in named for t in (m._modules, m._parameters)]
        self._objects = list(chain.from_iterable(map(dict.values, self._tables)))

    def _check(self, name: str, param: Any) -> None:
        if id(param) in self._own:
            first = cast("ShardedParameter", param).record.piece.name
            raise EngineError(
                f"{name}: expected the parameters where fs.shard found them; {first} was assigned "
                "here, too, so that forward would see a shard. Tie parameters before fs.shard. If "
                "ignore names a tied parameter, it must give all its names."
            )
        if id(param) in self._left_out or isinstance(param, ShardedParameter):
            return
        if param.requires_grad:
            raise EngineError(
                f"{name}: expected the parameters that the model had when it was sharded; this one "
                "was added afterwards, and its gradient would not be reduced over ranks. Add it "
                "before fs.shard, with the weights of fs.full_state_dict(model) if the model has "
                "trained; or freeze it (requires_grad=False)."
            )
        self._frozen.append(param)
