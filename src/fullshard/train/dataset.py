"""The tokens of a run: made once, kept in the run's folder, mapped by every rank.

data/train.npy       (num_sequences, length)   unsigned token ids
data/held_out.npy    the same, for evaluation; missing where nothing is held out
data/dataset.json    where they came from, what was dropped, the baseline, the sample's prompt
data/tokenizer/      a Hugging Face tokenizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fullshard.train.baseline import interpolated_bigram
from fullshard.train.facts import DatasetFacts, fingerprint_of, save_facts
from fullshard.train.packing import Tokens, hold_out, join, pack
from fullshard.train.text import Corpus
from fullshard.train.tokenizer import encode, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_CHARACTERS = 60
KIND = "text"


@dataclass(frozen=True)
class Dataset:
    """Sequences, the facts about them, and their tokenizer.

    Attributes:
        train: (num_sequences, length) token ids.
        held_out: The same, or None where nothing is held out.
    """

    facts: DatasetFacts
    train: Tokens
    held_out: Tokens | None
    tokenizer: PreTrainedTokenizerBase

    def save(self, folder: Path) -> None:
        """Writes everything into a folder."""
        save_facts(folder, KIND, self.facts, self.tokenizer)
        np.save(folder / "train.npy", self.train)
        if self.held_out is not None:
            np.save(folder / "held_out.npy", self.held_out)

    @classmethod
    def load(cls, folder: Path, facts: DatasetFacts, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        """Maps what `save` wrote; the tokens are read from disk as they are used."""
        held_out = folder / "held_out.npy"
        return cls(
            facts,
            np.load(folder / "train.npy", mmap_mode="r"),
            np.load(held_out, mmap_mode="r") if held_out.is_file() else None,
            tokenizer,
        )


@dataclass(frozen=True)
class DatasetSettings:
    """How text becomes sequences.

    Attributes:
        sequence_length: Tokens in a sequence.
        held_out_fraction: Share of the text that is held out.
        vocab_size: Most entries of a tokenizer that is trained on the text.
    """

    sequence_length: int
    held_out_fraction: float
    vocab_size: int


def make_dataset(
    corpus: Corpus, settings: DatasetSettings, tokenizer: PreTrainedTokenizerBase | None
) -> Dataset:
    """Splits, tokenizes and packs a corpus, and measures the baseline on it.

    Args:
        corpus: The text.
        settings: Numbers.
        tokenizer: None trains one on the training part of the text.

    Raises:
        DataError: Fewer tokens than one sequence, in either part.
    """
    split = hold_out(corpus, settings.held_out_fraction)
    tokenizer = tokenizer or train_tokenizer(split.train, settings.vocab_size)
    vocab_size, length = len(tokenizer), settings.sequence_length
    streams = [
        join(encode(tokenizer, documents), vocab_size)
        for documents in (split.train, split.held_out)
    ]
    train = pack(streams[0], length, "training")
    held_out = pack(streams[1], length, "held-out") if split.held_out else None
    num_held_out = 0 if held_out is None else held_out.size
    facts = DatasetFacts(
        origin=corpus.origin,
        sequence_length=length,
        num_train_sequences=len(train),
        num_held_out_sequences=0 if held_out is None else len(held_out),
        num_train_tokens=train.size,
        num_held_out_tokens=num_held_out,
        num_dropped_tokens=len(streams[0]) + len(streams[1]) - train.size - num_held_out,
        vocab_size=vocab_size,
        baseline=None if held_out is None else interpolated_bigram(train, held_out, vocab_size),
        prompt=_prompt(split.held_out or split.train),
        fingerprint=fingerprint_of(train, [] if held_out is None else held_out),
    )
    return Dataset(facts, train, held_out, tokenizer)


def _prompt(documents: Sequence[str]) -> str:
    """The first words of the first document that is surely not cut: the second, if there is one."""
    text = documents[min(1, len(documents) - 1)]
    if len(text) <= PROMPT_CHARACTERS:
        return text
    return text[:PROMPT_CHARACTERS].rpartition(" ")[0] or text[:PROMPT_CHARACTERS]
