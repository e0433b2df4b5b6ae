"""Conversations packed into rows of the tokens in the cache, mapped by every rank.

    parts    [ example 0 | example 1 | example 2 ][ example 3 | ... ]     in the data's order
    value    id << 2 | whether the loss counts it << 1 | whether an example begins
    best fit, decreasing        longest first, each into the fullest row that has room for it
    row      [ example 4       ][ example 0 ][ ex. 7 ]..    the rest is padding
    places   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 0 1 2 3 4 0    restart with each example

data/tokens.json, tokens/     the parts; see [Note: prepared tokens] in data/tokenize.py
data/train/starts.npy         (num_examples,)   place of each example in the parts, row after row
data/train/sizes.npy          (num_examples,)   tokens of each example in its row
data/train/rows.npy           (num_rows + 1,)   first example of each row
data/train/lengths.npy        (num_rows,)       tokens of each row
data/held_out/                the same

Without packing a row is one example. Rows truncate examples and skip some; the parts have all of
them, so they serve rows of any length.
"""

from __future__ import annotations

import itertools
import json
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fullshard import __version__
from fullshard.config.schema import SftConfig
from fullshard.data.arrays import Rows, checksum_of
from fullshard.data.chat import (
    ASSISTANT,
    Example,
    encode,
    prompt_ids,
    prompt_of,
    question_answers,
    read_examples,
    unread,
)
from fullshard.data.dataset import IGNORED, DatasetFacts, PreparedData
from fullshard.data.order import Indices
from fullshard.data.records import Corpus, FileKind, Span, files_at
from fullshard.data.text import DatasetSettings, cache_root, load_tokens, save_tokens, written
from fullshard.data.tokenize import (
    Shard,
    TokenSettings,
    digest,
    settings_of,
    shards,
    tokenize,
    words_of,
)
from fullshard.engine.hugging_face import num_ids, some
from fullshard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 5  # changes when the same conversations give other tokens
BEGINS, COUNTS, BITS = 1, 2, 2  # flags of a value, and how many there are
ARRAYS = ("starts", "sizes", "rows", "lengths")


@dataclass(frozen=True)
class ExampleRows:
    """Rows of examples in the values of the parts; the module's docstring describes the arrays."""

    values: Rows
    starts: Indices
    sizes: Indices
    rows: Indices
    lengths: Indices

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> Any:
        """Arrays in files are mapped again by the process that unpickles them."""
        if isinstance(self.starts, np.memmap):
            return ExampleRows.load, (Path(str(self.starts.filename)).parent, self.values)
        return ExampleRows, tuple(vars(self).values())

    @property
    def count(self) -> int:
        """Tokens of all rows."""
        return int(self.lengths.sum())

    def examples_of(self, row: int) -> list[tuple[int, int]]:
        """Place and size of each example of a row."""
        here = slice(*self.rows[row : row + 2].tolist())
        return list(zip(self.starts[here].tolist(), self.sizes[here].tolist(), strict=True))

    @classmethod
    def of(cls, values: Rows, starts: Indices, sizes: Indices, capacity: int | None) -> ExampleRows:
        """Rows of one example, or of several with up to `capacity` tokens."""
        order, rows = np.arange(len(starts)), np.arange(len(starts) + 1)
        if capacity is not None:
            order, rows = best_fit(sizes, capacity)
        sums = np.concatenate([[0], np.cumsum(sizes[order])])
        return cls(values, starts[order], sizes[order], rows, np.diff(sums[rows]))

    def save(self, folder: Path) -> None:
        """Writes the arrays."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def load(cls, folder: Path, values: Rows) -> ExampleRows:
        """Maps what `save` wrote."""
        return cls(values, *(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS))


@dataclass(frozen=True)
class ChatDataset(PreparedData):
    """Rows of conversations.

    Attributes:
        samples: Tokens of held-out prompts, which are answered at evaluations.
        is_padded: All batches have the length of the longest row that there may be.
    """

    kind: ClassVar = "chat"
    train: ExampleRows
    held_out: ExampleRows
    samples: tuple[list[int], ...]
    is_padded: bool = False

    def padded(self) -> Self:
        """The data with rows of one length; they have lengths of their own here."""
        return replace(self, is_padded=True)

    @property
    def prompts(self) -> Sequence[list[int]]:
        """Tokens of held-out prompts, which are answered at evaluations."""
        return self.samples

    @property
    def lengths(self) -> Indices:
        """Tokens of each training row."""
        return self.train.lengths

    def dealt(self, chosen: Indices) -> Indices:
        """The rows of a step, in an order in which ranks hardly wait for each other."""
        return dealt(chosen, self.lengths)

    def arrays(self, chosen: Indices, *, held_out: bool) -> dict[str, Any]:
        """Rows, padded to the longest one, or to one length; -1 is a row without labels.

        [Note: documents]
        transformers starts a new document wherever `position_ids` fall, and no token attends to
        another document. The padding is a document of its own that is not learned. Rows of one
        example need no position ids, because their padding follows them.
        """
        rows = self.held_out if held_out else self.train
        members = [rows.examples_of(int(row)) if row >= 0 else [] for row in chosen]
        lengths = [sum(size for _, size in documents) for documents in members]
        least = self.facts.sequence_length if self.is_padded else 2
        shape = (len(members), max(2, least, *lengths))
        values = np.full(shape, self.facts.pad << BITS, dtype=np.int64)
        places = np.tile(np.arange(shape[1]), (shape[0], 1))
        for at, documents in enumerate(members):
            cursor = 0
            for start, size in documents:
                here = slice(cursor, cursor + size)
                rows.values.read(0, start, values[at, here])
                places[at, here] = np.arange(size)
                cursor = here.stop
            places[at, cursor:] = np.arange(shape[1] - cursor)
        ids = values >> BITS
        arrays = {"input_ids": ids, "labels": np.where(values & COUNTS, ids, IGNORED)}
        if self.is_padded or any(len(documents) > 1 for documents in members):
            arrays["position_ids"] = places
        return arrays

    def save_rows(self, folder: Path) -> None:
        """Writes everything but facts and tokenizer; the tokens are links."""
        save_tokens(folder, {self.kind: self.train.values})
        self.train.save(folder / "train")
        self.held_out.save(folder / "held_out")
        (folder / "samples.json").write_text(json.dumps(self.samples))

    @classmethod
    def load(cls, folder: Path, facts: DatasetFacts, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Maps what `save` wrote."""
        samples = tuple(json.loads((folder / "samples.json").read_text()))
        values = load_tokens(folder, 1, tokenizer)[cls.kind]
        rows = [ExampleRows.load(folder / name, values) for name in ("train", "held_out")]
        return cls(facts, tokenizer, rows[0], rows[1], samples)


def chat_values(
    tokenizer: PreTrainedTokenizerBase, sft: SftConfig, shard: Shard
) -> Iterator[npt.NDArray[np.integer]]:
    """Values of the tokens of a shard's examples; the first token of each is never learned."""
    for example in read_examples(shard.spans):
        found = encode(example, tokenizer, sft)
        values = np.array(found.ids or [0], np.uint32) << BITS  # one that is empty is counted, too
        values[1:] |= np.array(found.learned[1:], np.uint32) * COUNTS
        values[0] |= BEGINS
        yield values


def chat_source(path: Path | None) -> Corpus:
    """Files of conversations; None: questions about Python's library, and their docstrings.

    Raises:
        DataError: There are no files, or they are text or arrays.
    """
    if path is None:
        files = written("questions", ".jsonl", [question_answers()])
        origin = "docstrings of Python's library (ship with Python)"
        return Corpus(files[0], files, FileKind.JSONL, origin)
    files = files_at(path)
    if files.kind in (FileKind.TEXT, FileKind.ARRAY):
        raise DataError(
            f"data.path: expected chat data (.jsonl, .json, .parquet, a datasets folder), got "
            f"{files.kind} in '{path}'. Use `fullshard train` for plain text."
        )
    return files


def chat_texts(shard: Shard, _column: str) -> Iterator[str]:
    """All texts of a part, for training a tokenizer."""
    for example in read_examples(shard.spans):
        yield from (str(message["content"]) for message in example.messages)


def make_chat_dataset(
    source: Corpus,
    settings: DatasetSettings,
    tokenizer: PreTrainedTokenizerBase,
    notes: Sequence[str] = (),
) -> ChatDataset:
    """Encodes, splits, truncates, filters and packs examples; the facts' notes describe it.

    Args:
        source: Files of all examples.
        settings: How examples become rows.
        tokenizer: Tokenizer with a chat template.
        notes: Earlier notes about the data.

    Raises:
        DataError: No example has a token to learn.
    """
    spans, limit = source.spans(), settings.sequence_length
    found = shards(spans)
    values = _encoded(found, settings, tokenizer)
    starts, lengths, learned = _examples_in(values, limit)
    if not len(starts):
        path = source.path
        raise DataError(f"data.path: expected records, got none in '{path}'.")
    border = max(1, len(starts) - math.ceil(len(starts) * settings.data.validation_fraction))
    cut, kept = np.minimum(lengths, limit), np.flatnonzero(learned)
    parts = np.split(kept, np.searchsorted(kept, [border]))
    capacity, num_samples = limit if settings.sft.packing else None, settings.sft.num_samples
    rows = [ExampleRows.of(values, starts[part], cut[part], capacity) for part in parts]
    if not len(rows[0]):
        raise _nothing_to_learn(values, starts, border, spans, limit)
    arrays = [[getattr(part, name)] for part in rows for name in ARRAYS]
    sums = [checksum_of(*one) for one in [(part for _, part in _mapped(values)), *arrays]]
    num_cut, share = np.count_nonzero(lengths > limit), learned[parts[0]].sum() / rows[0].count
    sampled = _examples_from(border % len(starts), values, starts, found)
    asked = list(itertools.islice(sampled, max(1, num_samples)))
    ids = [prompt_ids(example, tokenizer) for example in asked[:num_samples]]
    told = [f"columns that are not read: {some(names)}"] if (names := unread(asked[0])) else []
    facts = DatasetFacts(
        origin=source.origin,
        sequence_length=limit,
        num_train_sequences=len(rows[0]),
        num_held_out_sequences=len(rows[1]),
        num_train_tokens=rows[0].count,
        num_held_out_tokens=rows[1].count,
        num_dropped_tokens=int(lengths.sum()) - rows[0].count - rows[1].count,
        vocab_size=num_ids(tokenizer),
        baseline=None,
        prompt=prompt_of(asked[0], tokenizer),
        notes=(*notes, *_notes(len(starts), int(num_cut), share, rows, settings), *told),
        fingerprint=digest([VERSION, limit, *sums]),
        pad=tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0,
    )
    return ChatDataset(facts, tokenizer, rows[0], rows[1], tuple(filter(None, ids)))


def _encoded(
    found: Sequence[Shard], settings: DatasetSettings, tokenizer: PreTrainedTokenizerBase
) -> Rows:
    """Values of all tokens, from the cache or made now on all cores."""
    sft = settings.sft
    learned = {
        "completions_only": sft.completion_only_loss is not False,
        "assistant_only": sft.assistant_only_loss is not False,
    }
    parts = [__version__, VERSION, learned, tokenizer.chat_template]
    key = digest([*parts, words_of(tokenizer), settings_of(tokenizer)])
    how = TokenSettings((), (), "", num_ids(tokenizer) << BITS, "uint32")
    read = partial(chat_values, tokenizer, sft)
    return Rows([tokenize(found, cache_root() / key, how, read, num_processes=None)], 1)


def _examples_in(values: Rows, limit: int) -> Indices:
    """(3, num_examples): start, length, and how many of the first `limit` tokens are learned."""
    found = [np.empty((3, 0), np.int64)]
    for place, part in _mapped(values):
        starts = np.flatnonzero(part & BEGINS)
        lengths = np.diff(starts, append=len(part))
        counts = np.cumsum(part & COUNTS, dtype=np.int64) // COUNTS
        learned = counts[starts + np.minimum(lengths, limit) - 1] - counts[starts]
        found.append(np.stack([starts + place, lengths, learned]))
    return np.concatenate(found, axis=1)


def _mapped(values: Rows) -> Iterator[tuple[int, npt.NDArray[np.integer]]]:
    """The place of the first value of each part, and its values."""
    place = 0
    for file in values.sources[0]:
        yield place, file.mapped()
        place += file.count


def _examples_from(
    number: int, values: Rows, starts: Indices, found: Sequence[Shard]
) -> Iterator[Example]:
    """The examples from one of them on."""
    before = np.searchsorted(starts, [place for place, _ in _mapped(values)])
    shard = int(np.searchsorted(before, number, "right")) - 1
    spans = (span for one in found[shard:] for span in one.spans)
    return itertools.islice(read_examples(spans), number - int(before[shard]), None)


def _nothing_to_learn(
    values: Rows, starts: Indices, border: int, spans: Sequence[Span], limit: int
) -> DataError:
    """Why none of the first `border` examples has a token to learn within `limit` tokens."""
    many = f"{border:,} training examples"
    found = np.concatenate([np.flatnonzero(part & COUNTS) + at for at, part in _mapped(values)])
    number = np.searchsorted(starts, found, "right") - 1
    if len(places := (found - starts[number])[number < border]):
        return DataError(
            f"training.max_seq_length: expected more tokens than {places.min()}, where the first "
            f"answer of {many} begins, got {limit}."
        )
    turns = (example for example in read_examples(spans) if not example.is_plain)
    roles = Counter(str(message["role"]) for one in turns for message in one.messages)
    if roles and ASSISTANT not in roles:
        got = ", ".join(f"{role} ({count:,})" for role, count in roles.most_common(5))
        return DataError(
            "data.path: expected messages with the role 'assistant', because only they are "
            f"trained, got none in {many}; the roles are {got}. Rename the role of the answers, or "
            "set sft.assistant_only_loss=false to train on every message."
        )
    return DataError(
        f"data.path: expected answers to train on, got none in {many}: they are empty, or the chat "
        "template does not mark them. Check the data, or set sft.chat_template_path."
    )


def _notes(
    num_examples: int, num_cut: int, share: float, rows: Sequence[ExampleRows], how: DatasetSettings
) -> Iterator[str]:
    yield f"{num_examples:,} examples; {share:.0%} of the training tokens count in the loss"
    if num_cut:
        yield f"{num_cut:,} examples truncated to {how.sequence_length:,} tokens (max_seq_length)"
    if left_out := num_examples - sum(len(part.starts) for part in rows):
        yield f"{left_out:,} examples without trained tokens are skipped"
    if how.sft.packing:
        count, filled = len(rows[0]), rows[0].count / (len(rows[0]) * how.sequence_length)
        yield f"{len(rows[0].starts):,} examples in {count:,} rows, which are {filled:.0%} full"


def best_fit(lengths: Indices, capacity: int) -> tuple[Indices, Indices]:
    """Packs examples into rows.

    Args:
        lengths: Tokens of each example, at most `capacity`.
        capacity: Number of tokens per row.

    Returns:
        The examples, row after row, and the bounds of the rows among them.
    """
    order, room = np.argsort(-lengths, kind="stable"), list[tuple[int, int]]()
    row_of, num_rows = np.empty(len(order), np.int64), 0
    for place, length in enumerate(lengths[order].tolist()):
        at = bisect_left(room, (length, 0))  # (tokens left, row), sorted
        if at == len(room):
            left, row, num_rows = capacity, num_rows, num_rows + 1
        else:
            left, row = room.pop(at)
        row_of[place] = row
        if left > length:
            insort(room, (left - length, row))
    by_row = np.argsort(row_of, kind="stable")
    return order[by_row], np.searchsorted(row_of[by_row], np.arange(num_rows + 1))


def dealt(chosen: Indices, lengths: Indices) -> Indices:
    """Deals the rows of a step so that ranks wait little for each other.

    Rows of similar length share a micro-batch, which needs little padding. The rank with the
    longest rows of one micro-batch has the shortest of the next.

    Args:
        chosen: (accumulation, world_size, per_device) rows of a step; -1 is an empty place.
        lengths: Lengths of every row, in tokens.
    """
    flat = chosen.reshape(-1)
    sizes = np.where(flat < 0, -1, lengths[np.maximum(flat, 0)])
    sorted_rows = flat[np.argsort(-sizes, kind="stable")].reshape(chosen.shape)
    sorted_rows[1::2] = sorted_rows[1::2, ::-1]
    return sorted_rows
