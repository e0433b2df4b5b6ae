"""Tokenization of large data into a cache, shard by shard; and the tokenizer of a run.

    spans     |<----- a.txt ----->|<- b.txt ->|<- c.txt ->| ...
    shards    |<- 0 ->|<- 1 ->|<- 2 ->|<--- 3 --->| ...        cut at lines
    pieces    ---- ---- ---- ...                                one per core at a time
    cache     tokens/SETTINGS/SHARD.npy, .json                  .json marks it complete

[Note: prepared tokens]
The cache is in ~/.cache/fullshard/tokens (XDG_CACHE_HOME moves it). SETTINGS is the checksum of the
tokenizer and all other settings that affect the tokens. SHARD is the checksum of the files' names,
sizes and times of change (which cannot be set back), and of the shard's start and end. A run that
was killed during preparation continues with the missing shards, and a new file costs only its own
shards. A run's folder has links to the files (copies, on another disk), so the cache may be removed
at any time. A part is used if its tokens have the checksum in its .json; one that was damaged is
made again.

The tokenizers library encodes a batch of texts on all cores. Conversations need Python for each of
them, so their shards are shared out to a process per core.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from fullshard.config.regular_files import read_regular
from fullshard.config.schema import ModelConfig
from fullshard.data.arrays import Rows, TokenFile, checksum_of, map_tokens, tokens_in
from fullshard.data.order import ENDLESS, permuted
from fullshard.data.records import (
    FileKind,
    Span,
    identity,
    line_start,
    no_column,
    read_records,
    read_text,
    row_groups,
    text_of,
)
from fullshard.data.worker import on_all_cores
from fullshard.engine.hugging_face import read_tokenizer
from fullshard.errors import ConfigError, DataError, untrusted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SHARD_BYTES = 16 << 20
PIECE_CHARACTERS = 250_000  # text to tokenize at a time on a core
LEFT_S = 86_400.0  # age of a file that a kill left
SAY_S = 5.0  # seconds between lines of progress
BAR = 24  # characters

Encoder = Callable[[list[str]], Iterable[Sequence[int]]]
Reader = Callable[["Shard"], Iterable[Any]]  # arrays or lists of tokens, one after another


@dataclass(frozen=True)
class TokenSettings:
    """How data becomes tokens.

    Attributes:
        start: Tokens with which the tokenizer begins every text, as that of Llama does.
        end: The token that ends a document, if there is one.
        text_column: Column or key of the text in records.
        vocab_size: Number of tokens; ids are below it.
        dtype: Dtype of the written tokens.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    text_column: str
    vocab_size: int
    dtype: str


@dataclass(frozen=True)
class Shard:
    """A part of the data that is tokenized and cached together.

    Attributes:
        spans: Parts of files.
        name: Checksum of everything that its tokens depend on, besides the settings.
        tokens: Existing tokens of an array; None: the tokens are made from text.
    """

    spans: tuple[Span, ...]
    name: str
    tokens: TokenFile | None = None

    @classmethod
    def of(cls, spans: tuple[Span, ...], tokens: TokenFile | None = None) -> Shard:
        """The part of the files as they are now; those that change have another name."""
        entries = [asdict(span) | {"file": str(span.file)} for span in spans]
        files = [identity(span.file) for span in spans]
        return cls(spans, digest([entries, files, tokens and asdict(tokens)]), tokens)

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes to read."""
        return sum(span.size for span in self.spans)


def digest(value: object) -> str:
    """Checksum of a JSON value."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value).encode())


def shards(spans: Iterable[Span], dtype: str | None = None) -> list[Shard]:
    """Parts of about `SHARD_BYTES`; many small files share one.

    Args:
        spans: Parts of files, all of one kind.
        dtype: data.dtype, for arrays.
    """
    found: list[Shard] = []
    held: list[Span] = []
    size = 0
    for span in spans:
        array = tokens_in(span.file, dtype) if span.kind is FileKind.ARRAY else None
        for part in _parts(span):
            if array is not None:
                found.append(Shard.of((part,), array.part(part.start, part.stop)))
                continue
            held.append(part)
            size += part.size
            if size >= SHARD_BYTES // 2:  # parts are cut at lines, so most are a little smaller
                found.append(Shard.of(tuple(held)))
                held, size = [], 0
    return [*found, Shard.of(tuple(held))] if held else found


def _parts(span: Span) -> Iterator[Span]:
    cuts = {cut for cut in _cuts(span) if cut > span.start}
    return (span.part(*ends) for ends in pairwise(sorted({span.start, span.stop, *cuts})))


def _cuts(span: Span) -> Iterable[int]:
    """Places at which a span may be divided into shards."""
    match span.kind:
        case FileKind.TEXT | FileKind.JSONL:
            limit = SHARD_BYTES // 2 if span.kind is FileKind.TEXT else None
            places = range(span.start + SHARD_BYTES, span.stop, SHARD_BYTES)
            return (line_start(span.file, place, within=limit) for place in places)
        case FileKind.PARQUET:  # only full row groups can be decoded
            return [row for row in row_groups(span.file) if span.start < row < span.stop]
        case FileKind.DATASETS | FileKind.ARRAY:
            count = max(1, span.size // SHARD_BYTES)
            return np.linspace(span.start, span.stop, count + 1)[1:-1].astype(int).tolist()
        case _:
            return []


def tokenize(
    found: Sequence[Shard],
    folder: Path,
    how: TokenSettings,
    read: Reader,
    num_processes: int | None = 1,
) -> list[TokenFile]:
    """Tokens of all shards in order; shards in the cache are not tokenized again.

    Args:
        found: All shards.
        folder: Cache folder of these settings.
        how: How data becomes tokens.
        read: Makes the tokens of a shard.
        num_processes: Processes that share the shards; None: one per core.

    Raises:
        DataError: Something cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in (*folder.glob(".*.*"), *folder.parent.glob(".*.*")):  # not .lock
        with suppress(OSError):  # a kill left it; the processes of other hosts are not known
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    made = dict[Path, TokenFile]()
    todo = list[tuple[Path, Shard]]()
    progress = Progress("checked", sum(shard.num_bytes for shard in found))
    for shard in found:
        file = folder / shard.name
        if (tokens := _kept(file)) is not None:
            made[file] = tokens
        else:
            todo.append((file, shard))
        progress.add(shard.num_bytes)
    if made:
        logger.info("data: prepared %d of %d parts, in %s", len(made), len(found), folder)
    progress = Progress("tokenized", sum(shard.num_bytes for _, shard in todo))
    for (file, shard), tokens in on_all_cores(partial(ensure, how, read), todo, num_processes):
        made[file] = tokens
        progress.add(shard.num_bytes)
    return [made[folder / shard.name] for shard in found]


def ensure(how: TokenSettings, read: Reader, part: tuple[Path, Shard]) -> TokenFile:
    """The tokens of a shard, from the cache or made now; other processes wait meanwhile."""
    file, shard = part
    file.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        # Without it, processes only repeat each other's work: a file appears when it is whole.
        with suppress(OSError):  # another user's, or a file system without locks
            lock = held.enter_context((file.parent / ".lock").open("a"))
            # A byte per shard; lockf would not keep the threads of a process apart.
            request = struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, int(file.name[:15], 16), 1, 0)
            fcntl.fcntl(lock, fcntl.F_OFD_SETLKW, request)
        tokens = _kept(file) or make(file, shard, how, read)
    if shard.tokens is not None:  # which may be part of a stream, of files from a while ago
        _check_same(shard)
    return tokens


def _check_same(shard: Shard) -> None:
    """Raises DataError if the files of a shard have changed since it was found."""
    if Shard.of(shard.spans, shard.tokens).name != shard.name:
        raise DataError(
            f"data.path: expected files that do not change, got '{shard.spans[0].file}' or one "
            "after it that changed after the run read it. Start again when it is complete."
        )


_BROKEN = "Correct its tokenizer.json, or tokenizer_class in tokenizer_config.json."


def fast_encoder(tokenizer: str) -> Encoder:
    """The encoder of a tokenizer of the tokenizers library, from its JSON."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer)
    backend.no_truncation()
    backend.no_padding()

    def encode(texts: list[str]) -> Iterator[Sequence[int]]:
        with untrusted("data.tokenizer", "one that encodes every text", ConfigError, _BROKEN):
            found = backend.encode_batch_fast(texts, add_special_tokens=False)
        return (one.ids for one in found)

    return encode


def make(file: Path, shard: Shard, how: TokenSettings, read: Reader) -> TokenFile:
    """Tokenizes one shard into the cache: FILE.npy and FILE.json."""
    if shard.tokens is not None:
        tokens, array = shard.tokens, shard.tokens.mapped()
    else:
        parts = [np.asarray(ids, how.dtype) for ids in read(shard)]
        array = np.concatenate(parts) if parts else np.empty(0, how.dtype)
        _check_same(shard)
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
        (span, *_), at = shard.spans, ""
        if shard.tokens is not None:
            at = f" at token {span.start + place:,} (from 0)"
        raise DataError(
            f"data.path: expected token ids below {how.vocab_size:,}, the tokenizer's entries, got "
            f"{array[place]} in '{span.file}'{at}. Set the tokenizer that produced the tokens, or "
            "set data.dtype if they were read in another dtype."
        )
    tokens = replace(tokens, checksum=checksum_of(array))
    aside = file.with_name(f".{file.name}.{os.getpid()}.json")
    aside.write_text(json.dumps(asdict(tokens)))
    aside.replace(f"{file}.json")
    return tokens


def _kept(file: Path) -> TokenFile | None:
    """A part of the cache if it is as it was made; an existing array is not read as a whole."""
    with suppress(DataError, OSError, ValueError, TypeError, RecursionError):
        tokens = TokenFile(**json.loads(read_regular(f"{file}.json")))
        array = map_tokens(tokens)
        if tokens.file != f"{file}.npy" or checksum_of(array) == tokens.checksum:
            return tokens
    return None


# ---- from text to tokens -------------------------------------------------------------------------


def pieces(shard: Shard, text_column: str) -> Iterator[str | bool]:
    """The documents of a shard in pieces; True where a document begins, False where it ends.

    Raises:
        DataError: A record has no text; names its place.
    """
    for span in shard.spans:
        if span.kind is FileKind.TEXT:
            text, begins = "", not span.start
            for text in read_text(span):
                yield from (True, text) if begins else (text,)
                begins = False
            if text and span.stop == span.file.stat().st_size:
                yield False
            continue
        for record in read_records(span, [text_column]):
            if text_column not in record.value:
                raise no_column(text_column, list(record.value), record)
            if text := text_of(record, text_column, "data.text_column"):
                yield from (True, *cut(text), False)


def cut(document: str) -> Iterator[str]:
    """A document in parts that end with a line if possible."""
    begin = 0
    while len(document) - begin > PIECE_CHARACTERS:
        limit = begin + PIECE_CHARACTERS
        place = document.rfind("\n", begin, limit) + 1 or limit
        yield document[begin:place]
        begin = place
    yield document[begin:]


def text_tokens(encoder: Encoder, how: TokenSettings, shard: Shard) -> Iterator[Sequence[int]]:
    """The tokens of a shard of text, piece by piece."""
    return encode(encoder, pieces(shard, how.text_column), {True: how.start, False: how.end})


def encode(
    encoder: Encoder, texts: Iterable[str | bool], edges: Mapping[bool, Sequence[int]]
) -> Iterator[Sequence[int]]:
    """Token ids piece by piece, with those of the edges of documents (True: begins, False: ends).

    About `PIECE_CHARACTERS` a core are encoded at a time, so that a large corpus never becomes
    Python integers as a whole.
    """
    for batch in _batched(texts):
        found = [text for text in batch if isinstance(text, str)]
        ids = iter(encoder(found) if found else ())
        yield from (next(ids) if isinstance(text, str) else edges[text] for text in batch)


def _batched(texts: Iterable[str | bool]) -> Iterator[list[str | bool]]:
    batch: list[str | bool] = []
    size, most = 0, PIECE_CHARACTERS * len(os.sched_getaffinity(0))
    for text in texts:
        batch.append(text)
        size += len(text) if isinstance(text, str) else 0
        if size >= most:
            yield batch
            batch, size = [], 0
    yield batch


class Progress:
    """Logs progress every few seconds.

    Args:
        what: Participle in the log line, such as `tokenized`.
        size: Bytes to read.
    """

    def __init__(self, what: str, size: int) -> None:
        self._what, self._size, self._done = what, size, 0
        self._began = self._said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Adds bytes that were read."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._said < SAY_S and not (self._done >= self._size and self._said > self._began):
            return
        self._said = now
        share, speed = self._done / self._size, self._done / (now - self._began)
        bar, left_s = "#" * int(share * BAR), (self._size - self._done) / speed
        text = f"{self._what} [{bar:.<{BAR}}] {100 * share:.0f} % of {self._size / 2**20:,.0f} MiB"
        logger.info("data: %s, %.1f MiB/s, %.0f s left", text, speed / 2**20, left_s)


# ---- while ranks train ---------------------------------------------------------------------------
#
# [Note: streamed parts]
# `data.streaming`: endless sources of rows, whose text is tokenized when it is needed.
#
#     pass 0     part 3 | part 0 | part 4 | part 1 | part 2 |    the parts in an order of their own
#     pass 1     part 1 | part 4 | ...
#     tokens     <-- row 0 --><-- row 1 --><-- row 2 --> ...     cut across parts and passes
#     buffer     |<- shuffled ->|<- shuffled ->|<- ...           `SampleOrder.block` rows at a time
#
# A row depends only on its number: its place is the sum of the tokens before it, which the cache
# knows of every part. So order and position are exact for any number of ranks and after a resume,
# and a resume reads the counts of earlier parts but tokenizes none of them again.
#
# Whoever needs a part first makes it, under the lock of the cache (see `ensure`); the other ranks
# of the machine wait for it and then map the same file.

AHEAD = 3  # parts that are tokenized before they are needed

_encoder = lru_cache(fast_encoder)


@dataclass(frozen=True)
class Parts:
    """The parts of one source, and how they become tokens.

    Attributes:
        shards: The parts.
        key: Name of the cache folder of these settings.
        how: How data becomes tokens.
    """

    shards: tuple[Shard, ...]
    key: str
    how: TokenSettings


@dataclass(frozen=True)
class Sources:
    """The sources of a stream, as the run's folder has them.

    Attributes:
        parts: Parts of each source.
        seed: Seed of the order of parts.
    """

    parts: tuple[Parts, ...]
    seed: int


class Stream(Rows):
    """Rows of endless sources, numbered from `ENDLESS` times the number of the source.

    Args:
        found: Parts of each source.
        length: Tokens per row.
        root: Cache of this machine.
        tokenizer: The tokenizer as JSON.
        ahead: Parts to tokenize before they are needed.
    """

    def __init__(
        self, found: Sources, length: int, root: Path, tokenizer: str, ahead: int = 0
    ) -> None:
        super().__init__([[] for _ in found.parts], length)
        self.found, self.ahead = found, ahead
        self.sizes = [ENDLESS] * len(found.parts)
        self._first = np.arange(len(found.parts)) * ENDLESS
        self._how = (root, tokenizer)
        self._started: dict[tuple[int, int], Future[TokenFile]] = {}

    def __reduce__(self) -> Any:
        """For the worker, which tokenizes ahead."""
        return Stream, (self.found, self.length, *self._how, AHEAD)

    @property
    def num_dropped(self) -> int:
        return 0

    def num_rows(self, source: int) -> int:
        """About how many rows a pass over a source has, from the tokens of its first parts."""
        shards, count, size = self.found.parts[source].shards, 0, 0
        for number in range(len(shards)):
            count += self.tokens(source, number).count
            size += shards[self._index(source, number)].num_bytes
            if count >= self.length:
                break
        return count * sum(shard.num_bytes for shard in shards) // max(1, size) // self.length

    def tokens(self, source: int, number: int) -> TokenFile:
        """The tokens of a part, counted over all passes; waits until they are there."""
        for one in range(number, number + self.ahead + 1):
            if (source, one) not in self._started:
                made = self._thread.submit(self._made, source, self._index(source, one))
                self._started[source, one] = made
        return self._started[source, number].result()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "fullshard tokens")

    def _made(self, source: int, index: int) -> TokenFile:
        (root, tokenizer), parts = self._how, self.found.parts[source]
        shard, read = parts.shards[index], partial(text_tokens, _encoder(tokenizer), parts.how)
        return ensure(parts.how, read, (root / parts.key / shard.name, shard))

    def _index(self, source: int, number: int) -> int:
        count = len(self.found.parts[source].shards)
        turn, place = divmod(number, count)
        return int(permuted(np.array([place]), count, (self.found.seed, turn, source, 1))[0])

    def _reach(self, source: int, stop: int) -> None:
        bounds = self._bounds[source]
        while bounds[-1] < stop:
            self.sources[source].append(tokens := self.tokens(source, len(self.sources[source])))
            bounds.append(bounds[-1] + tokens.count)


# ---- the tokenizer of a run ----------------------------------------------------------------------

Tokens = npt.NDArray[np.integer]

END_OF_TEXT = "<|endoftext|>"
NUM_BYTES = 256
LONG_WORD = re.compile(r"\S{256}|\s{256}")
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
            f"special token) for a tokenizer trained on the data, got {vocab_size}. Raise "
            "it, and data.vocab_size if set."
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


def settings_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Other settings that change the tokens of a call, such as `do_lower_case`, `add_bos_token`."""
    given = tokenizer.init_kwargs.items()
    settings = {key: value for key, value in given if not re.search("file|path|local", key)}
    settings |= {"special": tokenizer.special_tokens_map, "split": tokenizer.split_special_tokens}
    return json.dumps(settings, default=repr, sort_keys=True)


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
