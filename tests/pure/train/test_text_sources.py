"""Reading text (embedded, text files, JSONL, JSON, parquet) and the errors of bad files."""

import gzip
import json
import os
from pathlib import Path

import pytest

from fullshard.config.schema import DataConfig, RunConfig
from fullshard.data.text import DatasetSettings, make_dataset, text_source
from fullshard.data.tokenize import pieces, shards
from fullshard.errors import DataError
from fullshard.recipes.base import make_data
from fullshard.recipes.registry import Command
from support.text import seeded_text

WHOLE = DataConfig(validation_fraction=0)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def write_parquet(folder, row_group_size=None, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = folder / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


def documents(path, text_column="text"):
    source, found = text_source(path, text_column=text_column), [""]
    for shard in shards(source.spans()):
        for text in pieces(shard, text_column):
            found[-1] += text if isinstance(text, str) else ""
            found += [""] if text is False else []
    return tuple(found[:-1])


def message(path, **options):
    with pytest.raises(DataError) as caught:
        make_dataset([text_source(path, **options)], DatasetSettings(1, 300, WHOLE), None)
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


# Contents of files and the path that is read; __snapshots__/ has the errors.
REFUSED = {
    "another name": ({"corpus.txt": "text"}, "corpsu.txt"),
    "another folder on the way": ({"books/a.txt": "text"}, "boks/a.txt"),
    "another encoding": ({"a.txt": "eins\nzwei gr\xfc\xdfe\n".encode("latin-1")}, "a.txt"),
    "nothing in a text": ({"a.txt": ""}, "a.txt"),
    "nothing in a list": ({"a.jsonl": ""}, "a.jsonl"),
    "nothing in all records": ({"a.jsonl": '{"text": ""}\n'}, "a.jsonl"),
    "nothing in a folder": ({}, "."),
    "two kinds of files": ({"a.txt": "text", "b.jsonl": '{"text": "x"}'}, "."),
    "no such column": ({"a.jsonl": '{"text": "x"}\n{"texts": "y", "id": 1}\n'}, "a.jsonl"),
    "null": ({"a.jsonl": '{"text": "x"}\n{"text": null}\n'}, "a.jsonl"),
    "no object": ({"a.jsonl": '{"text": "x"}\n["x"]\n'}, "a.jsonl"),
    "a number": ({"a.jsonl": '{"text": "x"}\n{"text": 3}\n'}, "a.jsonl"),
    "a key twice": ({"a.jsonl": '{"text": "x", "a": 1, "text": "y"}\n'}, "a.jsonl"),
    "a table": ({"a.csv": "text,label\na,1\n"}, "a.csv"),
    "packed": ({"a.txt.gz": gzip.compress(b"some text")}, "a.txt.gz"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_text_is_named_with_its_place(case, tmp_path, snapshot):
    files, path = REFUSED[case]
    for name, content in files.items():
        write(tmp_path / name, content)
    assert message(tmp_path / path).replace(str(tmp_path), "TMP") == snapshot


def test_records_that_are_read_as_text_are_reported(tmp_path, caplog):
    for rows in (["{}\n", "a\n"], ["[" * 9999, "\n"], ['{"text": "a"}\n'] * 2):
        assert not caplog.messages
        path = write(tmp_path / "a.jsonl.1", "".join(rows))
        text_source(path)
    text_source(path)
    (told,) = caplog.messages
    assert told.startswith(f"data: the JSON records of {path} are read as text.")


def test_splits_that_are_trained_on_together_are_told(tmp_path, caplog):
    write(tmp_path / "a" / "test-0.txt", "one")
    text_source(tmp_path)
    write(tmp_path / "a" / "training.txt", "two")
    text_source(tmp_path)
    assert not caplog.messages
    write(tmp_path / "a" / "train" / "0.txt", "three")
    text_source(tmp_path)
    told = f"data: '{tmp_path}' has files of train and of test; all are trained on"
    assert caplog.messages == [told]


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.jsonl", "a.bin", "a.parquet"])
def test_pointers_to_files_that_git_did_not_fetch_are_refused(tmp_path, name):
    path = write(tmp_path / name, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n" * 9)
    said = f"got a pointer of Git LFS in '{path}'. Run git lfs pull."
    assert said in message(path)


def test_a_file_in_two_sources_is_noted_beside_held_out_data(tmp_path):
    path = write(tmp_path / "a.txt", "one two three four " * 99)
    sources = [text_source(path), text_source(tmp_path / "*.txt")]
    told = "1 file(s) in several sources: one may train on what another holds out"
    settings = DatasetSettings(8, 300, DataConfig(validation_fraction=0.2))
    assert told in make_dataset(sources, settings, None).facts.notes
    assert told not in make_dataset(sources[:1], settings, None).facts.notes


def test_a_name_that_is_too_long_is_an_error(tmp_path):
    assert "File name too long" in message(tmp_path / ("x" * 300))


def test_link_that_leads_to_nothing_is_named(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "a.txt"):
        assert message(path).endswith(f"'{tmp_path / 'loop'}' is a broken link.")


HOLED = {  # and the place of the first zero byte
    "UTF-16": (("eins zwei drei\n" * 100).encode("utf-16-le"), 1),
    "UTF-16 of another script": (
        ("\u043e\u0434\u0438\u043d \u0434\u0432\u0430 \u0442\u0440\u0438\n" * 100).encode(
            "utf-16-le"
        ),
        9,
    ),
    "UTF-32": (("eins zwei drei\n" * 100).encode("utf-32-be"), 0),
    "the end was not written": (b"eins " * 999 + b"\0" * 9, 4995),
    "an archive": (b"a.txt" + b"\0" * 95 + b"eins " * 999, 5),
}


@pytest.mark.parametrize("case", HOLED)
def test_many_zero_bytes_in_a_file_are_no_text(tmp_path, case):
    content, offset = HOLED[case]
    path = write(tmp_path / "wide.txt", content)
    assert f"byte 0x00 at offset {offset} of '{path}' (line 1)" in message(path)
    write(path, b"\0".join([b"zwei drei\n" * 10] * 100))  # single zero bytes between documents
    assert make_dataset([text_source(path)], DatasetSettings(1, 300, WHOLE), None)


def test_missing_parquet_column_names_the_columns(tmp_path):
    said = message(write_parquet(tmp_path, content=["x"]))
    assert "got 'content' at" in said
    assert "expected text in column 'content'" not in said


def test_parquet_column_of_numbers_is_refused(tmp_path):
    said = message(write_parquet(tmp_path, text=[1, 2]))
    assert "expected text in column 'text', got int at" in said


def test_null_record_of_a_parquet_file_is_refused(tmp_path):
    assert "record 1" in message(write_parquet(tmp_path, text=["x", None]))


def test_columns_of_one_name_are_refused(tmp_path):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    table = pyarrow.table([["a", "b"], ["c", "d"]], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    assert "it has 2 columns 'text'" in message(tmp_path / "a.parquet")


def test_a_file_that_is_no_parquet_is_an_error(tmp_path):
    assert "expected a parquet file; got ArrowInvalid" in message(
        write(tmp_path / "a.parquet", "not parquet")
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "x"', "column 13"),
        ("[" * 100_000 + "]" * 100_000, "RecursionError"),
        ('{"text": "a", "n": ' + "9" * 5000 + "}", "got one that cannot be read"),
        ('{"text": "a \\ud83d b"}', "surrogates not allowed"),
    ],
    ids=range(4),
)
def test_broken_line_is_named_with_file_and_number(tmp_path, line, expected):
    path = write(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n{line}\n')
    said = message(path)
    assert expected in said
    assert f"{path}:2" in said


@pytest.mark.parametrize("what", ["link", "linked", "pipe", "folder"])
def test_no_file_of_a_folder_is_silently_skipped(tmp_path, monkeypatch, what):
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
    words = {"link": "is a broken link", "linked": "one way to each folder", "pipe": "a pipe"}
    assert words.get(what, "Permission denied") in said
    if what != "pipe":  # `glob` takes each file forty times, or leaves some out
        assert f"'{place}'" in message(tmp_path / "**" / "*.txt")


@pytest.mark.parametrize(("name", "has_effect"), [("a.txt", False), ("a.jsonl", True)])
def test_a_column_with_plain_text_is_reported_to_have_no_effect(tmp_path, name, has_effect):
    text = seeded_text(2000)
    path = write(tmp_path / name, json.dumps({"body": text}) if has_effect else text)
    made = make_dataset(
        [text_source(path, text_column="body")],
        DatasetSettings(8, 300, WHOLE.model_copy(update={"dtype": "uint16"})),
        None,
    )
    assert any("data.dtype has no effect on" in note for note in made.facts.notes)
    said = [note for note in made.facts.notes if "text_column has no effect on" in note]
    assert bool(said) is not has_effect


def test_keys_of_text_with_conversations_are_reported_to_have_no_effect(tmp_path):
    row = {"messages": [{"role": r, "content": seeded_text(20)} for r in ("user", "assistant")]}
    path = write(tmp_path / "a.jsonl", "\n".join([json.dumps(row)] * 9))
    data = {"path": str(path), "separate_documents": True, "text_column": "body"}
    config = RunConfig(model={"config": {"model_type": "llama"}}, data=data)
    made = make_data(config, Command.SFT, None, 300)
    said = [note for note in made.facts.notes if "has no effect on conversations" in note]
    assert [note.split()[0] for note in said] == ["data.text_column", "data.separate_documents"]
