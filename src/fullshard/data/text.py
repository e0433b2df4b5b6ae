"""Text to packed sequences: read, hold out, tokenize, cut; made once, mapped by every rank.

    embedded text            one document per topic of the language reference
    text file, folder of     one document per file
    JSONL, parquet           one document per record, taken from one column

documents   [ topic 1 ][ topic 2 ] ... [ topic n-1 ][ topic n ]
held out                                  |<- the end: `fraction` of the characters
stream      tok tok <eot> tok tok tok <eot> tok ...
sequences   |<-- length -->|<-- length -->| ... | rest: dropped, and said

data/train.npy       (num_sequences, length)   unsigned token ids
data/held_out.npy    the same, for evaluation; missing where nothing is held out

Everything is read and checked before any rank starts, so a fault in the data costs seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fullshard.config.values import nearest
from fullshard.data.bigram import interpolated_bigram
from fullshard.data.dataset import DatasetFacts, fingerprint_of, save_facts
from fullshard.data.records import Files, Kind, Record, files_at, open_parquet
from fullshard.data.tokenizer import Tokens, encode, join, train_tokenizer
from fullshard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Corpus:
    """Documents in their order.

    Attributes:
        documents: The texts; none of them empty.
        are_records: True where documents are independent records (the held-out part is then made
            of whole ones), False where they are pieces of one running text.
        origin: What they were read from, for people.
    """

    documents: tuple[str, ...]
    are_records: bool
    origin: str

    @property
    def num_characters(self) -> int:
        return sum(len(document) for document in self.documents)


def read_corpus(path: Path | None, text_column: str = "text") -> Corpus:
    """Reads the text to train on.

    Args:
        path: A file, a folder, or None for the text that ships with every Python.
        text_column: Name of the column that holds the text of a record.

    Raises:
        DataError: Nothing is there, or it cannot be read, with file and place.
    """
    if path is None:
        return embedded_corpus()
    files = files_at(path)
    documents = tuple(text for text in _documents(files, text_column) if text)
    if not documents:
        raise DataError(_nothing_found(files))
    return Corpus(documents, files.kind is not Kind.TEXT, files.origin)


def embedded_corpus() -> Corpus:
    """The language reference that ships with every Python, one document a topic."""
    from pydoc_data.topics import topics

    documents = tuple(topics[name] for name in sorted(topics) if topics[name])
    return Corpus(documents, False, "the language reference in pydoc_data (ships with Python)")


def _nothing_found(files: Files) -> str:
    what = "text" if files.kind is Kind.TEXT else f"{files.kind} records with text"
    sizes = sum(file.stat().st_size for file in files.files)
    return (
        f"data.path: expected {what}, got none in '{files.path}' ({len(files.files)} file(s), "
        f"{sizes} bytes). Name a file that is not empty."
    )


def _documents(files: Files, text_column: str) -> Iterator[str]:
    if files.kind is Kind.TEXT:
        yield from (record.value for record in files.records())
        return
    if files.kind is Kind.PARQUET:
        for file in files.files:
            _check_column(file, text_column)
    for record in files.records([text_column]):
        yield _text_of(record, text_column)


def _text_of(found: Record, text_column: str) -> str:
    record, place = found.value, found.place
    if not isinstance(record, dict):
        raise DataError(
            f"data.path: expected a JSON object, got {type(record).__name__} at {place}. "
            f'Write {{"{text_column}": "..."}}.'
        )
    if text_column not in record:
        raise DataError(_missing_column(text_column, list(record), place))
    value = record[text_column]
    if not isinstance(value, str):
        raise DataError(
            f"data.text_column: expected text in column '{text_column}', "
            f"got {type(value).__name__} at {place}. Name a column that holds text."
        )
    return value


def _missing_column(text_column: str, present: list[str], place: str) -> str:
    guess = nearest(text_column, present)
    hint = f"Did you mean '{guess}'?" if guess else "Name one of them with data.text_column."
    columns = ", ".join(f"'{name}'" for name in present) or "none"
    return f"data.text_column: expected a column '{text_column}', got {columns} at {place}. {hint}"


def _check_column(file: Path, text_column: str) -> None:
    """A parquet file says what its columns hold before they are read."""
    import pyarrow

    with open_parquet(file) as reader:
        present = reader.schema_arrow.names
        if text_column not in present:
            raise DataError(_missing_column(text_column, present, str(file)))
        column_type = reader.schema_arrow.field(text_column).type
    if not (pyarrow.types.is_string(column_type) or pyarrow.types.is_large_string(column_type)):
        raise DataError(
            f"data.text_column: expected text in column '{text_column}', got {column_type} "
            f"in '{file}'. Name a column that holds text."
        )


@dataclass(frozen=True)
class Split:
    """Training and held-out text; the held-out part may be empty."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def hold_out(corpus: Corpus, fraction: float) -> Split:
    """Takes the held-out text from the end.

    Records stay whole: the last `fraction` of them, at least one, is held out. Running text is cut
    by characters, at the nearest line end before the place.

    Args:
        corpus: The text.
        fraction: Share that is held out, in [0, 1). 0 holds nothing out.
    """
    if fraction == 0:
        return Split(corpus.documents, ())
    if corpus.are_records and len(corpus.documents) > 1:
        num_held_out = math.ceil(len(corpus.documents) * fraction)
        num_train = max(1, len(corpus.documents) - num_held_out)
        return Split(corpus.documents[:num_train], corpus.documents[num_train:])
    return _cut(corpus.documents, math.ceil(corpus.num_characters * fraction))


def _cut(documents: tuple[str, ...], num_held_out: int) -> Split:
    """Cuts running text so that about `num_held_out` characters are in the second part."""
    first = len(documents)
    missing = num_held_out
    while first > 0 and missing >= len(documents[first - 1]):
        first -= 1
        missing -= len(documents[first])
    if missing == 0 or first == 0:
        return Split(documents[:first], documents[first:])
    cut_document = documents[first - 1]
    place = len(cut_document) - missing
    place = cut_document.rfind("\n", 0, place) + 1 or place
    return Split(
        (*documents[: first - 1], cut_document[:place]),
        (cut_document[place:], *documents[first:]),
    )


def pack(stream: Tokens, length: int, what: str) -> Tokens:
    """Cuts a stream into sequences, shape (num_sequences, length); the rest is dropped.

    Args:
        stream: (num_tokens,) token ids.
        length: Tokens in a sequence.
        what: `training` or `held-out`, for the message.

    Raises:
        DataError: Fewer tokens than one sequence.
    """
    num_sequences = len(stream) // length
    if num_sequences == 0:
        way_out = "Give more text or lower training.max_seq_length."
        if what == "held-out":
            way_out = "Raise data.validation_fraction or set it to 0."
        raise DataError(
            f"data.path: expected at least {length:,} {what} tokens (one sequence of "
            f"training.max_seq_length), got {len(stream):,}. {way_out}"
        )
    return stream[: num_sequences * length].reshape(num_sequences, length)


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
