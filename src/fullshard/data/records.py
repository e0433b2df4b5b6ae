"""Files of data: which there are, of which kind, and the records in them, each with its place.

    text file, folder of     no records: a file is a whole
    JSONL, JSON, parquet     one record a line, list entry or row
    datasets' own folder     one record a row (what `save_to_disk` wrote)

Everything is read and checked before any rank starts, so a fault in the data costs seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fullshard.config.regular import did_you_mean_path
from fullshard.errors import DataError


class Kind(StrEnum):
    """What files hold."""

    TEXT = "text"
    JSONL = "JSONL"
    JSON = "JSON"
    PARQUET = "parquet"
    DATASETS = "datasets"


SUFFIXES = {
    ".jsonl": Kind.JSONL,
    ".ndjson": Kind.JSONL,
    ".json": Kind.JSON,
    ".parquet": Kind.PARQUET,
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
SPLIT = "train"


@dataclass(frozen=True)
class Record:
    """One record.

    Attributes:
        value: A mapping, unless the file holds something else.
        place: For messages: `chat.jsonl:12`.
    """

    value: Any
    place: str


@dataclass(frozen=True)
class Files:
    """Files of one kind.

    Attributes:
        path: What was named.
        files: In their order.
        kind: Kind of all of them.
    """

    path: Path
    files: tuple[Path, ...]
    kind: Kind

    @property
    def origin(self) -> str:
        """For people."""
        return f"{self.path} ({self.kind}, {len(self.files)} file(s))"

    def records(self, columns: Sequence[str] | None = None) -> Iterator[Record]:
        """The records of all files, of parquet files these columns alone.

        Raises:
            DataError: A file cannot be read; names the line.
        """
        for file in self.files:
            try:
                match self.kind:
                    case Kind.PARQUET:
                        yield from _read_parquet(file, columns)
                    case Kind.JSONL:
                        yield from _read_jsonl(file)
                    case Kind.JSON:
                        yield from _read_json(file)
                    case Kind.DATASETS:
                        yield from _read_datasets(file)
                    case Kind.TEXT:
                        yield Record(read_text(file), str(file))
            except (OSError, ValueError) as error:
                raise DataError(
                    f"data.path: expected a file that can be read, got '{file}' "
                    f"({type(error).__name__}: {error}). Replace the file or name another."
                ) from error


def files_at(path: Path) -> Files:
    """The files of a file or folder.

    Raises:
        DataError: There is none, or they are of several kinds.
    """
    try:
        if any((path / mark).is_file() for mark in DATASETS_MARKS):
            return Files(path, (path,), Kind.DATASETS)
        files = _files_at(path)
    except OSError as error:
        raise DataError(
            f"data.path: expected an existing file or folder, got "
            f"'{str(error.filename or path)[:200]}' ({error.strerror}). Name another."
        ) from error
    table = next((file for file in files if file.suffix.lower() in TABLES), None)
    if table is not None:
        raise DataError(
            f"data.path: expected text, JSONL or parquet, got the table '{table}'. Write its rows "
            "as JSONL, or rename it to .txt to train on its lines as they are."
        )
    examples = {SUFFIXES.get(file.suffix.lower(), Kind.TEXT): file for file in files}
    if len(examples) > 1:
        listed = ", ".join(f"{kind} ({examples[kind].name})" for kind in sorted(examples))
        raise DataError(
            f"data.path: expected files of one kind in '{path}', got {listed}. "
            "Name one file, or a folder with one kind of file."
        )
    return Files(path, tuple(files), next(iter(examples)))


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(_files_below(path))
        if not files:
            raise DataError(
                f"data.path: expected a folder with text, JSONL or parquet files, "
                f"got '{path}' with no file in it. Put files there or name another folder."
            )
        return files
    got = "a pipe or a device" if path.exists() else "which does not exist"
    raise DataError(
        f"data.path: expected a file or folder, got '{path}', {got}. "
        + (did_you_mean_path(path) or "Name a file or a folder of files.")
    )


def _files_below(folder: Path) -> Iterator[Path]:
    """What is not hidden, also in folders below.

    Raises:
        DataError: Something would be left out: a link to none or to a folder, a pipe, a device.
        OSError: A folder cannot be read.
    """
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_file():
            yield entry
        elif entry.is_symlink() or not entry.is_dir():
            what = "a link to nothing" if entry.is_symlink() else "a pipe or a device"
            what = "a link to a folder, which is not followed" if entry.is_dir() else what
            raise DataError(
                f"data.path: expected files that can be read, got '{entry}', {what}. "
                "Mend or remove it."
            )
        else:
            yield from _files_below(entry)


def read_text(file: Path) -> str:
    """The whole file as text; a leading byte-order mark is dropped."""
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts its offset after the mark.
        offset = error.start + (3 if content.startswith(b"\xef\xbb\xbf") else 0)
        line = content.count(b"\n", 0, offset) + 1
        packed = next((name for start, name in PACKED.items() if content.startswith(start)), None)
        advice = f"It is packed ({packed}): unpack it." if packed else "Convert the file to UTF-8."
        raise DataError(
            f"data.path: expected UTF-8 text, got byte 0x{content[offset]:02x} at offset {offset} "
            f"of '{file}' (line {line}). {advice}"
        ) from error


def _read_jsonl(file: Path) -> Iterator[Record]:
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            record = _parsed(line, place)
        except json.JSONDecodeError as error:
            raise DataError(
                f"data.path: expected one JSON object a line, got {error.msg} at {place}, "
                f"column {error.colno}. Mend the line."
            ) from error
        yield Record(record, place)


def _parsed(text: str, place: str) -> Any:
    """The value of a JSON text, all of which can be tokenized.

    Raises:
        DataError: It is nested too deeply, or has numbers or characters that nothing can hold.
        JSONDecodeError: It is no JSON.
    """
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # half of a pair of \ud83d\ude00 alone is no character
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"data.path: expected JSON records, got one that cannot be read at {place} "
            f"({type(error).__name__}: {str(error)[:120]}). Mend or remove it."
        ) from error
    return value


def _read_json(file: Path) -> Iterator[Record]:
    """A .json file: a list of records, or JSONL under another name."""
    content = read_text(file)
    if not content.lstrip().startswith("["):
        yield from _read_jsonl(file)
        return
    try:
        records = _parsed(content, str(file))
    except json.JSONDecodeError as error:
        raise DataError(
            f"data.path: expected a JSON list of objects, got {error.msg} at "
            f"{file}:{error.lineno}, column {error.colno}. Mend the file."
        ) from error
    for number, record in enumerate(records):
        yield Record(record, f"{file}, record {number}")


def open_parquet(file: Path) -> Any:
    """A parquet file, to be closed by the caller.

    Raises:
        DataError: It is none, or pyarrow is missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f"data.path: reading '{file}' needs pyarrow, which is not installed. "
            "Run pip install 'fullshard[data]'."
        ) from error
    try:
        return parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(
            f"data.path: expected a parquet file, got '{file}' that cannot be read ({error}). "
            "Write it again."
        ) from error


def _read_parquet(file: Path, columns: Sequence[str] | None) -> Iterator[Record]:
    number = 0
    with open_parquet(file) as reader:
        for batch in reader.iter_batches(columns=columns):
            for value in batch.to_pylist():
                yield Record(value, f"{file}, record {number}")
                number += 1


def _read_datasets(folder: Path) -> Iterator[Record]:
    """What `save_to_disk` wrote; of several splits the one called train."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.path: reading '{folder}' needs datasets, which is not installed. "
            "Run pip install 'fullshard[data]'."
        ) from error
    try:
        found: Any = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.path: expected a folder of datasets, got '{folder}' that cannot be read "
            f"({error}). Write it again with save_to_disk."
        ) from error
    if isinstance(found, dict):
        if SPLIT not in found:
            raise DataError(
                f"data.path: expected a split '{SPLIT}' in '{folder}', got {', '.join(found)}. "
                "Name the folder of one split."
            )
        found = found[SPLIT]
    for number, value in enumerate(found):
        yield Record(value, f"{folder}, record {number}")
