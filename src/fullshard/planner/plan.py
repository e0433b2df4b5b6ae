"""The plan: everything that a run will do and allocate, as plain data for all ranks.

    model (on meta) + config + mesh --> Plan --> engine, forecast, checkpoint, report

It is computed without a process group, a GPU or weights, and is the same bytes on every rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fullshard.config.schema import ShardConfig
from fullshard.config.values import (
    DType,
    GradSync,
    HomeKind,
    ReductionKind,
    Strategy,
    TransportKind,
)
from fullshard.errors import ConfigError, WrapError
from fullshard.planner.layout import Slice
from fullshard.planner.memory import MemoryRow, staging_bytes, state_rows
from fullshard.planner.mesh import Mesh, StrategyRow, Topology, mesh_of, row_of
from fullshard.planner.optimizers import ADAMW, OptimizerStates
from fullshard.planner.schedule import (
    Depths,
    Event,
    Order,
    Scheduler,
    nominal_trace,
    reduce_order,
    registration_order,
    simulate_step,
)
from fullshard.planner.slots import Ring, assign_slots
from fullshard.planner.spec import ITEMSIZE, ModelSpec, ParamSpec, check_globs, matches, parent_name
from fullshard.planner.text import PlanDocument, decode_plan, render_tree
from fullshard.planner.units import (
    DEFAULT_HOMES,
    GroupPlan,
    Homes,
    Place,
    UnitPlan,
    UnitSettings,
    assign_params,
    group_params,
)
from fullshard.planner.wrap import Role, choose_units, recomputed_modules


@dataclass(frozen=True, slots=True)
class Plan(PlanDocument):
    """The plan of the torch engine.

    Attributes:
        model_kind: Class name of the model.
        strategy: The configured strategy; single units may have others.
        mesh: Sizes of the mesh axes.
        units: Units in registration order, the root first.
        rings: The persistent buffers of gathered units and gradients.
        order: Order in which units compute and reduce.
        depths: Prefetch depths.
        events: Actions of one training step.
        memory: Bytes of the largest rank by kind.
        transport: Mechanism of collectives; `auto` if the plan was made without a device.
        buffer_bytes: Bytes of the model's buffers.
        saved_buffer_bytes: Bytes of the buffers in a checkpoint.
        grad_sync: Which micro-batches of an accumulated step reduce gradients.
        recompute: Modules whose forward is recomputed in backward.
        homes: Where state is stored.
        optimizer: State sizes of the optimizer; AdamW if there is no run.
        reduction: Who sums gradients over c10d.
    """

    model_kind: str
    strategy: Strategy
    mesh: Mesh
    units: tuple[UnitPlan, ...]
    rings: tuple[Ring, ...]
    order: Order
    depths: Depths
    events: tuple[Event, ...]
    memory: tuple[MemoryRow, ...]
    transport: TransportKind
    buffer_bytes: int
    grad_sync: GradSync = GradSync.EVERY_MICRO_BATCH
    recompute: tuple[str, ...] = ()
    homes: Homes = DEFAULT_HOMES
    optimizer: OptimizerStates = ADAMW
    saved_buffer_bytes: int = 0
    reduction: ReductionKind = field(
        default=ReductionKind.NATIVE, metadata={"omitted": ReductionKind.NATIVE}
    )

    def trained_by(self, optimizer: OptimizerStates) -> Plan:
        """Returns the plan with another optimizer."""
        if optimizer == self.optimizer:
            return self
        plan = replace(self, optimizer=optimizer)
        return replace(plan, memory=state_rows(plan))

    def view(self, rank: int) -> RankView:
        """Returns one rank's part."""
        slices = tuple(
            tuple(group.layout.slices(unit.mesh.coordinates(rank)[1]) for group in unit.groups)
            for unit in self.units
        )
        return RankView(rank, self.mesh.coordinates(rank)[1], slices)

    @property
    def most_parts(self) -> int:
        """Number of ranks with different parts of one parameter, before sharding."""
        return max((unit.mesh.inner for unit in self.units), default=self.mesh.inner)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, without padding."""
        placements = (place for group in self.groups for place in group.layout.placements)
        return sum(place.parts * place.numel for place in placements)

    @property
    def groups(self) -> tuple[GroupPlan, ...]:
        """The flat buffers of all units."""
        return tuple(group for unit in self.units for group in unit.groups)

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.units)

    @property
    def staging_bytes(self) -> int:
        """Most host bytes that a rank copies to save in the background."""
        return staging_bytes(self)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors in a checkpoint, without headers and JSON files."""
        total = float(self.saved_buffer_bytes)
        for group in self.groups:
            itemsize = ITEMSIZE[group.dtypes.master]
            for placement in group.layout.placements:
                shape = placement.whole_shape
                total += itemsize * math.prod(shape)
                if group.trainable:
                    total += self.optimizer.saved_bytes(placement.name, shape, itemsize)
        return math.ceil(total)

    def scheduler(self) -> Scheduler:
        """Returns a new scheduler for this plan."""
        return Scheduler(self.units, self.order, self.depths)

    def tree(self) -> str:
        """Returns units, sizes, padding, slots and dtypes as text."""
        return render_tree(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
            ConfigError: The text is something else, or of another version.
        """
        try:
            return decode_plan(cls, json.loads(text))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"plan: expected the output of Plan.to_json, got {error!r}. Plan again."
            ) from error

    def reordered(
        self, forward: Sequence[int], backward: Sequence[int], *, learned: bool = True
    ) -> Plan:
        """Returns the plan for another order; units that are entered repeatedly become resident.

        Units that the order lacks keep their place after the one before them: a later batch may
        need them on some ranks, and all ranks must gather them then.

        Args:
            forward: Units in the order in which forward enters them.
            backward: Units in the order in which backward enters them.
            learned: Whether the order was recorded in a real step, not in a trace.
        """
        unused = tuple(unit.index for unit in self.units if unit.index not in forward)
        forward = _with_unused(forward, self.order.forward, unused)
        left = [unit for what, unit in nominal_trace(self.units, forward) if what == "leave"]
        trained = [unit for unit in unused if unit in self.order.backward]
        backward = _with_unused(backward, left[::-1], trained)
        order = Order(forward, backward, reduce_order(self.units, forward), learned, unused)
        return _finish(replace(self, order=order))


def _with_unused(
    observed: Sequence[int], planned: Sequence[int], unused: Collection[int]
) -> tuple[int, ...]:
    found = list(observed)
    for at, unit in enumerate(planned):
        if unit in unused:
            before = next((x for x in reversed(planned[:at]) if x in found), None)
            found.insert(0 if before is None else len(found) - found[::-1].index(before), unit)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank's part of a plan: `slices[unit][group]` lists a slice per parameter."""

    rank: int
    part: int
    slices: tuple[tuple[tuple[Slice, ...], ...], ...]

    def all_slices(self) -> tuple[Slice, ...]:
        """Every slice that this rank owns, unit by unit."""
        return tuple(s for unit in self.slices for group in unit for s in group)


def make_plan(
    spec: ModelSpec,
    config: ShardConfig,
    topology: Topology,
    chosen_modules: Sequence[str] | None = None,
    settings: Mapping[str, UnitSettings] | None = None,
) -> Plan:
    """Computes the plan.

    Args:
        spec: The model.
        config: The sharding configuration.
        topology: Number of ranks, in all and per host.
        chosen_modules: Names of the modules that the callable `config.wrap` chose.
        settings: Overrides of single units, by module name ("" is the root).

    Raises:
        ConfigError: The mesh, the units or the strategy are impossible.
    """
    mesh = mesh_of(config, topology)
    spec = spec.without(config.ignore)
    choices = units_of(spec, config, chosen_modules)
    units = _bare_units(spec, config, choices, mesh, settings or {})
    depths = Depths(config.forward_prefetch, config.backward_prefetch)
    homes = _homes(config, trains=any(g.trainable for u in units for g in u.groups))
    unfinished = Plan(
        model_kind=spec.kind,
        strategy=config.strategy,
        mesh=mesh,
        units=units,
        rings=(),
        order=registration_order(units),
        depths=depths,
        events=(),
        memory=(),
        transport=config.transport,
        buffer_bytes=spec.buffer_bytes,
        grad_sync=config.grad_sync,
        recompute=recomputed_modules(spec, config.activation_checkpointing),
        homes=homes,
        saved_buffer_bytes=spec.saved_buffer_bytes,
        reduction=config.reduction,
    )
    return _finish(unfinished)


def _bare_units(
    spec: ModelSpec,
    config: ShardConfig,
    choices: Mapping[str, Role],
    mesh: Mesh,
    settings: Mapping[str, UnitSettings],
) -> tuple[UnitPlan, ...]:
    """The units with their layouts, without slots."""
    names = list(choices)
    rows = _rows_of(config, names)
    modules = {module.name: module for module in spec.modules}
    units: list[UnitPlan] = []
    for index, (parent, params) in enumerate(assign_params(spec, names)):
        module, row = modules[names[index]], rows[names[index]]
        own = settings.get(module.name, UnitSettings())
        row = row_of(own.strategy) if own.strategy else row
        own_mesh = _mesh_of(module.name, params, mesh)
        own_mesh = own_mesh if row.shard_params else own_mesh.unsharded()
        units.append(
            UnitPlan(
                index=index,
                name=module.name,
                kind=module.kind,
                role=choices[module.name],
                parent=parent,
                mesh=own_mesh,
                groups=group_params(params, config, own, own_mesh.shard),
                reshard_after_forward=row.reshard_after_forward,
                reads_weight_in_backward=module.reads_weight_in_backward,
            )
        )
    return tuple(units)


def _mesh_of(unit: str, params: Sequence[ParamSpec], mesh: Mesh) -> Mesh:
    """The mesh of a unit's parameters: the model's, or that of experts."""
    found = {param.mesh or mesh: param.name for param in params} or {mesh: ""}
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise WrapError(
            f"unit {unit or '(root)'}: expected experts in a module without other parameters, "
            f"which becomes a unit; got {one} and {other}, which are cut over different ranks. Put "
            "the experts into a module of their own, whose forward reads them."
        )
    return next(iter(found))


def _rows_of(config: ShardConfig, names: Sequence[str]) -> dict[str, StrategyRow]:
    """The strategy of each unit: the last glob of `strategies` that names it or a module above."""
    rows = dict.fromkeys(names, row_of(config.strategy))
    for glob, strategy in config.strategies:
        named = [name for name in names if name and matches(name, (glob,))]
        if not named:
            raise WrapError(
                "strategies: expected names (globs) of units or of modules around them; got "
                f"{glob!r}, which names modules inside of units. Write a module's full name to "
                f"make it a unit. Units here: {', '.join(names[1:6]) or 'the root alone'}."
            )
        rows.update(dict.fromkeys(named, row_of(strategy)))
    return rows


_PLACES = {None: Place.DEVICE, HomeKind.CPU: Place.HOST, HomeKind.NVME: Place.DISK}


def _homes(config: ShardConfig, *, trains: bool) -> Homes:
    """Where state is stored. torch's optimizers need all three kinds in one place."""
    if config.offload is None:
        shared = config.transport is TransportKind.SHARED
        return Homes(parameters=Place.SHARED) if shared else Homes()
    kinds = (config.offload.parameters, config.offload.gradients, config.offload.optimizer)
    if None not in kinds:
        return Homes(*(_PLACES[kind] for kind in kinds))
    if set(kinds) == {None}:
        return Homes()
    if not trains and set(kinds[1:]) == {None}:
        return Homes(parameters=_PLACES[config.offload.parameters])
    given = ", ".join(
        f"{name}: {kind or 'device'}"
        for name, kind in zip(("parameters", "gradients", "optimizer"), kinds, strict=True)
    )
    raise ConfigError(
        "offload: expected cpu or nvme for each of parameters, gradients and optimizer, because "
        f"torch's optimizers update parameters in place; got {given}, which is not yet supported. "
        "Write offload: cpu. (A model without trained parameters may offload parameters only.)"
    )


def units_of(
    spec: ModelSpec, config: ShardConfig, chosen_modules: Sequence[str] | None = None
) -> dict[str, Role]:
    """Names and roles of the units; arguments and errors as for `make_plan`."""
    modules = [module.name for module in spec.modules if module.name]
    check_globs("fp32_modules", config.fp32_modules, modules, "modules")
    _check_tied(spec, config)
    named = [glob for glob, _ in config.strategies]
    check_globs("strategies", named, modules, "modules")
    wrap = config.wrap if chosen_modules is None else frozenset(chosen_modules)
    assert not callable(wrap), "the caller passes a callable's choice as chosen_modules"
    return choose_units(spec, wrap, config.wrap_min_params, named)


def _check_tied(spec: ModelSpec, config: ShardConfig) -> None:
    """Raises ConfigError if `fp32_modules` names one of several modules of a parameter."""
    modules = {module.name for module in spec.modules}  # each by its first name
    is_low = ITEMSIZE[config.param_dtype or config.master_dtype or DType.FLOAT32] < 4
    for param in spec.params if is_low else ():
        names = {name for name in param.names if parent_name(name) in modules}
        chosen = {name for name in names if matches(name, config.fp32_modules)}
        if chosen and (rest := names - chosen):
            raise ConfigError(
                "fp32_modules: expected all modules of a tied parameter or none; got that of "
                f"{min(chosen)} without that of {min(rest)}. Name {parent_name(min(rest))} too."
            )


def _finish(plan: Plan) -> Plan:
    """The plan with the slots, events and memory table that follow from units and order."""
    num_slots = max(plan.depths.forward, plan.depths.backward) + 1
    units, rings = assign_slots(plan.units, plan.order.forward, num_slots, plan.homes)
    plan = replace(plan, units=units, rings=rings)
    plan = replace(plan, events=simulate_step(plan.scheduler()))
    return replace(plan, memory=state_rows(plan))
