"""The recipe of distillation: the teacher, a student cut out of it, the loss, the cache.

In the plan of a run the teacher has a plan of its own, whose rows are listed next to the student's.
Activations of both are traced together, because the student runs inside the teacher's head (see
loss.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

import fullshard as fs
from fullshard.config.schema import DistillConfig, ModelConfig, RunConfig, ShardConfig
from fullshard.config.sharding import Offload
from fullshard.config.values import DistillLoss, DType, HomeKind
from fullshard.data.chat import is_chat
from fullshard.data.dataset import DatasetFacts
from fullshard.data.order import evaluation_samples
from fullshard.data.tokenize import load_tokenizer
from fullshard.engine.axes import one_place
from fullshard.engine.engine import engine_of
from fullshard.engine.hugging_face import build_on_meta
from fullshard.engine.initial import has_weights_of
from fullshard.errors import ConfigError
from fullshard.launch.run_lock import RunLock
from fullshard.models.build import build_sharded, given_model_config, sharding_for
from fullshard.models.config import build_model, config_from_folder, sample_of_model
from fullshard.models.student import STUDENT, choose, counting, is_cut, write_student
from fullshard.outlook.memory import TEACHER
from fullshard.planner.memory import MemoryRow
from fullshard.planner.plan import Plan
from fullshard.recipes.base import RankTeam, RecipeKind, RowBatches, Seat, inputs_of
from fullshard.recipes.context import divide
from fullshard.recipes.distill.loss import (
    NEW,
    TOP_IDS,
    TOP_VALUES,
    Distillation,
    TopK,
    check_facts,
    write_facts,
)
from fullshard.recipes.head import Head
from fullshard.recipes.registry import Command

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

COUNTED_STEPS = 8  # steps of training data on which the use of experts is measured


def settings_of(config: RunConfig) -> DistillConfig:
    """The distill section, or its defaults, with its chunk size filled in."""
    found = config.distill or DistillConfig()
    if found.chunk_size is not None:
        return found
    return found.model_copy(update={"chunk_size": config.training.loss_chunk_size})


def check_teacher(config: RunConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises ConfigError if a student cannot learn from its teacher."""
    teacher, settings = config.teacher, config.distill or DistillConfig()
    if teacher is None:
        return
    if teacher.name_or_path is None:
        raise ConfigError(
            "teacher: expected a folder with weights, got a configuration, whose weights would be "
            "random. Train it first (fullshard train), and set RUN/model."
        )
    theirs = load_tokenizer(teacher, "teacher")
    if tokenizer is None or theirs is None or settings.loss is DistillLoss.HIDDEN:
        return
    ours, other = tokenizer.get_vocab(), theirs.get_vocab()
    if ours != other:
        word = next((w for w in sorted({*ours, *other}) if ours.get(w) != other.get(w)), "")
        raise ConfigError(
            "teacher: expected the student's tokenizer, because predictions are compared token by "
            f"token; got another one ({len(other):,} entries, the student's has {len(ours):,}; "
            f"they differ in {word!r}). Set data.tokenizer to the teacher's, or train on text that "
            "the teacher writes (fullshard sft)."
        )


def build_student(
    config: RunConfig, teacher: nn.Module | TopK, model_config: PretrainedConfig, seat: Seat
) -> tuple[nn.Module, Distillation]:
    """The sharded student and its loss, which its head computes. A collective."""

    def before(model: nn.Module) -> None:
        divide(model, seat)
        Head(model)

    model = build_sharded(config, model_config, seat.device, before)
    return model, Distillation(Head.of(model), teacher, settings_of(config))


def build_teacher(config: RunConfig, seat: Seat, run: Path) -> nn.Module:
    """The teacher, sharded for forward passes only, in its own dtype and strategy.

    Args:
        config: Configuration of the run.
        seat: Rank and world size.
        run: Folder of the run, for the files of a teacher that is offloaded to disk.
    """
    settings = settings_of(config)
    assert config.teacher is not None, "checked before"
    folder = Path(config.teacher.name_or_path or "")
    dtype = teacher_dtype(settings, on_gpu=seat.device.type == "cuda")
    model_config = config_from_folder(config.teacher, "teacher")
    model: Any = build_on_meta(model_config, dtype)
    weights: Path | None = folder
    if not has_weights_of(model, folder):
        model, weights = build_model(model_config, folder, dtype, 0).to(seat.device), None
    model.requires_grad_(requires_grad=False)
    divide(model, seat)
    Head(model)
    config = config.model_copy(update={"sharding": sharding_for(config, model)})
    return fs.shard(model.eval(), teacher_sharding(config, settings, dtype, run), weights=weights)


def teacher_dtype(settings: DistillConfig, *, on_gpu: bool) -> torch.dtype:
    """The dtype of the teacher's weights."""
    default = DType.BFLOAT16 if on_gpu else DType.FLOAT32
    return getattr(torch, settings.teacher_dtype or default)


def teacher_sharding(
    config: RunConfig, settings: DistillConfig, dtype: torch.dtype, run: Path
) -> ShardConfig:
    """The sharding of the teacher: the student's, except for training and offload."""
    axes = ("replicate", "shard", "context", "expert", "tensor")
    own = ("transport", "forward_prefetch", "wrap", *axes)
    shared = {name: getattr(config.sharding, name) for name in own}
    if settings.teacher_offload is not None:
        folder = str(run) if settings.teacher_offload is HomeKind.NVME else None
        shared["offload"] = Offload(parameters=settings.teacher_offload, folder=folder)
    strategy = settings.teacher_strategy or config.sharding.strategy
    found = ShardConfig.of(shared, strategy=strategy, master_dtype=str(dtype))
    return found.without("context")


@torch.no_grad()
def cut_student(
    config: RunConfig, teacher: nn.Module, data: RowBatches, student: Path, seat: Seat
) -> None:
    """Measures the use of experts and writes the student's folder, unless it exists."""
    settings, engine = settings_of(config), engine_of(teacher)
    team = RankTeam(engine.transport, seat)
    if not any(lacks for (lacks,) in team.exchange([not (student / "config.json").is_file()])):
        return
    with counting(teacher) as counts:
        for step in range(COUNTED_STEPS):
            for batch in data.micro_batches(step):
                Head.of(teacher).show(teacher, inputs_of(batch), lambda *_: None)
    layers = sorted(counts)
    own = [float(n) for layer in layers for n in counts[layer]]
    sums = [sum(column) for column in zip(*team.exchange(own), strict=True)]
    width = len(sums) // max(1, len(layers))
    used = {layer: sums[at * width : (at + 1) * width] for at, layer in enumerate(layers)}
    whole = config.teacher or config.model
    origin, full = Path(whole.name_or_path or ""), config_from_folder(whole)
    kept = choose(used, full.num_hidden_layers, settings)
    if seat.is_first:
        write_student(origin, student, given_model_config(config), kept)
        for line in kept.lines():
            logger.info("student: %s", line)
    team.exchange([0.0])  # no rank reads before it is written


# ---- logits for runs without the teacher ---------------------------------------------------------


@torch.no_grad()
def write_cache(config: RunConfig, data: RowBatches, seat: Seat) -> None:
    """Writes the teacher's largest logits of every training token. A collective."""
    folder = cache_folder(config)
    with ExitStack() as held:
        if seat.is_first:
            (folder / NEW).mkdir(parents=True, exist_ok=True)
            held.enter_context(RunLock(folder / NEW, "distill.cache"))
        _write_logits(config, data, seat, folder)


def _write_logits(config: RunConfig, data: RowBatches, seat: Seat, folder: Path) -> None:
    """Writes them into a folder that no other run writes. A collective."""
    settings, facts = settings_of(config), data.data.facts
    folder.parent.mkdir(parents=True, exist_ok=True)
    teacher = build_teacher(config, seat, folder.parent)
    team = RankTeam(engine_of(teacher).transport, seat)
    lengths = data.data.lengths
    if seat.is_first:
        TopK.create(folder, lengths, min(settings.top_k, facts.vocab_size))
    team.exchange([0.0])  # no rank opens it before it is created
    kept = TopK.load(folder, "r+", seat.parts[0])
    per_device = config.training.per_device_eval_batch_size
    for chosen in evaluation_samples(len(lengths), per_device, seat.num_batches)[:, seat.batch]:
        batch = data.train_rows(chosen)

        def see(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
            for at, row in enumerate(chosen.tolist()):  # noqa: B023  (asked at once)
                if row >= 0:
                    head = partial(F.linear, weight=w, bias=b)
                    kept.put(row, h[at], head, settings.tokens_at_once, facts.vocab_size)

        Head.of(teacher).show(teacher, inputs_of(batch), see)
    kept.flush()
    team.exchange([0.0])
    if seat.is_first:
        write_facts(folder, facts, sample_of_model(config.teacher))
        logger.info("the teacher's logits are in %s: distill.cache=%s", folder, folder)


def cache_folder(config: RunConfig) -> Path:
    """The folder that `distill cache` writes."""
    default = Path(config.training.output_dir or f"runs/{Command.CACHE}", "logits")
    return Path(settings_of(config).cache or default)


# ---- the recipe ----------------------------------------------------------------------------------


def _uses_chats(config: RunConfig) -> bool:
    return config.data.path is not None and is_chat(Path(config.data.path))


def _check_data(config: RunConfig, facts: DatasetFacts) -> None:
    """Checks that cached logits belong to this data."""
    settings = settings_of(config)
    if cache := settings.cache:
        check_facts(Path(cache), facts, sample_of_model(config.teacher))
        kept = TopK.load(Path(cache)).values.shape[1]
        logger.info("the teacher's %d largest logits of each token come from %s", kept, cache)
        for key in ("teacher_dtype", "teacher_strategy"):  # `distill cache` has used them
            if getattr(settings, key) is not None:
                logger.info("distill.%s has no effect, because distill.cache is set", key)
    if settings.top_k != DistillConfig().top_k:
        logger.info("distill.top_k has no effect here; `fullshard distill cache` uses it")


def _build(
    config: RunConfig, model_config: PretrainedConfig, data: RowBatches, seat: Seat, folder: Path
) -> nn.Module:
    """Builds the teacher, then the student, which may be cut out of the teacher."""
    settings = settings_of(config)
    if settings.cache is not None:
        teacher = TopK.load(Path(settings.cache), part=seat.parts[0])
    else:
        teacher = build_teacher(config, seat, folder)
        if is_cut(settings):
            place = folder / STUDENT
            cut_student(config, teacher, data, place, seat)
            whole = settings.model_copy(update={"experts": None, "layers": None})
            model = ModelConfig(name_or_path=str(place))
            config = config.model_copy(update={"model": model, "distill": whole})
    student, distillation = build_student(config, teacher, model_config, seat)
    data.objective = distillation.loss
    return student


_CACHE = RecipeKind(build=_build, uses_chats=_uses_chats, check=check_teacher, write=write_cache)
_DISTILL = replace(_CACHE, check_data=_check_data, write=None, xla="fullshard.recipes.distill.xla")
KINDS = {"distill": _DISTILL, "distill-cache": _CACHE}


# ---- the teacher in a plan -----------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedTeacher:
    """The teacher of a planned run.

    Attributes:
        config: Configuration of the run.
        model: The teacher on meta with its head installed; None if a cache replaces it.
        local_world_size: Ranks per host.
        resolved: Fills in open values of a sharding, for the planned machine.
    """

    config: RunConfig
    model: nn.Module | None
    local_world_size: int | None
    resolved: Callable[[ShardConfig], ShardConfig]

    @classmethod
    def of(
        cls,
        config: RunConfig,
        local_world_size: int | None,
        *,
        on_gpu: bool,
        resolved: Callable[[ShardConfig], ShardConfig],
    ) -> PlannedTeacher | None:
        """The teacher of a run; None for a run without one."""
        settings, model = settings_of(config), None
        if settings.cache is None:
            if config.teacher is None:
                return None
            dtype = teacher_dtype(settings, on_gpu=on_gpu)
            model = build_on_meta(config_from_folder(config.teacher, "teacher"), dtype).eval()
            model.requires_grad_(requires_grad=False)
            Head(model)
        return cls(config, model, local_world_size, resolved)

    @property
    def settings(self) -> DistillConfig:
        return settings_of(self.config)

    @property
    def beside(self) -> tuple[nn.Module, ...]:
        """One rank's parts of the models that run in the student's step."""
        if self.model is None:
            return ()
        return (one_place(self.model, sharding_for(self.config, self.model)).model,)

    def rows(self, plan: Plan, sharding: ShardConfig) -> tuple[MemoryRow, ...]:
        """Memory of the teacher next to a student with this plan and sharding."""
        if self.model is None:
            return ()
        config = self.config.model_copy(update={"sharding": sharding})
        config = config.model_copy(update={"sharding": sharding_for(config, self.model)})
        dtype = next(self.model.parameters()).dtype
        own = teacher_sharding(config, self.settings, dtype, Path())
        found = fs.plan(
            self.model,
            self.resolved(own),
            world_size=plan.mesh.world_size,
            local_world_size=self.local_world_size,
        )
        return tuple(replace(row, name=TEACHER + row.name) for row in found.memory if row.num_bytes)

    def work(self, samples: int, length: int) -> Callable[..., torch.Tensor]:
        """Forward and loss of a micro-batch of full rows, as in training."""
        s = self.settings

        def work(student: nn.Module, *teachers: nn.Module) -> torch.Tensor:
            ids = torch.zeros(samples, length, dtype=torch.long)
            batch = {"input_ids": ids, "labels": torch.zeros_like(ids)}
            teacher = teachers[0] if teachers else TopK(None, None, None)
            if not teachers:
                values = torch.zeros(samples, length, s.top_k)
                batch |= {TOP_VALUES: values, TOP_IDS: values.long()}
            objective = Distillation(Head.of(student), teacher, s)
            return objective.loss(student.train(), batch)[0] * 1.0

        return work
