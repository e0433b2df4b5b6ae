"""A session on the torch engine: the sharded model, its updates, checkpoints and export."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fullshard as fs
from fullshard import loading, saving
from fullshard.config.schema import SftConfig
from fullshard.config.values import DType, GradSync
from fullshard.engine.engine import engine_of
from fullshard.engine.norms import to_host
from fullshard.errors import ConfigError, DataError, DivergedError
from fullshard.models.build import (
    Adapters,
    generation_text,
    model_on_meta,
    save_model,
    weights_folder,
)
from fullshard.models.generate import Sample, Sampler, SamplingSettings
from fullshard.models.lora import check_base, sample_of_base
from fullshard.models.student import STUDENT, is_cut
from fullshard.observe import watchdog
from fullshard.observe.metrics import SampleRow, memory_bytes
from fullshard.planner.optimizers import states_of
from fullshard.planner.plan import Plan
from fullshard.recipes.base import Batch, RankTeam, RowBatches, Team, backward_scale, blank
from fullshard.run.console import plan_lines
from fullshard.run.generation import sampling
from fullshard.run.loop import Loop, Measured, Side, Trainee, Update, diverged
from fullshard.run.optim import Average, apply_scaled, build_optimizer
from fullshard.run.outlook import View, explained_memory, topology_of, view_of
from fullshard.run.resume import SCALER
from fullshard.saving import SaveSettings
from fullshard.transport import streams

if TYPE_CHECKING:
    from fullshard.run.session import Session

logger = logging.getLogger(__name__)

Read = Callable[[], list[float]]  # returns the loss of this rank and the norm of an update

NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
OFFLOADED_TOKENS = 20  # length of the final sample if weights are offloaded


@dataclass
class TorchTrainee(Trainee):
    """A sharded model with its optimizer, loss scaler and average."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    memory_bytes: Callable[[], tuple[int, int]]
    scaler: torch.amp.GradScaler = NO_SCALER
    average: Average | None = None
    _num_skipped: int = field(default=0, init=False)  # in this session
    _comm: float = field(default=0.0, init=False)  # seconds in communication when last measured
    _last: Batch | None = field(default=None, init=False)  # repeated if other ranks have more

    # ---- for the loop

    def update(self, step: int, batches: list[Batch], loop: Loop) -> Update:
        """Forward and backward of every micro-batch, reduced, clipped, applied."""
        engine, settings = engine_of(self.model), loop.settings
        comm_before = engine.communication_seconds()
        batches, num_tokens = self._even_out(batches, step, loop)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.schedule.learning_rate(step - 1)
        total = self._accumulate(batches, num_tokens, loop)
        loop.look_ahead(step)
        loop.watcher.entered("optimizer", step)
        self.scaler.unscale_(self.optimizer)
        norm = fs.clip_grad_norm_(self.model, settings.max_grad_norm or math.inf)
        values, device = torch.stack([total, norm.to(total)]), streams.of(engine.device)
        is_pending = device is not None and self.is_left_out_by_device(norm)
        read = self._queue(values, device) if is_pending else self._apply(values, step)
        self.optimizer.zero_grad(set_to_none=True)
        if device is not None and not is_pending:
            device.finish(device.event())  # the step's time includes the optimizer's
        measured = partial(self._measured, step, num_tokens, loop, comm_before, read)
        return Update(measured, num_tokens, self.memory_bytes(), is_pending)

    def _apply(self, values: torch.Tensor, step: int) -> Read:
        """Waits for the loss and the norm, then updates; returns what reads them again."""
        found = values.tolist()
        is_finite = math.isfinite(found[1])
        if is_finite or self.scaler.is_enabled():  # otherwise no scale helps
            apply_scaled(self.scaler, self.optimizer, step)
        if is_finite and self.average is not None:
            self.average.update()
        return lambda: found

    def is_left_out_by_device(self, norm: torch.Tensor) -> bool:
        """Whether the device itself leaves out an update if the norm is not finite."""
        is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        others = self.average is not None or self.scaler.is_enabled()
        is_there = norm.device.type == engine_of(self.model).device.type  # no offload
        return is_fused and is_there and not others

    def _queue(self, values: torch.Tensor, device: Any) -> Read:
        """Queues the update; returns what waits for it and reads the loss and the norm.

        A fused optimizer of torch changes nothing on its device if `found_inf` is 1, an attribute
        that `torch.amp.GradScaler` sets, too.
        """
        optimizer: Any = self.optimizer
        optimizer.found_inf = values[1].isfinite().logical_not().float()
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
        copy = to_host(values)
        end = device.event()

        def read() -> list[float]:
            device.finish(end)
            return copy.tolist()

        return read

    def _measured(
        self, step: int, num_tokens: int, loop: Loop, comm_before: float, read: Read
    ) -> Measured:
        """Measurements of an update; waits for it.

        Raises:
            DivergedError: More updates were skipped than max_skipped_steps allows.
        """
        total, grad_norm = read()
        is_skipped = not math.isfinite(grad_norm) and not self.scaler.is_enabled()
        if is_skipped:
            self._skip(step, (total, num_tokens, grad_norm), loop)
        comm = engine_of(self.model).communication_seconds()
        comm_s, self._comm = comm - max(comm_before, self._comm), comm
        return Measured(total, grad_norm, comm_s, is_skipped)

    def totals(self, batches: Iterable[Batch], loop: Loop) -> tuple[float, float]:
        """Summed loss and label tokens of held-out batches on this rank."""
        total, count = 0.0, 0
        self.model.eval()
        try:
            with torch.no_grad():
                for batch in batches:
                    batch_total, batch_count = loop.data.loss(self.model, batch)
                    total, count = total + batch_total.item(), count + batch_count
        finally:
            self.model.train()
        return total, count

    def _skip(self, step: int, found: tuple[float, int, float], loop: Loop) -> None:
        """Counts a skipped update.

        Raises:
            DivergedError: More updates were skipped than max_skipped_steps allows.
        """
        self._num_skipped += 1
        if self._num_skipped <= loop.settings.max_skipped_steps:
            return
        total, num_tokens, grad_norm = found
        loss = sum(part[0] for part in loop.team.exchange([total])) / max(1, num_tokens)
        what, value = ("gradient norm", grad_norm) if math.isfinite(loss) else ("loss", loss)
        raise DivergedError(diverged(what, value, step, self._num_skipped - 1))

    def _even_out(self, batches: list[Batch], step: int, loop: Loop) -> tuple[list[Batch], int]:
        """The same number of micro-batches on every rank, and the N of [Note: global
        token mean] in recipes/base.py.

        [Note: uneven batches]
        A rank with fewer micro-batches than another would leave the other waiting in a collective.
        If the counts are not known before, the ranks exchange them once per step with their
        numbers of label tokens. A rank with fewer repeats its last batch without labels.

        Raises:
            DataError: No rank has a batch, or this rank never had one.
        """
        if loop.data.tokens_per_step is not None:
            return batches, loop.data.tokens_per_step
        here = sum(map(loop.data.count, batches))
        parts = loop.team.exchange([here, len(batches)])
        most = int(max(part[1] for part in parts))
        self._last = batches[-1] if batches else self._last
        if self._last is None or most == 0:
            who = "this rank" if most else "all ranks"
            raise DataError(
                f"batches of step {step}: expected at least one; {who} has none. Give every rank "
                "data for the first step, and run no more steps than the data has."
            )
        missing = most - len(batches)
        return batches + [blank(self._last)] * missing, int(sum(part[0] for part in parts))

    def _accumulate(self, batches: list[Batch], num_tokens: int, loop: Loop) -> torch.Tensor:
        """Forward and backward of every micro-batch; returns this rank's summed loss, float64."""
        config = engine_of(self.model).config
        scale = backward_scale(num_tokens, loop.team.num_batches, config.grad_reduction)
        totals: list[torch.Tensor] = []
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.ExitStack() as around:
                if not last and config.grad_sync is not GradSync.EVERY_MICRO_BATCH:
                    outer_only = config.grad_sync is GradSync.LAST_MICRO_BATCH_OUTER
                    around.enter_context(fs.no_sync(self.model, outer_only=outer_only))
                batch_total, _ = loop.data.loss(self.model, batch)
                self.scaler.scale(batch_total * scale).backward()
            totals.append(batch_total.detach())
        return torch.stack(totals).sum(dtype=torch.float64)

    # ---- for checkpoints

    def save(self, folder: Path, values: dict[str, Any], settings: SaveSettings) -> None:
        """Saves model, optimizer and scaler. A collective."""
        state = {**values, SCALER: self.scaler.state_dict()}
        saving.save(folder, self.model, self.optimizer, state, settings)

    def load(self, path: Path) -> tuple[dict[str, Any], Path]:
        """Loads the newest usable checkpoint; returns its values and its path. A collective.

        The optimizer's settings stay those of the configuration, as on XLA.
        """
        engine, groups = engine_of(self.model), self.optimizer.param_groups
        settings = [{k: value for k, value in group.items() if k != "params"} for group in groups]
        found = loading.choose(saving.ranks_of(engine), path)
        state = loading.load_found(found, self.model, self.optimizer)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        if self.scaler.is_enabled() and (scale := state.get(SCALER)):
            self.scaler.load_state_dict(scale)
        if self.average is None and Average.forget(self.optimizer) and engine.rank == 0:
            logger.info("the checkpoint's average of the weights is dropped: ema_decay is not set")
        return state, found.path


class TorchSide(TorchTrainee, Side):
    """The torch engine's part of a session; the model is built after the banner is printed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        config, folder = session.config, session.folder
        # Folder of the weights that the run began with, which may be gone at the end.
        self._base = folder.path / STUDENT if is_cut(config.distill) else weights_folder(config)
        precision = session.config.training.matmul_precision
        if precision is not None:
            torch.set_float32_matmul_precision(precision)

    @cached_property
    def _view(self) -> View:
        """Plan of the run with its memory and time."""
        config, session = self._session.config, self._session
        bare = model_on_meta(config, session.model_config)
        return view_of(config, bare, topology_of(config, session.seat.world_size))

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Explains running out of memory from the plan."""
        return explained_memory(lambda: self._view)

    @cached_property
    def _shown_plan(self) -> Plan:
        return Plan.from_json(self._session.folder.plan.read_text(encoding="utf-8"))

    def lines(self) -> list[tuple[str, str]]:
        """Labelled lines of the banner."""
        run = self._session
        lines = plan_lines(run.config, self._shown_plan, run.seat.device.type)
        if run.config.training.matmul_precision is not None:
            precision = torch.get_float32_matmul_precision()
            lines.append(("matmul", f"float32 matrix products in {precision} precision"))
        why = run.folder.read_record()["planned"].get("whole_logits")
        return lines if why is None else [*lines, ("loss", f"from the logits of all tokens: {why}")]

    def build(self, data: RowBatches) -> Team:
        """Builds the sharded model and its optimizer; returns the team of ranks."""
        run, seat = self._session, self._session.seat
        decay = run.config.training.ema_decay
        model = run.command.kind.build(run.config, run.model_config, data, seat, run.folder.path)
        model.train()  # some models' own returns nothing
        optimizer = build_optimizer(model, run.config.training)
        fp16 = run.config.sharding.param_dtype is DType.FLOAT16
        super().__init__(
            model,
            optimizer,
            partial(memory_bytes, seat.device),
            torch.amp.GradScaler(seat.device.type, enabled=fp16),
            None if decay is None else Average(optimizer, decay),
        )
        if seat.is_first:
            self._check_plan()
        return RankTeam(engine_of(model).transport, seat)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The settings of generation that come with the model."""
        return generation_text(self._session.model_config)

    def load(self, path: Path) -> tuple[dict[str, Any], Path]:
        """As TorchTrainee.load; adapters must have been trained over the run's own weights."""
        if self._session.config.lora is None:
            return super().load(path)
        before = sample_of_base(self.model)
        state, found = super().load(path)
        check = partial(check_base, self.model, before, self._base, found)
        engine_of(self.model).agree(check)
        return state, found

    def utilization(self) -> float | None:
        """Model FLOPs utilization at one token per second; None if it is not known."""
        return self._view.utilization() if self._session.seat.device.type == "cuda" else None

    def export(self, loop: Loop) -> float | None:
        """Writes the model and the averaged weights; returns the held-out loss of the average."""
        folder = self._session.folder
        self._export(folder.model, folder.adapter)
        if self.average is not None:
            with self.average.applied():
                loss = loop.held_out_loss(self._session.steps.num_steps)
                self._export(folder.model_ema, folder.adapter_ema)
            return loss
        return None

    def _export(self, place: Path, adapter: Path) -> None:
        """Writes the model as a Hugging Face folder, and adapters on their own. A collective."""
        run = self._session
        lora = run.config.lora
        adapters = None if lora is None else Adapters(lora, self._base, adapter)
        save_model(self.model, run.model_config, run.dataset.tokenizer, place, adapters, self.texts)

    def _check_plan(self) -> None:
        """Warns if the engine's plan differs from the one in the banner, and records it."""
        states = states_of(self._session.config.training)
        found, shown = engine_of(self.model).plan.trained_by(states), self._shown_plan
        if found == shown:
            return
        self._session.folder.plan.write_text(found.to_json(), encoding="utf-8")
        why = f", transport {found.transport}" if found.transport is not shown.transport else ""
        logger.warning("the engine's plan differs from the one above%s; see plan.json", why)

    def evaluated(self, step: int, loop: Loop) -> None:
        """Answers held-out prompts."""
        try:
            self._answer_prompts(step, loop)
        except ConfigError as error:  # the model cannot generate, but it can be trained
            logger.warning("no text is sampled after step %d: %s", step, error)

    def _answer_prompts(self, step: int, loop: Loop) -> None:
        """Answers held-out prompts; plain text is continued, except after the last step."""
        data, prompts = self._session.dataset, self._session.dataset.prompts
        is_last = step == self._session.steps.num_steps
        if not prompts and not is_last and not self._shown_plan.homes.offloads:
            ids: list[int] = data.tokenizer(data.facts.prompt)["input_ids"]
            prompts = [ids] if ids else []
        if not prompts:
            return
        most = (self._session.config.sft or SftConfig()).sample_tokens
        watchdog.phase("sampling", step)
        likely = SamplingSettings(temperature=0)
        with sampling(self.model) as same:
            sampler = Sampler(self.model, data.tokenizer, likely, [same])
            for prompt in prompts:
                room = min(most, data.facts.sequence_length - len(prompt))
                found = sampler.continued([list(prompt)], room)[0] if room > 0 else []
                decode = partial(data.tokenizer.decode, skip_special_tokens=True)
                loop.watcher.tell(SampleRow(step, str(decode(prompt)), str(decode(found))))

    def sample(self, prompt: str) -> Sample:
        """Text sampled from the sharded model. A collective."""
        run = self._session
        # Each token gathers the model, which is slow from the host or the disk.
        most = OFFLOADED_TOKENS if self._shown_plan.homes.offloads else None
        settings = SamplingSettings(most, seed=run.config.training.seed)
        with sampling(self.model) as same:
            sampler = Sampler(self.model, run.dataset.tokenizer, settings, [same])
            (found,) = sampler.samples([prompt])
        return found
