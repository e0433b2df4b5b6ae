"""Hold-out, joining and cutting into sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.schema import ModelConfig
from fullshard.data.text import Corpus, hold_out, pack
from fullshard.data.tokenizer import encode, join, load_tokenizer, token_dtype, train_tokenizer
from fullshard.errors import ConfigError, DataError
from support.text import seeded_text

texts = st.text(alphabet="ab\n", min_size=1, max_size=40)


@given(st.lists(texts, min_size=1, max_size=8), st.floats(0.0, 0.9))
def test_running_text_is_cut_once_and_nothing_is_lost(documents, fraction):
    corpus = Corpus(tuple(documents), False, "test")
    split = hold_out(corpus, fraction)
    assert "".join(split.train) + "".join(split.held_out) == "".join(documents)
    held_out = sum(map(len, split.held_out))
    assert held_out >= fraction * corpus.num_characters


def test_running_text_is_cut_at_a_line_end():
    split = hold_out(Corpus(("one\ntwo\nthree\nfour\n",), False, "test"), 0.3)
    assert split.held_out == ("three\nfour\n",)
    assert split.train == ("one\ntwo\n",)


@given(st.integers(2, 60), st.floats(0.01, 0.9))
def test_records_stay_whole_and_at_least_one_is_on_each_side(count, fraction):
    documents = tuple(f"record {number}" for number in range(count))
    split = hold_out(Corpus(documents, True, "test"), fraction)
    assert split.train + split.held_out == documents
    assert split.train
    assert split.held_out


def test_no_fraction_holds_nothing_out():
    assert hold_out(Corpus(("a", "b"), True, "test"), 0.0).held_out == ()


def test_sequences_are_the_stream_and_the_rest_is_dropped():
    stream = join([[1, 2, 3], [4, 5], [6, 7, 8]], vocab_size=10)
    assert pack(stream, 3, "training").tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("what", "way_out"), [("training", "more text"), ("held-out", "validation_fraction")]
)
def test_too_few_tokens_for_one_sequence_says_how_many_there_are(what, way_out):
    with pytest.raises(DataError, match=rf"at least 8 {what} tokens .*got 3\..*{way_out}"):
        pack(join([[1, 2, 3]], vocab_size=10), 8, what)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(512, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_token_dtype_is_the_smallest_that_holds_every_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    assert token_dtype(vocab_size).type(vocab_size - 1) == vocab_size - 1


def test_tokenizer_gives_back_any_text_and_keeps_to_its_size(tmp_path):
    text = seeded_text(200)
    tokenizer = train_tokenizer([text], 300)
    assert len(tokenizer) == 300
    strange = "na\u00efve \u2028 tab\t  two spaces \U0001f600 \x00"
    for one in (text, strange):
        (ids,) = encode(tokenizer, [one])
        assert ids[-1] == tokenizer.eos_token_id == 0
        assert tokenizer.decode(ids[:-1]) == one
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(ModelConfig(name_or_path=str(tmp_path)))
    assert again is not None
    assert list(encode(again, [text])) == list(encode(tokenizer, [text]))


def test_long_documents_are_encoded_in_pieces_that_end_with_a_line(monkeypatch):
    text = seeded_text(40)
    tokenizer = train_tokenizer([text], 300)
    (whole,) = encode(tokenizer, [text])
    monkeypatch.setattr("fullshard.data.tokenizer.PIECE_CHARACTERS", 100)
    monkeypatch.setattr("fullshard.data.tokenizer.DOCUMENTS_AT_ONCE", 2)
    documents = [text, "short", text]
    pieces = list(encode(tokenizer, documents))
    assert len(pieces) > 40
    assert all(tokenizer.decode(piece).endswith(("\n", "<|endoftext|>")) for piece in pieces)
    joined = [token for piece in pieces for token in piece]
    (short,) = encode(tokenizer, ["short"])
    assert joined == whole + short + whole


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
