"""A run on one rank, for every recipe and engine: build, run the loop, write the results.

run folder  config.yaml, data/  --->  model, optimizer, recipe  --->  loop
            metrics.jsonl  <----------------------------------------'  |
            model/, samples, report.html, run.json  <---------------'

An engine implements `Side` (loop.py): on_torch.py and on_xla.py.
"""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fullshard.config.environment import read_launch_environment
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig
from fullshard.config.values import Backend
from fullshard.data.dataset import PreparedData
from fullshard.engine.homes import default_device
from fullshard.launch import rendezvous
from fullshard.launch.exit_codes import SAVE_SIGNALS, ExitCode, LaunchFolder, caught_stop_signals
from fullshard.models.build import model_config_of
from fullshard.models.config import quiet_libraries
from fullshard.observe import watchdog
from fullshard.observe.metrics import memory_bytes, sampled
from fullshard.recipes.base import RowBatches, Seat, load_data
from fullshard.recipes.registry import Command
from fullshard.run.console import RunConsole, RunWatcher, conclude, mark_running, run_lines
from fullshard.run.folder import RunFolder, RunStatus, now
from fullshard.run.loop import Loop, LoopSettings, Patience, Side, Watcher
from fullshard.run.optim import StepPlan, plan_steps, schedule_of
from fullshard.run.resume import Resume, RunCheckpoints, check_teacher

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Session:
    """The configuration, the data and the steps of a run, read by every rank."""

    config: RunConfig
    folder: RunFolder
    seat: Seat
    command: Command
    resume: Resume
    dataset: PreparedData
    steps: StepPlan
    model_config: PretrainedConfig

    @classmethod
    def read(cls, config: RunConfig, folder: RunFolder, seat: Seat) -> Session:
        dataset, record = load_data(folder.data, config.model), folder.read_record()
        resume, command = Resume.of_record(record), Command(record["command"])
        model_config = model_config_of(config, dataset.tokenizer)
        steps = plan_steps(config.training, dataset.facts, seat.num_batches, resume.global_batch)
        return cls(config, folder, seat, command, resume, dataset, steps, model_config)

    def batches(self) -> RowBatches:
        """This rank's batches."""
        per_device = self.config.training.per_device_eval_batch_size
        data = self.dataset.padded() if self.config.backend is Backend.JAX else self.dataset
        return self.command.kind.batches(data, per_device, self.steps.order, self.seat)

    def settings(self) -> LoopSettings:
        """Numbers of the loop."""
        training = self.config.training
        return LoopSettings(
            num_steps=self.steps.num_steps,
            eval_every=self.steps.eval_every,
            max_grad_norm=training.max_grad_norm,
            schedule=schedule_of(training, self.steps),
            max_skipped_steps=training.max_skipped_steps,
            patience=Patience(training.early_stopping_patience, training.early_stopping_threshold),
        )


def run(config: RunConfig, run_dir: Path) -> None:
    """Trains on this rank; creates the process group and destroys it.

    Args:
        config: Configuration that this rank was started with, for the rendezvous. The run uses the
            one in the folder, which rank 0 has checked and completed.
        run_dir: Folder of the run, with its prepared data.

    Raises:
        FullshardError: The run failed; run.json has the same error.
    """
    folder = RunFolder(run_dir)
    launch = read_launch_environment()
    rank = launch.rank if launch else 0
    with folder.recorded(rank):
        rendezvous.init_process_group(config.launch.timeout, folder.logs)
        if folder.config.is_file():  # else load_data reports that machines share no folder
            config = load_config(folder.config).config
        watchdog.on_hang(
            lambda hang: folder.fail("HangError", str(hang), ExitCode.HANG, hang.rank, final=True)
        )
        uses_torch = config.backend is not Backend.JAX
        device = default_device() if uses_torch else torch.device("cpu")  # measures the process
        world_size = launch.world_size if launch else 1
        train(config, folder, Seat(rank, world_size, device, config.sharding))
        rendezvous.shutdown()


def train(config: RunConfig, folder: RunFolder, seat: Seat) -> None:
    """Trains on this rank, inside a process group (XLA uses it only for the rendezvous)."""
    began = time.perf_counter()
    memory_bytes(seat.device)  # the peak counts from here
    quiet_libraries()
    session = Session.read(config, folder, seat)
    if config.backend is Backend.JAX:
        from fullshard.run.on_xla import XlaSide

        side: Side = XlaSide(session)
    else:
        from fullshard.run.on_torch import TorchSide

        side = TorchSide(session)
    with side.explained():
        _carry_out(session, side, began)


def _carry_out(session: Session, side: Side, began: float) -> None:
    """Train and export a model, or write the recipe's other output."""
    config, folder, steps = session.config, session.folder, session.steps
    data = session.batches()
    write = session.command.kind.write
    if write is not None:
        write(config, data, session.seat)
        if session.seat.is_first:
            folder.update_record(status=RunStatus.FINISHED, exit_code=0, ended=now())
        return
    console = _announced(session, side) if session.seat.is_first else None
    team = side.build(data)
    check_teacher(config, folder)
    settings, limit = session.settings(), config.training.save_total_limit
    with caught_stop_signals(SAVE_SIGNALS, _is_ending) as caught:
        keeper = RunCheckpoints(folder, side, steps, limit, caught, settings.patience)
        done = keeper.resume(session.resume)
        watcher = console and RunWatcher(console, folder, done, config, side.utilization())
        with watcher or nullcontext(), _measured_machine(folder):
            loop = Loop(side, data, settings, team, watcher or Watcher(), keeper)
            loop.run(done)
    watchdog.phase("saving", steps.num_steps)
    average_loss = side.export(loop)
    if config.training.ema_decay is None and session.seat.is_first:  # an earlier session's
        for stale in (folder.model_ema, folder.adapter_ema):
            shutil.rmtree(stale, ignore_errors=True)
    watchdog.phase("sampling", steps.num_steps)
    wall_s = time.perf_counter() - began
    sample = side.sample(session.dataset.facts.prompt)
    watchdog.phase("")
    if watcher and sample:
        conclude(session, watcher, sample, wall_s, average_loss)


def _measured_machine(folder: RunFolder) -> AbstractContextManager[None]:
    """Measures the use of this machine, on its first rank."""
    launch = read_launch_environment()
    if launch is None or launch.local_rank == 0:
        return sampled(folder.path, launch.rank // launch.local_world_size if launch else 0)
    return nullcontext()


def _announced(session: Session, side: Side) -> RunConsole:
    """Prints the banner before any weight is allocated; returns the console of the run."""
    console = RunConsole(session.steps.num_steps, session.steps.log_every)
    lines = side.lines() + run_lines(session.config, session.dataset.facts, session.steps)
    mark_running(session)
    console.print_banner(f"fullshard {session.command}  {session.folder.path}", lines)
    return console


def _is_ending() -> bool:
    """Whether the launcher is stopping all ranks because one failed: there is nothing to save."""
    folder = LaunchFolder.of(read_launch_environment())
    return folder is not None and folder.ending.exists()
