"""Plans as text: a tree for people, and JSON and back (dataclasses by field)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fullshard.errors import ConfigError
from fullshard.planner.memory import most_spilled_bytes, sum_by_place
from fullshard.planner.mesh import Mesh
from fullshard.planner.units import UnitPlan

if TYPE_CHECKING:
    from fullshard.planner.arrays import ArraysPlan
    from fullshard.planner.plan import Plan

SCHEMA_VERSION = 1  # of plan.json, run.json and cache.json
WIDTH = 100  # characters of a line of JSON

T = TypeVar("T")


def human_bytes(count: float) -> str:
    """Returns bytes in the largest fitting binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def render_tree(plan: Plan) -> str:
    """Returns mesh, dtypes, units (equal neighbours folded), rings and memory as text."""
    mesh = plan.mesh
    lines = [
        f"{plan.model_kind}: {plan.num_parameters:,} parameters, {plan.strategy} on "
        f"{mesh.world_size} ranks ({axes_of(plan)})",
        f"dtypes: {contracts(plan)}",
        f"units: {len(plan.units)}, padding {padding(plan):.3%}, prefetch "
        f"{plan.depths.forward} forward, {plan.depths.backward} backward",
    ]
    lines += [f"  {_unit_line(run, mesh)}" for run in like_neighbours(plan.units)]
    lines.append("rings:")
    for ring in plan.rings:
        size = f"{ring.count} x {ring.numel:,} {ring.dtype} = {human_bytes(ring.num_bytes)}"
        lines.append(f"  {ring.name}: {size}")
    rows = [f"  {row.name}: {human_bytes(row.num_bytes)}" for row in plan.memory]
    more = human_bytes(most_spilled_bytes(plan))
    spills = f"  up to {more} more per rank if backward's order is not the plan's (spills)"
    return "\n".join([*lines, "memory of a rank (state only):", *rows, spills])


def axes_of(plan: Plan | ArraysPlan) -> str:
    """Returns names and sizes of the mesh's axes, without other axes of one rank."""
    sizes = plan.mesh.axes(plan.most_parts)
    shown = [axis for axis, size in sizes.items() if size > 1 or axis in ("replicate", "shard")]
    return " x ".join(f"{axis} {sizes[axis]}" for axis in shown)


def like_neighbours(units: Iterable[UnitPlan]) -> list[list[UnitPlan]]:
    """Returns runs of neighbouring units that share a row of a table."""
    return [list(run) for _, run in groupby(units, key=_likeness)]


def _likeness(unit: UnitPlan) -> tuple[object, ...]:
    groups = (
        (g.trainable, g.dtypes, g.layout.num_parts, *(p.shape for p in g.layout.placements))
        for g in unit.groups
    )
    return unit.kind, unit.role, unit.parent, *groups


def _unit_line(run: list[UnitPlan], mesh: Mesh) -> str:
    first, last = run[0], run[-1]
    title = first.title if len(run) == 1 else f"{first.title} .. {last.title} ({len(run)})"
    frozen = "" if first.trainable or not first.groups else ", frozen"
    slots = sorted({g.slot.ring.rpartition(".")[0] for g in first.groups if g.slot})
    copied = f", on {first.mesh.replicate} x {first.mesh.shard}" if first.mesh != mesh else ""
    copied += f" x {first.mesh.inner} (experts)" if first.mesh.inner != mesh.inner else ""
    where = f"ring {', '.join(slots)}" if slots else "read in place"
    return (
        f"{title}: {first.kind}, {first.role}, {first.numel:,} elements "
        f"(padding {first.padding:,}), {where}{frozen}{copied}"
    )


def contracts(plan: Plan) -> str:
    """The dtypes of all groups, each combination once."""
    found = {
        f"master {d.master}, compute {d.compute}, reduce {d.reduce}, accumulate {d.accumulate}"
        for unit in plan.units
        for d in (group.dtypes for group in unit.groups)
    }
    return "; ".join(sorted(found)) or "no parameters"


def padding(plan: Plan) -> float:
    """Share of the padding in all elements."""
    total = sum(unit.numel for unit in plan.units)
    return sum(unit.padding for unit in plan.units) / total if total else 0.0


# ---- JSON ----------------------------------------------------------------------------------------


class PlanDocument:
    """The JSON and the memory table of a plan, for the plans of both engines.

    Attributes:
        memory: Bytes of the largest rank by kind.
    """

    __slots__ = ()
    __pydantic_config__ = ConfigDict(extra="forbid")  # for all dataclasses of a plan
    memory: Any  # a field or a property

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Bytes of the largest rank by place, without activations."""
        return sum_by_place(self.memory)

    def rows(self) -> list[dict[str, str | int]]:
        """Returns the memory table: [{"name", "bytes"}]."""
        return [{"name": row.name, "bytes": row.num_bytes} for row in self.memory]

    def to_json(self) -> str:
        """Returns the plan as JSON: the same bytes in every process."""
        return format_json({"schema_version": SCHEMA_VERSION, **_encode(self)}) + "\n"

    def digest(self) -> str:
        """Returns a short hash of the JSON, for comparing ranks."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def decode_plan(cls: type[T], data: dict[str, Any]) -> T:
    """Builds a plan from the JSON values of `PlanDocument.to_json`.

    Raises:
        ValueError: Another schema version, or a field is missing, unknown or invalid.
    """
    fields = dict(data)
    check_version(fields.pop("schema_version", None), "plan.json")
    try:
        return TypeAdapter(cls).validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def check_version(version: object, origin: object) -> None:
    """The rule of all our versioned JSON documents: files of later versions are not read.

    Args:
        version: The document's `schema_version`.
        origin: The document, for the error.

    Raises:
        ConfigError: It is later than this version, or no number.
    """
    if version not in range(1, SCHEMA_VERSION + 1):
        raise ConfigError(
            f"{origin}: expected schema_version {SCHEMA_VERSION} or older, got {version}. Use the "
            "version of fullshard that wrote it, or another folder."
        )


def format_json(value: Any, depth: int = 0, width: int = WIDTH) -> str:
    """Returns JSON with every value on one line if it fits into the width, so it reads as a table.

    Args:
        value: JSON values.
        depth: Spaces before the value's lines.
        width: Characters per line.
    """
    line = json.dumps(value)
    if not isinstance(value, dict | list) or not value or len(line) + depth <= width:
        return line
    margin = "\n" + " " * depth
    if isinstance(value, dict):
        inside = [
            f"{json.dumps(key)}: {format_json(item, depth + 1, width)}"
            for key, item in typing.cast("dict[str, Any]", value).items()
        ]
        return "{" + ",".join(f"{margin} {item}" for item in inside) + margin + "}"
    items = typing.cast("list[Any]", value)
    inside = [format_json(item, depth + 1, width) for item in items]
    return "[" + ",".join(f"{margin} {item}" for item in inside) + margin + "]"


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            f.name: _encode(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if getattr(value, f.name) != f.metadata.get("omitted", dataclasses.MISSING)
        }
    if isinstance(value, tuple | list):
        return [_encode(item) for item in typing.cast("list[Any]", value)]
    return value
