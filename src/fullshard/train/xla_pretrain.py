"""Every recipe on XLA, on one rank: what job.py does, by `backend: jax`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import optax
import torch

from fullshard.config.environment import read_launch_environment
from fullshard.config.schema import RunConfig
from fullshard.config.values import Command, DType, Optimizer
from fullshard.launch import rendezvous
from fullshard.launch.signals import SAVE_SIGNALS, caught_stop_signals
from fullshard.observe import watchdog
from fullshard.observe.memory import memory_bytes
from fullshard.planner.text import human_bytes
from fullshard.train.banner import DataFacts
from fullshard.train.build import model_on_meta, trainable
from fullshard.train.chat_dataset import ChatDataset
from fullshard.train.console import RunConsole
from fullshard.train.export import write_folder
from fullshard.train.facts import tokenizer_texts
from fullshard.train.lora import first_values
from fullshard.train.model import build_model, quiet_libraries
from fullshard.train.optim import OptimizerSettings, build_optimizer
from fullshard.train.patience import Patience
from fullshard.train.prepare import (
    StepPlan,
    model_config_of,
    plan_steps,
    schedule_of,
    weights_folder,
)
from fullshard.train.recipes import load_data, make_recipe
from fullshard.train.result import conclude, mark_running
from fullshard.train.resume import Resume
from fullshard.train.run_folder import RunFolder
from fullshard.train.schedule import Schedule
from fullshard.train.steps import LoopSettings
from fullshard.train.team import Seat
from fullshard.train.watcher import RunWatcher
from fullshard.train.xla_checkpoints import XlaCheckpoints, XlaKept
from fullshard.train.xla_loop import XlaLoop, XlaTrainee
from fullshard.train.xla_teaching import XlaTeaching, projection_shapes
from fullshard.train.xla_weights import state_beside, state_of, torch_weights
from fullshard.xla import optim, processes
from fullshard.xla.decoder import BLOCKS, EMBEDDING, HEAD, DecoderConfig, loss_fn
from fullshard.xla.distill import PROJECTION, Decoder
from fullshard.xla.plan import XlaPlan, plan
from fullshard.xla.step import State, eval_step, train_step, trained
from fullshard.xla_state import read

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

COORDINATOR = "fullshard/jax"  # under which the launcher's store has its address


@dataclass(frozen=True)
class _Built:
    """What follows from the configuration alone."""

    config: RunConfig
    model_config: PretrainedConfig
    decoder: DecoderConfig
    plan: XlaPlan
    tx: optax.GradientTransformation
    groups: list[dict[str, Any]]
    schedule: Schedule
    steps: StepPlan
    teaching: XlaTeaching | None


def train(config: RunConfig, folder: RunFolder, rank: int, is_ending: Callable[[], bool]) -> None:
    """Trains on this rank, inside a process group that is there for the rendezvous alone.

    Args:
        config: Configuration of the run, checked.
        folder: Folder of the run, with the prepared data.
        rank: This process.
        is_ending: Whether the launcher ends the ranks because another one failed.
    """
    began = time.perf_counter()
    quiet_libraries()
    dataset, record = load_data(folder.data, config.model), folder.read_record()
    resume, command = Resume.of_record(record), Command(record["command"])
    world_size = _join(config, rank)
    steps = plan_steps(config.training, dataset.facts, world_size, resume.global_batch)
    built = _build(config, model_config_of(config, dataset.tokenizer), steps, command)
    processes.connect(built.plan.mesh)
    console = RunConsole(steps.num_steps, steps.log_every) if rank == 0 else None
    if console is not None:
        _announce(DataFacts(command, config, dataset.facts, steps), folder, console, built)
        if isinstance(dataset, ChatDataset) and dataset.samples:
            logger.info("held-out prompts are not answered with backend: jax")
    with caught_stop_signals(SAVE_SIGNALS, is_ending) as caught:
        kept = _kept(built, tokenizer_texts(folder.data))
        limit = config.training.save_total_limit
        training = config.training
        patience = Patience(training.early_stopping_patience, training.early_stopping_threshold)
        keeper = XlaCheckpoints(folder.checkpoints, kept, steps, limit, caught, patience)
        trainee = _trainee(built, *keeper.load(resume, partial(_initial, built), built.tx))
        per_device = config.training.per_device_eval_batch_size
        seat = Seat(rank, world_size, torch.device("cpu"))
        recipe = make_recipe(dataset, steps.order, per_device, seat)
        settings = LoopSettings(
            steps.num_steps,
            steps.eval_every,
            training.max_grad_norm,
            built.schedule,
            patience=patience,
        )
        with RunWatcher(console, folder, trainee.done, config) as watcher:
            XlaLoop(trainee, recipe, settings, keeper, watcher).run(trainee.done)
    watchdog.phase("saving", steps.num_steps)
    weights = torch_weights(trainee.state)
    weights.pop(f"{PROJECTION}.weight", None)  # it is no part of the model
    processes.leave()
    if console is None:
        return
    write_folder(weights, built.model_config, dataset.tokenizer, folder.model)
    watchdog.phase("")
    wall_s = time.perf_counter() - began
    conclude(folder, watcher, dataset.facts, config, wall_s)


def _build(
    config: RunConfig, model_config: PretrainedConfig, steps: StepPlan, command: Command
) -> _Built:
    """Plan, optimizer and schedule. A model of torch on meta says which weights decay."""
    training = config.training
    decoder = DecoderConfig.of(model_config)
    shapes = {**decoder.shapes(), **projection_shapes(config, decoder.hidden_size)}
    placed = plan(shapes, config.sharding, blocks=BLOCKS, freeze=config.freeze)
    distills = command is Command.DISTILL
    teaching = XlaTeaching.of(config, Decoder(decoder, placed)) if distills else None
    shell = model_on_meta(config, model_config)
    model_config.architectures = [type(shell).__name__]
    settings = OptimizerSettings.of(training)
    names = {id(param): name for name, param in shell.named_parameters()}
    groups = [
        {**group, "params": [names[id(param)] for param in group["params"]]}
        for group in build_optimizer(shell, settings).param_groups
    ]
    tx = optim.sgd()
    if training.optim is not Optimizer.SGD:
        decays = {name: group["weight_decay"] for group in groups for name in group["params"]}
        decay = trained(placed, placed.map(lambda array: decays.get(array.names()[0], 0.0)))
        betas = (training.adam_beta1, training.adam_beta2)
        tx = optim.adamw(betas, training.adam_epsilon, decay)
    schedule = schedule_of(training, steps)
    return _Built(config, model_config, decoder, placed, tx, groups, schedule, steps, teaching)


def _kept(built: _Built, tokenizer: Mapping[str, str]) -> XlaKept:
    tied = {HEAD: EMBEDDING} if built.decoder.tie_word_embeddings else {}
    texts = {**tokenizer, "config.json": built.model_config.to_json_string()}
    return XlaKept(built.plan, built.groups, built.schedule, tied, texts)


def _trainee(built: _Built, state: State, done: int) -> XlaTrainee:
    teaching = built.teaching
    loss = told = loss_fn(built.decoder, built.plan)
    if teaching is not None:
        loss, told = teaching.loss, teaching.told
    step = train_step(
        built.plan,
        loss,
        built.tx,
        max_grad_norm=built.config.training.max_grad_norm or None,
        num_micro_batches=built.steps.order.shape.accumulation,
        given=teaching.given() if teaching is not None else None,
    )
    memory = partial(memory_bytes, torch.device("cpu"))
    trainee = XlaTrainee(state, step, eval_step(built.plan, told), memory, done)
    return trainee if teaching is None else replace(trainee, beside=teaching.beside)


def _join(config: RunConfig, rank: int) -> int:
    """Meet the other ranks in jax; returns how many there are."""
    launch = read_launch_environment()
    world_size = launch.world_size if launch else 1

    def publish() -> str:
        host = launch.master_addr if launch else None
        return rendezvous.published(COORDINATOR, partial(rendezvous.free_address, host))

    wide = config.sharding.master_dtype is DType.FLOAT64
    processes.join(rank, world_size, publish, wide=wide)
    return world_size


def _initial(built: _Built) -> State:
    """Weights of a folder, each process the bytes of its devices; or those that torch draws.

    The latter are drawn whole in every process, and kept in part, so that a run begins with the
    numbers that it begins with on torch.
    """
    config, placed, tx = built.config, built.plan, built.tx
    folder, seed = weights_folder(config), config.training.seed
    if folder is None:
        dtype = getattr(torch, config.sharding.master_dtype or DType.FLOAT32)
        model = build_model(built.model_config, None, dtype, seed)
        torch.manual_seed(seed)  # as on torch: what is added has numbers of its own
        return state_of(placed, trainable(model, config).state_dict(), tx)
    if PROJECTION not in placed.shardings:
        return read.load(placed, folder, tx)[0]
    shapes = built.decoder.shapes()
    bare = plan(shapes, config.sharding, blocks=BLOCKS, freeze=config.freeze)
    name, like = f"{PROJECTION}.weight", placed.under(PROJECTION)[0]
    values = first_values(name, like.shape, seed).to(getattr(torch, like.dtypes.master))
    return state_beside(placed, read.load(bare, folder)[0].params, {name: values}, tx)


def _announce(facts: DataFacts, folder: RunFolder, console: RunConsole, built: _Built) -> None:
    """Shows what is planned."""
    table = built.plan.table
    mesh, num_micro_batches = table.mesh, facts.steps.order.shape.accumulation
    mark_running(folder, torch.device("cpu"), built.model_config)
    moved = ", ".join(
        f"{kind} {c.count:,} x ({human_bytes(c.num_bytes)} in all)"
        for kind, c in table.collectives(num_micro_batches).items()
        if c.count
    )
    rows = ", ".join(f"{row.name} {human_bytes(row.num_bytes)}" for row in table.memory)
    device = jax.devices()[0].platform
    lines = [
        ("model", f"{table.num_parameters:,} parameters, {facts.weights()}"),
        (
            "mesh",
            f"{mesh.world_size} device(s) of jax on {device}: replicate {mesh.replicate} x "
            f"shard {mesh.shard}, {table.strategy}",
        ),
        ("plan", f"{table.num_units} units; a step: {moved or 'no collectives'}"),
        ("state", f"{human_bytes(table.peak_bytes['device'])} a device: {rows}"),
    ]
    if built.teaching is not None:
        lines += built.teaching.lines(num_micro_batches)
    console.print_banner(f"fullshard {facts.command}  {folder.path}", [*lines, *facts.lines()])
