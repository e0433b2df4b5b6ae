"""`fullshard verify` with `backend: jax`: XLA's step against one process of torch.

The other side is the same reference, which knows neither fullshard nor jax. On this side one
process has as many CPU devices as the run has ranks, so that every strategy runs on any machine.

    float64    20 steps, the reference's norms as wide as its weights      1e-10
    float32    20 steps, transformers' model as it is                      1e-5
    bfloat16   where the run computes in it                                 as on torch
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import Backend, DType
from fullshard.errors import ConfigError
from fullshard.models.small import NUM_LAYERS, Limits, shrink
from fullshard.planner.strategy import row_of
from fullshard.train.verify import Prepared, model_config_of, passes_of
from fullshard.train.verify_faults import Fault
from fullshard.train.verify_job import OPTIMIZER, Job, Pass
from fullshard.xla.decoder import DecoderConfig, plan_table

if TYPE_CHECKING:
    from fullshard.planner.arrays import ArraysPlan

RANK_MODULE = "fullshard.train.xla_verify_rank"
NUM_STEPS = 20
LEARNING_RATE = 1e-3  # rounding noise grows with every step, the faster the more a step changes
EXACT, SINGLE = 1e-10, 1e-5
MOST_DEVICES = 8


def prepare(config: RunConfig, fault: Fault | None) -> Prepared:
    """As `verify.prepare`.

    Raises:
        ConfigError: The model or its sharding cannot be used, or the fault cannot happen here.
    """
    check_supported(config.sharding, backend=Backend.JAX)
    if fault not in (None, Fault.REPEATED_DATA):
        raise ConfigError(
            f"--inject: expected {Fault.REPEATED_DATA} with backend: jax, got {fault}, which is "
            "made inside of torch's engine. Use that one, or backend: torch."
        )
    notes: list[str] = []
    full = model_config_of(config, fault, notes)
    DecoderConfig.of(full)
    world_size = _fit_devices(config, notes)
    depth = min(8, max(NUM_LAYERS, config.sharding.activation_checkpointing.every))
    small, model = shrink(full, Limits(num_layers=depth))
    table = plan_table(small.config, _in_float64(config), world_size)
    job = Job(
        passes=_passes(config.sharding, table),
        world_size=world_size,
        num_micro_batches=min(2, config.training.gradient_accumulation_steps),
        frozen=tuple(name for a in table.arrays if not a.trainable for name in a.names()),
        model_arguments={},
        fault=fault,
        num_steps=NUM_STEPS,
        optimizer={**OPTIMIZER, "learning_rate": LEARNING_RATE},
    )
    table = replace(table, model_kind=type(model).__name__)
    program = (RANK_MODULE, 1)
    return Prepared(job, model, small.config, table, small.changes, tuple(notes), program)


def _fit_devices(config: RunConfig, notes: list[str]) -> int:
    """How many devices are played: those of the run, where they are few."""
    asked, sharding = config.launch.num_processes, config.sharding
    sizes = (sharding.replicate or 1) * (sharding.shard or 1)
    fitting = asked if asked is not None and asked <= MOST_DEVICES else None
    if fitting is None:
        fitting = 2 * sizes if sharding.shard is None or sharding.replicate is None else sizes
        fitting = 4 if row_of(sharding.strategy).hybrid and fitting < 4 else fitting
    if fitting > MOST_DEVICES:
        raise ConfigError(
            f"sharding: expected a mesh of at most {MOST_DEVICES} devices to verify with backend: "
            f"jax, which plays them in one process; got replicate {sharding.replicate}, shard "
            f"{sharding.shard}. Give smaller ones: sharding.replicate=2 sharding.shard=2."
        )
    if asked not in (None, fitting):
        notes.append(f"{fitting} devices instead of {asked}.")
    return fitting


def _in_float64(config: RunConfig) -> RunConfig:
    return config.model_copy(
        update={"sharding": ShardConfig.of(config.sharding, master_dtype=DType.FLOAT64)}
    )


def _passes(sharding: ShardConfig, table: ArraysPlan) -> tuple[Pass, ...]:
    """In float64 and float32; and in the user's dtypes where these are lower."""
    sizes = {"replicate": table.mesh.replicate, "shard": table.mesh.shard}
    settings: dict[str, Any] = {key: value for key, value in sharding if key != "poison"}
    wide, *low = passes_of({**settings, **sizes}, EXACT)

    def in_dtype(name: str, tolerance: float) -> Pass:
        fields = {**wide.sharding, "master_dtype": name}
        return Pass(name, tolerance, fields, name, name, name, wide=name == "float64")

    return (in_dtype("float64", EXACT), in_dtype("float32", SINGLE), *low)
