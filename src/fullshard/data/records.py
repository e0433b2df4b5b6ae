"""Data files: finding them, their kind, and reading their records with their places.

    text file, folder of     no records: a file is one document
    JSONL, JSON, parquet     one record per line, list entry or row
    folder of `datasets`     one record per row (written by `save_to_disk`)
    .bin, .npy               existing tokens: see arrays.py

A span is a part of a file. It is read piece by piece, so a file may be larger than memory. The
exception is a list in a .json file, which is read as a whole.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import itertools
import json
import logging
import math
import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from fullshard.config.regular_files import did_you_mean_path
from fullshard.config.values import nearest
from fullshard.data.arrays import tokens_in
from fullshard.engine.hugging_face import some
from fullshard.errors import DataError, untrusted

logger = logging.getLogger(__name__)


class FileKind(StrEnum):
    """Kinds of data files."""

    TEXT = "text"
    JSONL = "JSONL"
    JSON = "JSON"
    PARQUET = "parquet"
    DATASETS = "datasets"
    ARRAY = "tokens"


SUFFIXES = {
    ".jsonl": FileKind.JSONL,
    ".ndjson": FileKind.JSONL,
    ".json": FileKind.JSON,
    ".parquet": FileKind.PARQUET,
    ".bin": FileKind.ARRAY,
    ".npy": FileKind.ARRAY,
}
TABLES = (".csv", ".tsv")
PACKED = {
    b"\x1f\x8b": "gzip",
    b"(\xb5/\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
DATASETS_MARKS = ("dataset_dict.json", "dataset_info.json")
# A file of a run, of a checkpoint and of cached logits, and what is near the start of it.
WRITTEN = {
    "run.json": ('"schema_version"', '"command"', '"status"', '"exit_code"'),
    "COMPLETE.json": ('"format"', '"fullshard-checkpoint"'),
    "cache.json": ('"num_train_sequences"', '"num_train_tokens"'),
}
# Files of editors, file systems and TensorBoard, which a pattern with the word on the right names.
NO_DATA = {
    **{"*~": "~", "#*#": "#", "*.bak": ".bak", "*.orig": ".orig"},
    **{"lost+found": "lost+found", "events.out.tfevents.*": "events"},
}
POINTER = b"version https://git-lfs"  # of a clone without the files of Git LFS
SPLIT = "train"
OTHER_SPLITS = {"test", "eval", "dev", "val", "valid", "validation"}
HOLE = bytes(9)  # as in an archive, or in a file that was not written to its end
PIECE = 1 << 18  # bytes read at a time
LINE_BYTES = 1 << 20  # distance to search for the end of a line of text


@dataclass(frozen=True)
class Span:
    """A part of a file.

    Attributes:
        file: Path of the file, or of a folder of `datasets`.
        kind: How it is read; JSON means a list, though a .json file may hold JSONL.
        start: First byte (text, JSONL), token (arrays) or record.
        stop: End of the span, exclusive, in the same unit.
        size: Bytes of the span; an estimate for records.
    """

    file: Path
    kind: FileKind
    start: int
    stop: int
    size: int

    def part(self, start: int, stop: int) -> Span:
        """A part of this span."""
        size = self.size * (stop - start) // (self.stop - self.start)
        return Span(self.file, self.kind, start, stop, size)


@dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
        value: Its columns.
        span: Span that it was read from.
        number: Number of its line in the span, or of the record in the file, from 0.
    """

    value: dict[str, Any]
    span: Span
    number: int

    def __str__(self) -> str:
        """Its place, for messages: `chat.jsonl:12`."""
        if self.span.kind is not FileKind.JSONL:
            return f"{self.span.file}, record {self.number}"
        return f"{self.span.file}:{_line(self.span.file, self.span.start) + self.number}"


@dataclass(frozen=True)
class Corpus:
    """Files of one kind: a source of data, perhaps one of several in a mixture.

    Attributes:
        path: Path that the user named.
        files: Paths of the files, in order.
        kind: Kind of all files.
        title: Description of data that ships with Python.
        weight: Its share of an epoch, relative to the weights of other sources.
        text_column: Column or key of the text in records; empty: records are conversations.
        key: Its key in the configuration: `data`, or `data.mixture.1`.
    """

    path: Path
    files: tuple[Path, ...]
    kind: FileKind
    title: str = ""
    weight: float = 1.0
    text_column: str = ""
    key: str = "data"

    @property
    def origin(self) -> str:
        """Path, kind and number of files, in words."""
        return self.title or f"{self.path} ({self.kind}, {len(self.files)} file(s))"

    def spans(self, dtype: str | None = None) -> list[Span]:
        """One span per file, without empty files; `dtype` is data.dtype."""
        found = (whole(file, self.kind, dtype, self.text_column) for file in self.files)
        return [span for span in found if span.stop]


def files_at(path: Path) -> Corpus:
    """The files of a path: a file, a folder or a pattern (`corpus/*.jsonl`, `**` for subfolders).

    Hidden files, backups of editors (`a.txt~`) and folders of runs, checkpoints and cached logits
    are left out and logged, unless the path names them or a file in them (`runs/*/samples.jsonl`).

    Raises:
        DataError: There is no file, or files are of several kinds.
    """
    with _listing(path):
        if any((path / mark).is_file() for mark in DATASETS_MARKS):
            return Corpus(path, (path,), FileKind.DATASETS)
        found = _found(path)
    files = [file for file in found if file.suffix != ".idx"]  # Megatron's index of a .bin file
    table = next((file for file in files if file.suffix.lower() in TABLES), None)
    if table is not None:
        raise DataError(
            f"data.path: expected text, JSONL or parquet, got the table '{table}'. Write its rows "
            "as JSONL, or rename it to .txt to train on its lines."
        )
    examples = {SUFFIXES.get(file.suffix.lower(), FileKind.TEXT): file for file in files}
    if len(examples) != 1:
        listed = ", ".join(f"{kind} ({examples[kind].name})" for kind in sorted(examples))
        raise DataError(
            f"data.path: expected files of one kind in '{path}', got {listed or 'none'}. Use one "
            "file, or a folder with one kind of file."
        )
    if (file := examples.get(FileKind.TEXT)) is not None and _has_records(file):
        _say(
            f"the JSON records of {file} are read as text. Name it .jsonl to read a column of them"
        )
    words = {re.split(r"[^a-z]", part)[0] for file in files for part in _below(file, path)}
    if SPLIT in words and (others := sorted(words & OTHER_SPLITS)):
        _say(f"'{path}' has files of train and of {', '.join(others)}; all are trained on")
    return Corpus(path, tuple(files), next(iter(examples)))


def _below(file: Path, folder: Path) -> tuple[str, ...]:
    """The parts of a file's path below a folder, in lower case."""
    below = file.relative_to(folder) if file.is_relative_to(folder) else Path(file.name)
    return tuple(part.lower() for part in below.parts)


def _has_records(file: Path) -> bool:
    """Whether a file begins with two lines of JSON objects."""
    with suppress(OSError, RecursionError, ValueError), file.open("rb") as opened:
        lines = [opened.readline(PIECE) for _ in range(2)]
        return all(isinstance(json.loads(line), dict) for line in lines)
    return False


@contextmanager
def _listing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"data.path: expected an existing file or folder, got "
            f"'{str(error.filename or path)[:200]}' ({error.strerror})."
        ) from error


@contextmanager
def under(key: str) -> Iterator[None]:
    """Errors about `data.path` name the path of a source: `data.mixture.1.path`.

    Args:
        key: `data.mixture.1`, or `data` for the only source.
    """
    try:
        yield
    except DataError as error:
        raise DataError(re.sub(r"^data(?=\.(path|text_column)\b)", key, str(error))) from error


def _found(path: Path) -> list[Path]:
    """The files of a path; a pattern that matches nothing but folders means the files in them.

    Raises:
        DataError: There is none, or one cannot be read: a broken link, a pipe, a device.
        OSError: A folder cannot be read.
    """
    place, parts, left = path, tuple[str, ...](), dict[Path, str]()
    if glob.has_magic(str(path)) and not path.exists():
        place, parts = Path(path.anchor), path.relative_to(path.anchor).parts
    named = {*_matching(place, parts, left)}
    found = {one for one in named if not one.is_dir()}
    if named and not found:
        found = {one for one in _matching(place, (*parts, "**"), left) if not one.is_dir()}
    if left and not found:
        listed = some([f"'{one}' ({why})" for one, why in sorted(left.items())])
        raise DataError(
            f"data.path: expected files in '{path}', got none but those that are left out: "
            f"{listed}. Set the path of such a file or folder to read it."
        )
    for why in sorted(set(left.values())):
        names = some(sorted(f"'{one}'" for one in left if left[one] == why))
        _say(f"left out {why}: {names}")
    for file in (files := sorted(found) if named else [path]):
        if not file.is_file():
            got = "a pipe or a device" if file.exists() else "which does not exist"
            raise DataError(
                f"data.path: expected a file or folder, got '{file}', {got}. "
                + (did_you_mean_path(file) or "Use a file or a folder of files.")
            )
    return files


def _matching(
    place: Path, parts: Sequence[str], left: dict[Path, str], entered: set[Path] | None = None
) -> Iterator[Path]:
    """The paths that a pattern matches, as with `glob`, which skips folders that it cannot read.

    Args:
        place: A file or folder.
        parts: The rest of the pattern.
        left: Gets each file and folder that is left out, and why.
        entered: Folders that the `**` before it has entered, without links.

    Raises:
        DataError: `**` enters a folder twice, because a link leads to it.
        OSError: A folder cannot be read.
    """
    if not parts:
        yield place
        return
    part, rest = parts[0], parts[1:]
    if not glob.has_magic(part):
        with suppress(FileNotFoundError, NotADirectoryError):
            (place / part).lstat()
            yield from _matching(place / part, rest, left)
        return
    if part == "**":
        entered = _enter(place, set() if entered is None else entered)
        yield from _matching(place, rest, left)
    for entry in _entries(place, part, left):
        is_folder = entry.is_dir()
        is_entered = is_folder and (part == "**" or rest)
        if is_entered and glob.has_magic(parts[-1]) and _is_written(entry, left):
            continue
        if part != "**":
            yield from _matching(entry, rest, left)
        elif is_folder:
            yield from _matching(entry, parts, left, entered)
        elif not rest:
            yield entry


def _entries(place: Path, part: str, left: dict[Path, str]) -> Iterator[Path]:
    """Yields a folder's entries that match a part of a pattern; adds skipped ones to `left`."""
    kinds = {} if part.startswith(".") else {".*": "hidden files"}
    kinds |= {kind: kind for kind, word in NO_DATA.items() if word not in part}
    for entry in place.iterdir() if place.is_dir() else ():
        if fnmatch.fnmatchcase(entry.name, part):
            if why := next((kinds[k] for k in kinds if fnmatch.fnmatchcase(entry.name, k)), ""):
                left[entry] = why
            else:
                yield entry


def _is_written(folder: Path, left: dict[Path, str]) -> bool:
    """Whether a run, a checkpoint or cached logits are in a folder; adds it to `left` then."""
    for name, keys in WRITTEN.items():
        if (file := folder / name).is_file():
            with file.open(encoding="utf-8", errors="replace") as opened:
                start = opened.read(PIECE)
            if all(key in start for key in keys):  # and not another program's
                left[folder] = f"what a run wrote ({name})"
    return folder in left


@lru_cache  # a command lists its data more than once
def _say(text: str) -> None:
    logger.warning("data: %s", text)


def _enter(folder: Path, entered: set[Path]) -> set[Path]:
    if (target := folder.resolve()) in entered:
        raise DataError(
            f"data.path: expected one way to each folder, got '{folder}', which is '{target}' "
            "again. Remove the link, or write a longer pattern."
        )
    entered.add(target)
    return entered


def whole(file: Path, kind: FileKind, dtype: str | None = None, column: str = "") -> Span:
    """The span of a full file.

    Args:
        file: Path of the file.
        kind: Kind of the file.
        dtype: data.dtype, for arrays.
        column: Column that a parquet file must have; empty: any.
    """
    with _reading(file):
        start = b""
        if file.is_file():
            with file.open("rb") as opened:
                start = opened.read(PIECE if kind is FileKind.JSON else len(POINTER))
        if start.startswith(POINTER):
            raise DataError(
                f"data.path: expected data, got a pointer of Git LFS in '{file}'. Run git lfs pull."
            )
        if kind is FileKind.JSON:
            start = start.removeprefix(codecs.BOM_UTF8).lstrip()
            kind = FileKind.JSON if start.startswith(b"[") else FileKind.JSONL
        size = sum(num_bytes for num_bytes, *_ in identity(file))
        match kind:
            case FileKind.TEXT | FileKind.JSONL:
                stop = size
            case FileKind.ARRAY:
                stop = tokens_in(file, dtype).count
            case FileKind.JSON:
                stop = len(_read_list(file))
            case FileKind.PARQUET:
                with open_parquet(file) as reader:
                    stop, present = reader.metadata.num_rows, reader.schema_arrow.names
                if column and column not in present:
                    raise no_column(column, present, f"'{file}'")
            case FileKind.DATASETS:
                stop = len(_open_datasets(file))
    return Span(file, kind, 0, stop, size)


def identity(file: Path) -> list[tuple[int, int, int]]:
    """Size and times of change of a file, or of each file in a folder of datasets.

    They differ after any change, because the last of them cannot be set back.
    """
    with _reading(file):
        found = [one.stat() for one in (sorted(file.rglob("*")) if file.is_dir() else [file])]
    return [(one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]


def read_records(span: Span, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """The records of a span; of parquet files and datasets only these columns, if all are there.

    Raises:
        DataError: The file cannot be read, or a record is no mapping; names the line.
    """
    with _reading(span.file):
        match span.kind:
            case FileKind.JSONL:
                numbered = _read_jsonl(span)
            case FileKind.PARQUET:
                numbered = enumerate(_read_parquet(span, columns), span.start)
            case FileKind.DATASETS:
                found = _open_datasets(span.file)
                found = found.select_columns(_among(found.column_names, columns))
                numbered = enumerate(found.select(range(span.start, span.stop)), span.start)
            case _:
                numbered = enumerate(_read_list(span.file)[span.start : span.stop], span.start)
        for number, value in numbered:
            record = Record(value, span, number)
            if not isinstance(value, dict):
                raise DataError(
                    f"data.path: expected a JSON object, got {type(value).__name__} at {record}. "
                    'Write {"KEY": VALUE}.'
                )
            yield record


def text_of(record: Record, column: str, key: str = "data.path") -> str:
    """The text of a record in a column.

    Raises:
        DataError: There is another value; says so of a key of the configuration.
    """
    if not isinstance(value := record.value[column], str):
        raise DataError(
            f"{key}: expected text in column '{column}', got {type(value).__name__} at {record}. "
            "Correct the record, or use another column."
        )
    return value


def no_column(column: str, present: Sequence[str], place: object) -> DataError:
    """The error for a text column that is not there."""
    guess = nearest(column, present)
    hint = f"Did you mean '{guess}'?" if guess else "Set data.text_column to one of them."
    return DataError(
        f"data.text_column: expected a column '{column}', got {quoted(present)} at {place}. {hint}"
    )


def quoted(names: Sequence[str]) -> str:
    """Names of columns, for messages."""
    return ", ".join(f"'{name}'" for name in names) or "none"


def _among(present: list[str], columns: Sequence[str] | None) -> list[str]:
    """The columns to read: all where one is missing, which whoever needs it will report."""
    return list(columns) if columns and {*columns} <= {*present} else present


def _reading(file: Path, what: str = "a file that can be read") -> AbstractContextManager[None]:
    """Raises DataError for any error of the system or a parser inside the block."""
    return untrusted(f"data.path: '{file}'", what, DataError, "Write it again, or use another.")


def read_text(span: Span) -> Iterator[str]:
    """The text of a span in pieces of about `PIECE` bytes that end with a line if possible.

    A leading byte-order mark is dropped.

    Raises:
        DataError: It is not UTF-8, or has a hole or many zero bytes; names the byte and the line.
    """
    decoder, left, held = codecs.getincrementaldecoder("utf-8")(), span.stop - span.start, ""
    with _reading(span.file), span.file.open("rb") as opened:
        opened.seek(span.start)
        while left:
            read = opened.read(min(PIECE, left))
            left = left - len(read) if read else 0  # the file was truncated meanwhile
            place = read.find(HOLE)
            if read.count(0) > max(8, len(read) // 50):  # UTF-16 of some scripts is valid UTF-8
                place = read.index(0)
            if place >= 0:
                _refuse_bytes(span.file, opened.tell() - len(read) + place, 0)
            try:
                held += decoder.decode(read, final=not left)
            except UnicodeDecodeError as error:
                begin = opened.tell() - len(error.object)
                _refuse_bytes(span.file, begin + error.start, error.object[error.start])
            if opened.tell() - len(read) == 0:
                held = held.removeprefix("\ufeff")
            cut = held.rfind("\n") + 1 or (len(held) if len(held) > PIECE else 0)
            if held[:cut]:
                yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _refuse_bytes(file: Path, offset: int, byte: int) -> NoReturn:
    with file.open("rb") as opened:
        start = opened.read(8)
    packed = next((name for mark, name in PACKED.items() if start.startswith(mark)), None)
    advice = f"It is compressed ({packed}). Unpack it." if packed else "Convert the file to UTF-8."
    if not byte and not packed:
        advice = "It is an archive, UTF-16, or damaged. Unpack, convert or restore it."
    raise DataError(
        f"data.path: expected UTF-8 text, got byte 0x{byte:02x} at offset {offset} "
        f"of '{file}' (line {_line(file, offset)}). {advice}"
    )


def _line(file: Path, offset: int) -> int:
    """Number of the line, from 1, that contains a byte."""
    number = 1
    with file.open("rb") as opened:
        while read := opened.read(min(PIECE, offset)):
            number, offset = number + read.count(b"\n"), offset - len(read)
    return number


def line_start(file: Path, place: int, *, within: int | None = None) -> int:
    """Start of the line that contains a byte.

    Args:
        file: A file of lines, not empty.
        place: Offset of the byte.
        within: How far back to look, in bytes. If no line begins there, the place itself is
            returned, or the byte with which its character begins.
    """
    least = 0 if within is None else max(0, place - within)
    with _mapped(file) as data:
        at = data.rfind(b"\n", least, place)
        if at >= 0 or within is None:
            return at + 1
        starts = (at for at in range(place, max(-1, place - 4), -1) if data[at] & 0xC0 != 0x80)
        return next(starts, place)


def next_line(file: Path, place: int) -> int:
    """Start of the next line after a byte; the end of the file if there is none."""
    with _mapped(file) as data:
        return data.find(b"\n", place) + 1 or len(data)


def split(spans: Sequence[Span], share: float) -> tuple[list[Span], list[Span]]:
    """Splits files into training and held-out spans; the end is held out.

    Records and lines are not cut, and at least one record is for training.

    Args:
        spans: Full files of one kind.
        share: Share of the bytes, tokens or records to hold out.
    """
    train, held_out = list(spans), list[Span]()
    missing = math.ceil(sum(span.stop for span in spans) * share)
    while missing > 0 and train:
        span = train.pop()
        place = _cut(span, max(0, span.stop - missing), first=not train)
        missing -= span.stop
        train += [span.part(0, place)] if place else []
        held_out[:0] = [span.part(place, span.stop)] if place < span.stop else []
    return train, held_out


def _cut(span: Span, place: int, *, first: bool) -> int:
    """The nearest place before `place` to cut a file; the first file keeps a record."""
    if place == 0 and not first:
        return 0
    match span.kind:
        case FileKind.TEXT:
            return line_start(span.file, place, within=LINE_BYTES)
        case FileKind.JSONL:
            return line_start(span.file, place) or (next_line(span.file, 0) if first else 0)
        case _:
            return max(place, int(first))


@contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    with _reading(file, "a file on a disk"), file.open("rb") as opened:  # not of /sys
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def _read_jsonl(span: Span) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not empty, and its value."""
    offset = span.start
    with span.file.open("rb") as opened:
        opened.seek(offset)
        for number, line in enumerate(opened):
            if offset >= span.stop:
                return
            try:
                text = line.decode().removesuffix("\n")
            except UnicodeDecodeError as error:
                _refuse_bytes(span.file, offset + error.start, line[error.start])
            text = text.removeprefix("\ufeff") if offset == 0 else text
            offset += len(line)
            if text.strip():
                yield number, _parsed(text, Record({}, span, number))


def _parsed(text: str, place: object) -> Any:
    """The value of a JSON text, checked to be valid for a tokenizer.

    Raises:
        DataError: It is not JSON, is nested too deeply, or has impossible numbers or characters.
    """
    try:
        value = json.loads(text, object_pairs_hook=_mapping)
        if "\\ud" in text.lower():  # half of the pair \ud83d\ude00 is no character
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error).replace("line 1 ", "")  # of the text, which is one line of a file
        raise DataError(
            f"data.path: expected JSON records, got one that cannot be read at {place} "
            f"({type(error).__name__}: {reason[:120]}). Correct or remove it."
        ) from error
    return value


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys, of which Python would keep the last value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice in one object")
    return found


def _read_list(file: Path) -> list[Any]:
    return _parsed("".join(read_text(whole(file, FileKind.TEXT))), file)


def _needing(name: str, file: Path) -> AbstractContextManager[None]:
    """Raises DataError if a library that reading a file needs is not installed."""
    advice = "Run pip install 'fullshard[data]'."
    return untrusted(f"data.path: '{file}'", f"{name}, which reads it", DataError, advice)


@contextmanager
def open_parquet(file: Path) -> Iterator[Any]:
    """A parquet file, open inside the block.

    Raises:
        DataError: It is none, or pyarrow is missing.
    """
    with _needing("pyarrow", file):
        from pyarrow import parquet
    with _reading(file, "a parquet file"), parquet.ParquetFile(file) as reader:
        yield reader


def row_groups(file: Path) -> list[int]:
    """First record of each row group of a parquet file, then the number of records."""
    with open_parquet(file) as reader:
        table = reader.metadata
        sizes = [table.row_group(group).num_rows for group in range(table.num_row_groups)]
    return [0, *itertools.accumulate(sizes)]


def _read_parquet(span: Span, columns: Sequence[str] | None) -> Iterator[Any]:
    starts = row_groups(span.file)
    groups = [
        group
        for group, (start, stop) in enumerate(itertools.pairwise(starts))
        if start < span.stop and stop > span.start
    ]
    first = starts[groups[0]] if groups else 0
    with open_parquet(span.file) as reader:
        columns = _among(names := reader.schema_arrow.names, columns)
        if twice := [name for name in columns or names if names.count(name) > 1]:
            raise ValueError(f"it has {names.count(twice[0])} columns {twice[0]!r}")
        batches = reader.iter_batches(1024, row_groups=groups, columns=columns)
        values = (value for batch in batches for value in batch.to_pylist())
        yield from itertools.islice(values, span.start - first, span.stop - first)


def _open_datasets(folder: Path) -> Any:
    """The mapped rows of a folder that `save_to_disk` wrote; of several splits, `train`."""
    with _needing("datasets", folder):
        import datasets
    with _reading(folder, "a folder that save_to_disk of datasets wrote"):
        found: Any = datasets.load_from_disk(str(folder))
    if isinstance(found, dict):
        if SPLIT not in found:
            raise DataError(
                f"data.path: expected a split '{SPLIT}' in '{folder}', got {', '.join(found)}. Use "
                "the folder of one split."
            )
        found = found[SPLIT]
    return found
