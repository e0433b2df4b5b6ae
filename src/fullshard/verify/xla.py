"""`fullshard verify` with `backend: jax`: XLA's step against one process of torch.

The reference is the one for torch, which imports neither fullshard nor jax. One process plays every
rank on a CPU device of its own with the step of a run, so every strategy can be verified on any
machine. It writes the elements on each device. Only the saved state is gathered, because there the
gather itself is checked.

    float64    20 steps, the reference in float64 throughout               1e-10
    float32    20 steps, transformers' model as it is                      1e-5
    bfloat16   where the run computes in it                                 as on torch
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from safetensors.torch import load_file, save_file

from fullshard import xla_state
from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import Backend, DType
from fullshard.engine.hugging_face import read_config
from fullshard.errors import ConfigError
from fullshard.models.config import quiet_libraries
from fullshard.models.small import NUM_LAYERS, model_arguments, shrink
from fullshard.planner.arrays import ArrayPlan, ArraysPlan
from fullshard.planner.mesh import row_of
from fullshard.run.on_xla import state_of, torch_weights
from fullshard.saving import SaveSettings
from fullshard.verify.check import PreparedCheck, chunk_size, left_out, model_config_of, passes_of
from fullshard.verify.compare import OPTIMIZER, WEIGHTS, CheckJob, Pass
from fullshard.verify.faults import Fault, Injection
from fullshard.xla import opt_state, processes
from fullshard.xla.decoder import BLOCKS, EMBEDDING, HEAD, DecoderConfig, plan_table, planned
from fullshard.xla.loss import Decoder, next_token
from fullshard.xla.opt_state import trained
from fullshard.xla.plan import XlaPlan, mesh_for
from fullshard.xla.step import State, Step, train_step

NUM_STEPS = 20
LEARNING_RATE = 1e-3  # rounding noise grows faster with larger steps
EXACT, SINGLE = 1e-10, 1e-5
MOST_DEVICES = 8


def prepare(config: RunConfig, fault: Fault | None) -> PreparedCheck:
    """As `check.prepare`.

    Raises:
        ConfigError: The model or its sharding cannot be used, or the fault cannot happen here.
    """
    check_supported(config.sharding, backend=Backend.JAX)
    if fault not in (None, Fault.REPEATED_DATA):
        raise ConfigError(
            f"--inject: expected {Fault.REPEATED_DATA} with backend: jax, got {fault}, which "
            f"exists only in torch's engine. Use {Fault.REPEATED_DATA}, or backend: torch."
        )
    notes = list(left_out(config))
    full = model_config_of(config, fault, notes)
    decoder = DecoderConfig.of(full)
    decoder.check_axes(config.sharding, alone=config.teacher is None)
    frozen = [name.replace(BLOCKS[0], f"{BLOCKS[0]}.*") for name in decoder.frozen(config.freeze)]
    world_size = _fit_devices(config, notes)
    depth = min(8, max(NUM_LAYERS, config.sharding.activation_checkpointing.every))
    small, model = shrink(full, num_layers=depth)
    in_float64 = ShardConfig.of(config.sharding, master_dtype=DType.FLOAT64)
    wide = config.model_copy(update={"sharding": in_float64, "freeze": frozen})
    table = plan_table(small.config, wide, world_size)
    job = CheckJob(
        passes=_passes(config.sharding, table, routed=decoder.num_experts > 0),
        world_size=world_size,
        num_micro_batches=min(2, config.training.gradient_accumulation_steps),
        frozen=tuple(name for a in table.arrays if not a.trainable for name in a.names()),
        model_arguments=model_arguments(small.config),
        fault=fault,
        num_steps=NUM_STEPS,
        optimizer={**OPTIMIZER, "learning_rate": LEARNING_RATE},
        loss_chunk_size=chunk_size(config),
    )
    table = replace(table, model_kind=type(model).__name__)
    program = (f"{__name__}:play", 1)
    return PreparedCheck(job, model, small.config, table, small.changes, tuple(notes), program)


def _fit_devices(config: RunConfig, notes: list[str]) -> int:
    """Number of devices to play: that of the run if it is small enough."""
    asked, sharding = config.launch.world_size, config.sharding
    sizes = (sharding.replicate or 1) * (sharding.shard or 1) * sharding.expert * sharding.tensor
    fitting = asked if asked is not None and asked <= MOST_DEVICES else None
    if fitting is None:
        fitting = 2 * sizes if sharding.shard is None or sharding.replicate is None else sizes
        fitting = 4 if row_of(sharding.strategy).hybrid and fitting < 4 else fitting
    if fitting > MOST_DEVICES:
        raise ConfigError(
            f"sharding: expected a mesh of at most {MOST_DEVICES} devices to verify with backend: "
            f"jax, which simulates them in one process; got replicate {sharding.replicate}, shard "
            f"{sharding.shard}, expert {sharding.expert}, tensor {sharding.tensor}. Use a smaller "
            "mesh: sharding.replicate=2 sharding.shard=2."
        )
    if asked not in (None, fitting):
        notes.append(f"{fitting} devices instead of {asked}.")
    return fitting


def _passes(sharding: ShardConfig, table: ArraysPlan, *, routed: bool) -> tuple[Pass, ...]:
    """One pass in float64, one in float32, and one in the user's dtypes if those are lower."""
    sizes = table.mesh.axes(table.most_parts)
    settings: dict[str, Any] = {key: value for key, value in sharding if key != "poison"}
    wide, *low = passes_of({**settings, **sizes}, EXACT, routed=routed)
    low = [replace(choice, rounds_alike=False) for choice in low]

    def in_dtype(name: str, tolerance: float) -> Pass:
        fields = {**wide.sharding, "master_dtype": name}
        return Pass(name, tolerance, fields, name, name, name, wide=name == "float64")

    return (in_dtype("float64", EXACT), in_dtype("float32", SINGLE), *low)


Batches = list[dict[str, np.ndarray]]


class SeenState(NamedTuple):
    """An optimizer's state, and the gradients of its last update."""

    gradients: Any
    inner: Any


def seeing(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The optimizer with its gradients in its state, sharded like their parameters."""
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> SeenState:
        return SeenState(jax.tree.map(jnp.zeros_like, params), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SeenState]:
        found, after = inner.update(updates, state.inner, params, **extra)
        kept = jax.tree.map(lambda update, old: update.astype(old.dtype), updates, state.gradients)
        return found, SeenState(kept, after)

    return optax.GradientTransformationExtraArgs(init, update)


class DeviceResults:
    """The results of every device, in the files that a torch rank writes."""

    def __init__(self, placed: XlaPlan, job: CheckJob) -> None:
        self._plan, self._job = placed, job
        self._rank_of = {device: rank for rank, device in enumerate(placed.mesh.devices.flat)}
        ranks = range(job.world_size)
        self.tensors: list[dict[str, torch.Tensor]] = [{} for _ in ranks]
        self.numbers: dict[str, list[float]] = {"loss": [], "norm": []}

    def keep(self, step: int, state: State, metrics: dict[str, Any]) -> None:
        """Record loss and norm of a step, and tensors if it is one of `written_steps`."""
        self.numbers["loss"].append(float(metrics["loss"]))
        self.numbers["norm"].append(float(metrics["grad_norm"]))
        if step not in self._job.written_steps:
            return
        arrays = self._plan.table.arrays
        moving = [array for array in arrays if array.trainable]
        self._keep(f"{step}/parameter", arrays, state.params)
        self._keep(f"{step}/gradient", moving, state.opt_state.gradients)

    def _keep(self, prefix: str, arrays: Sequence[ArrayPlan], tree: Any) -> None:
        for array, leaf in zip(arrays, jax.tree.leaves(tree), strict=True):
            for shard in leaf.addressable_shards:
                rank = self._rank_of[shard.device]
                for name, at, values in _layers_of(array, shard):
                    self.tensors[rank][f"{prefix}/{name}"] = torch.from_numpy(values).reshape(-1)
                    for model in (0, 1):  # the trained one and the loaded one
                        self.tensors[rank][f"{model}/at/{name}"] = at.clone()

    def write(self, folder: Path) -> None:
        """Writes everything for the comparison, with one rank per device."""
        folder.mkdir(exist_ok=True)
        names = (name for array in self._plan.table.arrays for name in array.names())
        facts = {**self.numbers, "units": {n: n.rpartition(".")[0] for n in names}}
        for rank, tensors in enumerate(self.tensors):
            save_file(tensors, folder / f"rank_{rank}.safetensors")
            (folder / f"rank_{rank}.json").write_text(json.dumps(facts))


def _layers_of(array: ArrayPlan, shard: Any) -> Iterator[tuple[str, torch.Tensor, np.ndarray]]:
    """Name, flat positions and values of each tensor in a device's shard, without padding."""
    index, data = shard.index, np.asarray(shard.data)
    index, layers = (index[1:], data) if array.block else (index, data[None])
    spans = [s.indices(size) for s, size in zip(index, array.padded_shape, strict=True)]
    box = tuple(
        slice(min(a, n), min(b, n)) for (a, b, _), n in zip(spans, array.shape, strict=True)
    )
    inside = tuple(slice(0, one.stop - one.start) for one in box)
    at = torch.arange(math.prod(array.shape)).view(array.shape)[box].reshape(-1)
    for name, values in zip(array.names(), layers, strict=True):
        yield name, at, np.array(values[inside], copy=True)


def run_pass(folder: Path, job: CheckJob, choice: Pass) -> None:
    """Train, save, load into a fresh state and train one more step; record all results."""
    jax.config.update("jax_enable_x64", choice.master_dtype == "float64")  # as a run does
    decoder = DecoderConfig.of(read_config(folder, "model"))
    placed = _planned(decoder, ShardConfig.of(choice.sharding), job)
    tx = _optimizer(placed, job)
    loss = next_token(Decoder(decoder, placed), job.loss_chunk_size or 0)
    made = partial(train_step, placed, loss, seeing(tx), num_micro_batches=job.num_micro_batches)
    batches, record = _batches_of(folder, job), DeviceResults(placed, job)
    dtype = getattr(torch, choice.master_dtype)
    weights = {name: value.to(dtype) for name, value in load_file(folder / WEIGHTS).items()}
    state = state_of(placed, weights, seeing(tx))
    step = made(max_grad_norm=job.max_norm(0))
    state = _train(state, step, batches, range(job.num_steps), (job, record))
    (folder / choice.name).mkdir(exist_ok=True)
    whole = torch_weights(state)
    if decoder.tie_word_embeddings:
        whole[HEAD] = whole[EMBEDDING].clone()
    save_file(whole, folder / choice.name / "state.safetensors")
    place = folder / choice.name / "checkpoint"
    xla_state.save(place, replace(state, opt_state=state.opt_state.inner), SaveSettings())
    fresh, _ = xla_state.load(placed, place, tx)
    seen = SeenState(state.opt_state.gradients, fresh.opt_state)
    again = replace(fresh, opt_state=seen)
    step = made(max_grad_norm=job.max_norm(job.num_steps))
    _train(again, step, _batches_of(folder, job, honest=True), [job.num_steps], (job, record))
    record.write(folder / choice.name)


def _train(
    state: State,
    step: Step,
    batches: Batches,
    steps: Sequence[int],
    kept: tuple[CheckJob, DeviceResults],
) -> State:
    job, record = kept
    for at in steps:
        rate = job.optimizer["learning_rate"]
        state, metrics = step(state, batches[at], learning_rate=rate)
        record.keep(at, state, metrics)
    return state


def _planned(decoder: DecoderConfig, sharding: ShardConfig, job: CheckJob) -> XlaPlan:
    """The plan on this process's devices; an array is frozen if its first tensor is."""
    mesh, shapes = mesh_for(sharding, jax.devices()[: job.world_size]), decoder.shapes()
    free = planned(shapes, sharding, mesh)
    names = [array.name for array in free.table.arrays if array.names()[0] in job.frozen]
    return planned(shapes, sharding, mesh, names)


def _optimizer(placed: XlaPlan, job: CheckJob) -> optax.GradientTransformation:
    numbers = job.optimizer
    decay = trained(placed, placed.map(lambda _: numbers["weight_decay"]))
    return opt_state.adamw((numbers["beta1"], numbers["beta2"]), numbers["epsilon"], decay)


def _batches_of(folder: Path, job: CheckJob, *, honest: bool = False) -> Batches:
    """The samples of every step, in rank order, which is the order of the devices."""
    found, injection = load_file(folder / "batches.safetensors"), Injection(job.fault)
    ranks = range(job.num_batches)
    sources = [rank if honest else injection.source(rank, job.num_batches) for rank in ranks]

    def of(step: int, kind: str) -> np.ndarray:
        micros = [
            torch.cat([found[f"{step}.{source}.{micro}.{kind}"] for source in sources]).numpy()
            for micro in range(job.num_micro_batches)
        ]
        return np.stack(micros).astype(np.int32) if len(micros) > 1 else micros[0].astype(np.int32)

    kinds = ("input_ids", "labels")
    return [{kind: of(step, kind) for kind in kinds} for step in range(job.num_steps + 1)]


def run_passes(folder: Path) -> None:
    """Runs every pass of the folder's job in a process that has the devices."""
    job = CheckJob.read(folder)
    for choice in job.passes:
        run_pass(folder, job, choice)


def play(folder: Path) -> None:
    """Creates the devices and runs the job."""
    torch.set_num_threads(1)
    quiet_libraries()
    processes.play(CheckJob.read(folder).world_size)
    run_passes(folder)
