"""Units as the plan lists them: their parameters laid out, their slots, their dtype contract."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fullshard.config.values import DType, Strategy
from fullshard.planner.layout import FlatLayout, clean_name
from fullshard.planner.mesh import Mesh
from fullshard.planner.spec import (
    ITEMSIZE,
    ModelSpec,
    ParamSpec,
    is_inside,
    matches,
    parent_name,
)
from fullshard.planner.wrap import Role, UnitChoice


@dataclass(frozen=True, slots=True)
class DtypeContract:
    """Which dtype each kind of number has.

    Attributes:
        master: At rest, and what the optimizer updates.
        compute: In the slot; forward and backward see it.
        reduce: Dtype of gradients on the wire.
        accumulate: Dtype of gradient sums: promote(float32, master).
    """

    master: DType
    compute: DType
    reduce: DType
    accumulate: DType


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place in a ring: `numel` elements from `base` in slot `index`."""

    ring: str
    index: int
    base: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One flat buffer of a unit: parameters alike in dtypes and in `requires_grad`.

    Attributes:
        names: Every name of each parameter, first names in the layout's order.
        slot: Where the gathered buffer lives; None where nothing is gathered, because every rank
            holds all of it in the compute dtype, or maps all of it.
        grad_slot: Where gradients are collected; None for frozen parameters.
    """

    names: tuple[tuple[str, ...], ...]
    layout: FlatLayout
    dtypes: DtypeContract
    trainable: bool
    slot: SlotRef | None = None
    grad_slot: SlotRef | None = None

    @property
    def shared(self) -> bool:
        """Whether all ranks of its shard axis map one copy."""
        return self.slot is None and self.layout.num_parts > 1

    def gather_bytes(self) -> int:
        """Bytes that a rank receives to gather it."""
        if self.slot is None:
            return 0
        others = self.layout.num_parts - 1
        return others * self.layout.part_numel * ITEMSIZE[self.dtypes.compute]

    def reduce_bytes(self, replicate: int) -> int:
        """Bytes that a rank receives to reduce its gradients over both axes."""
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
        index: Place in the plan.
        name: The unit's module; "" is the root.
        kind: Its class name.
        role: What it is to the model.
        parent: Index of the unit that it lies in; -1 for the root.
        mesh: The ranks that its parameters are cut over, and copied over.
        groups: Its flat buffers; one collective moves all of them.
        reshard_after_forward: Whether it gives its slot back after forward.
        reads_weight_in_backward: Whether its backward needs the weights.
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
        """The name as people read it."""
        return clean_name(self.name) or "(root)"

    @property
    def numel(self) -> int:
        """Elements in its flat buffers, padding included."""
        return sum(group.layout.numel for group in self.groups)

    @property
    def padding(self) -> int:
        return sum(group.layout.padding for group in self.groups)

    @property
    def trainable(self) -> bool:
        return any(group.trainable for group in self.groups)


def ancestors_of(units: Sequence[UnitPlan], unit: UnitPlan) -> tuple[int, ...]:
    """The units around a unit, innermost first."""
    found: list[int] = []
    above = unit.parent
    while above >= 0:
        found.append(above)
        above = units[above].parent
    return tuple(found)


def assign_params(
    spec: ModelSpec, choices: Sequence[UnitChoice]
) -> list[tuple[UnitChoice, int, list[ParamSpec]]]:
    """Give each parameter to a unit: (choice, parent index, parameters) in the choices' order.

    A parameter belongs to the innermost unit around its module; a tied one to the innermost unit
    around all of its modules (their lowest common ancestor), where it is gathered once.
    """
    names = [choice.module for choice in choices]
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
    return [(choice, parents[i], owned[i]) for i, choice in enumerate(choices)]


def group_params(
    params: Sequence[ParamSpec], contract: ContractRule, num_parts: int
) -> tuple[GroupPlan, ...]:
    """Lay a unit's parameters into one flat buffer per (dtype contract, trainable)."""
    by_key: dict[tuple[bool, DtypeContract], list[ParamSpec]] = defaultdict(list)
    for param in params:
        by_key[not param.trainable, contract.of(param)].append(param)
    groups: list[GroupPlan] = []
    for (frozen, dtypes), members in sorted(
        by_key.items(), key=lambda item: (item[0][0], item[0][1].master, item[0][1].compute)
    ):
        layout = FlatLayout.build([(p.name, p.shape) for p in members], num_parts)
        names = tuple(p.names for p in members)
        groups.append(GroupPlan(names, layout, dtypes, not frozen))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """What one unit has otherwise than the configuration says; None where it has the same.

    Attributes:
        strategy: When it gives its slot back, and whether it is cut at all.
        compute: Its compute dtype.
        reduce: The dtype of its gradients on the wire.
        keeps_dtypes: Its parameters rest in the dtypes that they came in.
    """

    strategy: Strategy | None = None
    compute: DType | None = None
    reduce: DType | None = None
    keeps_dtypes: bool = False


@dataclass(frozen=True, slots=True)
class ContractRule:
    """The configured dtypes; None where the parameter's own dtype decides.

    Attributes:
        fp32_modules: Globs of modules that compute in float32 where others compute in less.
        keeps_dtypes: Masters have the dtypes that the parameters came in.
    """

    master: DType | None = None
    compute: DType | None = None
    reduce: DType | None = None
    fp32_modules: tuple[str, ...] = ()
    keeps_dtypes: bool = False

    def for_unit(self, unit: UnitSettings) -> ContractRule:
        """The rule of a unit that has settings of its own."""
        return replace(
            self,
            compute=unit.compute or self.compute,
            reduce=unit.reduce or self.reduce,
            keeps_dtypes=unit.keeps_dtypes or self.keeps_dtypes,
        )

    def of(self, param: ParamSpec) -> DtypeContract:
        """The contract of a parameter: float64 stays float64, all else has a float32 master."""
        default = DType.FLOAT64 if param.dtype is DType.FLOAT64 else DType.FLOAT32
        if self.keeps_dtypes:
            default = param.dtype
        master = self.master or default
        accumulate = DType.FLOAT64 if master is DType.FLOAT64 else DType.FLOAT32
        compute = self.compute or master
        if ITEMSIZE[compute] < 4 and any(matches(name, self.fp32_modules) for name in param.names):
            compute = DType.FLOAT32
        return DtypeContract(
            master=master,
            compute=compute,
            reduce=self.reduce or accumulate,
            accumulate=accumulate,
        )
