"""Compiling a step ahead of time, for devices that are played or that are not there.

What XLA says of its own program is exact: the bytes that it allocates, the collectives it issues.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import optax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from fullshard.errors import ConfigError, WillNotFitError
from fullshard.planner.arrays import ArraysPlan, Collectives
from fullshard.xla import processes
from fullshard.xla.census import census
from fullshard.xla.gpu_targets import compiler_options, gpu_devices
from fullshard.xla.mesh import AXES
from fullshard.xla.opt_state import abstract_opt_state, trained
from fullshard.xla.plan import Tree, XlaPlan, batch_spec, spec_of
from fullshard.xla.step import Beside, LossFn, State, gradients, train_step


@dataclass(frozen=True)
class Compiled:
    """What XLA says of a step, in bytes of a device.

    Attributes:
        arguments: State and batch.
        in_place: The part of the arguments that is returned in the same memory.
        temporary: Everything else that the step holds at once.
        peak: What the device reports; on CPUs, which report none, all of the above together.
        collectives: By kind, loops multiplied; None where this jaxlib cannot read what the plugin
            compiled (libtpu is often the newer of the two).
        compile_s: Seconds that it took.
    """

    arguments: int
    in_place: int
    temporary: int
    peak: int
    collectives: dict[str, Collectives] | None
    compile_s: float


def devices_of(topology: str | None, world_size: int) -> list[Any]:
    """CPU devices that this process plays, or those of a named topology, none of which is needed.

    Args:
        topology: As libtpu names TPU slices (v5p:2x2x2, v6e:4x4), or GPUs (8xH100-80GB); None:
            CPUs.
        world_size: How many to play.

    Raises:
        ConfigError: The plugin is not installed, or it does not know the name.
    """
    if topology is None:
        processes.play(world_size)
        return list(jax.devices())
    if ":" not in topology:
        return gpu_devices(topology)
    if find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology: expected libtpu to compile for {topology!r}; it is not installed. Run "
            "pip install libtpu (no TPU is needed), or leave --topology out: the step is then "
            "compiled for CPUs."
        )
    processes.play(1)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # whatever the plugin raises at a name
        raise ConfigError(
            f"--topology: expected a slice that libtpu describes, such as v5p:2x2x2 or v6e:4x4; "
            f"got {topology!r}, of which it says: {str(error).splitlines()[0]}"
        ) from error
    return list(found)


def compile_step(
    plan: XlaPlan,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    batch: Tree,
    **settings: Any,
) -> Compiled:
    """Compile a training step from shapes alone.

    Args:
        plan: On the devices to compile for.
        loss_fn: As for `train_step`.
        tx: The optimizer, whose update is given `learning_rate`.
        batch: Shapes with shardings.
        **settings: Of `train_step`.

    Raises:
        WillNotFitError: XLA knows the devices' memory, and the step takes more.
    """
    step = train_step(plan, loss_fn, tx, **settings)
    began = time.perf_counter()
    try:
        options = compiler_options(list(plan.mesh.devices.flat))
        compiled = step.compile(abstract_state(plan, tx), batch, options, learning_rate=1e-3)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise WillNotFitError(
            f"plan: expected a step that fits the device; XLA says {str(error).splitlines()[0]} "
            "Use more devices, a smaller batch or activation_checkpointing=block."
        ) from error
    compile_s = time.perf_counter() - began
    on_cpu = plan.mesh.devices.flat[0].platform == "cpu"
    # TPU's loops do not say how often they run: those with collectives run over the blocks.
    layers = max((array.num_layers for array in plan.table.arrays), default=0)
    try:
        moved = census(compiled, num_trips=layers or None)
    except jax.errors.JaxRuntimeError:
        moved = None
    return Compiled(**memory_of(compiled, on_cpu=on_cpu), collectives=moved, compile_s=compile_s)


def abstract_state(plan: XlaPlan, tx: optax.GradientTransformation) -> State:
    """A state's shapes, each with its sharding."""

    stored = plan.map(
        lambda a: jax.ShapeDtypeStruct(
            a.stored_shape, str(a.dtypes.master), sharding=NamedSharding(plan.mesh, spec_of(a))
        )
    )
    step = jax.ShapeDtypeStruct((), "int32", sharding=plan.replicated)
    return State(stored, abstract_opt_state(plan, tx), step, plan)


def memory_of(compiled: Any, *, on_cpu: bool) -> dict[str, int]:
    """`arguments`, `in_place`, `temporary` and `peak` of a compiled program; see Compiled."""
    found = compiled.memory_analysis()
    arguments, in_place = found.argument_size_in_bytes, found.alias_size_in_bytes
    temporary = found.temp_size_in_bytes
    together = arguments + found.output_size_in_bytes - in_place + temporary
    reported = 0 if on_cpu else found.peak_memory_in_bytes
    return {
        "arguments": arguments,
        "in_place": in_place,
        "temporary": temporary,
        "peak": reported or together,
    }


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
