"""Holding out, joining and cutting into sequences."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.schema import DataConfig, ModelConfig
from fullshard.data.arrays import Rows, tokens_in
from fullshard.data.records import Corpus, FileKind, read_records, read_text, split
from fullshard.data.text import DatasetSettings, make_dataset, text_source
from fullshard.data.tokenize import (
    cut,
    encode,
    encoder_of,
    load_tokenizer,
    token_dtype,
    train_tokenizer,
    words_of,
)
from fullshard.errors import ConfigError, DataError
from support.text import seeded_text

texts = st.text(alphabet="ab\n", min_size=1, max_size=40)


def held_out(folder, kind, fraction, *contents):
    """Returns trained and held-out text of each file."""
    files = []
    for number, content in enumerate(contents):
        files.append(folder / f"{number:02}")
        files[-1].write_text(content)
    parts = split(Corpus(folder, tuple(files), kind).spans(), fraction)
    return [["".join(read_text(span)) for span in part] for part in parts]


@given(st.lists(texts, min_size=1, max_size=8), st.floats(0.0, 0.9))
def test_running_text_is_cut_once_and_nothing_is_lost(tmp_path, documents, fraction):
    train, rest = held_out(tmp_path, FileKind.TEXT, fraction, *documents)
    assert "".join(train + rest) == "".join(documents)
    assert sum(map(len, rest)) >= fraction * sum(map(len, documents))


def test_running_text_is_cut_at_a_line_end(tmp_path):
    parts = held_out(tmp_path, FileKind.TEXT, 0.3, "one\ntwo\nthree\nfour\n")
    assert parts == [["one\ntwo\n"], ["three\nfour\n"]]


def test_running_text_without_lines_is_cut_between_characters(tmp_path):
    train, rest = held_out(tmp_path, FileKind.TEXT, 0.5, "\u20ac" * 101)
    assert train + rest == ["\u20ac" * 50, "\u20ac" * 51]


@given(st.integers(2, 60), st.floats(0.01, 0.9))
def test_records_stay_whole_and_at_least_one_is_on_each_side(tmp_path, count, fraction):
    lines = [f'{{"text": "record {number}"}}\n' for number in range(count)]
    train, rest = held_out(tmp_path, FileKind.JSONL, fraction, "".join(lines))
    assert ("".join(train) + "".join(rest)).splitlines(keepends=True) == lines
    assert "".join(train).endswith("\n")
    assert rest


def test_a_fraction_of_zero_holds_out_no_text(tmp_path):
    assert held_out(tmp_path, FileKind.JSONL, 0.0, "1\n", "2\n") == [["1\n", "2\n"], []]


def test_a_single_record_is_trained_on(tmp_path):
    assert held_out(tmp_path, FileKind.JSONL, 0.1, '{"text": "a"}') == [['{"text": "a"}'], []]


def test_sequences_are_cut_from_the_joined_files_and_the_rest_is_dropped(tmp_path):
    files = []
    for name, tokens in (("a", [1, 2, 3]), ("b", []), ("c", [4, 5]), ("d", [6, 7, 8])):
        files.append(tmp_path / f"{name}.npy")
        np.save(files[-1], np.array(tokens, np.uint16))
    rows = Rows([[tokens_in(file, None) for file in files], [tokens_in(files[0], None)]], 3)
    assert rows.take(np.array([1, 0, 2])).tolist() == [[4, 5, 6], [1, 2, 3], [1, 2, 3]]
    assert (len(rows), rows.num_dropped) == (3, 2)


@pytest.mark.parametrize(
    ("fraction", "what"),
    [(0.0, "100 training tokens .*more text"), (0.1, "100 held-out tokens .*validation_fraction")],
)
def test_too_few_tokens_for_one_sequence_says_how_many_there_are(
    tmp_path, monkeypatch, fraction, what
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(seeded_text(12 if fraction else 2))
    settings = DatasetSettings(100, 300, DataConfig(validation_fraction=fraction))
    with pytest.raises(DataError, match=f"at least {what}"):
        make_dataset([text_source(tmp_path / "a.txt")], settings, None)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(512, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_token_dtype_is_the_smallest_that_holds_every_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    assert token_dtype(vocab_size).type(vocab_size - 1) == vocab_size - 1


def test_the_tokenizer_decodes_any_text_and_keeps_its_size(tmp_path):
    text = seeded_text(200)
    tokenizer = train_tokenizer([text], 300)
    assert len(tokenizer) == 300
    strange = "na\u00efve \u2028 tab\t  two spaces \U0001f600 \x00"
    encoder = encoder_of(tokenizer)
    for one in (text, strange):
        ids = [*itertools.chain(*encode(encoder, [one, False], {False: [0]}))]
        assert ids[-1] == tokenizer.eos_token_id == 0
        assert tokenizer.decode(ids[:-1]) == one
        assert tokenizer(one, add_special_tokens=False)["input_ids"] == ids[:-1]
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))
    assert again is not None
    assert words_of(again) == words_of(tokenizer)


def test_a_tokenizer_whose_words_share_a_number_is_refused(tmp_path):
    train_tokenizer([seeded_text(200)], 300).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = json.loads(file.read_text())
    vocab = whole["model"]["vocab"]
    *_, before, last = sorted(vocab, key=vocab.get)
    vocab[last] = vocab[before]
    file.write_text(json.dumps(whole))
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"expected one that can be read again; got .*tokenizer"):
        encoder_of(tokenizer)


def test_long_documents_are_encoded_in_pieces_that_end_with_a_line(monkeypatch):
    text = seeded_text(40)
    tokenizer = train_tokenizer([text], 300)
    encoder = encoder_of(tokenizer)
    (whole,) = encode(encoder, [text], {})
    monkeypatch.setattr("fullshard.data.tokenize.PIECE_CHARACTERS", 100)
    pieces = list(encode(encoder, cut(text), {}))
    assert len(pieces) > 20
    assert all(tokenizer.decode(piece).endswith("\n") for piece in pieces)
    assert [token for piece in pieces for token in piece] == list(whole)


def test_text_is_read_in_pieces_and_a_character_is_never_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("fullshard.data.records.PIECE", 7)
    text = "\ufeffgr\u00fc\u00dfe \u20ac\n" * 9 + "\U0001f600" * 9
    (tmp_path / "a.txt").write_text(text)
    (span,) = Corpus(tmp_path, (tmp_path / "a.txt",), FileKind.TEXT).spans()
    assert "".join(read_text(span)) == text[1:]
    middle = text[:30].encode()
    assert "".join(read_text(span.part(len(middle), span.stop))) == text[30:]


def test_a_span_contains_the_lines_that_begin_in_it(tmp_path):
    lines = [f'{{"n": {number}}}\n' for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (span,) = Corpus(tmp_path, (tmp_path / "a.jsonl",), FileKind.JSONL).spans()
    place = sum(map(len, lines[:12]))
    (first, *_) = read_records(span.part(place, span.stop))
    assert (first.value, str(first)) == ({"n": 12}, f"{tmp_path / 'a.jsonl'}:13")


def test_tokenizer_is_the_same_every_time():
    text = seeded_text(100)
    first, second = (train_tokenizer([text], 320).get_vocab() for _ in range(2))
    assert first == second


def test_short_text_gives_a_smaller_tokenizer():
    assert 257 <= len(train_tokenizer(["ab ab"], 400)) < 300


def test_vocabulary_without_room_for_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"at least 257 .*got 100"):
        train_tokenizer(["text"], 100)


def test_folder_without_tokenizer_files_has_none(tmp_path):
    assert load_tokenizer(ModelConfig(name_or_path=str(tmp_path))) is None
