"""Conversations packed into rows: made once, saved in the run's folder, mapped by every rank.

    best fit, decreasing        longest first, each into the fullest row that has room for it
    row      [ example 4       ][ example 0 ][ ex. 7 ]..    the rest is padding
    places   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 0 1 2 3 4 0    restart with each example

data/train/tokens.npy     (num_tokens,)         tokens of all examples, row after row
data/train/learned.npy    (num_tokens,)         whether the loss counts a token
data/train/examples.npy   (num_examples + 1,)   start of each example
data/train/rows.npy       (num_rows + 1,)       first example of each row
data/held_out/            the same

Without packing a row is one example.

[Note: prepared chat data]
The result is cached in ~/.cache/fullshard/chats/KEY/ (XDG_CACHE_HOME moves it). KEY is the checksum
of all that the result depends on: the files' names, sizes and times of change, the tokenizer, the
template, the settings and our version. The cache is read and written before the ranks start, and a
folder appears by one rename, so nothing waits for it.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fullshard import __version__
from fullshard.config.environment import cache_folder
from fullshard.data.arrays import checksum_of
from fullshard.data.chat import ASSISTANT, Example, Examples, Turns
from fullshard.data.chat_template import Encoded, Learned, encode, prompt_of
from fullshard.data.dataset import (
    IGNORED,
    DatasetFacts,
    PreparedData,
    read_facts,
    save_facts,
)
from fullshard.data.order import Indices
from fullshard.data.records import identity
from fullshard.data.tokenize import digest
from fullshard.data.tokenizer import Tokens, token_dtype, words_of
from fullshard.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


KIND = "chat"
VERSION = 2  # changes when the same conversations give other tokens


@dataclass(frozen=True)
class ChatSettings:
    """How examples become rows.

    Attributes:
        sequence_length: Largest number of tokens in a row; longer examples lose their end.
        held_out_fraction: Share of the examples to hold out, from the end.
        packing: Whether a row has several examples.
        learned: Tokens that the loss counts.
        num_samples: Number of held-out prompts to answer at evaluations.
    """

    sequence_length: int
    held_out_fraction: float
    packing: bool
    learned: Learned
    num_samples: int


@dataclass(frozen=True)
class ExampleRows:
    """Rows of full examples; the module's docstring describes the arrays."""

    tokens: Tokens
    learned: npt.NDArray[np.bool_]
    examples: Indices
    rows: Indices

    def __len__(self) -> int:
        return len(self.rows) - 1

    def __reduce__(self) -> Any:
        """Rows in files are mapped again by the process that unpickles them."""
        if isinstance(self.tokens, np.memmap):
            return ExampleRows.load, (Path(str(self.tokens.filename)).parent,)
        return ExampleRows, tuple(vars(self).values())

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each row."""
        return np.diff(self.examples[self.rows])

    def examples_of(self, row: int) -> list[tuple[int, int]]:
        """Start and end of each example of a row."""
        bounds = self.examples[self.rows[row] : self.rows[row + 1] + 1].tolist()
        return list(itertools.pairwise(bounds))

    @classmethod
    def of(
        cls, found: Sequence[Encoded], members: Sequence[Sequence[int]], vocab: int
    ) -> ExampleRows:
        """Rows of encoded examples; `members` lists the examples of each row."""
        ordered = [found[index] for row in members for index in row]
        sizes = [len(one.ids) for one in ordered]
        parts = [np.asarray(one.ids, token_dtype(vocab)) for one in ordered]
        flags = [np.asarray(one.learned, bool) for one in ordered]
        return cls(
            np.concatenate(parts) if parts else np.empty(0, token_dtype(vocab)),
            np.concatenate(flags) if flags else np.empty(0, bool),
            np.cumsum([0, *sizes]),
            np.cumsum([0, *map(len, members)]),
        )

    def save(self, folder: Path) -> None:
        """Writes the arrays."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in vars(self).items():
            np.save(folder / f"{name}.npy", array)

    @classmethod
    def load(cls, folder: Path) -> ExampleRows:
        """Maps what `save` wrote."""
        names = ("tokens", "learned", "examples", "rows")
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in names))


@dataclass(frozen=True)
class ChatDataset(PreparedData):
    """Rows of conversations.

    Attributes:
        samples: Tokens of held-out prompts, which are answered at evaluations.
    """

    train: ExampleRows
    held_out: ExampleRows
    samples: tuple[list[int], ...]

    @property
    def row_length(self) -> int:
        """Rows have lengths of their own, up to this one."""
        return max(2, self.facts.sequence_length)

    @property
    def prompts(self) -> Sequence[list[int]]:
        """Tokens of held-out prompts, which are answered at evaluations."""
        return self.samples

    @property
    def lengths(self) -> Indices:
        """Tokens of each training row."""
        return self.train.lengths

    def dealt(self, chosen: Indices) -> Indices:
        """The rows of a step, in an order in which ranks wait little for each other."""
        return dealt(chosen, self.lengths)

    def arrays(self, chosen: Indices, *, held_out: bool) -> dict[str, Any]:
        """Rows, padded to the longest one; -1 is a row without labels.

        [Note: documents]
        transformers starts a new document wherever `position_ids` fall, and no token attends to
        another document. The padding is a document of its own that is not learned. Rows of one
        example need no position ids, because their padding stands behind them.
        """
        rows = self.held_out if held_out else self.train
        members = [rows.examples_of(int(row)) if row >= 0 else [] for row in chosen]
        sizes = [sum(stop - start for start, stop in documents) for documents in members]
        shape = (len(members), max(2, *sizes))
        ids = np.full(shape, self.facts.pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        places = np.tile(np.arange(shape[1]), (shape[0], 1))
        for at, documents in enumerate(members):
            cursor = 0
            for start, stop in documents:
                here = slice(cursor, cursor + stop - start)
                ids[at, here] = rows.tokens[start:stop]
                labels[at, here] = np.where(rows.learned[start:stop], ids[at, here], IGNORED)
                places[at, here] = np.arange(stop - start)
                cursor = here.stop
            places[at, cursor:] = np.arange(shape[1] - cursor)
        arrays = {"input_ids": ids, "labels": labels}
        if any(len(documents) > 1 for documents in members):
            arrays["position_ids"] = places
        return arrays

    def save(self, folder: Path) -> None:
        """Writes everything into a folder; the facts come last and mark it complete."""
        self.train.save(folder / "train")
        self.held_out.save(folder / "held_out")
        bounds = np.cumsum([0, *map(len, self.samples)])
        flat = [token for sample in self.samples for token in sample]
        np.savez(folder / "samples.npz", bounds=bounds, tokens=np.asarray(flat, np.int64))
        save_facts(folder, KIND, self.facts, self.tokenizer)

    @classmethod
    def load(
        cls, folder: Path, facts: DatasetFacts, tokenizer: PreTrainedTokenizerBase
    ) -> ChatDataset:
        """Maps what `save` wrote."""
        with np.load(folder / "samples.npz") as found:
            cuts: list[Any] = np.split(found["tokens"], found["bounds"][1:-1])
        samples = tuple(list(map(int, cut)) for cut in cuts if len(cut))
        rows = [ExampleRows.load(folder / name) for name in ("train", "held_out")]
        return cls(facts, tokenizer, rows[0], rows[1], samples)


def make_chat_dataset(
    data: Examples, settings: ChatSettings, tokenizer: PreTrainedTokenizerBase
) -> ChatDataset:
    """Splits, encodes, truncates, filters and packs examples; the facts' notes describe it.

    Args:
        data: All examples.
        settings: How examples become rows.
        tokenizer: Tokenizer with a chat template.

    Raises:
        DataError: No example has a token to learn.
    """
    parts = hold_out(data.examples, settings.held_out_fraction)
    encoded = [[encode(e, tokenizer, settings.learned) for e in part] for part in parts]
    kept = [[cut for e in part if any((cut := _cut(e, settings)).learned)] for part in encoded]
    rows = [_rows(part, settings, len(tokenizer)) for part in kept]
    num_tokens = sum(len(e.ids) for part in encoded for e in part)
    if len(rows[0]) == 0:
        raise _nothing_to_learn(data, encoded[0], settings)
    sampled = parts[1] or parts[0]
    prompts = [prompt_of(example, tokenizer)[0] for example in sampled[: settings.num_samples]]
    ids: Any = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    facts = DatasetFacts(
        origin=data.origin,
        sequence_length=settings.sequence_length,
        num_train_sequences=len(rows[0]),
        num_held_out_sequences=len(rows[1]),
        num_train_tokens=len(rows[0].tokens),
        num_held_out_tokens=len(rows[1].tokens),
        num_dropped_tokens=num_tokens - len(rows[0].tokens) - len(rows[1].tokens),
        vocab_size=len(tokenizer),
        baseline=None,
        prompt=prompt_of(sampled[0], tokenizer)[0],
        notes=_notes(encoded, kept, rows[0], settings),
        fingerprint=_fingerprint(*rows),
        pad=tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0,
    )
    return ChatDataset(facts, tokenizer, rows[0], rows[1], tuple(ids))


def _fingerprint(*parts: ExampleRows) -> str:
    return checksum_of(*(array for rows in parts for array in vars(rows).values()))


def _nothing_to_learn(
    data: Examples, encoded: Sequence[Encoded], settings: ChatSettings
) -> DataError:
    """Why no training example has a token to learn: no answer, or none within a row."""
    starts = [one.learned.index(True) for one in encoded if any(one.learned)]
    many = f"{len(encoded):,} training examples"
    if starts:
        return DataError(
            f"training.max_seq_length: expected more tokens than {min(starts)}, where the first "
            f"answer of {many} begins, got {settings.sequence_length}. Raise it."
        )
    turns = [example for example in data.examples if isinstance(example, Turns)]
    roles = Counter(str(message["role"]) for one in turns for message in one.messages)
    if turns and ASSISTANT not in roles:
        got = ", ".join(f"{role} ({count:,})" for role, count in roles.most_common(5))
        return DataError(
            f"data.path: expected messages with the role 'assistant', which are what is learned, "
            f"got none in {many}; the roles are {got}. Rename the role of the answers, or set "
            "sft.assistant_only_loss=false to learn every message."
        )
    return DataError(
        f"data.path: expected answers to learn, got none in {many}: they are empty, or the chat "
        "template does not mark them. Look at the data, or set sft.chat_template_path."
    )


def hold_out(
    examples: Sequence[Example], fraction: float
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Holds out the last `fraction` of the examples, at least one unless it is 0."""
    num_held_out = min(math.ceil(len(examples) * fraction), len(examples) - 1)
    border = len(examples) - num_held_out
    return examples[:border], examples[border:]


def _cut(example: Encoded, settings: ChatSettings) -> Encoded:
    """An example cut to a row's length; its first token is never learned."""
    stop = settings.sequence_length
    return Encoded(example.ids[:stop], [False, *example.learned[1:stop]][: len(example.ids)])


def _rows(found: Sequence[Encoded], settings: ChatSettings, vocab: int) -> ExampleRows:
    lengths = [len(example.ids) for example in found]
    if settings.packing:
        members = best_fit(lengths, settings.sequence_length)
    else:
        members = [[index] for index in range(len(found))]
    return ExampleRows.of(found, members, vocab)


def _notes(
    encoded: Sequence[Sequence[Encoded]],
    kept: Sequence[Sequence[Encoded]],
    train: ExampleRows,
    settings: ChatSettings,
) -> tuple[str, ...]:
    num_examples, num_kept = (sum(map(len, parts)) for parts in (encoded, kept))
    limit = settings.sequence_length
    num_cut = sum(len(example.ids) > limit for part in encoded for example in part)
    share = train.learned.mean()
    notes = [f"{num_examples:,} examples; {share:.0%} of the training tokens are learned"]
    if num_cut:
        notes.append(f"{num_cut:,} examples are cut to {limit:,} tokens (max_seq_length)")
    if num_kept < num_examples:
        notes.append(f"{num_examples - num_kept:,} examples have nothing to learn: left out")
    if settings.packing:
        filled = len(train.tokens) / (len(train) * limit)
        notes.append(
            f"{len(kept[0]):,} examples in {len(train):,} rows, which are {filled:.0%} full"
        )
    return tuple(notes)


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs examples into rows; returns the examples of each row.

    Args:
        lengths: Tokens of each example, at most `capacity`.
        capacity: Tokens of a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for example in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[example]
        at = bisect_left(room, (length, 0))
        if at == len(room):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = room.pop(at)
        rows[row].append(example)
        if left > length:
            insort(room, (left - length, row))
    return rows


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


def cached(
    data: Examples,
    settings: ChatSettings,
    tokenizer: PreTrainedTokenizerBase,
    make: Callable[[], ChatDataset],
) -> ChatDataset:
    """The cached data set, or the result of `make`, which is then cached.

    See [Note: prepared chat data].
    """
    folder = cache_folder() / "chats" / _key(data, settings, tokenizer)
    if folder.is_dir():
        with suppress(Exception):  # whatever a damaged file makes its reader raise
            _, facts = read_facts(folder)
            found = ChatDataset.load(folder, facts, tokenizer)
            if facts.fingerprint == _fingerprint(found.train, found.held_out):
                logger.info("data: prepared before, taken from %s", folder)
                return found
        logger.warning("data: '%s' is damaged and is made again", folder)
        shutil.rmtree(folder, ignore_errors=True)
    made = make()
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    with suppress(OSError):  # the cache is optional
        try:
            made.save(aside)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return made


def _key(data: Examples, settings: ChatSettings, tokenizer: PreTrainedTokenizerBase) -> str:
    files = {str(file): identity(file) for file in data.files.files} if data.files else None
    return digest(
        [
            __version__,
            VERSION,
            repr(settings),
            words_of(tokenizer),
            repr(tokenizer.special_tokens_map),
            repr(tokenizer.chat_template),
            files or repr(data.examples),
        ]
    )
