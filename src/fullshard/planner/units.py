"""Units of a plan: the layout of their parameters, their slots, their dtypes and their homes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fullshard.config.sharding import ShardConfig
from fullshard.config.values import DType, Strategy
from fullshard.planner.layout import FlatLayout, clean_name
from fullshard.planner.mesh import Mesh
from fullshard.planner.spec import ITEMSIZE, ModelSpec, ParamSpec, is_inside, matches, parent_name
from fullshard.planner.wrap import Role


class Place(StrEnum):
    """A kind of memory; `shared` is one mapping for all ranks of a host."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class Homes:
    """Where each kind of state is stored; gathered units are always on the device."""

    parameters: Place = Place.DEVICE
    gradients: Place = Place.DEVICE
    optimizer: Place = Place.DEVICE

    @property
    def offloads(self) -> bool:
        """Whether parameters are copied to the device before every gather."""
        return self.parameters in (Place.HOST, Place.DISK)


DEFAULT_HOMES = Homes()


@dataclass(frozen=True, slots=True)
class DtypeContract:
    """The dtypes of a parameter.

    Attributes:
        master: Dtype of the stored parameter, which the optimizer updates.
        compute: Dtype in the slot, for forward and backward.
        reduce: Dtype of gradients in reductions.
        accumulate: Dtype of gradient sums: promote(float32, master).
    """

    master: DType
    compute: DType
    reduce: DType
    accumulate: DType


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place in a ring: elements from `base` in slot `index`."""

    ring: str
    index: int
    base: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One flat buffer of a unit: parameters with equal dtypes and equal `requires_grad`.

    Attributes:
        names: All names of each parameter, in the order of the layout.
        layout: The place of each parameter.
        dtypes: Dtypes of the parameters.
        trainable: `requires_grad`.
        slot: Slot of the gathered buffer; None if nothing is gathered, because every rank stores or
            maps all of it in the compute dtype.
        grad_slot: Slot in which gradients are collected; None for frozen parameters.
    """

    names: tuple[tuple[str, ...], ...]
    layout: FlatLayout
    dtypes: DtypeContract
    trainable: bool
    slot: SlotRef | None = None
    grad_slot: SlotRef | None = None

    @property
    def shared(self) -> bool:
        """Whether the ranks of the shard axis share one mapping."""
        return self.slot is None and self.layout.num_parts > 1

    def gather_bytes(self) -> int:
        """Returns the bytes that a rank receives in a gather."""
        if self.slot is None:
            return 0
        others = self.layout.num_parts - 1
        return others * self.layout.part_numel * ITEMSIZE[self.dtypes.compute]

    def reduce_bytes(self, replicate: int) -> int:
        """Returns the bytes that a rank receives in a reduction over both axes."""
        if not self.trainable:
            return 0
        part = self.layout.part_numel
        inner = (self.layout.num_parts - 1) * part * ITEMSIZE[self.dtypes.reduce]
        outer = 2 * (replicate - 1) * part * ITEMSIZE[self.dtypes.accumulate] // replicate
        return inner + outer


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Modules that are gathered and freed together.

    Attributes:
        index: Index in the plan.
        name: Name of the unit's module; "" is the root.
        kind: Class name of the module.
        role: Role of the unit in the model.
        parent: Index of the unit around it; -1 for the root.
        mesh: Ranks that its parameters are sharded and replicated over.
        groups: Flat buffers of the unit; one collective moves all of them.
        reshard_after_forward: Whether the slot is released after forward.
        reads_weight_in_backward: Whether backward needs the weights.
    """

    index: int
    name: str
    kind: str
    role: Role
    parent: int
    mesh: Mesh
    groups: tuple[GroupPlan, ...]
    reshard_after_forward: bool = True
    reads_weight_in_backward: bool = True

    @property
    def title(self) -> str:
        """The name for people; "(root)" for the root."""
        return clean_name(self.name) or "(root)"

    @property
    def numel(self) -> int:
        """Elements in its flat buffers, padding included."""
        return sum(group.layout.numel for group in self.groups)

    @property
    def padding(self) -> int:
        """Elements of padding in its flat buffers."""
        return sum(group.layout.padding for group in self.groups)

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(group.trainable for group in self.groups)


def ancestors_of(units: Sequence[UnitPlan], unit: UnitPlan) -> tuple[int, ...]:
    """Returns the units around a unit, innermost first."""
    found: list[int] = []
    above = unit.parent
    while above >= 0:
        found.append(above)
        above = units[above].parent
    return tuple(found)


def assign_params(spec: ModelSpec, names: Sequence[str]) -> list[tuple[int, list[ParamSpec]]]:
    """Assigns parameters to units; returns (parent index, parameters) per unit.

    A parameter belongs to the innermost unit around its module. A tied parameter belongs to the
    innermost unit around all of its modules (their lowest common ancestor), and is gathered once.
    """
    by_name = {name: i for i, name in enumerate(names)}

    def innermost(path: str) -> int:
        while path not in by_name:
            path = parent_name(path)
        return by_name[path]

    owned: dict[int, list[ParamSpec]] = defaultdict(list)
    for param in spec.params:
        unit = innermost(parent_name(param.name))
        while not all(is_inside(parent_name(n), names[unit]) for n in param.names):
            unit = innermost(parent_name(names[unit]))
        owned[unit].append(param)
    parents = [-1 if not name else innermost(parent_name(name)) for name in names]
    return [(parent, owned[i]) for i, parent in enumerate(parents)]


def group_params(
    params: Sequence[ParamSpec], config: ShardConfig, unit: UnitSettings, num_parts: int
) -> tuple[GroupPlan, ...]:
    """Returns a unit's flat buffers: one per dtype contract and `requires_grad`."""
    by_key: dict[tuple[bool, DtypeContract], list[ParamSpec]] = defaultdict(list)
    for param in params:
        by_key[not param.trainable, contract_of(param, config, unit)].append(param)
    groups: list[GroupPlan] = []
    for (frozen, dtypes), members in sorted(
        by_key.items(), key=lambda item: (item[0][0], item[0][1].master, item[0][1].compute)
    ):
        layout = FlatLayout.build([(p.name, p.shape, p.parts) for p in members], num_parts)
        names = tuple(p.names for p in members)
        groups.append(GroupPlan(names, layout, dtypes, not frozen))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """Per-unit overrides; None inherits from the configuration.

    Attributes:
        strategy: Strategy of the unit.
        compute: Compute dtype.
        reduce: Dtype of gradients in reductions.
        keeps_dtypes: Whether masters keep the dtypes of the given parameters.
    """

    strategy: Strategy | None = None
    compute: DType | None = None
    reduce: DType | None = None
    keeps_dtypes: bool = False


def contract_of(param: ParamSpec, config: ShardConfig, unit: UnitSettings) -> DtypeContract:
    """Returns a parameter's dtypes: float64 stays float64, others have a float32 master."""
    default = DType.FLOAT64 if param.dtype is DType.FLOAT64 else DType.FLOAT32
    master = config.master_dtype or (param.dtype if unit.keeps_dtypes else default)
    accumulate = DType.FLOAT64 if master is DType.FLOAT64 else DType.FLOAT32
    compute, fp32 = unit.compute or config.param_dtype or master, config.fp32_modules
    if ITEMSIZE[compute] < 4 and any(matches(name, fp32) for name in param.names):
        compute = DType.FLOAT32
    return DtypeContract(
        master=master,
        compute=compute,
        reduce=unit.reduce or config.reduce_dtype or accumulate,
        accumulate=accumulate,
    )
