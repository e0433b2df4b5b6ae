"""The tokenizer of a run: trained on its data, or loaded from a folder."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fullshard.config.schema import ModelConfig
from fullshard.data.tokenize import Encoder, cut, digest, fast_encoder
from fullshard.engine.hugging_face import read_tokenizer
from fullshard.errors import ConfigError, untrusted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = npt.NDArray[np.integer]

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
LONG_WORD = re.compile(r"\S{256}|\s{256}")
# Characters that normalizers and pre-tokenizers treat specially.
UNUSUAL = (
    "I don't, WE'LL.  Two   blanks\u00a0one\r\nline\rline\n\n\tthe 1234567 3.14 "
    "e\u0301\u00e9 \ufb01 \uff21 \u2018a\u2019 \u201cb\u201d \u2013\u2014\u2026 "
    "\u00df\u1e9e\u0130\u0131 "
    "\u6f22\u5b57\u304b\u3099 \u0e44\u0e17\u0e22 \u0645\u0631 \u200b\u200d\ufeff\x7f\x85\u2028 "
    "\U0001f468\u200d\U0001f469 hello world the quick brown fox"
)
SMALLEST_VOCABULARY = NUM_BYTES + 1  # every byte, and the end of a text


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE tokenizer.

    Every byte is a token, so that any text can be encoded and decoded unchanged. The other tokens
    are merged from the documents. One special token, `<|endoftext|>` (id 0), ends a document and
    begins a sample.

    Args:
        documents: Training text, without the held-out part.
        vocab_size: Largest number of entries, at least 257. A short text may give fewer.

    Raises:
        ConfigError: `vocab_size` is too small for the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"model.config.vocab_size: expected at least {SMALLEST_VOCABULARY} (256 bytes and one "
            f"special token) for a tokenizer trained on the data, got {vocab_size}."
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _without_long_words(documents: Iterable[str]) -> Iterator[str]:
    """Cuts very long words, because training time is quadratic in a word's length."""
    for document in documents:
        begin = 0
        for run in LONG_WORD.finditer(document):
            yield document[begin : run.end()]
            begin = run.end()
        yield document[begin:]


def load_tokenizer(
    model: ModelConfig, key: str = "model.name_or_path", folder: Path | None = None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a local folder; None if it has none.

    Args:
        model: Model section, with the folder and whether the folder's code may run.
        key: Configuration key of the folder, for errors.
        folder: Folder to read in place of the model's.

    Raises:
        ConfigError: The folder has tokenizer files that cannot be loaded.
    """
    folder = folder or Path(model.name_or_path or "")
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        return None
    return read_tokenizer(folder, key, trust=model.trust_remote_code)


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """A function that encodes texts."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        origin, expected = f"tokenizer '{tokenizer.name_or_path}'", "one that can be read again"
        with untrusted(origin, expected, ConfigError, "Correct its tokenizer.json."):
            return fast_encoder(backend.to_str())

    def encode(texts: list[str]) -> Any:
        # verbose=False: a text longer than model_max_length is expected here, it gets packed.
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    return encode


def words_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text that is equal for tokenizers that make the same tokens."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return backend.to_str()
    return repr(sorted(tokenizer.get_vocab().items())) + settings_of(tokenizer)


def effect_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Checksum of a vocabulary and of the tokens of its own words.

    `words_of` may differ after an update of the tokenizers library, although no token does.
    """
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    probe = "\n".join([string.printable, UNUSUAL, *(word for word, _ in words)])
    try:
        made: Any = [list(ids) for ids in encoder_of(tokenizer)([*cut(probe)])]
    except Exception as error:  # noqa: BLE001  tokenizers raises it for words it does not have
        made = str(error)
    return digest([words, made])


def settings_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Other settings that change the tokens of a call, such as `do_lower_case`, `add_bos_token`."""
    told = {k: v for k, v in tokenizer.init_kwargs.items() if not re.search("file|path|local", k)}
    told |= {"special": tokenizer.special_tokens_map, "split": tokenizer.split_special_tokens}
    return json.dumps(told, default=repr, sort_keys=True)


def numbers_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer that shows tokens as numbers, "17 4 230", for data without a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned dtype for every token id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
