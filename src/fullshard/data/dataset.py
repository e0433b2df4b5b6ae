"""Prepared data of a run: facts, tokenizer, rows, and its files in the run's folder."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from fullshard.data.bigram import Baseline
from fullshard.data.order import Indices
from fullshard.engine.hugging_face import read_tokenizer
from fullshard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # a label that counts nothing, as everywhere in torch and transformers
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
        notes: What else was done to the data, in words.
        fingerprint: Checksum of all tokens; empty if an older version wrote the facts.
        mixture: See `SampleOrder.mixture`.
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


@dataclass(frozen=True)
class PreparedData(ABC):
    """Data that ranks can train on: numbered rows of tokens, and how they become batches."""

    facts: DatasetFacts
    tokenizer: PreTrainedTokenizerBase

    @property
    def labels_per_row(self) -> int | None:
        """Label tokens of a row; None if rows differ."""
        return None

    @property
    def row_length(self) -> int | None:
        """Length that rows are padded to on XLA; None if all rows have the same length."""
        return None

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

    @abstractmethod
    def arrays(self, chosen: Indices, *, held_out: bool) -> dict[str, Any]:
        """`input_ids`, `labels` and other inputs of some rows; -1 is a row without labels."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes everything into a folder."""


def save_facts(
    folder: Path, kind: str, facts: DatasetFacts, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes facts and tokenizer into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / TOKENIZER)
    text = json.dumps({"kind": kind, **asdict(facts)}, indent=2, ensure_ascii=False)
    (folder / FACTS).write_text(text + "\n", encoding="utf-8")


def load_facts(
    folder: Path, *, trust: bool = False
) -> tuple[str, DatasetFacts, PreTrainedTokenizerBase]:
    """Kind, facts and tokenizer as `save_facts` wrote them; see `read_facts` for errors."""
    kind, facts = read_facts(folder)
    return kind, facts, read_tokenizer(folder / TOKENIZER, "model", trust=trust)


def read_facts(folder: Path) -> tuple[str, DatasetFacts]:
    """Kind and facts as `save_facts` wrote them.

    Raises:
        DataError: There are none, as on a machine that does not share the run's folder.
    """
    if not (folder / FACTS).is_file():
        raise DataError(
            f"training.output_dir: expected the run's tokens in '{folder}', got nothing. "
            "All machines of a run need the same folder: put it on a shared file system."
        )
    found: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    return found.pop("kind"), TypeAdapter(DatasetFacts).validate_python(found)


def tokenizer_texts(folder: Path) -> dict[str, str]:
    """Text files of the tokenizer by name, which are copied into checkpoints."""
    texts: dict[str, str] = {}
    for path in sorted((folder / TOKENIZER).iterdir()):
        with suppress(UnicodeDecodeError, IsADirectoryError):
            texts[path.name] = path.read_text(encoding="utf-8")
    return texts
