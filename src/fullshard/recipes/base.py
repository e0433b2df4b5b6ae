"""The interface of a recipe: its data, batches and their loss, and the ranks that share a step.

[Note: global token mean]
The loss that a step minimises is the mean over all label tokens of the global batch,

    L = (1 / N) * sum over ranks r, micro-batches a of S_ra        N = sum of n_ra

with S_ra the summed loss and n_ra the number of label tokens of one micro-batch. Each rank calls
backward on `scale * S_ra`; the engine adds the micro-batches of a rank and takes the mean (or the
sum) over W ranks, so

    grad_reduction mean:   (1 / W) * sum_ra scale * dS_ra = dL    where scale = W / N
    grad_reduction sum:              sum_ra scale * dS_ra = dL    where scale = 1 / N

N must be known before the first backward of the step. A mean per micro-batch, averaged over ranks
and micro-batches, is a different number as soon as the counts differ: micro-batches with few label
tokens weigh too much.

[Note: the data of a run]
It is made once, before the ranks start, and mapped by every rank.

    text    documents -> packed sequences                  Dataset
    chat    conversations -> rows, some of it learned      ChatDataset

`fullshard train` is for text, `fullshard sft` for chat data; `fullshard distill` accepts either.
Another recipe may make its own (`RecipeKind.make`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fullshard.config.schema import ModelConfig, RunConfig, SftConfig, ShardConfig
from fullshard.config.values import GradReduction
from fullshard.data.chat import set_template
from fullshard.data.chat_rows import ChatDataset, chat_source, chat_texts, make_chat_dataset
from fullshard.data.dataset import (
    DOCUMENTS,
    IGNORED,
    PREDICTED,
    ROWS,
    SHIFTED,
    BatchMaker,
    DatasetFacts,
    PreparedData,
    load_facts,
)
from fullshard.data.order import Indices, SampleOrder, evaluation_samples
from fullshard.data.text import Dataset, DatasetSettings, make_dataset, new_tokenizer, text_source
from fullshard.data.tokenize import shards
from fullshard.data.worker import Request, Worker
from fullshard.errors import ConfigError, DataError, EngineError
from fullshard.recipes.registry import Command
from fullshard.transport.base import Transport

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


Batch = dict[str, torch.Tensor]


class RankBatches(Protocol):
    """The batches of one rank and their loss, as the loop uses them."""

    @property
    def samples_per_step(self) -> int:
        """Samples per update, over all ranks."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def tokens_per_step(self) -> int | None:
        """Label tokens per update, over all ranks; None if updates differ."""
        ...

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's batches of an update (steps from 0), each with `input_ids` and `labels`.

        A label of -100 counts nothing: a batch of such labels keeps a rank without data in step.

        If `tokens_per_step` is None, ranks may have different numbers of batches.
        """
        ...

    def held_out(self) -> Iterable[Batch]:
        """This rank's evaluation batches; every rank has the same number."""
        ...

    def count(self, batch: Batch) -> int:
        """Number of items that the loss of a batch is summed over, for example label tokens."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        """Loss summed over the items of a batch, and their number."""
        ...


class Team(Protocol):
    """The ranks of a run, which exchange a few numbers per step."""

    @property
    def num_batches(self) -> int:
        """Number of batches, or parts of their sequences, that the ranks see at a time."""
        ...

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each such batch's rank, in order; all ranks call it together."""
        ...


@dataclass(frozen=True)
class Seat:
    """A rank's number, its device, and the batch (or part of a batch) that it computes.

    Attributes:
        sharding: Sizes of the axes; ranks are numbered as in `planner.mesh.mesh_of`.
    """

    rank: int
    world_size: int
    device: torch.device
    sharding: ShardConfig = field(default_factory=ShardConfig)

    @property
    def batch(self) -> int:
        """Index of the batch that this rank sees, whole or in part."""
        outer, inner = divmod(self.rank, self.sharding.context * self.num_inner)
        return outer * self.sharding.expert + inner // self.sharding.tensor % self.sharding.expert

    @property
    def parts(self) -> tuple[int, int]:
        """Which part of how many of every sequence this rank sees."""
        size = self.sharding.context
        return self.rank // self.num_inner % size, size

    @property
    def num_inner(self) -> int:
        """Number of ranks with the same part of different batches, or of one batch, in a row."""
        return self.sharding.expert * self.sharding.tensor

    @property
    def num_batches(self) -> int:
        """Number of batches that the ranks see at a time."""
        return self.sharding.num_batches(self.world_size)

    @property
    def is_first(self) -> bool:
        return self.rank == 0


class RankTeam:
    """Exchanges numbers over the transport of a sharded model.

    Args:
        transport: Transport that sums small vectors over all ranks.
        seat: This rank, with the device of the transport.
    """

    def __init__(self, transport: Transport, seat: Seat) -> None:
        self._transport, self._seat = transport, seat
        self.num_batches = seat.num_batches * seat.sharding.context

    def exchange(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each batch's rank, in order; all ranks call it together.

        Rank r fills row r of a table of zeros; the sum over ranks has the values of all. Of ranks
        that share a batch, the largest values count.
        """
        seat = self._seat
        table = torch.zeros(seat.world_size, len(values), dtype=torch.float64)
        table[seat.rank] = torch.tensor(list(values), dtype=torch.float64)
        flat = table.reshape(-1).to(seat.device)
        self._transport.all_reduce(flat)
        found = flat.cpu().reshape(self.num_batches, seat.sharding.tensor, len(values))
        return found.amax(1).tolist()


# Loss summed over the label tokens of a batch, and their number.
Objective = Callable[[nn.Module, Batch], tuple[torch.Tensor, int]]


def whole_logits_loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    """The cross-entropy of the next tokens, from the logits of all tokens at once."""
    logits = model(**inputs_of(batch), use_cache=False).logits
    total = cross_entropy(logits.flatten(0, -2), shifted_of(batch).reshape(-1))
    return total, num_predicted(batch)


class RowBatches:
    """Batches of one rank, and the objective that is learned from them.

    A recipe with other batches derives its own class (`RecipeKind.batches`).

    Args:
        data: Prepared data of the run.
        per_device_eval: Number of held-out rows per rank and batch.
        order: Rows of each step.
        seat: This rank, and the device that its batches go to.
    """

    def __init__(
        self, data: PreparedData, per_device_eval: int, order: SampleOrder, seat: Seat
    ) -> None:
        self.data = data
        self.objective: Objective = whole_logits_loss
        self._order, self._seat = order, seat
        evaluation = evaluation_samples(
            data.facts.num_held_out_sequences, per_device_eval, order.shape.world_size
        )
        self._num_evaluated = len(evaluation)
        maker = BatchMaker(data.without_tokenizer(), order, evaluation, seat.batch, seat.parts)
        self._worker = Worker(maker)

    @property
    def samples_per_step(self) -> int:
        return self._order.shape.global_batch

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    @property
    def tokens_per_step(self) -> int | None:
        per_row = self.data.labels_per_row
        return None if per_row is None else self.samples_per_step * per_row

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's batches, which its worker made during the step before."""
        return self._made((False, step), (False, step + 1))

    def held_out(self) -> Iterable[Batch]:
        for number in range(self._num_evaluated):
            follows = number + 1 < self._num_evaluated
            yield from self._made((True, number), (True, number + 1) if follows else None)

    def train_rows(self, chosen: Indices) -> Batch:
        """Some training rows as a batch; -1 is an empty place."""
        found = self.data.batch(chosen, held_out=False, parts=self._seat.parts)
        return placed(found, self._seat.device)

    def count(self, batch: Batch) -> int:
        return num_predicted(batch)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        return self.objective(model, batch)

    def _made(self, request: Request, ahead: Request | None) -> list[Batch]:
        return [placed(made, self._seat.device) for made in self._worker.take(request, ahead)]


def placed(arrays: Mapping[str, Any], device: torch.device) -> Batch:
    """Arrays on a device, which the host does not wait for; numbers of rows stay on the host."""
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    to = partial(torch.Tensor.to, device=device, non_blocking=True)
    return {name: tensor if name == ROWS else to(tensor) for name, tensor in batch.items()}


@dataclass(frozen=True, kw_only=True)
class RecipeKind:
    """The trained model and the data of a command; the defaults are those of pre-training on text.

    Attributes:
        uses_chats: (configuration) -> whether the data is chat data.
        make: (configuration, tokenizer or None, largest vocabulary) -> the prepared data. None:
            text or chat data.
        data: Classes of prepared data; `load_data` finds the one whose `kind` was saved.
        batches: Class of a rank's batches.
        check: (configuration, tokenizer) -> None; raises ConfigError before data is read.
        check_data: (configuration, facts of the data) -> None; raises DataError.
        write: (configuration, batches, seat) -> None. Writes something in place of a trained model;
            a collective.
        build: (configuration, model configuration, batches, seat, run folder) -> the sharded model.
            Sets the objective of the batches; a collective.
        xla: Module with the recipe's part on XLA: `more_shapes` (configuration, width of the
            decoder) -> more arrays to train; `teaching` (configuration, decoder) -> the teacher.
    """

    build: Callable[[RunConfig, PretrainedConfig, RowBatches, Seat, Path], nn.Module]
    uses_chats: Callable[[RunConfig], bool] = lambda _: False
    make: Callable[[RunConfig, PreTrainedTokenizerBase | None, int], PreparedData] | None = None
    data: Sequence[type[PreparedData]] = (Dataset, ChatDataset)
    batches: type[RowBatches] = RowBatches
    check: Callable[[RunConfig, PreTrainedTokenizerBase | None], None] = lambda *_: None
    check_data: Callable[[RunConfig, DatasetFacts], None] = lambda *_: None
    write: Callable[[RunConfig, RowBatches, Seat], None] | None = None
    xla: str | None = None


def inputs_of(batch: Batch) -> Batch:
    """The entries of a batch that are inputs of the model."""
    return {name: batch[name] for name in ("input_ids", "position_ids", DOCUMENTS) if name in batch}


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Summed next-token cross-entropy, and the number of label tokens.

    Args:
        logits: (batch, length, vocabulary), any float dtype; position t predicts token t + 1.
        labels: (batch, length) token ids; -100 marks tokens that are not predicted.

    Returns:
        The sum in float32 (float64 logits: float64) and the count.
    """
    targets = shifted_of({"labels": labels}).reshape(-1)
    return cross_entropy(logits.flatten(0, -2), targets), int((targets != IGNORED).sum())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over (num_tokens, vocabulary) logits, in float32 at least; one backward may run."""
    return _CrossEntropy.apply(logits, targets)  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """Its gradient overwrites its log-probabilities; torch's own creates two more tensors."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logs = F.log_softmax(logits, dim=-1, dtype=dtype)
        ctx.save_for_backward(logs, targets)
        ctx.dtype, ctx.is_spent = logits.dtype, False
        return F.nll_loss(logs, targets, ignore_index=IGNORED, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.is_spent:  # also under saved_tensors_hooks, where torch does not see the write
            raise EngineError("cross-entropy: expected one backward, whose gradient replaces it.")
        ctx.is_spent = True
        logs, targets = ctx.saved_tensors
        factors = torch.where(targets == IGNORED, 0, gradient).unsqueeze(-1)
        found = logs.exp_().mul_(factors)
        found.scatter_add_(1, targets.clamp(min=0).unsqueeze(-1), -factors)
        return found.to(ctx.dtype), None


def num_predicted(batch: Batch) -> int:
    """Number of label tokens of a batch."""
    return len(predicted_of(batch))


def predicted_of(batch: Batch) -> torch.Tensor:
    """Flat positions of a batch whose next token is a label, within their row."""
    if PREDICTED in batch:
        return batch[PREDICTED]
    return (shifted_of(batch) != IGNORED).reshape(-1).nonzero().reshape(-1)


def shifted_of(batch: Batch) -> torch.Tensor:
    """(batch, length) the label of every position's next token."""
    if SHIFTED in batch:
        return batch[SHIFTED]
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def blank(batch: Batch) -> Batch:
    """The batch without labels."""
    nothing = torch.full_like(batch["labels"], IGNORED)
    more = {SHIFTED: nothing} if SHIFTED in batch else {}
    return {**batch, **more, "labels": nothing, PREDICTED: predicted_of(batch)[:0]}


def backward_scale(num_tokens: int, num_batches: int, reduction: GradReduction) -> float:
    """Factor of each micro-batch's summed loss; see [Note: global token mean].

    Args:
        num_tokens: N, label tokens of the global batch.
        num_batches: W, number of batches whose gradients the engine reduces.
        reduction: Whether the engine takes the mean or the sum over ranks.
    """
    if num_tokens == 0:
        return 0.0
    return (num_batches if reduction is GradReduction.MEAN else 1) / num_tokens


# ---- the data of a run ---------------------------------------------------------------------------


def make_data(
    config: RunConfig,
    command: Command,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> PreparedData:
    """Read, tokenize and pack the data of a run.

    Args:
        config: Configuration of the run.
        command: Recipe of the run.
        tokenizer: Tokenizer of the run; None trains one on the data.
        vocab_size: Largest vocabulary of a trained tokenizer.

    Raises:
        DataError: The data cannot be used.
    """
    if command.kind.make is not None:
        return command.kind.make(config, tokenizer, vocab_size)
    data, training, sft = config.data, config.training, config.sft or SftConfig()
    path, is_chat = Path(data.path) if data.path else None, command.kind.uses_chats(config)
    _check_streaming(config, command, is_chat=is_chat)
    settings = DatasetSettings(training.max_seq_length, vocab_size, data, training.seed, sft)
    if is_chat:
        if data.mixture:
            raise ConfigError(
                "data.mixture: expected text or tokens, got conversations. Put them into one "
                "folder, and set data.path to it."
            )
        source, fields = chat_source(path), type(data).model_fields
        of_text = ("dtype", "text_column", "separate_documents", "bigram_baseline")
        asked = [key for key in of_text if getattr(data, key) != fields[key].default]
        notes = [f"data.{key} has no effect on conversations" for key in asked]
        if tokenizer is None:
            parts = [shards(source.spans())]
            tokenizer = new_tokenizer([source], parts, vocab_size, notes, chat_texts)
        template = Path(sft.chat_template_path) if sft.chat_template_path else None
        set_template(tokenizer, template, config.model)
        return make_chat_dataset(source, settings, tokenizer, notes)
    column = data.text_column
    sources = [
        text_source(Path(one.path), one.weight, one.text_column or column, f"data.mixture.{number}")
        for number, one in enumerate(data.mixture)
    ]
    return make_dataset(sources or [text_source(path, text_column=column)], settings, tokenizer)


def _check_streaming(config: RunConfig, command: Command, *, is_chat: bool) -> None:
    """Raises ConfigError where rows must be numbered before training."""
    cached = command is Command.CACHE or (config.distill and config.distill.cache)
    got = "conversations" if is_chat else "a cache of the teacher's logits"
    if config.data.streaming and (is_chat or cached):
        raise ConfigError(
            f"data.streaming: expected a run on text or tokens, got {got}, which needs all rows "
            "before training. Remove data.streaming."
        )


def load_data(folder: Path, model: ModelConfig) -> PreparedData:
    """Map the prepared data of a run.

    Args:
        folder: Folder of the data.
        model: Model section; decides whether the tokenizer's own code may run.

    Raises:
        DataError: The folder has no data.
    """
    kind, facts, tokenizer = load_facts(folder, trust=model.trust_remote_code)
    kinds = {made.kind: made for command in Command for made in command.kind.data}
    if kind not in kinds:
        known = ", ".join(sorted(kinds))
        raise DataError(f"'{folder}': expected data of one of the kinds {known}; got '{kind}'.")
    return kinds[kind].load(folder, facts, tokenizer)
