"""Packed sequences of text: found, split, tokenized once, and mapped by every rank.

    embedded text            one document per topic of the language reference
    text file, folder of     one document per file
    JSONL, parquet, datasets one document per record, taken from one column
    arrays of tokens         no documents: the files are mapped in place

source      [ file 1 ][ file 2 ] ... [ file n ]     in the order of their names
held out                             |<- the end: `fraction` of its bytes, records or tokens
stream      tok tok <eot> tok tok tok <eot> tok ...
sequences   |<-- length -->|<-- length -->| ... | rest: dropped, and reported

data/tokens.json     token files of every source, for training and evaluation
data/tokens/         links to prepared files; see [Note: prepared tokens] in data/tokenize.py

Everything is read and checked before any rank trains, so an error in the data is reported once.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import TypeAdapter

from fullshard.config.environment import cache_folder
from fullshard.config.schema import DataConfig, SftConfig
from fullshard.data.arrays import Rows, TokenFile, identity_of
from fullshard.data.dataset import (
    IGNORED,
    Baseline,
    DatasetFacts,
    PreparedData,
    interpolated_bigram,
)
from fullshard.data.order import ENDLESS, Indices, apportioned
from fullshard.data.records import Corpus, FileKind, files_at, split, under
from fullshard.data.tokenize import (
    SHARD_BYTES,
    Parts,
    Progress,
    Shard,
    Sources,
    Stream,
    TokenSettings,
    digest,
    encoder_of,
    numbers_tokenizer,
    pieces,
    shards,
    text_tokens,
    token_dtype,
    tokenize,
    train_tokenizer,
    words_of,
)
from fullshard.engine.hugging_face import num_ids, read_tokenizer, start_of
from fullshard.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

VERSION = 1  # changes when the same data gives other tokens or another order
PROMPT_ROWS, PROMPT_TOKENS, PROMPT_CHARACTERS = 64, 32, 60
TRAINING_BYTES = 256 << 20  # most text that a tokenizer is trained on
SMALL_BUFFER = 4096  # sequences of a mixture that are shuffled together even if it has fewer
EMBEDDED = "the language reference in pydoc_data (ships with Python)"


@dataclass(frozen=True)
class DatasetSettings:
    """How text becomes sequences, and conversations rows.

    Attributes:
        sequence_length: Tokens per sequence; longer conversations are truncated at the end.
        vocab_size: Largest vocabulary of a tokenizer that is trained on the text.
        data: Section of the configuration.
        seed: Seed of a stream's order of parts.
        sft: Which tokens are learned, whether a row has several examples, and how many held-out
            prompts are answered at evaluations.
    """

    sequence_length: int
    vocab_size: int
    data: DataConfig
    seed: int = 0
    sft: SftConfig = field(default_factory=SftConfig)


Texts = Callable[[Shard, str], Iterable[str | bool]]
SavedTokens = list[list[TokenFile]] | Sources
_SAVED_TOKENS = TypeAdapter(dict[str, SavedTokens])


@dataclass(frozen=True)
class Dataset(PreparedData):
    """Packed sequences of one length."""

    kind: ClassVar = "text"
    train: Rows
    held_out: Rows

    @property
    def labels_per_row(self) -> int | None:
        """A sequence predicts all its tokens but the first of each document."""
        return self.train.length - 1 if self.facts.separator is None else None

    @property
    def lengths(self) -> Indices:
        """Tokens of each training row."""
        return np.full(len(self.train), self.train.length, dtype=np.int64)

    def arrays(self, chosen: Indices, *, held_out: bool) -> dict[str, Any]:
        """Input ids and labels of some rows."""
        ids = (self.held_out if held_out else self.train).take(np.maximum(chosen, 0))
        arrays = {"input_ids": ids, "labels": np.where(chosen[:, None] < 0, IGNORED, ids)}
        if (end := self.facts.separator) is None:
            return arrays
        places = np.arange(ids.shape[1])  # see [Note: documents] in data/chat_rows.py
        begins = np.zeros_like(ids)
        begins[:, 1:] = np.where(ids[:, :-1] == end, places[1:], 0)
        arrays["labels"][begins > 0] = IGNORED  # nothing before it belongs to its document
        return {**arrays, "position_ids": places - np.maximum.accumulate(begins, axis=1)}

    def save_rows(self, folder: Path) -> None:
        """Writes links to prepared tokens, and the paths of other files."""
        save_tokens(folder, {"train": self.train, "held_out": self.held_out})

    @classmethod
    def load(cls, folder: Path, facts: DatasetFacts, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Maps what `save` wrote; the tokens are read from disk when they are used."""
        return cls(facts, tokenizer, **load_tokens(folder, facts.sequence_length, tokenizer))


def save_tokens(folder: Path, parts: Mapping[str, Rows]) -> None:
    """Writes links to prepared tokens, and the paths of other files, into a folder."""
    own, root, kept = folder / "tokens", cache_root(), dict[str, SavedTokens]()
    own.mkdir(exist_ok=True)
    for part, rows in parts.items():
        linked = [[_linked(file, own, root) for file in source] for source in rows.sources]
        kept[part] = rows.found if isinstance(rows, Stream) else linked
    (folder / "tokens.json").write_bytes(_SAVED_TOKENS.dump_json(kept))


def load_tokens(folder: Path, length: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Rows]:
    """Rows of `length` tokens of what `save_tokens` wrote."""

    def rows(found: SavedTokens) -> Rows:
        if isinstance(found, Sources):
            return Stream(found, length, cache_root(), words_of(tokenizer))
        placed = [[replace(f, file=str(folder / f.file)) for f in source] for source in found]
        return Rows(placed, length)

    kept = _SAVED_TOKENS.validate_json((folder / "tokens.json").read_bytes())
    return {part: rows(found) for part, found in kept.items()}


def _linked(tokens: TokenFile, folder: Path, root: Path) -> TokenFile:
    """The tokens for a run, with their file's identity; links a prepared file into its folder."""
    file = Path(tokens.file)
    if root not in file.parents:
        return replace(tokens, identity=identity_of(file.stat()))
    name = f"{file.parent.name}-{file.name}"
    (folder / name).unlink(missing_ok=True)  # of an earlier start; it may be damaged
    try:
        (folder / name).hardlink_to(file)
    except OSError:  # another file system
        shutil.copyfile(file, folder / name)
    identity = identity_of((folder / name).stat())
    return replace(tokens, file=f"{folder.name}/{name}", identity=identity)


def text_source(
    path: Path | None, weight: float = 1.0, text_column: str = "text", key: str = "data"
) -> Corpus:
    """The source at a path; None: the text that ships with Python.

    Raises:
        DataError: There are no files.
    """
    with under(key):
        found = _embedded() if path is None else files_at(path)
    return replace(found, weight=weight, text_column=text_column, key=key)


def make_dataset(
    sources: Sequence[Corpus], settings: DatasetSettings, tokenizer: PreTrainedTokenizerBase | None
) -> Dataset:
    """Splits and tokenizes sources, and fits the baseline if requested.

    Args:
        sources: Sources of the data.
        settings: How text becomes sequences.
        tokenizer: Tokenizer of the run; None trains one on the training part of the text.

    Raises:
        DataError: A source cannot be used, or has fewer tokens than one sequence in either part.
    """
    parts = [_split(source, settings) for source in sources]
    notes: list[str] = []
    uses = Counter(file.resolve() for source in sources for file in source.files)
    if settings.data.validation_fraction and (shared := sum(n > 1 for n in uses.values())):
        notes.append(
            f"{shared} file(s) in several sources: one may train on what another holds out"
        )
    trained_on, vocab_size = [part[0] for part in parts], settings.vocab_size
    tokenizer = tokenizer or new_tokenizer(sources, trained_on, vocab_size, notes)
    made = [_tokens(*one, settings, tokenizer) for one in zip(sources, parts, strict=True)]
    length, how = settings.sequence_length, settings.data
    held_out = Rows([rest for _, rest in made], length)
    if how.validation_fraction and not len(held_out):
        raise _too_few(None, held_out.num_dropped, length)
    train, sizes, checksums = _training_rows(sources, [own for own, _ in made], settings, tokenizer)
    # Of more than a pass, the rows of a step could lie any number of passes ahead.
    least = SMALL_BUFFER if len(sources) > 1 else 0
    buffer = min(how.shuffle_buffer * how.streaming, max(sum(sizes), least))
    mixture = _mixture(sources, sizes, buffer)
    sums: list[object] = [*zip(checksums, held_out.checksums, strict=True)]
    separator = _separator(tokenizer) if how.separate_documents else None
    if separator is not None and any(source.kind is FileKind.ARRAY for source in sources):
        sums.append(separator)  # of the same tokens, it would make other documents
    facts = DatasetFacts(
        origin=" + ".join(source.origin for source in sources),
        sequence_length=length,
        num_train_sequences=sum(sizes),
        num_held_out_sequences=len(held_out),
        num_train_tokens=sum(sizes) * length,
        num_held_out_tokens=len(held_out) * length,
        num_dropped_tokens=train.num_dropped + held_out.num_dropped,
        vocab_size=num_ids(tokenizer),
        baseline=_baseline(train, held_out, num_ids(tokenizer)) if how.uses_baseline else None,
        prompt=_prompt(held_out if len(held_out) else train, tokenizer),
        notes=(*notes, *_said(sources, mixture, how, tokenizer)),
        fingerprint=digest([VERSION, length, mixture, sums]),
        mixture=mixture,
        shuffle_buffer=buffer,
        separator=separator,
    )
    return Dataset(facts, tokenizer, train, held_out)


def _separator(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a document.

    Raises:
        ConfigError: The tokenizer has none.
    """
    if isinstance(end := tokenizer.eos_token_id, int):
        return end
    raise ConfigError(
        "data.separate_documents: expected a tokenizer with an end-of-text token, got one "
        "without. Set its eos_token, or data.separate_documents: false."
    )


def _training_rows(
    sources: Sequence[Corpus],
    made: Sequence[list[TokenFile] | Parts],
    settings: DatasetSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[Rows, list[int], list[list[str]]]:
    """The rows, their number per source, and checksums of their contents, for any kind of source.

    Raises:
        DataError: A source has fewer tokens than one sequence.
    """
    length = settings.sequence_length
    if not settings.data.streaming:
        rows = Rows([one for one in made if not isinstance(one, Parts)], length)
        return rows, rows.sizes, rows.checksums
    parts = tuple(one for one in made if isinstance(one, Parts))
    found, sizes = Sources(parts, settings.seed), list[int]()
    stream = Stream(found, length, cache_root(), words_of(tokenizer))
    for number, source in enumerate(sources):
        with under(source.key):
            sizes.append(stream.num_rows(number))
            if not sizes[-1]:
                raise _too_few(source, 0, length)
    checksums = [
        [f"{stream.tokens(number, 0).checksum}:{one.key}"]
        + [f"{s.file.name}:{s.start}:{s.stop}" for shard in one.shards for s in shard.spans]
        for number, one in enumerate(parts)
    ]
    return stream, sizes, checksums


# ---- held out -----------------------------------------------------------------------------------


def _split(source: Corpus, settings: DatasetSettings) -> tuple[list[Shard], list[Shard]]:
    """The parts of a source to train on, and those that are held out."""
    with under(source.key):
        dtype = settings.data.dtype
        spans = split(source.spans(dtype), settings.data.validation_fraction)
        train, rest = (shards(one, dtype) for one in spans)
        if not train:
            raise _too_few(source, 0, settings.sequence_length)
    return train, rest


# ---- tokens --------------------------------------------------------------------------------------


def cache_root() -> Path:
    """Cache of prepared tokens; a temporary folder of this process if it cannot be written."""
    folder = cache_folder() / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        logger.warning("data: nothing is cached: %s", error)
        return Path(_temporary().name)
    return folder


@lru_cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fullshard-tokens-")


def _tokens(
    source: Corpus,
    parts: tuple[list[Shard], list[Shard]],
    settings: DatasetSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[TokenFile] | Parts, list[TokenFile]]:
    """Tokens of both parts of a source, from the cache or made now; of a stream, the second."""
    end = (tokenizer.eos_token_id,) if isinstance(tokenizer.eos_token_id, int) else ()
    dtype = token_dtype(vocab_size := num_ids(tokenizer))
    how = TokenSettings(start_of(tokenizer), end, source.text_column, vocab_size, dtype.name)
    key, (train, rest) = digest([VERSION, words_of(tokenizer), asdict(how)]), parts
    folder, read = cache_root() / key, partial(text_tokens, encoder_of(tokenizer), how)
    for array in (shard.tokens for shard in (*train, *rest) if shard.tokens):
        if np.iinfo(array.dtype).max < vocab_size - 1:
            raise DataError(
                f"data.dtype: expected a dtype that holds the ids of {vocab_size:,} tokens, got "
                f"{np.dtype(array.dtype).name} in '{array.file}'. Set the tokenizer that produced "
                "the tokens, or the dtype in which they were written."
            )
    with under(source.key):
        if settings.data.streaming:
            if getattr(tokenizer, "backend_tokenizer", None) is None:
                raise ConfigError(
                    "data.streaming: expected a tokenizer of the tokenizers library "
                    f"(tokenizer.json), got {type(tokenizer).__name__}. Leave data.streaming out."
                )
            return Parts(tuple(train), key, how), tokenize(rest, folder, how, read)
        made = tokenize([*train, *rest], folder, how, read)
        count = sum(one.count for one in made[: len(train)])
        if count < settings.sequence_length:
            raise _too_few(source, count, settings.sequence_length)
    return made[: len(train)], made[len(train) :]


def new_tokenizer(
    sources: Sequence[Corpus],
    parts: Sequence[Sequence[Shard]],
    vocab_size: int,
    notes: list[str],
    texts: Texts = pieces,
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on at most `TRAINING_BYTES`; for arrays only, it shows numbers.

    Args:
        sources: Sources of the data.
        parts: Parts of each source.
        vocab_size: Largest vocabulary.
        notes: Facts about the tokenizer are added.
        texts: Returns the texts of a part, given it and the column.
    """
    if all(source.kind is FileKind.ARRAY for source in sources):
        notes.append("no tokenizer is set, so tokens are shown as numbers")
        return numbers_tokenizer(vocab_size)
    array = next((one for one in sources if one.kind is FileKind.ARRAY), None)
    if array is not None:
        raise DataError(
            f"data.tokenizer: expected the tokenizer that produced '{array.path}', because "
            "text is mixed with it, got none. Set its folder."
        )
    every_one = zip(sources, parts, strict=True)
    found = [(source, shard) for source, part in every_one for shard in part]
    every = max(1, math.ceil(sum(shard.num_bytes for _, shard in found) / TRAINING_BYTES))
    if every > 1:
        notes.append(f"the tokenizer was trained on one part of the text in {every}")
    return _trained(found[::every], vocab_size, texts)


def _trained(
    found: Sequence[tuple[Corpus, Shard]], vocab_size: int, texts: Texts
) -> PreTrainedTokenizerBase:
    """A tokenizer trained on some parts, from the cache or now; read from its files in both cases.

    Both must be the same, because tokens are cached under the checksum of the tokenizer.
    """
    names = [(source.text_column, shard.name) for source, shard in found]
    folder = cache_root() / f"tokenizer-{digest([VERSION, vocab_size, names])}"
    was_there = folder.exists()
    with suppress(ConfigError):
        return read_tokenizer(folder, "data")
    with _placed(folder, damaged=was_there) as aside:
        train_tokenizer(_texts(found, texts), vocab_size).save_pretrained(aside)
    return read_tokenizer(folder, "data")


@contextmanager
def _placed(folder: Path, *, damaged: bool) -> Iterator[Path]:
    """A folder to fill, which is then renamed to its place, unless another start was first."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    aside.mkdir(exist_ok=True)
    try:
        yield aside
        if damaged:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _texts(found: Sequence[tuple[Corpus, Shard]], texts: Texts) -> Iterator[str]:
    size = sum(shard.num_bytes for _, shard in found)
    if size > SHARD_BYTES:
        logger.info("data: training a tokenizer on %s MiB", f"{size / 2**20:,.0f}")
    progress = Progress("read", size)
    for source, shard in found:
        with under(source.key):
            both = texts(shard, source.text_column)
            yield from (text for text in both if isinstance(text, str))
        progress.add(shard.num_bytes)


# ---- facts ---------------------------------------------------------------------------------------


def _mixture(
    sources: Sequence[Corpus], sizes: Sequence[int], buffer: int
) -> tuple[tuple[int, int], ...]:
    """(sequences, places in an epoch or in the buffer) of each source; see `SampleOrder.mixture`.

    An epoch has as many places as there are sequences. They are divided by weight.
    """
    if len(sources) == 1 and not buffer:
        return ()
    places = apportioned(buffer or sum(sizes), [source.weight for source in sources])
    if buffer and 0 in places:
        raise ConfigError(
            "data.shuffle_buffer: expected enough sequences for a share of every source, got "
            f"{buffer} (at most one pass) and none for {sources[places.index(0)].origin}. Raise "
            "it, or the source's weight."
        )
    return tuple(zip([ENDLESS] * len(sizes) if buffer else sizes, places, strict=True))


def _said(
    sources: Sequence[Corpus],
    mixture: tuple[tuple[int, int], ...],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[str]:
    is_text = any(source.kind is not FileKind.ARRAY for source in sources)
    if is_text and not isinstance(tokenizer.eos_token_id, int):
        yield "the tokenizer has no end-of-text token: nothing separates the documents"
    for source in sources:
        kind = source.kind
        if source.text_column != "text" and kind in (FileKind.TEXT, FileKind.ARRAY):
            yield f"text_column has no effect on {source.origin}, which is {kind}, not records"
        if data.dtype and kind is not FileKind.ARRAY:
            yield f"data.dtype has no effect on {source.origin}, which is {kind}, not tokens"
    for source, (size, places) in zip(sources, mixture, strict=False):
        amount = f"{places:,} of an epoch's sequences, {places / size:.2f} passes over the source"
        if size == ENDLESS:
            amount = f"streamed (counts are estimates), {places:,} sequences shuffled at a time"
        yield f"{source.origin}: {amount}"


def _baseline(train: Rows, held_out: Rows, vocab_size: int) -> Baseline | None:
    if not len(held_out):
        return None
    seen, unseen = (rows.take(np.arange(len(rows))) for rows in (train, held_out))
    return interpolated_bigram(seen, unseen, vocab_size)


def _prompt(rows: Rows, tokenizer: PreTrainedTokenizerBase) -> str:
    """First words of the second document, which is not cut, if it begins early enough."""
    tokens = rows.take(np.arange(min(len(rows), PROMPT_ROWS))).ravel()
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    first = tokens[ends[0] + 1 if len(ends) and ends[0] + 1 < len(tokens) else 0 :][:PROMPT_TOKENS]
    text = str(tokenizer.decode(first.tolist(), skip_special_tokens=True))
    if len(text) <= PROMPT_CHARACTERS and len(first) < PROMPT_TOKENS:
        return text
    return text[:PROMPT_CHARACTERS].rpartition(" ")[0] or text[:PROMPT_CHARACTERS]


def _embedded() -> Corpus:
    """The language reference that ships with Python, one file per topic."""
    from pydoc_data.topics import topics

    files = written("topics", ".txt", [topics[name] for name in sorted(topics) if topics[name]])
    return Corpus(files[0].parent, files, FileKind.TEXT, EMBEDDED)


def written(name: str, suffix: str, texts: Sequence[str]) -> tuple[Path, ...]:
    """Files of texts in the cache, which stay as they are if they are there."""
    folder = cache_root() / f"{name}-{digest(texts)}"
    was_there = folder.exists()
    files = {folder / f"{number:03}{suffix}": text.encode() for number, text in enumerate(texts)}
    if not all(file.is_file() and file.stat().st_size == len(files[file]) for file in files):
        with _placed(folder, damaged=was_there) as aside:
            for file, content in files.items():
                (aside / file.name).write_bytes(content)
    return tuple(files)


def _too_few(source: Corpus | None, got: int, length: int) -> DataError:
    """The error for a part with less than one sequence; without a source, the held-out part."""
    what, way_out = "held-out tokens", "Raise data.validation_fraction or set it to 0."
    if source is not None:
        what = f"training tokens in '{source.path}'"
        way_out = "Add more text, or lower training.max_seq_length or data.validation_fraction."
    return DataError(
        f"data.path: expected at least {length:,} {what} (one sequence of "
        f"training.max_seq_length), got {got:,}. {way_out}"
    )
