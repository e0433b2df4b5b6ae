"""From documents to training sequences: hold out, join, cut.

documents   [ topic 1 ][ topic 2 ] ... [ topic n-1 ][ topic n ]
held out                                  |<- the end: `fraction` of the characters
stream      tok tok <eot> tok tok tok <eot> tok ...
sequences   |<-- length -->|<-- length -->| ... | rest: dropped, and said
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullshard.data.text import Corpus
from fullshard.errors import DataError

Tokens = npt.NDArray[np.unsignedinteger]


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


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned dtype that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def join(encoded: Iterable[list[int]], vocab_size: int) -> Tokens:
    """One stream of token ids, shape (num_tokens,)."""
    dtype = token_dtype(vocab_size)
    parts = [np.asarray(ids, dtype=dtype) for ids in encoded]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


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
