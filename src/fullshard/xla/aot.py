"""Ahead-of-time compilation of a step, for simulated or absent devices.

XLA reports exactly which bytes its program allocates and which collectives it issues.

[Note: GPUs that are absent]
    8xH100-80GB      one machine
    4x8xH100-80GB    four machines

XLA's GPU compiler reads a few properties of a device. It also accepts them as text (OpenXLA's
GpuTargetConfigProto). They are in chips.yaml.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import optax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType

from fullshard.config.regular_files import packaged_table
from fullshard.errors import ConfigError, WillNotFitError
from fullshard.outlook.devices import parse_gpus
from fullshard.planner.arrays import ArraysPlan, Collectives
from fullshard.xla import processes
from fullshard.xla.opt_state import abstract_opt_state, rules_of
from fullshard.xla.plan import Tree, XlaPlan
from fullshard.xla.step import Beside, LossFn, State, gradients, train_step
from fullshard.xla.traced import census, traced_collectives, within


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
    on_cpu = plan.platform == "cpu"
    # Loops compiled for TPUs have no trip count. Those with collectives run over the blocks.
    layers = max((array.num_layers for array in plan.table.arrays), default=0)
    try:
        moved = census(compiled, num_trips=layers or None)
    except jax.errors.JaxRuntimeError:
        moved = None
    return Compiled(**memory_of(compiled, on_cpu=on_cpu), collectives=moved, compile_s=compile_s)


def abstract_state(plan: XlaPlan, tx: optax.GradientTransformation) -> State:
    """The shapes and shardings of a training state."""
    step = jax.ShapeDtypeStruct((), "int32", sharding=plan.replicated)
    return State(plan.shapes(), abstract_opt_state(plan, tx), step, plan, rules=rules_of(tx))


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
class Traced:
    """The properties of a traced step that is not compiled.

    Attributes:
        collectives: Counts and bytes of the step's collectives by kind.
        activations: Bytes of activations per device that a forward keeps for the backward.
        gathered: Bytes of full parameters that stay gathered until the backward.
    """

    collectives: dict[str, Collectives]
    activations: int = 0
    gathered: int = 0


def without_devices(table: ArraysPlan, structure: Any, platform: str = "") -> XlaPlan:
    """The plan on an abstract mesh, which can be traced but not run."""
    names, sizes = zip(*table.mesh.axes(table.most_parts).items(), strict=True)
    mesh: Any = AbstractMesh(sizes, names, (AxisType.Auto,) * len(sizes))
    return XlaPlan(table, mesh, structure, platform)


def trace_step(plan: XlaPlan, loss_fn: LossFn, batch: Tree, num_micro_batches: int = 1) -> Traced:
    """Traces the forward and backward of a step, which needs no device.

    Args:
        plan: The model's plan; its mesh may be abstract.
        loss_fn: The step's loss function.
        batch: Shapes of the global batch, after an axis of micro-batches if there are several.
        num_micro_batches: Number of micro-batches.
    """
    mapped = gradients(plan, loss_fn, num_micro_batches, batch)
    program = jax.make_jaxpr(mapped)(plan.shapes(), batch, Beside())
    # Matrix products save transposed weights.
    arrays = [array for array in plan.table.arrays if array.block]
    blocks = [tuple(map(min, array.shape, array.part_shape)) for array in arrays]
    weights = {shape for one in blocks for shape in (one, (*one[:-2], *one[:-3:-1]))}
    activations = gathered = 0
    for scan in _scans(program.jaxpr, inside=num_micro_batches > 1):
        for out in scan.outvars[scan.params["num_carry"] :]:
            num_bytes = out.aval.size * out.aval.dtype.itemsize
            if out.aval.shape[1:] in weights:
                gathered += num_bytes
            elif "host" not in str(out.aval).lower():  # not those offloaded
                activations += num_bytes
    moved = traced_collectives(program.jaxpr, on_cpu=plan.platform == "cpu")
    return Traced(moved, activations, gathered)


def _scans(program: Any, *, inside: bool) -> Iterator[Any]:
    """The outermost scans of the forward, or those inside of them, of a micro-batch."""
    for step in program.eqns:
        if step.primitive.name == "scan" and not inside:
            if not step.params["reverse"]:
                yield step
            continue
        below = inside and step.primitive.name != "scan"
        for inner in within(step):
            yield from _scans(inner, inside=below)


_KEY = "--topology"
_FORM = re.compile(r"(?:(?P<hosts>[1-9]\d*)x)?(?P<gpus>\d+x[A-Za-z]\S*)")


def gpu_devices(topology: str) -> list[Any]:
    """Returns the devices of a topology to compile for.

    Args:
        topology: A topology in the notation of [Note: GPUs that are absent].

    Raises:
        ConfigError: The GPU is unknown, or XLA's CUDA plugin is not installed.
    """
    match = _FORM.fullmatch(topology)
    if match is None:
        raise ConfigError(
            f"{_KEY}: expected a TPU slice by libtpu's name, such as v5p:2x2x2, or a machine's "
            f"GPUs, such as 8xH100-80GB (4x8xH100-80GB: four machines); got {topology!r}."
        )
    gpus = parse_gpus(match["gpus"], _KEY)
    if gpus.name not in chips() or gpus.memory_bytes is None:
        raise ConfigError(
            f"{_KEY}: expected one of {', '.join(chips())}, for which XLA can compile without the "
            f"device; got {gpus.name!r}."
        )
    if find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda12") is None:
        version = jax.__version__
        raise ConfigError(
            f"{_KEY}: expected XLA's plugin for CUDA to compile for {topology!r}; it is not "
            f"installed. Run pip install --no-deps jax-cuda12-plugin=={version} "
            f"jax-cuda12-pjrt=={version} nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12 (no GPU is "
            f"needed), or leave {_KEY} out: the step is then compiled for CPUs."
        )
    processes.play(1)
    text = target_config(gpus.name, gpus.memory_bytes)
    described = topologies.get_topology_desc(
        gpus.name,
        platform="cuda",
        topology=f"1x{match['hosts'] or 1}x{gpus.count}",
        target_config=text,
    )
    return list(described.devices)


@cache
def chips() -> dict[str, dict[str, Any]]:
    """Returns the properties of each GPU, by XLA's names."""
    return packaged_table("fullshard.xla", "chips.yaml")["chips"]


def target_config(name: str, memory_bytes: int) -> str:
    """Returns a chip as XLA's GpuTargetConfigProto in protobuf text format."""
    facts = {**chips()[name], "device_memory_size": memory_bytes}
    version = f"major: {facts.pop('major')} minor: {facts.pop('minor')}"
    fields = " ".join(f"{key}: {value}" for key, value in facts.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ {version} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } '
        f'device_description_str: "{name}"'
    )


def compiler_options(devices: list[Any]) -> dict[str, str]:
    """Compiler options for these devices: the path of NVIDIA's assembler."""
    spec = None
    if devices[0].platform == "gpu" and find_spec("nvidia") is not None:
        spec = find_spec("nvidia.cuda_nvcc")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return {"xla_gpu_cuda_data_dir": folders[0]} if folders else {}
