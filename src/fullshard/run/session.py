"""A run on one rank, whatever its recipe and engine: build, run the loop, write what came of it.

run folder  config.yaml, data/  --->  model, optimizer, recipe  --->  loop
            metrics.jsonl  <----------------------------------------'  |
            model/, samples, report.html, run.json  <---------------'

What an engine adds is its `Side`: on_torch.py and on_xla.py.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from fullshard.config.environment import read_launch_environment
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig
from fullshard.config.values import Backend
from fullshard.data.dataset import PreparedData
from fullshard.errors import HangError
from fullshard.launch import rendezvous
from fullshard.launch.folder import LaunchFolder
from fullshard.launch.signals import SAVE_SIGNALS, caught_stop_signals
from fullshard.models.build import model_config_of
from fullshard.models.config import quiet_libraries
from fullshard.models.generate import Sample
from fullshard.observe import watchdog
from fullshard.observe.position import Verdict
from fullshard.recipes.base import RowBatches, Seat, Team
from fullshard.recipes.batches import load_data
from fullshard.recipes.registry import Command
from fullshard.run.checkpoints import RunCheckpoints
from fullshard.run.console import RunConsole, run_lines
from fullshard.run.folder import RunFolder, RunStatus, now
from fullshard.run.loop import Loop, LoopSettings, Patience, Trainee
from fullshard.run.result import conclude, mark_running
from fullshard.run.resume import Resume
from fullshard.run.schedule import StepPlan, plan_steps, schedule_of
from fullshard.run.watcher import RunWatcher

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Side(Protocol):
    """What an engine adds to a session."""

    def explained(self) -> AbstractContextManager[None]:
        """Inside, errors that the plan can explain are."""
        ...

    def lines(self) -> list[tuple[str, str]]:
        """Labelled lines of the banner about the model and its plan, on rank 0."""
        ...

    def build(self, data: RowBatches, console: RunConsole | None) -> tuple[Trainee, Team]:
        """What is trained, and the ranks. A collective."""
        ...

    def utilization(self) -> float | None:
        """Model FLOPs utilization of one token a second, where that is known."""
        ...

    def export(self, loop: Loop) -> float | None:
        """Writes the model; returns the held-out loss of its average, if any. A collective."""
        ...

    def sample(self, prompt: str) -> Sample | None:
        """A text by the trained model, on rank 0 at least. A collective, after `export`."""
        ...


@dataclass(frozen=True)
class Session:
    """What follows from the configuration, the prepared data and the record, on every rank."""

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
        steps = plan_steps(config.training, dataset.facts, seat.world_size, resume.global_batch)
        return cls(config, folder, seat, command, resume, dataset, steps, model_config)

    def batches(self) -> RowBatches:
        """This rank's batches."""
        per_device = self.config.training.per_device_eval_batch_size
        return RowBatches(self.dataset, per_device, self.steps.order, self.seat)

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
        uses_torch = config.backend is not Backend.JAX
        device = _device() if uses_torch else torch.device("cpu")  # of XLA: its processes' memory
        train(config, folder, Seat(rank, launch.world_size if launch else 1, device))
    rendezvous.shutdown()


def train(config: RunConfig, folder: RunFolder, seat: Seat) -> None:
    """Trains on this rank, inside a process group (on XLA it is there for the rendezvous alone)."""
    began = time.perf_counter()
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
    """Learn and export; or write what a recipe leaves in place of a model."""
    config, folder, steps = session.config, session.folder, session.steps
    data = session.batches()
    write = session.command.kind.write
    if write is not None:
        write(config, data, session.seat)
        if session.seat.is_first:
            folder.update_record(status=RunStatus.FINISHED, exit_code=0, ended=now())
        return
    console = _announced(session, side) if session.seat.is_first else None
    trainee, team = side.build(data, console)
    settings, limit = session.settings(), config.training.save_total_limit
    with caught_stop_signals(SAVE_SIGNALS, _is_ending) as caught:
        keeper = RunCheckpoints(folder, trainee, steps, limit, caught, settings.patience)
        done = keeper.resume(session.resume)
        utilization = side.utilization() if console else None
        with RunWatcher(console, folder, done, config, utilization) as watcher:
            loop = Loop(trainee, data, settings, team, watcher, keeper)
            loop.run(done)
    watchdog.phase("saving", steps.num_steps)
    average_loss = side.export(loop)
    watchdog.phase("sampling", steps.num_steps)
    wall_s, facts = time.perf_counter() - began, session.dataset.facts
    drawn = side.sample(facts.prompt)
    watchdog.phase("")
    if console and drawn:
        conclude(folder, watcher, facts, drawn, wall_s, average_loss)


def _announced(session: Session, side: Side) -> RunConsole:
    """Shows what is planned, before a weight is made; returns where the run goes on to be shown."""
    console = RunConsole(session.steps.num_steps, session.steps.log_every)
    lines = side.lines() + run_lines(session.config, session.dataset.facts, session.steps)
    mark_running(session.folder, session.seat.device, session.model_config)
    console.print_banner(f"fullshard {session.command}  {session.folder.path}", lines)
    return console


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
