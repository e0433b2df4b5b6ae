"""A session on XLA, where an update is one program: its arrays, steps, checkpoints, export."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from jax.experimental import multihost_utils
from optax import GradientTransformation

from fullshard import xla_state
from fullshard.config.environment import read_launch_environment
from fullshard.config.values import DType
from fullshard.errors import DivergedError
from fullshard.launch import rendezvous
from fullshard.models.build import (
    build_model,
    generation_text,
    model_on_meta,
    trainable,
    weights_folder,
    write_folder,
)
from fullshard.models.generate import Sample, SamplingSettings
from fullshard.models.lora import first_values
from fullshard.observe.metrics import memory_bytes
from fullshard.planner.arrays import ArrayPlan, ArraysPlan
from fullshard.planner.text import axes_of, human_bytes
from fullshard.recipes.base import Batch, RowBatches, Team
from fullshard.recipes.distill.loss import TOP_IDS, TOP_VALUES
from fullshard.run.console import weights_line
from fullshard.run.generation import Request, generate
from fullshard.run.loop import Loop, Measured, Side, Update, diverged
from fullshard.run.optim import build_optimizer, schedule_of
from fullshard.run.resume import SCALER
from fullshard.saving import SaveSettings
from fullshard.xla import opt_state, processes
from fullshard.xla.decoder import EMBEDDING, HEAD, DecoderConfig, planned
from fullshard.xla.loss import PROJECTION, Decoder, next_token
from fullshard.xla.opt_state import trained
from fullshard.xla.plan import Tree, XlaPlan
from fullshard.xla.step import State, eval_step, train_step, whole_array, with_optimizer

if TYPE_CHECKING:
    from fullshard.run.session import Session

logger = logging.getLogger(__name__)

COORDINATOR = "fullshard/jax"  # key of its address in the launcher's store
KEYS = ("input_ids", "labels", "position_ids", TOP_VALUES, TOP_IDS)


@dataclass(frozen=True)
class ProcessTeam:
    """Exchanges numbers between jax's processes."""

    tensor: int  # processes in a row that share a batch

    @property
    def num_batches(self) -> int:
        return jax.process_count() // self.tensor

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """As `RankTeam.exchange`."""
        words = np.array(values, np.float64).view(np.uint32)  # jax would round them to float32
        found = np.ascontiguousarray(multihost_utils.process_allgather(words)).view(np.float64)
        return found.reshape(self.num_batches, self.tensor, -1).max(1).tolist()


class XlaSide(Side):
    """A session on XLA and its model: the plan is made first, the arrays after the banner."""

    _state: State  # parameters and optimizer; each step uses it up and makes the next

    def __init__(self, session: Session) -> None:
        self._session = session
        self._join()
        config, model_config = session.config, session.model_config
        self._decoder = decoder = DecoderConfig.of(model_config)
        xla = session.command.kind.xla
        recipe: Any = import_module(xla) if xla else None
        shapes = decoder.shapes()
        if recipe is not None:
            shapes |= recipe.more_shapes(config, decoder.hidden_size)
        self._frozen = decoder.frozen(config.freeze)
        self._plan = planned(shapes, config.sharding, freeze=self._frozen)
        self._teaching = recipe and recipe.teaching(config, Decoder(decoder, self._plan))
        processes.connect(self._plan.mesh)

    def lines(self) -> list[tuple[str, str]]:
        """Labelled lines of the banner."""
        run = self._session
        table = ArraysPlan.from_json(run.folder.plan.read_text("utf-8")) or self._plan.table
        mesh, num_micro_batches = table.mesh, run.steps.order.shape.accumulation
        moved = ", ".join(
            f"{kind} {c.count:,} x ({human_bytes(c.num_bytes)} in total)"
            for kind, c in table.collectives(num_micro_batches).items()
            if c.count
        )
        rows = ", ".join(f"{row.name} {human_bytes(row.num_bytes)}" for row in table.memory)
        device = jax.devices()[0].platform
        lines = [
            ("model", f"{table.num_parameters:,} parameters, {weights_line(run.config)}"),
            (
                "mesh",
                f"{mesh.world_size} device(s) of jax on {device}: {axes_of(table)}, "
                f"{table.strategy}",
            ),
            ("plan", f"{table.num_units} units; a step: {moved or 'no collectives'}"),
            ("state", f"{human_bytes(table.peak_bytes['device'])} per device: {rows}"),
        ]
        if self._teaching is not None:
            lines += self._teaching.lines(num_micro_batches)
        return lines

    def build(self, data: RowBatches) -> Team:  # noqa: ARG002
        """Builds the state and its programs; returns the team of ranks."""
        run, teaching, training = self._session, self._teaching, self._session.config.training
        if run.seat.is_first and run.dataset.prompts:
            logger.info("answers to held-out prompts are not sampled with backend: jax")
        groups, self._tx = self._optimizer()
        loss = eval_loss = next_token(Decoder(self._decoder, self._plan), training.loss_chunk_size)
        if teaching is not None:
            loss, eval_loss = teaching.loss, teaching.eval_loss
        self._step = train_step(
            self._plan,
            loss,
            self._tx,
            max_grad_norm=training.max_grad_norm or None,
            num_micro_batches=run.steps.order.shape.accumulation,
            given=teaching.given() if teaching is not None else None,
        )
        self._sums = eval_step(self._plan, eval_loss)
        tied = {HEAD: EMBEDDING} if self._decoder.tie_word_embeddings else {}
        self._beside = xla_state.Extras(groups, tied=tied)
        if run.resume.path is None:
            self._state = self._initial(self._tx)
        return ProcessTeam(run.config.sharding.tensor)

    # ---- for the loop

    def update(self, step: int, batches: list[Batch], loop: Loop) -> Update:
        """Runs one program, which returns the loss and norm of all ranks."""
        if self._teaching is not None:
            batches = [self._teaching.beside(batch) for batch in batches]
        rate = loop.settings.schedule.learning_rate(step - 1)
        self._state, found = self._step(self._state, _arrays(batches), learning_rate=rate)
        loop.look_ahead(step)
        is_pending = jax.devices()[0].platform != "cpu"
        memory = memory_bytes(torch.device("cpu"))
        return Update(partial(self._measured, step, found), 1, memory, is_pending)

    def _measured(self, step: int, found: Mapping[str, jax.Array]) -> Measured:
        """Waits for the program; the loss is returned on the first rank.

        Raises:
            DivergedError: The loss or the norm is not finite.
        """
        loss, norm = float(found["loss"]), float(found["grad_norm"])
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise DivergedError(diverged(what, value, step))
        return Measured(loss if self._session.seat.is_first else 0.0, norm)

    def totals(self, batches: Iterable[Batch], loop: Loop) -> tuple[float, float]:  # noqa: ARG002
        """Sums over all ranks, returned on the first rank; zero on the others."""
        sums = [self._sums(self._state, _arrays([batch])) for batch in batches]
        if not self._session.seat.is_first:
            return 0.0, 0.0
        return sum(float(total) for total, _ in sums), sum(float(count) for _, count in sums)

    # ---- for checkpoints

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """The model's configuration, from which a checkpoint can be exported."""
        model_config = self._session.model_config
        return {"config.json": model_config.to_json_string(), **generation_text(model_config)}

    def save(self, folder: Path, values: dict[str, Any], settings: SaveSettings) -> None:
        """Saves the state. A collective."""
        schedule = schedule_of(self._session.config.training, self._session.steps)
        rate = schedule.learning_rate((settings.step or 1) - 1)
        groups = [{**group, "lr": rate} for group in self._beside.groups]
        beside = replace(self._beside, groups=groups, values={**values, SCALER: {}})
        xla_state.save(folder, self._state, settings, beside)

    def load(self, path: Path) -> tuple[dict[str, Any], Path]:
        """Loads the newest usable checkpoint. A collective."""
        self._state, beside = xla_state.load(self._plan, path, self._tx)
        return dict(beside.values), path

    # ---- at the end

    def export(self, loop: Loop) -> None:  # noqa: ARG002
        """Writes the model."""
        run = self._session
        weights = torch_weights(self._state)
        weights.pop(f"{PROJECTION}.weight", None)  # not part of the model
        processes.leave()
        if run.seat.is_first:
            tokenizer, place = run.dataset.tokenizer, run.folder.model
            write_folder(weights, run.model_config, tokenizer, place, self.texts)

    def sample(self, prompt: str) -> Sample | None:
        """Text sampled from the exported model, on the first rank."""
        run = self._session
        if not run.seat.is_first:
            return None
        settings = SamplingSettings(seed=run.config.training.seed)
        trust = run.config.model.trust_remote_code
        return generate(Request(run.folder.model, (prompt,), settings, trust=trust))[0]

    def _join(self) -> None:
        """Joins the other ranks in jax."""
        seat, launch = self._session.seat, read_launch_environment()
        host = launch.master_addr if launch else None
        address = partial(rendezvous.free_address, host)
        wide = self._session.config.sharding.master_dtype is DType.FLOAT64
        published = partial(rendezvous.published, COORDINATOR, address)
        processes.join(seat.rank, seat.world_size, published, wide=wide)

    def _optimizer(self) -> tuple[list[dict[str, Any]], GradientTransformation]:
        """Groups of torch's optimizer, and XLA's; the model on meta decides which weights decay."""
        run, training, placed = self._session, self._session.config.training, self._plan
        shell = model_on_meta(run.config, run.model_config)
        run.model_config.architectures = [type(shell).__name__]
        names = {id(param): name for name, param in shell.named_parameters()}
        groups = [
            {**group, "params": [names[id(param)] for param in group["params"]]}
            for group in build_optimizer(shell, training).param_groups
        ]
        decays = {name: group["weight_decay"] for group in groups for name in group["params"]}
        decay = trained(placed, placed.map(lambda array: decays.get(array.names()[0], 0.0)))
        return groups, opt_state.of_run(training, decay)

    def _initial(self, tx: GradientTransformation) -> State:
        """Weights from a folder, where each process reads its devices' bytes; or random ones.

        Random weights are drawn in full by torch in every process, so that a run begins with the
        same numbers as on torch; each process then keeps its part.
        """
        config, placed = self._session.config, self._plan
        folder, seed = weights_folder(config), config.training.seed
        if folder is None:
            dtype = getattr(torch, config.sharding.master_dtype or DType.FLOAT32)
            model = build_model(self._session.model_config, None, dtype, seed)
            torch.manual_seed(seed)  # for the added modules, as on torch
            return state_of(placed, trainable(model, config).state_dict(), tx)
        if PROJECTION not in placed.shardings:
            return xla_state.load(placed, folder, tx)[0]
        bare = planned(self._decoder.shapes(), config.sharding, placed.mesh, self._frozen)
        name, like = f"{PROJECTION}.weight", placed.under(PROJECTION)[0]
        values = first_values(name, like.shape, seed).to(getattr(torch, like.dtypes.master))
        return state_of(placed, {name: values}, tx, xla_state.load(bare, folder)[0].params)


def _arrays(batches: Sequence[Batch]) -> dict[str, np.ndarray]:
    """This rank's samples; several micro-batches are stacked on a first axis. Tokens are int32."""
    found: dict[str, np.ndarray] = {}
    for key in KEYS:
        if key in batches[0]:
            stacked = np.stack([batch[key].numpy() for batch in batches])
            narrow = stacked.astype(np.int32) if stacked.dtype.kind == "i" else stacked
            found[key] = narrow if len(batches) > 1 else narrow[0]
    return found


def state_of(
    plan: XlaPlan,
    weights: Mapping[str, torch.Tensor],
    tx: GradientTransformation,
    loaded: Tree | None = None,
) -> State:
    """A state with a fresh optimizer; each process keeps the part of its devices.

    Args:
        plan: Plan of the model.
        weights: Full weights by name, in the master dtype.
        tx: The optimizer.
        loaded: Arrays that are already on the devices, by name; `weights` has the others.
    """
    leaves = jax.tree.leaves_with_path(loaded)
    there = {jax.tree_util.keystr(p, simple=True, separator="."): leaf for p, leaf in leaves}

    def place(array: ArrayPlan, sharding: Any) -> jax.Array:
        found = there.get(array.name)
        return _placed(array, sharding, weights) if found is None else found

    return with_optimizer(plan, plan.with_arrays(place, plan.shardings), tx)


def _placed(array: ArrayPlan, sharding: Any, weights: Mapping[str, torch.Tensor]) -> jax.Array:
    tensors = [_in_numpy(weights[name]) for name in array.names()]
    whole = np.stack(tensors) if array.block else tensors[0]
    pairs = zip(array.stored_shape, whole.shape, strict=True)
    whole = np.pad(whole, [(0, to - here) for to, here in pairs])
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _in_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same elements; torch and numpy know bfloat16 only by its bits."""
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    return tensor.view(torch.int16).numpy().view(jax.numpy.bfloat16)


def torch_weights(state: State) -> dict[str, torch.Tensor]:
    """All full weights by name. A collective."""
    found: dict[str, torch.Tensor] = {}
    for array, leaf in zip(state.plan.table.arrays, jax.tree.leaves(state.params), strict=True):
        whole = np.array(whole_array(array, leaf), copy=True)
        layers = whole if array.block else [whole]
        for name, values in zip(array.names(), layers, strict=True):
            narrow = values.dtype == jax.numpy.bfloat16
            same = torch.from_numpy(values.view(np.int16) if narrow else values)
            found[name] = same.view(torch.bfloat16) if narrow else same
    return found
