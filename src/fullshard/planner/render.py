"""A plan as text for people."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from fullshard.planner.mesh import Mesh
from fullshard.planner.units import UnitPlan

if TYPE_CHECKING:
    from fullshard.planner.plan import Plan


def human_bytes(count: float) -> str:
    """Bytes in the binary unit that reads best."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def render_tree(plan: Plan) -> str:
    """Mesh, dtype contract, units (like neighbours folded), rings, memory."""
    mesh = plan.mesh
    lines = [
        f"{plan.model_kind}: {plan.num_parameters:,} parameters, {plan.strategy} on "
        f"{mesh.world_size} ranks (replicate {mesh.replicate} x shard {mesh.shard})",
        f"dtypes: {_contracts(plan)}",
        f"units: {len(plan.units)}, padding {_padding(plan):.3%}, prefetch "
        f"{plan.depths.forward} forward, {plan.depths.backward} backward",
    ]
    for _, run in groupby(plan.units, key=_likeness):
        lines.append("  " + _unit_line(list(run), mesh))
    lines.append("rings:")
    for ring in plan.rings:
        lines.append(
            f"  {ring.name}: {ring.count} x {ring.numel:,} {ring.dtype}"
            f" = {human_bytes(ring.num_bytes)}"
        )
    lines.append("memory of a rank (state only):")
    for row in plan.memory:
        lines.append(f"  {row.name}: {human_bytes(row.num_bytes)}")
    return "\n".join(lines)


def _likeness(unit: UnitPlan) -> tuple[object, ...]:
    groups = tuple((g.trainable, *(p.shape for p in g.layout.placements)) for g in unit.groups)
    return unit.kind, unit.role, unit.parent, groups


def _unit_line(run: list[UnitPlan], mesh: Mesh) -> str:
    first, last = run[0], run[-1]
    title = first.title if len(run) == 1 else f"{first.title} .. {last.title} ({len(run)})"
    frozen = "" if first.trainable or not first.groups else ", frozen"
    slots = sorted({g.slot.ring.rpartition(".")[0] for g in first.groups if g.slot})
    copied = f", on {first.mesh.replicate} x {first.mesh.shard}" if first.mesh != mesh else ""
    where = f"ring {', '.join(slots)}" if slots else "read in place"
    return (
        f"{title}: {first.kind}, {first.role}, {first.numel:,} elements "
        f"(padding {first.padding:,}), {where}{frozen}{copied}"
    )


def _contracts(plan: Plan) -> str:
    found = {
        f"master {d.master}, compute {d.compute}, reduce {d.reduce}, accumulate {d.accumulate}"
        for unit in plan.units
        for d in (group.dtypes for group in unit.groups)
    }
    return "; ".join(sorted(found)) or "no parameters"


def _padding(plan: Plan) -> float:
    total = sum(unit.numel for unit in plan.units)
    return sum(unit.padding for unit in plan.units) / total if total else 0.0
