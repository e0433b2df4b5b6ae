"""Where training text comes from: the embedded text, or the user's own files.

    embedded text            one document a topic of the language reference
    text file, folder of     one document a file
    JSONL, parquet           one document a record, taken from one column

Everything is read and checked before any rank starts, so a fault in the data costs seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.values import nearest
from fullshard.errors import DataError

RECORD_SUFFIXES = {".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSON", ".parquet": "parquet"}


@dataclass(frozen=True)
class Corpus:
    """Documents in their order.

    Attributes:
        documents: The texts; none of them empty.
        are_records: True where documents are independent records (the held-out part is then made
            of whole ones), False where they are pieces of one running text.
        origin: What they were read from, for people.
    """

    documents: tuple[str, ...]
    are_records: bool
    origin: str

    @property
    def num_characters(self) -> int:
        return sum(len(document) for document in self.documents)


def read_corpus(path: Path | None, text_column: str = "text") -> Corpus:
    """Reads the text to train on.

    Args:
        path: A file, a folder, or None for the text that ships with every Python.
        text_column: Name of the column that holds the text of a record.

    Raises:
        DataError: Nothing is there, or it cannot be read, with file and place.
    """
    if path is None:
        return embedded_corpus()
    files = _files_at(path)
    kinds = {RECORD_SUFFIXES.get(file.suffix.lower(), "text") for file in files}
    if len(kinds) > 1:
        examples = {RECORD_SUFFIXES.get(file.suffix.lower(), "text"): file for file in files}
        listed = ", ".join(f"{kind} ({examples[kind].name})" for kind in sorted(kinds))
        raise DataError(
            f"data.path: expected files of one kind in '{path}', got {listed}. "
            "Name one file, or a folder with one kind of file."
        )
    kind = kinds.pop()
    documents = tuple(
        text for file in files for text in _read_file(file, kind, text_column) if text
    )
    if not documents:
        raise DataError(_nothing_found(path, files, kind))
    return Corpus(documents, kind != "text", f"{path} ({kind}, {len(files)} file(s))")


def embedded_corpus() -> Corpus:
    """The language reference that ships with every Python, one document a topic."""
    from pydoc_data.topics import topics

    documents = tuple(topics[name] for name in sorted(topics) if topics[name])
    return Corpus(documents, False, "the language reference in pydoc_data (ships with Python)")


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not _is_hidden(file.relative_to(path))
        )
        if not files:
            raise DataError(
                f"data.path: expected a folder with text, JSONL or parquet files, "
                f"got '{path}' with no file in it. Put files there or name another folder."
            )
        return files
    raise DataError(_missing_path(path))


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _missing_path(path: Path) -> str:
    """The message for a path that does not exist, with the nearest name that does."""
    existing = path.parent
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    wanted = path.relative_to(existing).parts[0] if existing in path.parents else path.name
    guess = nearest(wanted, [entry.name for entry in existing.iterdir()])
    hint = f"Did you mean '{existing / guess}'?" if guess else f"Looked in '{existing}'."
    return f"data.path: expected an existing file or folder, got '{path}'. {hint}"


def _nothing_found(path: Path, files: list[Path], kind: str) -> str:
    what = "text" if kind == "text" else f"{kind} records with text"
    sizes = sum(file.stat().st_size for file in files)
    return (
        f"data.path: expected {what}, got none in '{path}' ({len(files)} file(s), {sizes} bytes). "
        "Name a file that is not empty."
    )


def _read_file(file: Path, kind: str, text_column: str) -> Iterator[str]:
    match kind:
        case "parquet":
            yield from _read_parquet(file, text_column)
        case "JSONL":
            yield from _read_jsonl(file, text_column)
        case "JSON":
            yield from _read_json(file, text_column)
        case _:
            yield _read_text(file)


def _read_text(file: Path) -> str:
    """The whole file as text; a leading byte-order mark is dropped."""
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # utf-8-sig counts its offset after the mark.
        offset = error.start + (3 if content.startswith(b"\xef\xbb\xbf") else 0)
        line = content.count(b"\n", 0, offset) + 1
        raise DataError(
            f"data.path: expected UTF-8 text, got byte 0x{content[offset]:02x} at offset {offset} "
            f"of '{file}' (line {line}). Convert the file to UTF-8."
        ) from error


def _read_jsonl(file: Path, text_column: str) -> Iterator[str]:
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"data.path: expected one JSON object a line, got {error.msg} at {place}, "
                f"column {error.colno}. Mend the line."
            ) from error
        yield _text_of(record, text_column, place)


def _read_json(file: Path, text_column: str) -> Iterator[str]:
    """A .json file: a list of records, or JSONL under another name."""
    content = _read_text(file)
    if not content.lstrip().startswith("["):
        yield from _read_jsonl(file, text_column)
        return
    try:
        records = json.loads(content)
    except json.JSONDecodeError as error:
        raise DataError(
            f"data.path: expected a JSON list of objects, got {error.msg} at "
            f"{file}:{error.lineno}, column {error.colno}. Mend the file."
        ) from error
    for number, record in enumerate(records):
        yield _text_of(record, text_column, f"{file}, record {number}")


def _text_of(record: Any, text_column: str, place: str) -> str:
    if not isinstance(record, dict):
        raise DataError(
            f"data.path: expected a JSON object, got {type(record).__name__} at {place}. "
            f'Write {{"{text_column}": "..."}}.'
        )
    if text_column not in record:
        raise DataError(_missing_column(text_column, list(record), place))
    value = record[text_column]
    if not isinstance(value, str):
        raise DataError(
            f"data.text_column: expected text in column '{text_column}', "
            f"got {type(value).__name__} at {place}. Name a column that holds text."
        )
    return value


def _missing_column(text_column: str, present: list[str], place: str) -> str:
    guess = nearest(text_column, present)
    hint = f"Did you mean '{guess}'?" if guess else "Name one of them with data.text_column."
    columns = ", ".join(f"'{name}'" for name in present) or "none"
    return f"data.text_column: expected a column '{text_column}', got {columns} at {place}. {hint}"


def _read_parquet(file: Path, text_column: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f"data.path: reading '{file}' needs pyarrow, which is not installed. "
            "Run pip install 'fullshard[data]'."
        ) from error
    try:
        reader = parquet.ParquetFile(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(
            f"data.path: expected a parquet file, got '{file}' that cannot be read ({error}). "
            "Write it again."
        ) from error
    with reader:
        present = reader.schema_arrow.names
        if text_column not in present:
            raise DataError(_missing_column(text_column, present, str(file)))
        column_type = reader.schema_arrow.field(text_column).type
        if not (pyarrow.types.is_string(column_type) or pyarrow.types.is_large_string(column_type)):
            raise DataError(
                f"data.text_column: expected text in column '{text_column}', got {column_type} "
                f"in '{file}'. Name a column that holds text."
            )
        number = 0
        for batch in reader.iter_batches(columns=[text_column]):
            for value in batch.column(0).to_pylist():
                yield _text_of({text_column: value}, text_column, f"{file}, record {number}")
                number += 1
