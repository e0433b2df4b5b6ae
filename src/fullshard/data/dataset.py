"""What every kind of prepared data has: facts about it and a tokenizer, in the run's folder."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

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
    """What is known about a data set besides its tokens.

    Attributes:
        origin: What it was read from.
        sequence_length: Most tokens in a sequence.
        num_train_sequences: Number of sequences that steps draw from.
        num_held_out_sequences: For evaluation.
        num_train_tokens: In training sequences.
        num_held_out_tokens: In held-out sequences.
        num_dropped_tokens: Tokens of both parts that are in no sequence.
        vocab_size: Entries of the tokenizer.
        baseline: The interpolated bigram over the held-out sequences, where it means something.
        prompt: A sample goes on from it.
        notes: What else was done to the data, in words.
        fingerprint: Checksum of all its tokens; empty where an older version wrote the facts.
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


class PreparedData(Protocol):
    """Data that ranks can train on."""

    @property
    def facts(self) -> DatasetFacts: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def labels_per_row(self) -> int | None:
        """Label tokens of a row; None where rows differ."""
        ...

    @property
    def row_length(self) -> int | None:
        """Length that rows are padded to on XLA; None where all have the same length."""
        ...

    @property
    def lengths(self) -> Indices:
        """Tokens of each training row."""
        ...

    def dealt(self, chosen: Indices) -> Indices:
        """The rows of a step, (accumulation, world_size, per_device), in the order for ranks."""
        ...

    def arrays(self, chosen: Indices, *, held_out: bool) -> dict[str, Any]:
        """`input_ids`, `labels` and other inputs of some rows; -1 is a row without labels."""
        ...

    def save(self, folder: Path) -> None:
        """Writes everything into a folder."""
        ...


def fingerprint_of(*arrays: Any) -> str:
    """The checksum of arrays of tokens."""
    checksum = xxhash.xxh3_128()
    for array in arrays:
        checksum.update(np.ascontiguousarray(array).data)
    return checksum.hexdigest()


def save_facts(
    folder: Path, kind: str, facts: DatasetFacts, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes facts and tokenizer; the folder is made if it is missing."""
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
        DataError: Nothing is there, as on a machine that does not share the run's folder.
    """
    if not (folder / FACTS).is_file():
        raise DataError(
            f"training.output_dir: expected the run's tokens in '{folder}', got nothing. "
            "All machines of a run need the same folder: put it on a shared file system."
        )
    found: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    kind, baseline = found.pop("kind"), found.pop("baseline")
    found["notes"] = tuple(found["notes"])
    found["mixture"] = tuple((size, places) for size, places in found.get("mixture", ()))
    return kind, DatasetFacts(**found, baseline=Baseline(**baseline) if baseline else None)


def tokenizer_texts(folder: Path) -> dict[str, str]:
    """The tokenizer's files that are text, by name: what a checkpoint takes along."""
    texts: dict[str, str] = {}
    for path in sorted((folder / TOKENIZER).iterdir()):
        with suppress(UnicodeDecodeError, IsADirectoryError):
            texts[path.name] = path.read_text(encoding="utf-8")
    return texts
