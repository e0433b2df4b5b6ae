"""Chat data that was prepared before: encoded once for any number of runs.

~/.cache/fullshard/chats/KEY/     what ChatDataset.save writes; XDG_CACHE_HOME moves it

KEY is the checksum of all that the result depends on: the files' bytes, the tokenizer, the
template, the settings and our version. Nothing waits for it: it is read and written before the
ranks start, and a folder appears by one rename.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from fullshard import __version__
from fullshard.config.environment import cache_folder
from fullshard.data.chat import Examples
from fullshard.data.chat_rows import ChatDataset, ChatSettings
from fullshard.data.dataset import read_facts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PIECE = 1 << 20


def cached(
    data: Examples,
    settings: ChatSettings,
    tokenizer: PreTrainedTokenizerBase,
    make: Callable[[], ChatDataset],
) -> ChatDataset:
    """What was prepared before, or `make`'s result, which is kept where the disk lets us."""
    folder = cache_folder() / "chats" / _key(data, settings, tokenizer)
    if folder.is_dir():
        logger.info("data: prepared before, taken from %s", folder)
        _, facts = read_facts(folder)
        return ChatDataset.load(folder, facts, tokenizer)
    made = make()
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    with suppress(OSError):  # a cache that cannot be written is none
        try:
            made.save(aside)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return made


def _key(data: Examples, settings: ChatSettings, tokenizer: PreTrainedTokenizerBase) -> str:
    checksum = xxhash.xxh3_128()
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    special = repr(tokenizer.special_tokens_map)
    for text in (__version__, repr(settings), words, special, repr(tokenizer.chat_template)):
        checksum.update(f"{len(text)}:{text}".encode())
    if data.files is None:
        checksum.update(repr(data.examples).encode())
    for piece in _bytes(data):
        checksum.update(piece)
    return checksum.hexdigest()


def _bytes(data: Examples) -> Iterator[bytes]:
    """Names and contents of all files."""
    for path in data.files.files if data.files else ():
        inside: list[Path] = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in filter(Path.is_file, inside):
            yield f"{file}:{file.stat().st_size}:".encode()
            with file.open("rb") as opened:
                while piece := opened.read(PIECE):
                    yield piece
