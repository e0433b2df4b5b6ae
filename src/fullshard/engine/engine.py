"""The engine of one sharded model on this rank: plan, units, slots, hooks, and their lifetime.

[Note: parameters that come later]
The plan knows the parameters of its day. One that is put into the model afterwards would train on
each rank by itself. The objects in all modules' tables are compared at every step; where they
differ from the last look, every parameter that stands in a place unknown to the plan is looked at.

[Note: parts of the root]
`generate` calls the encoder of a T5 or the base of a PEFT model, not the module that was sharded.
So every module of the root unit enters the root unit when it is called from outside of it, and
leaves it at the end of its own forward.
"""

from __future__ import annotations

import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, cast

import torch
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.config.values import GradReduction
from fullshard.engine._torch_compat import (
    call_outside_compile,
    is_tracing,
    no_guard,
    unless_compiling,
)
from fullshard.engine.gradients import Gradients, follow_freezing
from fullshard.engine.homes import DeviceHomes, compute_device
from fullshard.engine.kept import Kept, own_modules, tensors_in
from fullshard.engine.model_spec import places_of
from fullshard.engine.norms import GradientNorms
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.precision import cast_tensors
from fullshard.engine.recompute import convert_reentrant
from fullshard.engine.record import ShardRecord
from fullshard.engine.replicas import STEPS, check_replicas
from fullshard.engine.step import Runtime
from fullshard.engine.streamed import StreamedRuntime
from fullshard.engine.unit import Group, Member, Rings, Swap, Unit, address_of, cut_group
from fullshard.errors import EngineError, ShardedTensorError
from fullshard.planner.events import Event, EventKind, Recorder, Sync
from fullshard.planner.mesh import Mesh
from fullshard.planner.plan import Plan
from fullshard.planner.units import UnitPlan
from fullshard.transport import Transport, streams
from fullshard.transport.base import Hook, torch_dtype

ATTRIBUTE = "_fullshard"  # where a sharded model keeps its engine
_TRACED = (
    "tracing of a sharded model: expected a whole model; a trace (torch.jit.trace, make_fx, "
    "torch.export) would keep one rank's gathers. Trace a model that was not sharded, with the "
    "weights of fs.full_state_dict(model)."
)


class Engine:
    """Everything that `fs.shard` gives a model.

    Args:
        model: The user's module, whole parameters.
        plan: What to do.
        config: What was asked for.
        transports: Move bytes, one a mesh of the plan.
        recorder: Told of every event.
        values: Gives the (n_local,) of each parameter that is on meta, by first name.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        config: ShardConfig,
        transports: dict[Mesh, Transport],
        recorder: Recorder,
        values: Mapping[str, Callable[[], torch.Tensor]] | None = None,
    ) -> None:
        transport = transports[plan.mesh]
        self.plan = plan
        self.config = config
        self.transport = transport
        self.home = transport.home
        self.transports = transports
        self.recorder = recorder
        self.unsharded = 0  # blocks that show whole parameters
        self.rank = transport.rank
        params = places_of(model)
        self.device = compute_device(model)
        self.residences = DeviceHomes.of(plan.homes, self.device, config.offload)
        self.norms = GradientNorms(transport, self.device)
        self.units: list[Unit] = []
        self.home.open_weights(plan.units)
        for unit in plan.units:  # one after another: a part and its home are not held twice
            self.units.append(self._cut(unit, params))
            for member in (m for group in self.units[-1].groups for m in group.members):
                if values and member.piece.name in values:
                    member.param.to_local().view(-1).copy_(values[member.piece.name]())
        self._attach_records()
        self._find_swaps(model)
        divisor = plan.mesh.num_copies if config.grad_reduction is GradReduction.MEAN else 1
        self.gradients = Gradients(transport, self.norms, divisor, self._on_spill)
        made = streams.of(self.device)
        kind = Runtime if made is None else partial(StreamedRuntime, made, plan.homes)
        self.runtime = kind(
            self.units, plan.scheduler(), self.gradients, recorder, poison=config.poison
        )
        self.runtime.before_step = self._before_step
        self.rings = self._bind({})
        self._agreed = False
        self._looked = -1  # the step at which replicas were compared last
        self.handles: list[Any] = []  # of hooks, removed when the model is cut anew
        self.index_of: dict[int, int] = {}  # units by their module's id
        self._part = 0  # the id of the module that the root unit was entered by
        self._hook(model)
        self._root = weakref.ref(model)
        self._inventory = Inventory(model, [p[:2] for unit in self.units for p in unit.places])
        self.on_change: Callable[[nn.Module], Engine | None] = _keep

    def __deepcopy__(self, memo: Any) -> Any:
        raise ShardedTensorError(
            "deepcopy of a sharded model: expected whole parameters; the copy would share this "
            "model's slots and hooks. Copy the model before fs.shard and shard both, or average "
            "its shards: {name: p.detach().clone() for name, p in model.named_parameters()}."
        )

    def __reduce__(self) -> Any:
        raise ShardedTensorError(
            "pickling of a sharded model: expected whole parameters. Save "
            "fs.full_state_dict(model) instead."
        )

    # ---- building

    def _cut(self, plan: UnitPlan, params: dict[str, nn.Parameter]) -> Unit:
        transport = self.transports[plan.mesh]
        part = plan.mesh.coordinates(self.rank)[1]
        groups = [
            cut_group(
                group,
                [params[names[0]] for names in group.names],
                part,
                self.residences,
                self.home.weights(plan.index, at),
            )
            for at, group in enumerate(plan.groups)
        ]
        return Unit(plan, groups, transport)

    def _attach_records(self) -> None:
        trained = [m for u in self.units for g in u.trained for m in g.members]
        index = {id(member): i for i, member in enumerate(trained)}
        for unit in self.units:
            for group in unit.groups:
                layout = group.plan.layout
                for member, placement in zip(group.members, layout.placements, strict=True):
                    parts = member.cut.num_parts if member.cut is not None else 1
                    record = ShardRecord(
                        piece=member.piece,
                        unit=unit.plan.title,
                        index=index.get(id(member), -1),
                        is_cut=layout.num_parts * parts > 1,
                        copies=unit.plan.mesh.replicate * unit.plan.mesh.inner // parts,
                        holders=layout.holders(placement),
                        norms=self.norms,
                        before_write=self.home.before_write,
                        gather=_weak_gather(self, unit, group, member),
                        post_accumulate=_taken_hooks(member.param),
                        states=self.residences.states,
                        cut=member.cut,
                    )
                    member.param.record = record
                if group.grads is not None:
                    group.hold(group.grads)

    def _find_swaps(self, model: nn.Module) -> None:
        """Every place where a parameter stands, tied ones in all of theirs."""
        for unit in self.units:
            for group in unit.groups:
                for names, member in zip(group.plan.names, group.members, strict=True):
                    for name in names:
                        path, _, attribute = name.rpartition(".")
                        unit.swaps.append(Swap(model.get_submodule(path), attribute, member))

    def _bind(self, given: dict[str, list[torch.Tensor]]) -> Rings:
        """Make the plan's rings but for those that are given, and let units use them."""
        given |= self.home.open_slots(self.plan.units, self.plan.rings)
        rings = Rings(self.plan.rings, given, self.device, poison=self.config.poison)
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
        self.runtime.kept = [Kept(own_modules(module, others)) for module in modules]
        owners = {id(swap.module): u.plan.index for u in self.units for swap in u.swaps}
        self.handles += _watch_exits(self.units, owners, others, self._watch)
        for part in own_modules(model, others)[1:]:
            first = part.register_forward_pre_hook(
                unless_compiling(self._enter_part), prepend=True, with_kwargs=True
            )
            last = part.register_forward_hook(unless_compiling(self._leave_part), always_call=True)
            self.handles += [first, last]
        for unit in self.units:
            for swap in unit.swaps:
                vars(swap.module)["__deepcopy__"] = self.__deepcopy__  # hooks cannot be copied

    # ---- hooks: torch calls them with more than they need

    def begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A unit's pre-forward, where its hooks were made too late for this very call."""
        index = self.index_of.get(id(module))
        if index is None:
            return self._enter_part(module, args, kwargs)
        return self._pre_forward(index, module, args, kwargs)

    def _enter_part(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module of the root unit's is called; see [Note: parts of the root]."""
        if self.units[0].swapped:
            return None
        self._part = id(module)
        return self._pre_forward(0, module, args, kwargs)

    def _leave_part(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002 torch's
        if self._part != id(module):
            return None
        self._part = 0
        return None if self.unsharded else self.runtime.leave(0, output)

    def _pre_forward(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.unsharded:
            _refuse_training_unsharded()
            return None
        begins = self.runtime.begins_step(is_root=index == 0 and not self._part)
        if begins:
            if is_tracing():
                raise EngineError(_TRACED)
            root = self._root()
            assert root is not None
            changed = self.on_change(root)
            if changed is not None:
                return changed.begin_call(module, args, kwargs)
            if root.training and torch.is_grad_enabled():
                self.norms.num_forwards += self.gradients.sync is Sync.ALL
            if not self._agreed:
                convert_reentrant(root)  # the switch may have been turned on since fs.shard
        self.runtime.enter(index, begins=begins)
        if begins and self.config.param_dtype is not None:
            dtype = torch_dtype(self.config.param_dtype)
            return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        return None

    def _post_forward(self, index: int, *module_args_output: Any) -> Any:
        output = module_args_output[-1]
        if self.unsharded:
            return None
        output = self.runtime.leave(index, output)
        if index == 0 and self.config.output_dtype is not None:
            return cast_tensors(output, torch_dtype(self.config.output_dtype))
        return output

    def _watch(self, index: int, *module_args_output: Any) -> None:
        if not self.unsharded and torch.is_grad_enabled():
            self.runtime.watch(index, tensors_in(module_args_output[-1]))

    def _on_spill(self, unit: Unit) -> None:
        spill = Event(EventKind.SPILL, unit.plan.index)
        self.recorder.record(spill, self.runtime.step)

    def reduce_with(self, hook: Hook) -> None:
        """Let a hook reduce gradients from the next backward on; see `HookedReduction`."""
        self.gradients.divisor = 1
        for unit in self.units:
            unit.reduce_hook = hook

    # ---- between steps

    def check_params(self) -> None:
        """Shards must be where the plan put them.

        Raises:
            EngineError: One was moved or converted behind our back.
        """
        with no_guard():
            for unit in self.units:
                for group in unit.groups:
                    if not group.is_in_place():
                        self._check_params(group)

    def _before_step(self) -> None:
        self.check_params()
        root = self._root()
        assert root is not None
        self._inventory.check(root)
        if not torch.is_grad_enabled():
            return  # one rank alone may evaluate where nothing is gathered: no collective
        if self.runtime.step % STEPS == 1 and self.runtime.step != self._looked:
            self._looked = self.runtime.step
            check_replicas(self.units, self.transport)
        if self.runtime.observed.done and not self._agreed:
            with torch.inference_mode(mode=False):  # slots may be made now, and outlive the block
                self._agree_on_order()

    def _check_params(self, group: Group) -> None:
        """Shards must be where the plan put them; `requires_grad` may have been turned off."""
        with no_guard():
            follow_freezing(group)
            for member in group.members:
                was_moved = address_of(member.param) != member.address
                if was_moved or member.param.dtype is not group.master.dtype:
                    raise EngineError(
                        f"{member.piece.name}: expected its shard where fs.shard put it; it was "
                        "moved or converted (.to, .double, .data = ...). Convert the model before "
                        "fs.shard, and write into shards in place (p.data.copy_)."
                    )

    def _agree_on_order(self) -> None:
        """After the first step: do all ranks see one order, and is it the plan's? (law 6)."""
        observed, order = self.runtime.observed, self.plan.order
        seen = f"{observed.forward}{observed.backward}".encode()
        code, waits = float(zlib.crc32(seen)), float(self.runtime.awaits_backward())
        bounds = torch.tensor([code, -code, waits], dtype=torch.float64, device=self.device)
        bounds = self.norms.all_reduce(bounds, "the order of units", maximum=True)
        if bounds[2]:  # a graph reads today's slots: ask again at the next forward
            return
        self._agreed = True
        if bounds[0] != -bounds[1]:  # ranks run different parts: all issue all that is planned
            strange = set(observed.forward) - set(order.forward)
            assert not strange, strange
            self.runtime.scheduler.order = replace(order, learned=True)
        elif observed.differs_from(order):
            self._adopt(self.plan.reordered(observed.forward, observed.backward))
        else:
            self.runtime.scheduler.order = replace(order, learned=True)

    def _adopt(self, plan: Plan) -> None:
        """Run another plan of the same units and shards from the next forward on."""
        self.plan = plan
        for unit, unit_plan in zip(self.units, plan.units, strict=True):
            unit.plan = unit_plan
            for group, group_plan in zip(unit.groups, unit_plan.groups, strict=True):
                group.plan = group_plan
        for unit in self.units:
            unit.unbind()
        self.rings = self._bind(self.rings.give(plan.rings))
        self.runtime.scheduler = plan.scheduler()

    # ---- whole tensors

    def meet(self, unit: Unit, asked: str) -> None:
        """Before a unit is gathered outside of a step: every rank asks for it. A collective."""
        if unit.plan.mesh.shard > 1:
            self.norms.all_reduce(torch.zeros(1, device=self.device), asked)

    def gather_group(self, unit: Unit, group: Group) -> torch.Tensor:
        """(numel,), master dtype: the whole flat buffer, newly allocated. A collective."""
        layout = group.plan.layout
        self.meet(unit, f"the whole of {unit.plan.title}")
        full = torch.empty(layout.numel, dtype=group.master.dtype, device=self.device)
        full.chunk(layout.num_parts)[unit.part].copy_(group.master)
        unit.transport.fetch([full]).wait()
        return full

    def gather_member(
        self, unit: Unit, group: Group, member: Member, local: torch.Tensor
    ) -> torch.Tensor:
        """A whole tensor of a parameter's shape, newly allocated. A collective.

        Args:
            unit: The parameter's.
            group: The parameter's.
            member: The parameter.
            local: (n_local,), this rank's elements of it, its gradient or a state of its.

        Returns:
            Of the whole parameter's shape, over other axes too.
        """
        layout, piece = group.plan.layout, member.piece
        self.meet(unit, f"the whole of {piece.name!r}")
        full = torch.zeros(layout.numel, dtype=local.dtype, device=self.device)
        own = full.chunk(layout.num_parts)[unit.part]
        own[piece.offset : piece.offset + piece.numel].copy_(local)
        unit.transport.fetch([full]).wait()
        local = full[member.offset : member.offset + member.numel].view(piece.shape)
        return local.clone() if member.cut is None else member.cut.whole_of(local)


def _watch_exits(
    units: Sequence[Unit],
    owners: Mapping[int, int],
    left_out: Container[int],
    watch: Callable[..., None],
) -> list[Any]:
    """Let `watch(unit, module, args, output)` see what the modules that own parameters return.

    Compiled code does without: it is one autograd node, and a hook would cut its graph in two. A
    module with frozen parameters is watched nevertheless, because nothing would tell that these
    were read from a slot that held another unit; trained ones have gradients, which do.

    Args:
        units: In plan order.
        owners: By the id of a module, the unit that watches its output.
        left_out: Ids of modules that are watched in another way.
        watch: Is told.

    Returns:
        Handles that remove the hooks.
    """
    handles = []
    swaps = [swap for unit in units for swap in unit.swaps]
    frozen = {id(swap.module) for swap in swaps if swap.member.grad is None}
    for key, module in {id(swap.module): swap.module for swap in swaps}.items():
        if key not in left_out:
            hook: Callable[..., Any] = unless_compiling(watch, owners[key])
            if key in frozen:
                hook = partial(call_outside_compile, watch, owners[key])
            handles.append(module.register_forward_hook(hook))
    return handles


def _weak_gather(
    engine: Engine, unit: Unit, group: Group, member: Member
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`engine.gather_member` without holding the engine.

    The way from a parameter to its gradient's record leads through C++, where the garbage
    collector sees no cycle.
    """
    weak_engine, weak_unit = weakref.ref(engine), weakref.ref(unit)
    weak_group, weak_member = weakref.ref(group), weakref.ref(member)

    def gather(local: torch.Tensor) -> torch.Tensor:
        alive, within, of, which = weak_engine(), weak_unit(), weak_group(), weak_member()
        if alive is None or within is None or of is None or which is None:
            raise EngineError("full_tensor: expected the sharded model to exist; it was deleted.")
        return alive.gather_member(within, of, which, local)

    return gather


def refuse_other_axes(engine: Engine, asked: str, instead: str) -> None:
    """For what does not know parameters that are cut along other axes of the mesh.

    Raises:
        EngineError: The model has such axes.
    """
    if engine.plan.mesh.inner > 1:
        raise EngineError(
            f"{asked}: expected a model that no other axis of the mesh cuts (tensor or expert "
            f"parallelism); got {engine.plan.mesh.inner} ranks along others, for which this is "
            f"not yet supported. {instead}"
        )


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
        raise EngineError(
            f"expected a model that fs.shard was called on; got {type(model).__name__}."
        )
    return engine


def _keep(_: nn.Module) -> None:
    """Changes between steps are errors, found where they are met."""


def _taken_hooks(param: Any) -> OrderedDict[int, Any]:
    """Hooks that the user put on the parameter before it was sharded; ours to call from now on.

    The very dict, so that the handles that the user holds still remove them. Autograd will not call
    them: it accumulates into the compute parameter.
    """
    if hasattr(param, "record"):  # cut before
        return param.record.post_accumulate
    hooks = param._post_accumulate_grad_hooks
    return OrderedDict() if hooks is None else hooks


def _refuse_training_unsharded() -> None:
    if torch.is_grad_enabled():
        raise EngineError(
            "forward inside fs.unsharded: expected torch.no_grad(); gradients of whole parameters "
            "have no place at rest. Train outside of the block."
        )


# ---- modules and parameters that are put into a model after it was sharded


class Inventory:
    """The parameters of a model. See [Note: parameters that come later].

    Args:
        model: Just sharded.
        tables: The `_parameters` and names under which the plan's parameters stand.
    """

    def __init__(self, model: nn.Module, tables: Iterable[tuple[dict[str, Any], str]]) -> None:
        known = [(table, name) for table, name in tables]
        self._places = {(id(table), name) for table, name in known}
        self._own = {id(table[name]) for table, name in known}
        self._left_out = {id(p): p for p in model.parameters() if id(p) not in self._own}
        self._frozen: list[nn.Parameter] = []  # came later, and need no reduction
        self._tables: list[dict[str, Any]] = []
        self._objects: list[Any] = []

    def check(self, model: nn.Module) -> None:
        """Look for parameters that came later.

        Raises:
            EngineError: One is trained, or is one of the plan's in a second place.
        """
        now = list(chain.from_iterable(map(dict.values, self._tables)))
        same = len(now) == len(self._objects) and all(map(is_, now, self._objects))
        if same and self._objects and not any(param.requires_grad for param in self._frozen):
            return
        self._frozen = []
        for path, module in model.named_modules():
            for name, param in module._parameters.items():
                if param is not None and (id(module._parameters), name) not in self._places:
                    self._check(f"{path}.{name}" if path else name, param)
        modules = list(model.modules())
        self._tables = [t for m in modules for t in (m._modules, m._parameters)]
        self._objects = list(chain.from_iterable(map(dict.values, self._tables)))

    def _check(self, name: str, param: Any) -> None:
        if id(param) in self._own:
            first = cast("ShardedParameter", param).record.piece.name
            raise EngineError(
                f"{name}: expected the parameters where fs.shard found them; {first} was put in "
                "here, too, where the forward would see a shard. Tie parameters before fs.shard."
            )
        if id(param) in self._left_out or isinstance(param, ShardedParameter):
            return
        if param.requires_grad:
            raise EngineError(
                f"{name}: expected the parameters that the model had when it was sharded; this one "
                "was put in afterwards, and its gradient would not be reduced over ranks. Put it "
                "in before fs.shard, with the weights of fs.full_state_dict(model) if the model "
                "has trained; or freeze it (requires_grad=False)."
            )
        self._frozen.append(param)
