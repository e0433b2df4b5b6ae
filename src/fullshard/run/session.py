"""A run on one rank, whatever its recipe: build, shard, run the loop, write what came of it.

run folder  config.yaml, data/  --->  model, optimizer, recipe  --->  loop
            metrics.jsonl  <----------------------------------------'  |
            model/, samples, report.html, run.json  <---------------'
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.config.environment import read_launch_environment
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig, SftConfig
from fullshard.config.values import Backend, Command, DType
from fullshard.data.chat_rows import ChatDataset
from fullshard.data.dataset import Prepared, tokenizer_texts
from fullshard.engine.engine import engine_of
from fullshard.engine.stats import communication_seconds
from fullshard.errors import HangError
from fullshard.launch import rendezvous
from fullshard.launch.folder import LaunchFolder
from fullshard.launch.signals import SAVE_SIGNALS, caught_stop_signals
from fullshard.models.build import build_sharded, model_config_of, model_on_meta, weights_folder
from fullshard.models.config import quiet_libraries
from fullshard.models.export import Adapters, save_model
from fullshard.observe import watchdog
from fullshard.observe.memory import memory_bytes
from fullshard.observe.position import Verdict
from fullshard.planner.optimizers import states_of
from fullshard.planner.plan import Plan
from fullshard.recipes.base import RankTeam, Recipe, Seat
from fullshard.recipes.distill.teacher import set_up, write_cache
from fullshard.recipes.registry import load_data, make_recipe
from fullshard.run.checkpoints import Kept, RunCheckpoints
from fullshard.run.console import RunConsole, RunFacts, banner
from fullshard.run.folder import RunFolder, RunStatus, now
from fullshard.run.loop import Loop, Trainee
from fullshard.run.optim import Average, LossScaler, OptimizerSettings, build_optimizer
from fullshard.run.outlook import View, answered, topology_of, view_of
from fullshard.run.patience import Patience
from fullshard.run.result import conclude, mark_running
from fullshard.run.resume import Resume
from fullshard.run.schedule import StepPlan, plan_steps, schedule_of
from fullshard.run.steps import LoopSettings
from fullshard.run.watcher import RunWatcher

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)


def run(config: RunConfig, run_dir: Path) -> None:
    """Trains on this rank; the process group is made and ended here.

    Args:
        config: The run's configuration as this rank was given it, for the rendezvous. The one in
            the folder, which rank 0 has checked and completed, is what runs.
        run_dir: A run's folder that holds the prepared data.

    Raises:
        FullshardError: Whatever went wrong; it is in run.json too.
    """
    folder = RunFolder(run_dir)
    launch = read_launch_environment()
    rank = launch.rank if launch else 0
    with folder.recorded(rank):
        rendezvous.init_process_group(config.launch.timeout, run_dir)
        if folder.config.is_file():  # else load_data says that machines do not share the folder
            config = load_config(folder.config).config
        watchdog.on_hang(partial(_record_hang, folder))
        seat = Seat(rank, launch.world_size if launch else 1, _device())
        if config.backend is Backend.JAX:
            from fullshard.run.xla_session import train

            train(config, folder, seat.rank, _is_ending)
        else:
            _train(config, folder, seat)
    rendezvous.shutdown()


def _record_hang(folder: RunFolder, verdict: Verdict) -> None:
    folder.fail("HangError", verdict.message, HangError.exit_code, verdict.rank, final=True)


def _is_ending() -> bool:
    """Whether the launcher ends the ranks because another one failed: there is nothing to save."""
    folder = LaunchFolder.of(read_launch_environment())
    return folder is not None and folder.ending.exists()


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class _Run:
    """What follows from the configuration, the prepared data and the record, on every rank."""

    config: RunConfig
    folder: RunFolder
    seat: Seat
    command: Command
    resume: Resume
    dataset: Prepared
    steps: StepPlan
    model_config: PretrainedConfig

    @classmethod
    def read(cls, config: RunConfig, folder: RunFolder, seat: Seat) -> _Run:
        dataset, record = load_data(folder.data, config.model), folder.read_record()
        resume, command = Resume.of_record(record), Command(record["command"])
        model_config = model_config_of(config, dataset.tokenizer)
        steps = plan_steps(config.training, dataset.facts, seat.world_size, resume.global_batch)
        return cls(config, folder, seat, command, resume, dataset, steps, model_config)

    def recipe(self) -> Recipe:
        per_device = self.config.training.per_device_eval_batch_size
        return make_recipe(self.dataset, self.steps.order, per_device, self.seat)

    @cached_property
    def view(self) -> View:
        """The run as the planner sees it."""
        bare = model_on_meta(self.config, self.model_config)
        return view_of(self.config, bare, topology_of(self.config, self.seat.world_size))

    def export(self, model: nn.Module, place: Path, adapter: Path) -> None:
        """Writes what can be opened anywhere, adapters alone too; all ranks call it."""
        adapters = Adapters.of(self.config, weights_folder(self.config), adapter)
        save_model(model, self.model_config, self.dataset.tokenizer, place, adapters)


def _train(config: RunConfig, folder: RunFolder, seat: Seat) -> None:
    began = time.perf_counter()
    quiet_libraries()
    run = _Run.read(config, folder, seat)
    with answered(lambda: run.view):
        _carry_out(run, began)


def _carry_out(run: _Run, began: float) -> None:
    """Build, learn and export, or write a teacher's logits."""
    folder, seat, recipe = run.folder, run.seat, run.recipe()
    if run.command is Command.CACHE:
        _cache(run.config, run.dataset, recipe, folder, seat)
        return
    console = _announced(run) if seat.is_first else None
    if run.command is Command.DISTILL:
        teaching = set_up(run.config, folder.path, recipe, seat)
        model, recipe = teaching.student(run.model_config, seat), teaching.recipe()
    else:
        model = build_sharded(run.config, run.model_config, seat.device)
    if seat.is_first:
        _check_plan(run, model)
    loop, watcher = _learn(run, model, recipe, console)
    watchdog.phase("saving", run.steps.num_steps)
    run.export(model, folder.model, folder.adapter)
    average_loss = None
    if loop.average is None and seat.is_first:  # what an earlier session left would be no average
        for stale in (folder.model_ema, folder.adapter_ema):
            shutil.rmtree(stale, ignore_errors=True)
    if loop.average is not None:
        with loop.average.applied():
            average_loss = loop.held_out_loss(run.steps.num_steps)
            run.export(model, folder.model_ema, folder.adapter_ema)
    watchdog.phase("")
    if console:
        wall_s = time.perf_counter() - began
        conclude(folder, watcher, run.dataset.facts, run.config, wall_s, average_loss)


def _learn(
    run: _Run, model: nn.Module, recipe: Recipe, console: RunConsole | None
) -> tuple[Loop, RunWatcher]:
    """All steps that are left."""
    config, folder, seat = run.config, run.folder, run.seat
    trainee, settings = _trainee(config, model, seat), _settings(config, run.steps)
    team = RankTeam(engine_of(model).transport, seat)
    with caught_stop_signals(SAVE_SIGNALS, _is_ending) as caught:
        keeper = RunCheckpoints(
            folder.checkpoints,
            Kept(model, trainee.optimizer, trainee.scaler, tokenizer_texts(folder.data)),
            run.steps,
            config.training.save_total_limit,
            caught,
            settings.patience,
        )
        done = keeper.resume(run.resume)
        if trainee.average is None and Average.forget(trainee.optimizer) and seat.is_first:
            logger.info("the checkpoint's average of the weights is dropped: ema_decay is not set")
        speak = partial(_speak, model, run.dataset, config, console)
        trainee = replace(trainee, keeper=keeper, speak=speak)
        on_gpu = seat.device.type == "cuda"
        utilization = run.view.utilization() if console and on_gpu else None
        with RunWatcher(console, folder, done, config, utilization) as watcher:
            loop = Loop(trainee, recipe, settings, team, watcher)
            loop.run(done)
    return loop, watcher


def _cache(
    config: RunConfig, dataset: Prepared, recipe: Any, folder: RunFolder, seat: Seat
) -> None:
    """Write a teacher's logits, and be done."""
    write_cache(config, dataset.facts, recipe, seat)
    if seat.is_first:
        folder.update_record(status=RunStatus.FINISHED, exit_code=0, ended=now())


def _speak(
    model: nn.Module, data: Prepared, config: RunConfig, console: RunConsole | None, step: int
) -> None:
    """Answer held-out prompts, and show it."""
    if not isinstance(data, ChatDataset):
        return
    most = (config.sft or SftConfig()).sample_tokens
    end = data.tokenizer.eos_token_id
    watchdog.phase("sampling", step)
    for prompt in data.samples:
        room = max(0, min(most, data.facts.sequence_length - len(prompt)))
        ids = _answer(model, prompt, room, end if isinstance(end, int) else None)
        if console is not None:
            texts = (
                str(data.tokenizer.decode(part, skip_special_tokens=True)) for part in (prompt, ids)
            )
            console.print_sample(step, *texts)


def _announced(run: _Run) -> RunConsole:
    """Shows what is planned, before a weight is made; returns where the run goes on to be shown."""
    plan = Plan.from_json(run.folder.plan.read_text(encoding="utf-8"))
    device = run.seat.device.type
    facts = RunFacts(run.command, run.config, run.dataset.facts, run.steps, plan, device)
    console = RunConsole(run.steps.num_steps, run.steps.log_every)
    mark_running(run.folder, run.seat.device, run.model_config)
    console.print_banner(f"fullshard {run.command}  {run.folder.path}", banner(facts))
    return console


def _check_plan(run: _Run, model: nn.Module) -> None:
    """Says so where the engine runs another plan than the one that was shown, and records it."""
    found = engine_of(model).plan.trained_by(states_of(run.config.training))
    shown = Plan.from_json(run.folder.plan.read_text(encoding="utf-8"))
    if found == shown:
        return
    run.folder.plan.write_text(found.to_json(), encoding="utf-8")
    why = f", transport {found.transport}" if found.transport is not shown.transport else ""
    logger.warning("the engine's plan is another than the one above%s; see plan.json", why)


def _trainee(config: RunConfig, model: nn.Module, seat: Seat) -> Trainee:
    optimizer = build_optimizer(model, OptimizerSettings.of(config.training))
    fp16 = config.sharding.param_dtype is DType.FLOAT16
    decay = config.training.ema_decay
    return Trainee(
        model,
        optimizer,
        partial(communication_seconds, model),
        partial(memory_bytes, seat.device),
        LossScaler(optimizer, seat.device, enabled=fp16),
        average=Average(optimizer, decay) if decay is not None else None,
    )


def _settings(config: RunConfig, steps: StepPlan) -> LoopSettings:
    training = config.training
    return LoopSettings(
        num_steps=steps.num_steps,
        eval_every=steps.eval_every,
        max_grad_norm=training.max_grad_norm,
        schedule=schedule_of(training, steps),
        grad_sync=config.sharding.grad_sync,
        grad_reduction=config.sharding.grad_reduction,
        max_skipped_steps=training.max_skipped_steps,
        patience=Patience(training.early_stopping_patience, training.early_stopping_threshold),
    )


@torch.no_grad()
def _answer(model: nn.Module, prompt: Sequence[int], most: int, end: int | None) -> list[int]:
    """The most likely tokens after a prompt, up to `end` or `most` of them. A collective.

    Every rank sees the same tokens, so all of them stop together; no cache of keys.
    """
    was_training = model.training
    model.eval()
    device = next(model.buffers(), torch.empty(0)).device
    ids = torch.tensor([list(prompt)], device=device)
    for _ in range(most):
        logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        if int(ids[0, -1]) == end:
            break
    model.train(was_training)
    return ids[0, len(prompt) :].tolist()
