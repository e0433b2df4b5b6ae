"""Prepared data of a run: facts, tokenizer, rows, and its files in the run's folder.

[Note: the bigram baseline]
A model that beats it has learned more than pairs of tokens.

    p(b | a) = lambda * c(a, b) / c(a)  +  (1 - lambda) * (c(b) + 1) / (N + V)

`c` counts tokens and pairs in the training sequences, N is the sum of c(b), V the size of the
vocabulary. lambda is chosen by EM on the last tenth of the training sequences, with the counts of
the others; then the counts of all are used. Pairs never cross the end of a sequence, so the model
and the baseline predict exactly the same tokens.

References:
    Jelinek and Mercer, Interpolated estimation of Markov source parameters, 1980.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from fullshard.data.order import Indices, SampleOrder
from fullshard.data.tokenize import Tokens
from fullshard.engine.hugging_face import read_tokenizer
from fullshard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Floats = npt.NDArray[np.float64]
CHOOSING_SHARE = 10  # one in ten training sequences chooses lambda


@dataclass(frozen=True)
class Baseline:
    """The interpolated bigram's result.

    Attributes:
        nats: Mean negative log likelihood per held-out token.
        weight: lambda, the weight of the bigram part.
        num_tokens: Held-out tokens that were predicted.
    """

    nats: float
    weight: float
    num_tokens: int


def interpolated_bigram(train: Tokens, held_out: Tokens, vocab_size: int) -> Baseline:
    """Fits the baseline on training sequences and measures it on held-out ones.

    Args:
        train: (num_sequences, length) token ids.
        held_out: (num_sequences, length) token ids.
        vocab_size: Size of the vocabulary.
    """
    num_choosing = max(1, len(train) // CHOOSING_SHARE)
    counted = train[:-num_choosing] if len(train) > 1 else train
    weight = best_weight(*_probabilities(counted, train[-num_choosing:], vocab_size))
    bigram, unigram = _probabilities(train, held_out, vocab_size)
    nats = -np.log(weight * bigram + (1.0 - weight) * unigram).mean()
    return Baseline(float(nats), weight, len(bigram))


def best_weight(bigram: Floats, unigram: Floats, tolerance: float = 1e-7) -> float:
    """The lambda with the largest likelihood, found by EM (the target is concave in lambda).

    It stays below 1, because pairs that never occurred need some probability.
    """
    weight = 0.5
    for _ in range(1000):
        from_bigram = weight * bigram
        update = float((from_bigram / (from_bigram + (1.0 - weight) * unigram)).mean())
        if abs(update - weight) < tolerance:
            break
        weight = update
    return min(weight, 1.0 - 1e-6)


def _probabilities(counted: Tokens, predicted: Tokens, vocab_size: int) -> tuple[Floats, Floats]:
    """Bigram and unigram probability of every predicted token.

    Args:
        counted: (num_sequences, length) sequences whose tokens and pairs are counted.
        predicted: (num_sequences, length) sequences whose tokens are predicted.
        vocab_size: V.
    """
    token_counts = np.bincount(counted.ravel(), minlength=vocab_size)
    context_counts = np.bincount(counted[:, :-1].ravel(), minlength=vocab_size)
    pairs, pair_counts = np.unique(_keys(counted, vocab_size), return_counts=True)
    keys = _keys(predicted, vocab_size)
    contexts, targets = np.divmod(keys, vocab_size)
    place = np.searchsorted(pairs, keys).clip(max=max(len(pairs) - 1, 0))
    found = np.where(pairs[place] == keys, pair_counts[place], 0)
    bigram = found / np.maximum(context_counts[contexts], 1)
    return bigram, (token_counts[targets] + 1.0) / (token_counts.sum() + vocab_size)


def _keys(sequences: Tokens, vocab_size: int) -> npt.NDArray[np.int64]:
    """a * V + b for each pair of neighbours inside a sequence."""
    contexts = sequences[:, :-1].astype(np.int64)
    return (contexts * vocab_size + sequences[:, 1:].astype(np.int64)).ravel()


IGNORED = -100  # a label that counts nothing, as everywhere in torch and transformers
ROWS = "rows"  # key of a batch: numbers of its rows, -1 for empty places
PREDICTED = "predicted"  # key of a batch: flat positions whose next token is a label
SHIFTED = "shift_labels"  # labels of the next tokens, only for parts of rows
# Key of a batch of parts of rows: (rows, whole length) numbers of documents, ~number at padding; or
# (rows, 0) if every row is one document.
DOCUMENTS = "documents"
WHOLE = (0, 1)  # the first of one part
FACTS = "dataset.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class DatasetFacts:
    """Facts about a data set besides its tokens.

    Attributes:
        origin: Files or library that it was read from, in words.
        sequence_length: Largest number of tokens in a sequence.
        num_train_sequences: Number of training sequences.
        num_held_out_sequences: Number of sequences for evaluation.
        num_train_tokens: Tokens in training sequences.
        num_held_out_tokens: Tokens in held-out sequences.
        num_dropped_tokens: Tokens of both parts that are in no sequence.
        vocab_size: Number of entries of the tokenizer.
        baseline: Interpolated bigram over the held-out sequences, if it was computed.
        prompt: Prompt of the sample at the end of a run.
        notes: Other facts about the preparation of the data.
        fingerprint: Checksum of all tokens; of a stream, of its first tokens and of what decides
            the others.
        mixture: See `SampleOrder.mixture`.
        pad: Token that fills rows up.
        shuffle_buffer: Sequences of a stream that are shuffled together; numbers of training
            sequences and tokens are estimates then. 0: there is no stream.
        separator: Token between documents that do not attend to each other; None: they do.
    """

    origin: str
    sequence_length: int
    num_train_sequences: int
    num_held_out_sequences: int
    num_train_tokens: int
    num_held_out_tokens: int
    num_dropped_tokens: int
    vocab_size: int
    baseline: Baseline | None
    prompt: str
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    mixture: tuple[tuple[int, int], ...] = ()
    pad: int = 0
    shuffle_buffer: int = 0
    separator: int | None = None


@dataclass(frozen=True)
class PreparedData(ABC):
    """Data that ranks can train on: numbered rows of tokens, and how they become batches."""

    kind: ClassVar[str]
    facts: DatasetFacts
    tokenizer: PreTrainedTokenizerBase

    def without_tokenizer(self) -> Self:
        """For a process that must not import transformers; rows do not need it."""
        return replace(self, tokenizer=None)  # type: ignore[arg-type]

    @property
    def labels_per_row(self) -> int | None:
        """Label tokens of a row; None if rows differ."""
        return None

    def padded(self) -> Self:
        """The data with rows of one length, because XLA needs a program for every length."""
        return self

    @property
    def prompts(self) -> Sequence[list[int]]:
        """Tokens of held-out prompts, which are answered at evaluations."""
        return ()

    @property
    @abstractmethod
    def lengths(self) -> Indices:
        """Tokens of each training row."""

    def dealt(self, chosen: Indices) -> Indices:
        """The rows of a step, (accumulation, world_size, per_device), perhaps in another order."""
        return chosen

    def batch(
        self, chosen: Indices, *, held_out: bool, parts: tuple[int, int] = WHOLE
    ) -> dict[str, Any]:
        """A batch of some rows: `arrays`, the rows, and the flat positions that predict labels.

        Args:
            chosen: The rows.
            held_out: Whether they are held-out rows.
            parts: Which part of how many of every row.
        """
        arrays = self.arrays(chosen, held_out=held_out)
        shifted = np.full_like(arrays["labels"], IGNORED)
        shifted[:, :-1] = arrays["labels"][:, 1:]
        if parts != WHOLE:
            arrays = divided({**arrays, SHIFTED: shifted}, *parts)
            shifted = arrays[SHIFTED]
        # Found on the CPU, so that no GPU waits.
        return {**arrays, ROWS: chosen.copy(), PREDICTED: np.flatnonzero(shifted != IGNORED)}

    @abstractmethod
    def arrays(self, chosen: Indices, *, held_out: bool) -> dict[str, Any]:
        """`input_ids`, `labels` and other inputs of some rows; -1 is a row without labels."""

    def save(self, folder: Path) -> None:
        """Writes everything into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save_pretrained(folder / TOKENIZER)
        text = json.dumps({"kind": self.kind, **asdict(self.facts)}, indent=2, ensure_ascii=False)
        (folder / FACTS).write_text(text + "\n", encoding="utf-8")
        self.save_rows(folder)

    @abstractmethod
    def save_rows(self, folder: Path) -> None:
        """Writes the rows; tokens of the cache become links."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, facts: DatasetFacts, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Maps what `save` wrote."""


@dataclass(frozen=True)
class BatchMaker:
    """The batches of one rank, a function of (is held out, number).

    Attributes:
        data: Prepared data of the run.
        order: Rows of each step.
        evaluation: (num_batches, world_size, per_device) held-out rows.
        index: Which of the batches of a micro-batch the rank sees.
        parts: Which part of how many of every row.
    """

    data: PreparedData
    order: SampleOrder
    evaluation: Indices
    index: int
    parts: tuple[int, int] = WHOLE

    def __call__(self, request: tuple[bool, int]) -> list[dict[str, Any]]:
        """The micro-batches of a step (from 0), or one batch of the evaluation."""
        held_out, number = request
        rows = self.evaluation[None, number] if held_out else self.order.of_step(number)
        of_all = rows if held_out else self.data.dealt(rows)
        batch = partial(self.data.batch, held_out=held_out, parts=self.parts)
        return [batch(rows) for rows in of_all[:, self.index]]


def divided(arrays: dict[str, Any], part: int, num_parts: int) -> dict[str, Any]:
    """One part of every row, and the documents of the whole rows.

    Rows are padded to a multiple of the parts; the padding is a document without labels.
    """
    rows, length = arrays["labels"].shape
    places, more = np.arange(length), -length % num_parts
    positions = arrays.get("position_ids", np.broadcast_to(places, (rows, length)))
    fill = {"position_ids": np.arange(more), "labels": IGNORED, SHIFTED: IGNORED}
    found: dict[str, Any] = {DOCUMENTS: np.zeros((rows, 0), np.int64)}
    for name, array in {**arrays, "position_ids": positions}.items():
        end = np.broadcast_to(np.asarray(fill.get(name, 0)), (rows, more))
        whole = np.concatenate([array, end], 1)
        found[name] = np.ascontiguousarray(np.split(whole, num_parts, 1)[part])
        if name == "position_ids" and name in arrays:
            found[DOCUMENTS] = np.cumsum(np.diff(whole, prepend=whole[:, :1] - 1) != 1, 1)
    return found


def load_facts(
    folder: Path, *, trust: bool = False
) -> tuple[str, DatasetFacts, PreTrainedTokenizerBase]:
    """Kind, facts and tokenizer as `PreparedData.save` wrote them.

    Raises:
        DataError: There are none, as on a machine that does not share the run's folder.
    """
    if not (folder / FACTS).is_file():
        raise DataError(
            f"training.output_dir: expected the run's tokens in '{folder}', got nothing. All "
            "machines of a run need the same folder, on a shared file system."
        )
    found: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    kind, facts = found.pop("kind"), TypeAdapter(DatasetFacts).validate_python(found)
    return kind, facts, read_tokenizer(folder / TOKENIZER, "model", trust=trust)


def tokenizer_texts(folder: Path) -> dict[str, str]:
    """Text files of the tokenizer by name, which are copied into checkpoints."""
    texts: dict[str, str] = {}
    for path in sorted((folder / TOKENIZER).iterdir()):
        with suppress(UnicodeDecodeError, IsADirectoryError):
            texts[path.name] = path.read_text(encoding="utf-8")
    return texts
