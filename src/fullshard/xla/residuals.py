"""What the blocks of a step keep for backward, read off the program that jax traces.

A scan over blocks hands what backward reads to its end as arrays with a first axis of layers:

    forward   gather, block   ... x L    --> (layers, ...) inputs, scores, products
    backward  reads them, the last layer first

Which these are follows from the block and from the policy of activation checkpointing; tracing it
takes a second, whatever the size, and no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from fullshard.planner.arrays import ArraysPlan
from fullshard.xla.losses import LossFn
from fullshard.xla.mesh import AXES
from fullshard.xla.opt_state import trained
from fullshard.xla.plan import Tree, XlaPlan, batch_spec
from fullshard.xla.step import Beside, gradients


@dataclass(frozen=True)
class Kept:
    """Bytes of a device.

    Attributes:
        activations: That backward reads.
        gathered: Parameters that backward reads whole, where they are not gathered again.
    """

    activations: int = 0
    gathered: int = 0


def without_devices(table: ArraysPlan, structure: Any) -> XlaPlan:
    """A plan that can be traced, and on which nothing can run."""
    sizes = (table.mesh.replicate, table.mesh.shard)
    return XlaPlan(table, AbstractMesh(sizes, AXES, (AxisType.Auto,) * 2), structure)  # type: ignore[arg-type]


def kept_for_backward(plan: XlaPlan, loss_fn: LossFn, batch: Tree) -> Kept:
    """What a micro-batch's forward keeps on a device, over all blocks.

    Args:
        plan: Plan of the model; its mesh may be abstract.
        loss_fn: Loss of the step.
        batch: Shapes of a micro-batch of all devices.
    """
    mapped = jax.shard_map(
        partial(gradients, plan, lambda _: loss_fn, 1),
        mesh=plan.mesh,
        in_specs=(plan.specs, batch_spec(plan.mesh, 1), PartitionSpec()),
        out_specs=(trained(plan, plan.specs), PartitionSpec(), PartitionSpec()),
        check_vma=False,
    )
    params = plan.map(lambda a: jax.ShapeDtypeStruct(a.stored_shape, str(a.dtypes.master)))
    program = jax.make_jaxpr(mapped)(params, batch, Beside())
    # Products keep weights transposed.
    blocks = [array.shape for array in plan.table.arrays if array.block]
    weights = {shape for one in blocks for shape in (one, one[::-1])}
    found = Kept()
    for scan in _scans(program.jaxpr):
        found = _with_kept(found, scan, weights)
    return found


def _scans(program: Any) -> Iterator[Any]:
    """Those of forward that stand in no other."""
    for step in program.eqns:
        if step.primitive.name == "scan":
            if not step.params["reverse"]:
                yield step
            continue
        for param in step.params.values():
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from _scans(inner)


def _with_kept(found: Kept, scan: Any, weights: set[tuple[int, ...]]) -> Kept:
    """With what it gives back beside what it carries, but for what waits on the host."""
    activations, gathered = found.activations, found.gathered
    for out in scan.outvars[scan.params["num_carry"] :]:
        aval = out.aval
        num_bytes = aval.size * aval.dtype.itemsize
        if "host" in str(aval).lower():
            continue
        if aval.shape[1:] in weights:
            gathered += num_bytes
        else:
            activations += num_bytes
    return Kept(activations, gathered)
