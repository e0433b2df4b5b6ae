"""Reading text: embedded, text files, JSONL, JSON, parquet; and what is said when it fails."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from fullshard.data.text import DatasetSettings, Source, make_dataset
from fullshard.data.tokenize import pieces, shards
from fullshard.errors import DataError
from support.text import seeded_text


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write_parquet(folder: Path, row_group_size: int | None = None, **columns: list) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


def documents(path: Path | None, text_column: str = "text") -> tuple[str, ...]:
    source, found = Source.at(path, text_column=text_column), [""]
    for shard in shards(source.files.spans(), {}):
        for text in pieces(shard, text_column):
            found[-1] += text or ""
            found += [""] if text is None else []
    return tuple(found[:-1])


def message(path: Path, **options: str) -> str:
    with pytest.raises(DataError) as caught:
        make_dataset([Source.at(path, **options)], DatasetSettings(1, 0.0, 300), None)
    return str(caught.value)


def test_embedded_text_is_one_document_a_topic_in_key_order():
    from pydoc_data.topics import topics

    assert documents(None) == tuple(topics[name] for name in sorted(topics))


def test_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf" + "gr\u00fc\u00dfe\r\nzwei\n".encode())
    assert documents(path) == ("gr\u00fc\u00dfe\r\nzwei\n",)


def test_folder_of_text_is_read_in_name_order_without_hidden_files(tmp_path):
    write(tmp_path / "b.md", "second")
    write(tmp_path / "a" / "z.txt", "first")
    write(tmp_path / ".cache" / "x.txt", "hidden")
    write(tmp_path / "c.txt", "")
    assert documents(tmp_path) == ("first", "second")


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_jsonl_records_are_documents_and_blank_lines_none(tmp_path, name):
    path = write(tmp_path / name, '{"text": "one"}\n\n{"text": "two\\u2028", "id": 3}\n')
    assert documents(path) == ("one", "two\u2028")


def test_json_list_is_read_as_records(tmp_path):
    path = write(tmp_path / "a.json", json.dumps([{"body": "one"}, {"body": "two"}]))
    assert documents(path, text_column="body") == ("one", "two")


def test_parquet_column_is_read_over_all_row_groups(tmp_path):
    texts = seeded_text(50).splitlines()
    path = write_parquet(tmp_path, row_group_size=7, id=list(range(50)), text=texts)
    assert list(documents(path)) == texts


def test_missing_path_names_the_nearest_one(tmp_path):
    write(tmp_path / "corpus.txt", "text")
    said = message(tmp_path / "corpsu.txt")
    assert f"got '{tmp_path / 'corpsu.txt'}'" in said
    assert f"Did you mean '{tmp_path / 'corpus.txt'}'?" in said
    assert "File name too long" in message(tmp_path / ("x" * 300))


def test_link_that_leads_to_nothing_is_named(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "a.txt"):
        assert message(path).endswith(f"'{tmp_path / 'loop'}' is a link that leads to nothing.")


def test_missing_folder_on_the_way_is_the_one_that_is_named(tmp_path):
    write(tmp_path / "books" / "a.txt", "text")
    assert f"Did you mean '{tmp_path / 'books'}'?" in message(tmp_path / "boks" / "a.txt")


def test_wrong_encoding_names_file_byte_offset_and_line(tmp_path):
    path = write(tmp_path / "latin.txt", "eins\nzwei gr\xfc\xdfe\n".encode("latin-1"))
    said = message(path)
    assert f"byte 0xfc at offset 12 of '{path}' (line 2)" in said
    assert "Convert the file to UTF-8." in said


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-32-be"])
def test_wide_characters_without_a_mark_are_no_text(tmp_path, encoding):
    path = write(tmp_path / "wide.txt", ("eins zwei drei\n" * 100).encode(encoding))
    assert f"byte 0x00 at offset {encoding.endswith('le'):d} of '{path}' (line 1)" in message(path)
    write(path, b"eins\0" + b"zwei drei\n" * 100)  # one zero byte is text
    assert make_dataset([Source.at(path)], DatasetSettings(1, 0.0, 300), None)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_empty_file_is_said_with_its_size(tmp_path, name):
    said = message(write(tmp_path / name, ""))
    assert "got none in" in said
    assert "(1 file(s), 0 bytes)" in said


def test_records_without_any_text_are_no_data(tmp_path):
    assert "JSONL records with text" in message(write(tmp_path / "a.jsonl", '{"text": ""}\n'))


def test_empty_folder_is_said(tmp_path):
    assert "with no file in it" in message(tmp_path)


def test_folder_with_two_kinds_of_file_names_one_of_each(tmp_path):
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "b.jsonl", '{"text": "x"}')
    assert "got JSONL (b.jsonl), text (a.txt)" in message(tmp_path)


def test_missing_column_names_place_columns_and_the_nearest(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n{"texts": "y", "id": 1}\n')
    said = message(path)
    assert f"got 'texts', 'id' at {path}:2" in said
    assert "Did you mean 'texts'?" in said


def test_missing_parquet_column_names_the_columns(tmp_path):
    said = message(write_parquet(tmp_path, content=["x"]))
    assert "got 'content' at" in said
    assert "expected text in column 'content'" not in said


def test_parquet_column_of_numbers_is_refused(tmp_path):
    said = message(write_parquet(tmp_path, text=[1, 2]))
    assert "expected text in column 'text', got int64" in said


def test_null_record_is_refused_in_either_format(tmp_path):
    assert "record 1" in message(write_parquet(tmp_path, text=["x", None]))
    path = write(tmp_path / "b.jsonl", '{"text": "x"}\n{"text": null}\n')
    assert f"got NoneType at {path}:2" in message(path)


def test_file_that_is_no_parquet_is_said(tmp_path):
    assert "expected a parquet file; got ArrowInvalid" in message(
        write(tmp_path / "a.parquet", "not parquet")
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "x"', "column 13"),
        ('["x"]', "expected a JSON object, got list at"),
        ('{"text": 3}', "expected text in column 'text', got int at"),
        ('{"text": "x", "a": 1, "text": "y"}', "the key 'text' comes twice"),
        ("[" * 100_000 + "]" * 100_000, "RecursionError"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "got one that cannot be read"),
        ('{"text": "a \\ud83d b"}', "surrogates not allowed"),
    ],
    ids=range(7),
)
def test_broken_line_is_named_with_file_and_number(tmp_path, line, expected):
    path = write(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n{line}\n')
    said = message(path)
    assert expected in said
    assert f"{path}:2" in said


@pytest.mark.parametrize("what", ["link", "linked", "pipe", "folder"])
def test_nothing_of_a_folder_is_left_out_in_silence(tmp_path, monkeypatch, what):
    write(tmp_path / "a.txt", "text")
    place = tmp_path / "below" / "b.txt"
    write(tmp_path / "below" / "c.txt", "more")
    (tmp_path / ".hidden").symlink_to("nowhere")
    assert len(documents(tmp_path)) == 2
    if what in ("link", "linked"):
        place.symlink_to("nowhere" if what == "link" else "..")
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place = place.parent
        iterdir = Path.iterdir

        def refused(folder):
            if folder == place:
                raise PermissionError(13, "Permission denied", str(folder))
            return iterdir(folder)

        monkeypatch.setattr(Path, "iterdir", refused)
    said = message(tmp_path)
    assert f"got '{place}'" in said
    words = {"link": "a link to nothing", "linked": "a link to a folder", "pipe": "a pipe"}
    assert words.get(what, "Permission denied") in said


def test_tables_are_no_text_and_packed_files_are_named(tmp_path):
    assert "got the table" in message(write(tmp_path / "a.csv", "text,label\na,1\n"))
    packed = write(tmp_path / "a.txt.gz", gzip.compress(b"some text"))
    assert message(packed).endswith("It is packed (gzip): unpack it.")
