"""Tokens of large data: made once by several processes, kept in a cache, never held as a whole.

    spans     |<----- a.txt ----->|<- b.txt ->|<- c.txt ->| ...
    shards    |<- 0 ->|<- 1 ->|<- 2 ->|<--- 3 --->| ...        each by one process, cut at lines
    cache     tokens/SETTINGS/SHARD.npy, .json                  SHARD.json: complete

[Note: prepared tokens]
The cache lies in ~/.cache/fullshard/tokens (XDG_CACHE_HOME moves it). SETTINGS is the checksum of
the tokenizer and of what else decides how text becomes tokens; SHARD that of the files' names,
sizes and times of change (which nobody can set back), and of the places where the shard begins and
ends. A start that was killed goes on with the shards that are missing, and a file that is added
costs its own shards. A run's folder has links to the files (copies, on another disk), so the cache
may be removed at any time.

Worker processes import neither torch nor transformers.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fullshard.config.environment import tokenize_on_one_thread
from fullshard.config.values import nearest
from fullshard.data.arrays import TokenFile
from fullshard.data.records import (
    Kind,
    Record,
    Span,
    identity,
    line_start,
    read_records,
    read_text,
    row_groups,
)
from fullshard.errors import DataError

logger = logging.getLogger(__name__)

SHARD_BYTES = 16 << 20
ALONE_BYTES = 8 << 20  # less is tokenized in this process, before others would have started
PIECE_CHARACTERS = 250_000  # of a text that is tokenized at a time
SAY_S = 5.0  # between lines of progress
BAR = 24  # characters

Encoder = Callable[[list[str]], Iterable[Sequence[int]]]


@dataclass(frozen=True)
class Settings:
    """How data becomes tokens.

    Attributes:
        tokenizer: The tokenizer as JSON; empty: it has no such form, and works in this process.
        end: The token that closes a document, if there is one.
        text_column: Column or key of records.
        vocab_size: Tokens are below it.
        dtype: In which they are written.
    """

    tokenizer: str
    end: tuple[int, ...]
    text_column: str
    vocab_size: int
    dtype: str


@dataclass(frozen=True)
class Shard:
    """What is tokenized at a time.

    Attributes:
        spans: Parts of files.
        tokens: Where arrays have their tokens; None: they are made.
    """

    spans: tuple[Span, ...]
    tokens: TokenFile | None = None

    @property
    def num_bytes(self) -> int:
        """About how much is read."""
        return sum(span.size for span in self.spans)

    @property
    def name(self) -> str:
        """The checksum of all that it depends on besides the settings."""
        told = [asdict(span) | {"file": str(span.file)} for span in self.spans]
        files = [identity(span.file) for span in self.spans]
        return digest([told, files, self.tokens and asdict(self.tokens)])


@dataclass(frozen=True)
class Made:
    """A shard's tokens, and their checksum."""

    tokens: TokenFile
    checksum: str


def digest(told: object) -> str:
    """The checksum of what JSON can hold."""
    return xxhash.xxh3_128_hexdigest(json.dumps(told).encode())


def shards(spans: Iterable[Span], arrays: Mapping[Path, TokenFile]) -> list[Shard]:
    """Parts of about `SHARD_BYTES`; many small files share one.

    Args:
        spans: Of one kind.
        arrays: What is known of those that are arrays.
    """
    found: list[Shard] = []
    held: list[Span] = []
    size = 0
    for part in (part for span in spans for part in _parts(span)):
        if part.kind is Kind.ARRAY:
            found.append(Shard((part,), arrays[part.file].part(part.start, part.stop)))
            continue
        held.append(part)
        size += part.size
        if size >= SHARD_BYTES:
            found.append(Shard(tuple(held)))
            held, size = [], 0
    return [*found, Shard(tuple(held))] if held else found


def _parts(span: Span) -> Iterator[Span]:
    begin = span.start
    for place in [*_cuts(span), span.stop]:
        if place > begin:
            yield span.part(begin, place)
            begin = place


def _cuts(span: Span) -> Iterable[int]:
    """Where a span may be cut for others to read on."""
    match span.kind:
        case Kind.TEXT | Kind.JSONL:
            limit = SHARD_BYTES // 2 if span.kind is Kind.TEXT else None
            places = range(span.start + SHARD_BYTES, span.stop, SHARD_BYTES)
            return (line_start(span.file, place, within=limit) for place in places)
        case Kind.PARQUET:  # a row group is decoded as a whole
            return [row for row in row_groups(span.file) if span.start < row < span.stop]
        case Kind.DATASETS | Kind.ARRAY:
            count = max(1, span.size // SHARD_BYTES)
            return np.linspace(span.start, span.stop, count + 1)[1:-1].astype(int).tolist()
        case _:
            return []


def tokenize(found: Sequence[Shard], folder: Path, how: Settings, encoder: Encoder) -> list[Made]:
    """The tokens of all shards, in their order; those that the cache has are not made again.

    Args:
        found: Shards.
        folder: The cache of these settings.
        how: Settings.
        encoder: The tokenizer, for this process.

    Raises:
        DataError: Something cannot be read; or a process was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / shard.name for shard in found]
    todo = {file: shard for file, shard in zip(files, found, strict=True) if not _is_made(file)}
    size = sum(shard.num_bytes for shard in todo.values())
    if len(todo) < len(files):
        logger.info(
            "data: %d of %d parts are prepared, in %s", len(files) - len(todo), len(files), folder
        )
    progress = Progress(size)
    if size < ALONE_BYTES or not how.tokenizer:
        for file, shard in todo.items():
            make(file, shard, how, encoder)
            progress.add(shard.num_bytes)
    else:
        _in_processes(todo, how, progress)
    return [_read(file) for file in files]


def _in_processes(todo: dict[Path, Shard], how: Settings, progress: Progress) -> None:
    count = min(len(os.sched_getaffinity(0)), len(todo))
    spawn = multiprocessing.get_context("spawn")  # threads of this process would not survive a fork
    with ProcessPoolExecutor(count, spawn, _begin, (how, os.getpid())) as pool:
        try:
            futures = {pool.submit(_work, *one): one[1].num_bytes for one in todo.items()}
            for future in as_completed(futures):
                future.result()
                progress.add(futures[future])
        except BrokenProcessPool as error:
            raise DataError(
                f"data: expected {count} processes to tokenize, got one that ended without a word. "
                "Memory may have run out: look at the kernel's log. The same command goes on with "
                "what is missing."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_WORKER: tuple[Settings, Encoder] | None = None  # of a process that does nothing else


def _begin(how: Settings, parent: int) -> None:
    global _WORKER
    from fullshard.launch.rank_entry import die_with_parent

    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too
    tokenize_on_one_thread()
    _WORKER = how, fast_encoder(how.tokenizer)


def _work(file: Path, shard: Shard) -> None:
    assert _WORKER is not None, "_begin has set it"
    make(file, shard, *_WORKER)


def fast_encoder(tokenizer: str) -> Encoder:
    """A tokenizer of the tokenizers library, from its JSON."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer)
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: list[str]) -> Iterator[Sequence[int]]:
        found = backend.encode_batch_fast(texts, add_special_tokens=False)
        return (one.ids for one in found)

    return encode


def make(file: Path, shard: Shard, how: Settings, encoder: Encoder) -> None:
    """Makes what one shard leaves in the cache: FILE.npy and FILE.json."""
    if shard.tokens is not None:
        tokens, array = shard.tokens, shard.tokens.mapped()
    else:
        parts = [np.asarray(ids, how.dtype) for ids in encode(encoder, pieces(shard, how), how.end)]
        array = np.concatenate(parts) if parts else np.empty(0, how.dtype)
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            with aside.open("wb") as opened:
                np.save(opened, array)
                offset = opened.tell() - array.nbytes
            aside.replace(file.with_suffix(".npy"))
        finally:
            aside.unlink(missing_ok=True)
        tokens = TokenFile(f"{file}.npy", how.dtype, offset, len(array))
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < how.vocab_size:
        place = int(np.flatnonzero((array < 0) | (array >= how.vocab_size))[0])
        raise DataError(
            f"data.path: expected token ids below {how.vocab_size:,}, the tokenizer's entries, got "
            f"{array[place]} in '{shard.spans[0].file}'. Name the tokenizer that made the tokens, "
            "or set data.dtype if they were read in another dtype."
        )
    checksum = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).data)
    aside = file.with_name(f".{file.name}.{os.getpid()}.json")
    aside.write_text(json.dumps({"tokens": asdict(tokens), "checksum": checksum}))
    aside.replace(f"{file}.json")


def _is_made(file: Path) -> bool:
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Path(_read(file).tokens.file).is_file()
    return False


def _read(file: Path) -> Made:
    found: dict[str, Any] = json.loads(Path(f"{file}.json").read_text())
    return Made(TokenFile(**found["tokens"]), found["checksum"])


# ---- from text to tokens -------------------------------------------------------------------------


def pieces(shard: Shard, how: Settings) -> Iterator[str | None]:
    """The documents of a shard in pieces; None after the last piece of each document.

    Raises:
        DataError: A record has no such text; names its place.
    """
    for span in shard.spans:
        if span.kind is Kind.TEXT:
            text = ""
            for text in read_text(span):
                yield text
            if text and span.stop == span.file.stat().st_size:
                yield None
            continue
        for record in read_records(span, [how.text_column]):
            if text := _text_of(record, how.text_column):
                yield from cut(text)
                yield None


def cut(document: str) -> Iterator[str]:
    """A document in parts that end with a line where they can."""
    begin = 0
    while len(document) - begin > PIECE_CHARACTERS:
        limit = begin + PIECE_CHARACTERS
        place = document.rfind("\n", begin, limit) + 1 or limit
        yield document[begin:place]
        begin = place
    yield document[begin:]


def encode(
    encoder: Encoder, texts: Iterable[str | None], end: Sequence[int]
) -> Iterator[Sequence[int]]:
    """Token ids piece by piece, and `end` where a document ends (None among the pieces).

    About `PIECE_CHARACTERS` are encoded at a time, so that a large corpus is never held as Python
    integers.
    """
    for batch in _batched(texts):
        found = [text for text in batch if text is not None]
        ids = iter(encoder(found) if found else ())
        yield from (end if text is None else next(ids) for text in batch)


def _batched(texts: Iterable[str | None]) -> Iterator[list[str | None]]:
    batch: list[str | None] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text or "")
        if size >= PIECE_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _text_of(found: Record, text_column: str) -> str:
    record = found.value
    if not isinstance(record, dict):
        raise DataError(
            f"data.path: expected a JSON object, got {type(record).__name__} at {found.place}. "
            f'Write {{"{text_column}": "..."}}.'
        )
    if text_column not in record:
        raise DataError(missing_column(text_column, list(record), found.place))
    value = record[text_column]
    if not isinstance(value, str):
        raise DataError(
            f"data.text_column: expected text in column '{text_column}', "
            f"got {type(value).__name__} at {found.place}. Name a column that holds text."
        )
    return value


def missing_column(text_column: str, present: list[str], place: str) -> str:
    """What a DataError says of a column that is not there."""
    guess = nearest(text_column, present)
    hint = f"Did you mean '{guess}'?" if guess else "Name one of them with data.text_column."
    columns = ", ".join(f"'{name}'" for name in present) or "none"
    return f"data.text_column: expected a column '{text_column}', got {columns} at {place}. {hint}"


class Progress:
    """Says how far the data is, every few seconds.

    Args:
        size: Bytes to be read.
    """

    def __init__(self, size: int) -> None:
        self._size, self._done = size, 0
        self._began = self._said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """So many more were read."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._said < SAY_S and not (self._done >= self._size and self._said > self._began):
            return
        self._said = now
        share, speed = self._done / self._size, self._done / (now - self._began)
        bar = "#" * int(share * BAR)
        logger.info(
            "data: [%s] %.0f %% of %s MiB, %.1f MiB/s, %.0f s left",
            bar.ljust(BAR, "."),
            100 * share,
            f"{self._size / 2**20:,.0f}",
            speed / 2**20,
            (self._size - self._done) / speed,
        )
