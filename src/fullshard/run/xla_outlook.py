"""Memory and collectives of a step on XLA: as planned, and as XLA compiles it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from fullshard.config.schema import RunConfig
from fullshard.config.training import TrainingConfig
from fullshard.config.values import DType, Recompute, RecomputeKind
from fullshard.outlook.memory import StepShape, at_peak
from fullshard.outlook.predict import Lack, Machine
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.memory import MemoryRow
from fullshard.recipes.distill.xla import check_teacher, more_shapes
from fullshard.xla import opt_state
from fullshard.xla.aot import (
    Compiled,
    Traced,
    compile_step,
    devices_of,
    trace_step,
    without_devices,
)
from fullshard.xla.decoder import DecoderConfig, plan_table, planned
from fullshard.xla.loss import Decoder, next_token
from fullshard.xla.opt_state import trained
from fullshard.xla.plan import Tree, mesh_for
from fullshard.xla.processes import num_devices

if TYPE_CHECKING:
    from transformers import PretrainedConfig


UNKNOWN = Machine(None, None)


@dataclass(frozen=True)
class XlaOutlook:
    """The plan of a run on XLA with its memory.

    Attributes:
        plan: Plan of the state and its collectives.
        num_micro_batches: Number of micro-batches of a step.
        rows: Memory of a device at its peak; the state is exact, the rest is estimated.
        config: Configuration of the run.
        machine: Machine of a rank.
    """

    plan: ArraysPlan
    num_micro_batches: int
    rows: tuple[MemoryRow, ...]
    config: RunConfig
    machine: Machine

    @property
    def peak_bytes(self) -> int:
        """Peak bytes per device."""
        return sum(row.num_bytes for row in self.rows)

    def lack(self) -> Lack | None:
        """The memory that is too small; None if the run fits or the memory is not known."""
        device, host = (0, self.peak_bytes) if self.machine.is_host else (self.peak_bytes, 0)
        return Lack.of(self.machine, device, host)

    def errors(self, exact: Compiled) -> dict[str, Any]:
        """Differences between the plan and XLA: bytes of the state, share of the peak, and
        whether the collectives are equal (None: not known).
        """
        planned, found = self.plan.collectives(self.num_micro_batches), exact.collectives
        return {
            "state_bytes": exact.arguments - self.plan.state_bytes,
            "peak": self.peak_bytes / exact.peak - 1,
            "collectives": None if found is None else found == planned,
        }


def look(
    config: RunConfig,
    model_config: PretrainedConfig,
    world_size: int,
    *,
    on_cpu: bool = False,
    machine: Machine = UNKNOWN,
) -> XlaOutlook:
    """The plan of a run on XLA and its memory.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the model.
        world_size: Number of devices.
        on_cpu: The devices are CPUs, whose compiler keeps more in memory.
        machine: Machine of a rank.

    Raises:
        ConfigError: The decoder does not compute this model or its teacher, or the mesh is
            impossible.
    """
    num_batches = config.sharding.num_batches(world_size)
    decoder, training = DecoderConfig.of(model_config), config.training.divided(num_batches)
    more = more_shapes(config, decoder.hidden_size)
    table = plan_table(model_config, config, world_size, more)
    check_teacher(config, table)
    tokens = training.per_device_train_batch_size * (training.max_seq_length - 1)
    chunk_size, num_micro_batches = training.loss_chunk_size, training.gradient_accumulation_steps
    structure = jax.tree.structure({**decoder.shapes(), **more})

    def traced(table: ArraysPlan) -> Traced:
        placed = without_devices(table, structure, "cpu" if on_cpu else "")
        loss = next_token(Decoder(decoder, placed), chunk_size)

        def reading(params: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
            total, count = loss(params, batch)
            # The recipe's own loss reads them.
            return total + sum(map(jnp.sum, jax.tree.leaves([params[n] for n in more]))), count

        return trace_step(placed, reading, _batch(training, num_batches), num_micro_batches)

    num_devices()  # tracing asks jax for its platform
    with jax.enable_x64(config.sharding.master_dtype is DType.FLOAT64):  # as on the ranks
        kept, whole = traced(table), traced(replace(table, recompute=Recompute(RecomputeKind.NONE)))
    table = table.with_traced(num_micro_batches, kept.collectives)
    shape = StepShape(
        num_logits=min(tokens, chunk_size or tokens) * decoder.vocab_size,
        kept_bytes=kept.activations,
        gathered_bytes=kept.gathered,
        block_bytes=whole.activations // decoder.num_hidden_layers,
        accumulates=num_micro_batches > 1,
        on_cpu=on_cpu,
        num_chunks=-(-tokens // chunk_size) if chunk_size else 0,
    )
    return XlaOutlook(table, num_micro_batches, at_peak(table, shape), config, machine)


def _batch(training: TrainingConfig, num_batches: int, sharding: Any = None) -> Tree:
    """Shapes of a step's batch, which so many devices with batches of their own divide."""
    parts, length = training.gradient_accumulation_steps, training.max_seq_length
    samples = num_batches * training.per_device_train_batch_size
    shape = (parts, samples, length) if parts > 1 else (samples, length)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return {"input_ids": ids, "labels": ids}


def compiled_step(
    config: RunConfig, model_config: PretrainedConfig, topology: str | None, world_size: int
) -> tuple[Compiled, int]:
    """Compile the step of a run; return it with its number of devices.

    Call it before any other jax code of the process.

    Args:
        config: Configuration of the run.
        model_config: Configuration of the model.
        topology: As for `devices_of`.
        world_size: Number of devices if no topology is named.
    """
    jax.config.update("jax_enable_x64", config.sharding.master_dtype is DType.FLOAT64)
    devices, sharding = devices_of(topology, world_size), config.sharding
    num_batches = sharding.num_batches(len(devices))
    training, mesh = config.training.divided(num_batches), mesh_for(sharding, devices)
    decoder = DecoderConfig.of(model_config)
    placed = planned(decoder.shapes(), sharding, mesh, decoder.frozen(config.freeze))
    num_micro_batches = training.gradient_accumulation_steps
    decay = trained(placed, placed.map(lambda _: training.weight_decay))
    found = compile_step(
        placed,
        next_token(Decoder(decoder, placed), training.loss_chunk_size),
        opt_state.of_run(training, decay),
        _batch(training, num_batches, placed.batch_sharding(num_micro_batches)),
        max_grad_norm=training.max_grad_norm or None,
        num_micro_batches=num_micro_batches,
    )
    return found, len(devices)
