"""Where training text comes from: the embedded text, or the user's own files.

    embedded text            one document a topic of the language reference
    text file, folder of     one document a file
    JSONL, parquet           one document a record, taken from one column

Everything is read and checked before any rank starts, so a fault in the data costs seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fullshard.config.values import nearest
from fullshard.data.records import Files, Kind, Record, files_at, open_parquet
from fullshard.errors import DataError


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
    files = files_at(path)
    documents = tuple(text for text in _documents(files, text_column) if text)
    if not documents:
        raise DataError(_nothing_found(files))
    return Corpus(documents, files.kind is not Kind.TEXT, files.origin)


def embedded_corpus() -> Corpus:
    """The language reference that ships with every Python, one document a topic."""
    from pydoc_data.topics import topics

    documents = tuple(topics[name] for name in sorted(topics) if topics[name])
    return Corpus(documents, False, "the language reference in pydoc_data (ships with Python)")


def _nothing_found(files: Files) -> str:
    what = "text" if files.kind is Kind.TEXT else f"{files.kind} records with text"
    sizes = sum(file.stat().st_size for file in files.files)
    return (
        f"data.path: expected {what}, got none in '{files.path}' ({len(files.files)} file(s), "
        f"{sizes} bytes). Name a file that is not empty."
    )


def _documents(files: Files, text_column: str) -> Iterator[str]:
    if files.kind is Kind.TEXT:
        yield from (record.value for record in files.records())
        return
    if files.kind is Kind.PARQUET:
        for file in files.files:
            _check_column(file, text_column)
    for record in files.records([text_column]):
        yield _text_of(record, text_column)


def _text_of(found: Record, text_column: str) -> str:
    record, place = found.value, found.place
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


def _check_column(file: Path, text_column: str) -> None:
    """A parquet file says what its columns hold before they are read."""
    import pyarrow

    with open_parquet(file) as reader:
        present = reader.schema_arrow.names
        if text_column not in present:
            raise DataError(_missing_column(text_column, present, str(file)))
        column_type = reader.schema_arrow.field(text_column).type
    if not (pyarrow.types.is_string(column_type) or pyarrow.types.is_large_string(column_type)):
        raise DataError(
            f"data.text_column: expected text in column '{text_column}', got {column_type} "
            f"in '{file}'. Name a column that holds text."
        )
