"""The tokenizer of a run: one trained on the spot, or the one that a model folder holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from fullshard.config.schema import ModelConfig
from fullshard.engine.hugging_face import read_tokenizer
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.unsignedinteger]

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
DOCUMENTS_AT_ONCE = 256
PIECE_CHARACTERS = 1_000_000
LONG_WORD = re.compile(r"\S{256}|\s{256}")
SMALLEST_VOCABULARY = NUM_BYTES + 1  # every byte, and the end of a text


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer.

    Every byte is a token of its own, so that any text can be encoded and comes back unchanged;
    the rest of the vocabulary is merged from the documents. One special token, `<|endoftext|>`
    (id 0), ends a document and begins a sample.

    Args:
        documents: The training text, without the held-out part.
        vocab_size: Most entries, at least 257. A short text may give fewer.

    Raises:
        ConfigError: `vocab_size` leaves no room for the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"model.config.vocab_size: expected at least {SMALLEST_VOCABULARY} (256 bytes and one "
            f"special token) for a tokenizer trained on the data, got {vocab_size}. Raise it."
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_long_words(documents), trainer)
    return _wrapped(tokenizer)


def _without_long_words(documents: Iterable[str]) -> Iterator[str]:
    """The documents, cut within very long words: training takes the square of a word's length."""
    for document in documents:
        begin = 0
        for run in LONG_WORD.finditer(document):
            yield document[begin : run.end()]
            begin = run.end()
        yield document[begin:]


def _wrapped(tokenizer: object) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(
    model: ModelConfig, key: str = "model.name_or_path", folder: Path | None = None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a local folder, or None where it has none.

    Args:
        model: Names the folder, and says whether its own code may run.
        key: Names the folder, for errors.
        folder: Another folder than the model's.

    Raises:
        ConfigError: The folder has tokenizer files that cannot be loaded.
    """
    folder = folder or Path(model.name_or_path or "")
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        return None
    return read_tokenizer(folder, key, trust=model.trust_remote_code)


def encode(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> Iterator[list[int]]:
    """Token ids of all documents in order, each closed by the end-of-text token if there is one.

    They come in pieces, so that a large corpus is never held as Python integers; documents longer
    than a piece are cut at line ends.
    """
    end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    for first in range(0, len(documents), DOCUMENTS_AT_ONCE):
        pieces = [
            piece
            for document in documents[first : first + DOCUMENTS_AT_ONCE]
            for piece in _pieces(document)
        ]
        # verbose=False: a text longer than model_max_length is expected here, it gets packed.
        texts = [text for text, _ in pieces]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for (_, is_last), ids in zip(pieces, cast("list[list[int]]", encoded), strict=True):
            yield [*ids, *end] if is_last else ids


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned dtype that holds every token id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def join(encoded: Iterable[list[int]], vocab_size: int) -> Tokens:
    """One stream of token ids, shape (num_tokens,)."""
    dtype = token_dtype(vocab_size)
    parts = [np.asarray(ids, dtype=dtype) for ids in encoded]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def _pieces(document: str) -> Iterator[tuple[str, bool]]:
    """A document in parts that end with a line where they can, and whether each is its last."""
    begin = 0
    while len(document) - begin > PIECE_CHARACTERS:
        limit = begin + PIECE_CHARACTERS
        cut = document.rfind("\n", begin, limit) + 1 or limit
        yield document[begin:cut], False
        begin = cut
    yield document[begin:], True
