"""A run on one rank, whatever its recipe: build, shard, run the loop, write what came of it.

run folder  config.yaml, data/  --->  model, optimizer, recipe  --->  loop
            metrics.jsonl  <----------------------------------------'  |
            model/, samples, report.html, run.json  <---------------'
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.config.environment import read_launch_environment
from fullshard.config.schema import RunConfig, SftConfig
from fullshard.config.values import Backend, Command, DType, Strategy
from fullshard.engine.engine import engine_of
from fullshard.engine.stats import communication_seconds
from fullshard.errors import HangError
from fullshard.launch import rendezvous
from fullshard.launch.exit_codes import exit_code_of
from fullshard.launch.folder import LaunchFolder
from fullshard.launch.signals import SAVE_SIGNALS, caught_stop_signals
from fullshard.observe import watchdog
from fullshard.observe.memory import memory_bytes
from fullshard.observe.position import Verdict
from fullshard.train.answers import answer
from fullshard.train.banner import RunFacts, banner
from fullshard.train.build import build_sharded, model_on_meta
from fullshard.train.chat_dataset import ChatDataset
from fullshard.train.checkpoints import Kept, RunCheckpoints
from fullshard.train.console import RunConsole
from fullshard.train.export import Adapters, save_model
from fullshard.train.facts import Prepared, tokenizer_texts
from fullshard.train.loop import Loop, LoopSettings, Trainee
from fullshard.train.model import quiet_libraries
from fullshard.train.optim import OptimizerSettings, build_optimizer
from fullshard.train.out_of_memory import answered
from fullshard.train.outlook import View, view_of, with_chosen_strategy
from fullshard.train.prepare import (
    StepPlan,
    model_config_of,
    plan_steps,
    schedule_of,
    weights_folder,
)
from fullshard.train.recipes import load_data, make_recipe
from fullshard.train.result import conclude, environment, planned
from fullshard.train.resume import Resume
from fullshard.train.run_folder import RunFolder, RunStatus, now
from fullshard.train.scaling import LossScaler
from fullshard.train.seat import Seat
from fullshard.train.teaching import set_up, write_cache
from fullshard.train.team import RankTeam
from fullshard.train.watcher import RunWatcher


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
        if config.backend is Backend.JAX:
            from fullshard.train.xla_pretrain import train

            train(config, folder, seat.rank, _is_ending)
        else:
            _train(config, folder, seat)
    except BaseException as error:
        message = str(error) or "stopped by a signal"
        folder.fail(type(error).__name__, message, exit_code_of(error), rank)
        raise
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


def _train(config: RunConfig, folder: RunFolder, seat: Seat) -> None:
    began = time.perf_counter()
    quiet_libraries()
    dataset = load_data(folder.data)
    record = folder.read_record()
    resume, command = Resume.of_record(record), Command(record["command"])
    steps = plan_steps(config.training, dataset.facts, seat.world_size, resume.global_batch)
    model_config = model_config_of(config, dataset.tokenizer)
    recipe = make_recipe(dataset, steps.order, config.training.per_device_eval_batch_size, seat)
    if command is Command.CACHE:
        _cache(config, dataset, recipe, folder, seat)
        return
    if config.sharding.strategy is Strategy.AUTO:  # a launcher of others started us
        bare = model_on_meta(config, model_config)
        config = with_chosen_strategy(config, bare, seat.world_size)
    if command is Command.DISTILL:
        teaching = set_up(config, folder, recipe, seat)
        model, recipe = teaching.student(model_config, seat), teaching.recipe()
    else:
        model = build_sharded(config, model_config, seat.device)
    view = partial(_view, config, model_config, seat.world_size)
    console = None
    if seat.is_first:
        console = RunConsole(steps.num_steps, steps.log_every)
        _announce(RunFacts(command, config, dataset.facts, steps, model), view(), folder, console)
    team = RankTeam(engine_of(model).transport, seat.rank, seat.world_size, seat.device)
    trainee = _trainee(config, model, seat)
    with caught_stop_signals(SAVE_SIGNALS, _is_ending) as caught:
        kept = Kept(model, trainee.optimizer, trainee.scaler, tokenizer_texts(folder.data))
        keeper = RunCheckpoints(
            folder.checkpoints, kept, steps, config.training.save_total_limit, caught
        )
        done = keeper.resume(resume)
        speak = partial(_speak, model, dataset, config, console)
        trainee = replace(trainee, keeper=keeper, speak=speak)
        with RunWatcher(console, folder, done) as watcher:
            with answered(view):
                Loop(trainee, recipe, _settings(config, steps), team, watcher).run(done)
    watchdog.phase("saving", steps.num_steps)
    adapters = Adapters.of(config, weights_folder(config), folder.adapter)
    save_model(model, model_config, dataset.tokenizer, folder.model, adapters)
    watchdog.phase("")
    if console:
        conclude(
            folder,
            console,
            watcher,
            dataset.facts,
            config.training.seed,
            time.perf_counter() - began,
        )


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
        ids = answer(model, prompt, room, end if isinstance(end, int) else None)
        if console is not None:
            texts = (
                str(data.tokenizer.decode(part, skip_special_tokens=True)) for part in (prompt, ids)
            )
            console.print_sample(step, *texts)


def _announce(facts: RunFacts, view: View, folder: RunFolder, console: RunConsole) -> None:
    """Writes what is planned and shows it."""
    plan = facts.plan
    folder.plan.write_text(plan.to_json(), encoding="utf-8")
    folder.update_record(
        status=RunStatus.RUNNING,
        planned=planned(plan, facts.steps, view.outlook),
        environment=environment(),
    )
    console.print_banner(f"fullshard {facts.command}  {folder.path}", banner(facts))


def _view(config: RunConfig, model_config: Any, world_size: int) -> View:
    """The run as the planner sees it."""
    return view_of(config, model_on_meta(config, model_config), world_size)


def _trainee(config: RunConfig, model: nn.Module, seat: Seat) -> Trainee:
    optimizer = build_optimizer(model, OptimizerSettings.of(config.training))
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
        schedule=schedule_of(training, steps),
        grad_sync=config.sharding.grad_sync,
        grad_reduction=config.sharding.grad_reduction,
    )
