"""Ahead-of-time compilation of a step, for simulated or absent devices.

XLA reports exactly which bytes its program allocates and which collectives it issues.
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
    """XLA's report on a compiled step, in bytes per device.

    Attributes:
        arguments: Bytes of the state and the batch.
        in_place: Bytes of the arguments that are donated, so that results reuse their memory.
        temporary: Peak of all other buffers.
        peak: The peak that the backend reports; the sum of the above on CPUs, which report none.
        collectives: Counts and bytes by kind, multiplied by loop trip counts; None if this jaxlib
            cannot parse the plugin's program (libtpu is often newer).
        compile_s: Compile time.
    """

    arguments: int
    in_place: int
    temporary: int
    peak: int
    collectives: dict[str, Collectives] | None
    compile_s: float


def devices_of(topology: str | None, world_size: int) -> list[Any]:
    """Returns simulated CPU devices, or the devices of a named topology, which need not exist.

    Args:
        topology: libtpu's name of a TPU slice (v5p:2x2x2, v6e:4x4), or GPUs (8xH100-80GB); None:
            CPUs.
        world_size: Number of simulated CPU devices.

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
    except Exception as error:  # plugins raise various types for an unknown name
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
    """Compiles a training step from shapes, without arrays.

    Args:
        plan: A plan on the devices to compile for.
        loss_fn: Loss function, as in `train_step`.
        tx: The optimizer; its update receives `learning_rate`.
        batch: Shapes of the batch's arrays, with shardings.
        **settings: Further arguments of `train_step`.

    Raises:
        WillNotFitError: The step needs more memory than XLA knows the device to have.
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
    # Loops compiled for TPUs have no trip count. Those with collectives run over the blocks.
    layers = max((array.num_layers for array in plan.table.arrays), default=0)
    try:
        moved = census(compiled, num_trips=layers or None)
    except jax.errors.JaxRuntimeError:
        moved = None
    return Compiled(**memory_of(compiled, on_cpu=on_cpu), collectives=moved, compile_s=compile_s)


def abstract_state(plan: XlaPlan, tx: optax.GradientTransformation) -> State:
    """The shapes and shardings of a training state."""

    stored = plan.map(
        lambda a: jax.ShapeDtypeStruct(
            a.stored_shape, str(a.dtypes.master), sharding=NamedSharding(plan.mesh, spec_of(a))
        )
    )
    step = jax.ShapeDtypeStruct((), "int32", sharding=plan.replicated)
    return State(stored, abstract_opt_state(plan, tx), step, plan)


def memory_of(compiled: Any, *, on_cpu: bool) -> dict[str, int]:
    """Returns `arguments`, `in_place`, `temporary` and `peak` of a program; see `Compiled`."""
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
    """Bytes per device that a forward keeps for the backward.

    Attributes:
        activations: Bytes of activations.
        gathered: Bytes of full parameters that stay gathered until the backward.
    """

    activations: int = 0
    gathered: int = 0


def without_devices(table: ArraysPlan, structure: Any) -> XlaPlan:
    """The plan on an abstract mesh, which can be traced but not run."""
    sizes = (table.mesh.replicate, table.mesh.shard)
    return XlaPlan(table, AbstractMesh(sizes, AXES, (AxisType.Auto,) * 2), structure)  # type: ignore[arg-type]


def kept_for_backward(plan: XlaPlan, loss_fn: LossFn, batch: Tree) -> Kept:
    """Returns the bytes per device that the forward of a micro-batch keeps for all blocks.

    Args:
        plan: The model's plan; its mesh may be abstract.
        loss_fn: The step's loss function.
        batch: Shapes of the global micro-batch.
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
    # Matrix products save transposed weights.
    blocks = [array.shape for array in plan.table.arrays if array.block]
    weights = {shape for one in blocks for shape in (one, one[::-1])}
    found = Kept()
    for scan in _scans(program.jaxpr):
        found = _with_kept(found, scan, weights)
    return found


def _scans(program: Any) -> Iterator[Any]:
    """The outermost scans of the forward."""
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
    """The scan's stacked outputs, without those offloaded to the host."""
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
