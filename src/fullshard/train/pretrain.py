"""Pretraining, on one rank: build, shard, run the loop, write what came of it.

run folder  config.yaml, data/  --->  model, optimizer, recipe  --->  loop
            metrics.jsonl  <----------------------------------------'  |
            model/, sample.txt, report.html, run.json  <---------------'
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

import fullshard as fs
from fullshard.config.environment import read_launch_environment
from fullshard.config.schema import RunConfig
from fullshard.config.values import DType
from fullshard.engine.engine import engine_of
from fullshard.engine.initial import has_weights_of
from fullshard.engine.stats import communication_seconds
from fullshard.errors import HangError
from fullshard.launch import rendezvous
from fullshard.launch.exit_codes import exit_code_of
from fullshard.observe import watchdog
from fullshard.observe.memory import memory_bytes
from fullshard.observe.metrics import EvalRow, MetricsWriter, StepRow
from fullshard.observe.position import Verdict
from fullshard.train.banner import RunFacts, banner
from fullshard.train.causal_lm import PackedText, Sequences
from fullshard.train.console import RunConsole
from fullshard.train.dataset import Dataset
from fullshard.train.export import save_model
from fullshard.train.generate import SamplingSettings, generate
from fullshard.train.loop import Loop, LoopSettings, Trainee
from fullshard.train.model import build_model, build_on_meta, freeze, quiet_libraries
from fullshard.train.optim import OptimizerSettings, build_optimizer
from fullshard.train.prepare import (
    StepPlan,
    model_config_of,
    plan_steps,
    weights_folder,
)
from fullshard.train.result import Result, environment, finish, planned, print_result
from fullshard.train.run_folder import RunFolder, RunStatus
from fullshard.train.scaling import LossScaler
from fullshard.train.schedule import Schedule
from fullshard.train.team import RankTeam

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Seat:
    """This rank's place."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def run(config: RunConfig, run_dir: Path) -> None:
    """Trains on this rank; the process group is made and ended here.

    Args:
        config: Of the run, checked.
        run_dir: A run's folder that holds the prepared data.

    Raises:
        FullshardError: Whatever went wrong; it is in run.json too.
    """
    folder = RunFolder(run_dir)
    launch = read_launch_environment()
    rank = launch.rank if launch else 0
    try:
        rendezvous.init_process_group(config.launch.timeout, run_dir)
        watchdog.on_hang(partial(_record_hang, folder))
        seat = Seat(rank, launch.world_size if launch else 1, _device())
        _train(config, folder, seat)
    except BaseException as error:
        message = str(error) or "stopped by a signal"
        folder.fail(type(error).__name__, message, exit_code_of(error), rank)
        raise
    rendezvous.shutdown()


def _record_hang(folder: RunFolder, verdict: Verdict) -> None:
    folder.fail("HangError", verdict.message, HangError.exit_code, verdict.rank, final=True)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _train(config: RunConfig, folder: RunFolder, seat: Seat) -> None:
    began = time.perf_counter()
    quiet_libraries()
    dataset = Dataset.load(folder.data)
    steps = plan_steps(config.training, dataset.facts, seat.world_size)
    model_config = model_config_of(config, dataset.tokenizer)
    model = _build(config, model_config, seat.device)
    console = None
    if seat.is_first:
        console = RunConsole(steps.num_steps, steps.log_every)
        _announce(RunFacts(config, dataset.facts, steps, model), folder, console)
    team = RankTeam(engine_of(model).transport, seat.rank, seat.world_size, seat.device)
    sequences = Sequences(
        dataset.train, dataset.held_out, config.training.per_device_eval_batch_size
    )
    recipe = PackedText(sequences, steps.order, seat.rank, seat.device)
    with _Watcher(console, folder) as watcher:
        Loop(_trainee(config, model, seat), recipe, _settings(config, steps), team, watcher).run()
    watchdog.phase("saving", steps.num_steps)
    save_model(model, model_config, dataset.tokenizer, folder.model, seat.rank)
    watchdog.phase("")
    if console is None:
        return
    assert watcher.step is not None, "a run has at least one step"
    result = Result(
        step=watcher.step,
        evaluation=watcher.evaluation,
        baseline=dataset.facts.baseline,
        wall_s=time.perf_counter() - began,
        num_tokens=steps.num_steps * steps.order.shape.global_batch * sequences.train.shape[1],
    )
    sampling = SamplingSettings(seed=config.training.seed)
    sample = generate(folder.model, dataset.facts.prompt, sampling)
    finish(folder, result, sample)
    print_result(console, folder, result, sample)


def _build(config: RunConfig, model_config: PretrainedConfig, device: torch.device) -> nn.Module:
    """The sharded model, of which no rank ever holds the whole.

    Folders whose tensors have other names than the model's, which transformers converts as it
    loads them, are loaded whole on every rank and then cut.
    """
    dtype = getattr(torch, config.sharding.master_dtype or DType.FLOAT32)
    folder = weights_folder(config)
    model = build_on_meta(model_config, dtype)
    if folder is not None and not has_weights_of(model, folder):
        model = build_model(model_config, folder, dtype, config.training.seed).to(device)
        folder = None
    freeze(model, config.freeze)
    torch.manual_seed(config.training.seed)
    return fs.shard(model, config.sharding, weights=folder)


def _announce(facts: RunFacts, folder: RunFolder, console: RunConsole) -> None:
    """Writes what is planned and shows it."""
    plan = facts.plan
    folder.plan.write_text(plan.to_json(), encoding="utf-8")
    folder.update_record(
        status=RunStatus.RUNNING, planned=planned(plan, facts.steps), environment=environment()
    )
    console.print_banner(f"fullshard train  {folder.path}", banner(facts))


def _trainee(config: RunConfig, model: nn.Module, seat: Seat) -> Trainee:
    training = config.training
    optimizer = build_optimizer(
        model,
        OptimizerSettings(
            kind=training.optim,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            adam_epsilon=training.adam_epsilon,
        ),
    )
    fp16 = config.sharding.param_dtype is DType.FLOAT16
    return Trainee(
        model,
        optimizer,
        partial(communication_seconds, model),
        partial(memory_bytes, seat.device),
        LossScaler(optimizer, seat.device, enabled=fp16),
    )


def _settings(config: RunConfig, steps: StepPlan) -> LoopSettings:
    training = config.training
    return LoopSettings(
        num_steps=steps.num_steps,
        eval_every=steps.eval_every,
        max_grad_norm=training.max_grad_norm,
        schedule=Schedule(
            training.lr_scheduler_type,
            training.learning_rate,
            steps.num_warmup_steps,
            steps.num_steps,
        ),
        grad_sync=config.sharding.grad_sync,
        grad_reduction=config.sharding.grad_reduction,
    )


class _Watcher:
    """Remembers the last rows; on rank 0, which has a console, it also shows and writes them."""

    def __init__(self, console: RunConsole | None, folder: RunFolder) -> None:
        self.step: StepRow | None = None
        self.evaluation: EvalRow | None = None
        self._console = console
        self._metrics = None if console is None else MetricsWriter(folder.metrics)

    def __enter__(self) -> Self:
        if self._console is not None:
            self._console.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console is not None and self._metrics is not None:
            self._console.stop()
            self._metrics.close()

    def entered(self, phase: str, step: int) -> None:
        watchdog.phase(phase, step)

    def stepped(self, row: StepRow) -> None:
        self.step = row
        if self._console is not None and self._metrics is not None:
            self._metrics.write(row)
            self._console.print_step(row)

    def evaluated(self, row: EvalRow) -> None:
        self.evaluation = row
        if self._console is not None and self._metrics is not None:
            self._metrics.write(row)
            self._console.print_evaluation(row)
