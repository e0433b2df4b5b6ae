"""`fullshard verify`: compares this sharding with one process.

    the user's model --> small model of its class --> folder: weights, batches, job
                                                        |
              reference.py, a process of its own  <-----+----->  local ranks, fs.shard, the loop;
                                                        |        or XLA's step (xla.py)
                                                        |
                            rows, a diagnosis  <--------'        compared piece by piece

Nothing is written outside a temporary folder.
"""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fullshard as fs
from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.config.supported import check_supported
from fullshard.config.values import DType, Optimizer, TransportKind, WrapKind
from fullshard.engine.hugging_face import build_on_meta
from fullshard.errors import ConfigError, FullshardError
from fullshard.launch.local_call import call_on_ranks
from fullshard.launch.spawn import LocalLaunch
from fullshard.launch.supervise import LaunchResult
from fullshard.models.build import given_model_config
from fullshard.models.config import freeze
from fullshard.models.lora import add_adapters
from fullshard.models.small import (
    Change,
    Shrunk,
    fit_globs,
    logits_of,
    model_arguments,
    shrink,
    shrunk,
)
from fullshard.planner.mesh import row_of
from fullshard.planner.plan import Plan
from fullshard.planner.spec import matches
from fullshard.planner.text import axes_of
from fullshard.recipes.context import check_context
from fullshard.recipes.head import whole_logits
from fullshard.verify.compare import (
    EXACT,
    LOW,
    NUM_TOKENS,
    ROUTED,
    SINGLE,
    CheckJob,
    Diagnosis,
    Pass,
    Sides,
    WorstRow,
    diagnose,
    rows_of,
    write_batches,
    write_weights,
)
from fullshard.verify.faults import NEEDS_GATHERS, Fault

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fullshard.planner.arrays import ArraysPlan

REFERENCE = Path(__file__).with_name("reference.py")
# Ends with our process, however that ends; the reference itself imports nothing of ours.
_REFERENCE_PROGRAM = """
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MOST_RANKS = 4
TIMEOUT_S = 600.0
_ADAMW = (Optimizer.ADAMW_TORCH, Optimizer.ADAMW_TORCH_FUSED)
AXES = ("context", "expert", "tensor")
DTYPE_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "fp32_modules")


@dataclasses.dataclass(frozen=True)
class PreparedCheck:
    """A check that is ready to run.

    Attributes:
        job: Numbers that both sides read.
        model: The small model with its first weights.
        config: Configuration of the small model.
        plan: Plan that the ranks run, in float64.
        changes: Fields in which the small configuration differs from the user's.
        notes: Other differences from the user's run, in sentences.
        program: Function that plays the ranks, and its number of processes.
    """

    job: CheckJob
    model: nn.Module
    config: PretrainedConfig
    plan: Plan | ArraysPlan
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    program: tuple[str, int]

    def facts(self) -> dict[str, Any]:
        """For --json."""
        mesh = self.plan.mesh
        return {
            "model": self.plan.model_kind,
            "num_parameters": self.plan.num_parameters,
            "strategy": self.plan.strategy,
            "world_size": self.job.world_size,
            "mesh": {"replicate": mesh.replicate, "shard": mesh.shard},
            "axes": axes_of(self.plan),
            "num_units": self.plan.num_units,
            "dtypes": [choice.name for choice in self.job.passes],
            "num_steps": self.job.num_steps,
            "injected": self.job.fault,
            "shrunk": [dataclasses.asdict(change) for change in self.changes],
            "notes": list(self.notes),
        }


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        rows: Worst error of each kind, pass by pass.
        diagnosis: Likely cause of the differences; None if there are none.
        time_s: Seconds that both sides took.
    """

    rows: tuple[WorstRow, ...]
    diagnosis: Diagnosis | None
    time_s: float


# ---- preparing -----------------------------------------------------------------------------------


def prepare(config: RunConfig, fault: Fault | None) -> PreparedCheck:
    """Shrinks the model and fits the sharding to local ranks of torch; starts nothing.

    Raises:
        ConfigError: The model or its sharding cannot be used, or the fault cannot happen here.
    """
    if config.sharding.transport is TransportKind.FAKE:
        raise ConfigError("transport: expected a real transport, got 'fake', which moves no data.")
    check_supported(config.sharding.without("context"))  # the rest of it does not matter here
    notes = list(left_out(config))
    model_config = model_config_of(config, fault, notes)
    _check_names(config, model_config)
    if config.sharding.context > 1:
        check_context(build_on_meta(model_config), config.sharding)
    sharding, world_size = _fit_ranks(config, notes)
    small, model = _shrink(model_config, sharding, world_size, notes)
    check_context(model, ShardConfig.of(sharding), NUM_TOKENS)
    frozen = _freeze(config, model, len(small.layers), notes)
    sharding["ignore"] = ()
    modules, globs = [name for name, _ in model.named_modules()], config.sharding.fp32_modules
    depth = len(small.layers)
    sharding["fp32_modules"] = _fitted("sharding.fp32_modules", globs, modules, depth, notes)
    exact = EXACT
    if logits_of(model).dtype is not torch.float64:
        exact = SINGLE
        notes.append("The model computes its logits in float32, also in float64.")
    num_micro_batches = min(2, config.training.gradient_accumulation_steps)
    routed = any(re.search("expert|moe", name) for name in modules)
    job = CheckJob(
        passes=passes_of(sharding, exact, routed=routed),
        world_size=world_size,
        num_micro_batches=num_micro_batches,
        frozen=frozen,
        model_arguments=model_arguments(small.config),
        device="cuda" if torch.cuda.device_count() >= world_size else "cpu",
        fault=fault,
        loss_chunk_size=None if whole_logits(model, config) else chunk_size(config),
    )
    plan = fs.plan(model, job.passes[0].sharding, world_size=world_size)
    _check_fault(fault, plan, model)
    program = ("fullshard.verify.rank:run_passes", world_size)
    return PreparedCheck(job, model, small.config, plan, small.changes, tuple(notes), program)


def chunk_size(config: RunConfig) -> int:
    """Tokens per chunk of the loss, few enough for several chunks of a batch."""
    return min(config.training.loss_chunk_size, NUM_TOKENS // 2)


def left_out(config: RunConfig) -> Iterator[str]:
    """A note on the settings that change what a run trains, and not what the check trains."""
    training = config.training
    given = {
        "lora": config.lora,
        "sft": config.sft,
        "teacher": config.teacher,
        "training.optim": training.optim not in _ADAMW,
        "training.ema_decay": training.ema_decay,
    }
    if names := ", ".join(name for name, value in given.items() if value):
        yield f"Not checked: {names}. All weights are trained by AdamW on next tokens."


def check_compares(model: nn.Module, frozen: Sequence[str]) -> None:
    """Raises ConfigError if no parameter is trained, so that no gradient could be compared."""
    if not {name for name, _ in model.named_parameters()} - {*frozen}:
        raise ConfigError(
            "verify: expected a parameter that is trained here; got none, because freeze and "
            "sharding.ignore leave all of them out. Leave fewer out."
        )


def model_config_of(config: RunConfig, fault: Fault | None, notes: list[str]) -> PretrainedConfig:
    """Configuration of the user's full model; tied if the fault needs tied weights."""
    found = given_model_config(config.model_copy(update={"distill": None}))
    text = found.get_text_config()
    if fault is Fault.LOST_TIE and not text.tie_word_embeddings:
        text.tie_word_embeddings = found.tie_word_embeddings = True
        notes.append("Embedding and head are tied for this fault, because the model has no ties.")
    return found


def _fit_ranks(config: RunConfig, notes: list[str]) -> tuple[dict[str, Any], int]:
    """The user's sharding on a few local ranks, and how many."""
    asked, sharding = config.launch.world_size, config.sharding
    row = row_of(sharding.strategy)
    rest = max(1, (asked or 1) // math.prod(getattr(sharding, axis) for axis in AXES))
    copies = sharding.replicate or rest // (sharding.shard or rest)
    settings = {key: value for key, value in sharding if key != "poison"}
    settings["replicate"] = settings["shard"] = None
    settings |= {axis: min(2, getattr(sharding, axis)) for axis in AXES}
    others = math.prod(settings[axis] for axis in AXES)
    if not row.shard_params or not (row.hybrid or copies > 1):
        fits = asked and 2 <= asked <= MOST_RANKS and asked % others == 0
        world_size = asked if asked and fits else max(MOST_RANKS, others) if others > 1 else 2
    else:
        world_size, most = max(MOST_RANKS, others), max(1, MOST_RANKS // others)
        replicate = {sharding.replicate: 1, sharding.shard: most}.get(1, min(2, most))
        settings["replicate"], settings["shard"] = replicate, most // replicate
    notes += [
        f"{axis} {settings[axis]} instead of {getattr(sharding, axis)}."
        for axis in AXES
        if settings[axis] != getattr(sharding, axis)
    ]
    if asked not in (None, world_size):
        notes.append(f"{world_size} ranks instead of {asked}.")
    return settings, world_size


def _shrink(
    config: PretrainedConfig, sharding: dict[str, Any], world_size: int, notes: list[str]
) -> tuple[Shrunk, nn.Module]:
    """The small model, with units like those of the user's model."""
    depth = 2 + max(sharding["forward_prefetch"], sharding["backward_prefetch"])
    depth = min(8, max(depth, sharding["activation_checkpointing"].every, 4))
    small, model = shrink(config, num_layers=depth)
    unnamed = {"ignore": (), "fp32_modules": ()}  # names are fitted to the small model later
    wide = build_on_meta(shrunk(config, depth=True, width=False, num_layers=depth).config)
    wanted = fs.plan(wide, sharding | unnamed, world_size=world_size)
    if sharding["wrap"] is WrapKind.SIZE:
        share = sum(p.numel() for p in model.parameters()) / max(1, wanted.num_parameters)
        sharding["wrap_min_params"] = max(1, int(sharding["wrap_min_params"] * share))
    found = fs.plan(model, sharding | unnamed, world_size=world_size)
    if {unit.name for unit in wanted.units} - {unit.name for unit in found.units}:
        # An embedding is a unit if it is as large as a block.
        width = model.get_input_embeddings().weight.shape[-1]  # type: ignore[attr-defined]
        largest = max(unit.numel for unit in found.units)
        small, model = shrink(config, num_layers=depth, vocab_size=2 * largest // width)
        found = fs.plan(model, sharding | unnamed, world_size=world_size)
    if {unit.name for unit in wanted.units} != {unit.name for unit in found.units}:
        notes.append("The units differ from those of the full width, because sizes decide them.")
    return small, model


def _check_names(config: RunConfig, full: PretrainedConfig) -> None:
    """Raises ConfigError if a glob matches nothing in the user's model, as a run does."""
    sharding = config.sharding
    keys = ("ignore", "fp32_modules")
    if config.freeze or any(getattr(sharding, key) for key in keys):
        model = build_on_meta(full)
        if config.lora is not None:
            add_adapters(model, config.lora)  # globs may name them
        freeze(model, config.freeze)
        fs.plan(model, {key: getattr(sharding, key) for key in keys}, world_size=1)


def _fitted(
    key: str, globs: Sequence[str], names: Sequence[str], num_layers: int, notes: list[str]
) -> tuple[str, ...]:
    """The globs of a key that match names of the small model; notes the others."""
    fitted = dict(zip(globs, fit_globs(globs, num_layers), strict=True))
    lost = [asked for asked, glob in fitted.items() if not any(matches(n, (glob,)) for n in names)]
    notes += [f"{key}: {asked} matches nothing in the small model." for asked in lost]
    return tuple(glob for asked, glob in fitted.items() if asked not in lost)


def _freeze(
    config: RunConfig, model: nn.Module, num_layers: int, notes: list[str]
) -> tuple[str, ...]:
    """Names of the parameters that are not trained: frozen and ignored ones."""
    names = [name for name, _ in model.named_parameters()]
    freeze(model, _fitted("freeze", config.freeze, names, num_layers, notes))
    ignored = _fitted("sharding.ignore", config.sharding.ignore, names, num_layers, notes)
    for name, param in model.named_parameters():
        if matches(name, ignored):
            param.requires_grad_(False)
    if ignored:
        notes.append("Ignored parameters are frozen, because nothing reduces their gradients.")
    frozen = tuple(name for name, param in model.named_parameters() if not param.requires_grad)
    check_compares(model, frozen)
    return frozen


def passes_of(sharding: dict[str, Any], exact: float, *, routed: bool) -> tuple[Pass, ...]:
    """One pass in float64, and one in the user's dtypes if those are lower.

    Args:
        sharding: Fields of ShardConfig.
        exact: Tolerance in float64.
        routed: Whether tokens are routed to experts.
    """
    low = (DType.BFLOAT16, DType.FLOAT16)
    master = sharding["master_dtype"] or DType.FLOAT32
    compute = sharding["param_dtype"] or master
    reduce = sharding["reduce_dtype"] or DType.FLOAT32
    settings = ShardConfig.of(sharding).to_dict()
    settings.pop("poison")
    empty = {key: () if key == "fp32_modules" else None for key in DTYPE_KEYS}
    passes = [Pass("float64", exact, {**settings, **empty, "master_dtype": None})]
    others = any(sharding[key] for key in DTYPE_KEYS[2:])
    if others or any(dtype in low for dtype in (master, compute, reduce)):
        scale = 1024.0 if compute is DType.FLOAT16 else 1.0
        name = next((d for d in (compute, reduce, master) if d in low), compute)
        dtypes = ("float32", compute, reduce)
        alike = not others and master not in low
        tolerance = ROUTED if routed else LOW
        passes.append(Pass(name.value, tolerance, settings, *dtypes, scale, rounds_alike=alike))
    return tuple(passes)


def _check_fault(fault: Fault | None, plan: Plan, model: nn.Module) -> None:
    if fault in NEEDS_GATHERS and plan.mesh.shard == 1:
        raise ConfigError(
            f"--inject: expected a sharded strategy for {fault}, got '{plan.strategy}', which "
            "gathers nothing. Choose another fault or strategy=full_shard."
        )
    places = len(list(model.named_parameters(remove_duplicate=False)))
    if fault is Fault.LOST_TIE and places == len(list(model.parameters())):
        raise ConfigError(
            f"--inject: expected a model with tied weights for {fault}, got {plan.model_kind}, "
            "which has none and cannot tie its embedding to its head. Choose another fault."
        )


# ---- running -------------------------------------------------------------------------------------


def write(prepared: PreparedCheck, folder: Path) -> None:
    """Writes everything that the two sides read."""
    prepared.job.write(folder)
    prepared.config.save_pretrained(folder)
    write_weights(folder, prepared.model)
    write_batches(folder, prepared.job, prepared.config.get_text_config().vocab_size)


def run_sides(prepared: PreparedCheck, folder: Path) -> tuple[LocalLaunch, LaunchResult]:
    """Runs both sides at the same time; returns how the ranks ended.

    Raises:
        FullshardError: The reference failed.
    """
    log = folder / "reference.log"
    with log.open("w") as output:
        alone = subprocess.Popen(
            [sys.executable, "-P", "-c", _REFERENCE_PROGRAM, str(REFERENCE), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            function, num_processes = prepared.program
            on_cpu = prepared.job.device == "cpu"
            launch, result, _ = call_on_ranks(
                function, folder, num_processes, TIMEOUT_S, on_cpu=on_cpu
            )
            code = alone.wait(TIMEOUT_S) if result.exit_code == 0 else 0
        finally:
            alone.kill()
            alone.wait()
    if code != 0:
        raise FullshardError(
            f"verify: expected the reference to run in one process, got exit code {code}:\n"
            f"{log.read_text()[-4000:]}"
        )
    return launch, result


def judge(job: CheckJob, folder: Path, began: float) -> Verdict:
    """Compares the results of the two sides.

    Args:
        job: Numbers that both sides read.
        folder: Folder with the results.
        began: Time of the start, from time.perf_counter().
    """
    rows: list[WorstRow] = []
    diagnosis = None
    for choice in job.passes:
        sides = Sides(folder, job, choice)
        differences = list(sides.differences())
        rows += rows_of(sides, differences)
        wrong = [d for d in differences if not d.error <= choice.tolerance]
        found = diagnose(sides, wrong)
        if found is not None and diagnosis is None:
            only = "" if choice is job.passes[0] else f"Equal in float64, not in {choice.name}. "
            diagnosis = Diagnosis(found.kind, only + found.says)
    return Verdict(tuple(rows), diagnosis, time.perf_counter() - began)
