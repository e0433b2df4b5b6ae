"""Text that is tokenized during training, and documents that do not attend to each other."""

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fullshard.config.schema import DataConfig, RunConfig
from fullshard.data import text, tokenize
from fullshard.data.dataset import IGNORED, BatchMaker, load_facts
from fullshard.data.text import Dataset, DatasetSettings, make_dataset, text_source
from fullshard.data.tokenize import train_tokenizer
from fullshard.errors import ConfigError, DataError
from fullshard.recipes.base import causal_lm_loss, inputs_of, make_data
from fullshard.recipes.registry import Command
from fullshard.run.optim import plan_steps
from fullshard.run.resume import Resume, check_data
from support.sizes import sizes_of
from support.text import seeded_text

LENGTH, BUFFER = 16, 24


def streamed(buffer):
    data = DataConfig(validation_fraction=0.1, streaming=True, shuffle_buffer=buffer)
    return DatasetSettings(LENGTH, 300, data, seed=3)


STREAMED = streamed(BUFFER)


@pytest.fixture(autouse=True)
def small_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenize, "SHARD_BYTES", 4_000)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([seeded_text(200)], 300)


def sources(tmp_path, *counts):
    for number, count in enumerate(counts):
        (tmp_path / f"{number}.txt").write_text(seeded_text(count))
    weights = range(1, 1 + len(counts))
    return [text_source(tmp_path / f"{n}.txt", w) for n, w in enumerate(weights)]


def plan_of(data, per_device, ranks, batch=None):
    training = RunConfig(
        model={"config": {"model_type": "llama"}},
        training={"per_device_train_batch_size": per_device, "max_steps": 40, "seed": 3},
    ).training
    return plan_steps(training, data.facts, ranks, batch)


def order_of(*args, **more):
    return plan_of(*args, **more).order


def steps_of(data, order, ranks, steps):
    """Returns the tokens of every step over all ranks, from the makers of the ranks' workers."""
    nothing = np.empty((0, ranks, 1), np.int64)
    makers = [
        pickle.loads(pickle.dumps(BatchMaker(data.without_tokenizer(), order, nothing, rank)))
        for rank in range(ranks)
    ]
    for step in steps:
        made = [micro for maker in makers for micro in maker((False, step))]
        yield sorted(itertools.chain(*(one["input_ids"].tolist() for one in made)))


def num_made(tmp_path):
    return len(list((tmp_path / "cache").rglob("*.npy")))


def test_a_step_has_the_same_rows_for_any_ranks_and_after_a_resume(tmp_path, tokenizer):
    data = make_dataset(sources(tmp_path, 300, 200), STREAMED, tokenizer)
    order = order_of(data, 4, 1)
    expected = list(steps_of(data, order, 1, range(40)))
    assert 2 * BUFFER < 40 * 4
    two = order_of(data, 2, 2)
    assert list(steps_of(data, two, 2, range(40))) == expected
    four = order_of(data, 1, 3, batch=4)  # one slot stays empty
    found = [[row for row in step if any(row)] for step in steps_of(data, four, 3, range(10))]
    assert all(len(rows) >= 4 for rows in found)
    assert all(
        set(map(tuple, a)) <= set(map(tuple, b)) for a, b in zip(expected, found, strict=False)
    )
    data.save(tmp_path / "run")
    _, facts, read = load_facts(tmp_path / "run")
    again = Dataset.load(tmp_path / "run", facts, read)
    assert list(steps_of(again, order, 1, range(33, 40))) == expected[33:]
    for file in (tmp_path / "cache").rglob("*.npy"):  # as on another machine
        file.unlink()
    again = Dataset.load(tmp_path / "run", facts, read)
    assert list(steps_of(again, order, 1, range(38, 40))) == expected[38:]


def test_a_pass_has_the_tokens_of_data_tokenized_in_advance(tmp_path, tokenizer):
    """Parts in order form one text; each part occurs once per pass."""
    found = sources(tmp_path, 600)
    whole = make_dataset(
        found, DatasetSettings(LENGTH, 300, DataConfig(validation_fraction=0.1)), tokenizer
    )
    data = make_dataset(found, STREAMED, tokenizer)
    (parts,) = data.train.found.parts
    count = len(parts.shards)
    assert count > 3
    in_text = [file.count for file in whole.train.sources[0]]
    passes = []
    for turn in range(2):
        numbers = range(turn * count, (turn + 1) * count)
        taken = [data.train.tokens(0, number) for number in numbers]
        assert sorted(one.count for one in taken) == sorted(in_text)
        assert len({one.file for one in taken}) == count
        passes.append([Path(one.file).stem for one in taken])
    assert [shard.name for shard in parts.shards] != passes[0] != passes[1]
    total = sum(in_text) // LENGTH
    rows = data.train.take(np.arange(total)).ravel()
    assert sorted(rows.tolist())[:50] == sorted(whole.train.take(np.arange(total)).ravel())[:50]
    assert np.bincount(rows).sum() == total * LENGTH
    assert data.facts.num_train_sequences == pytest.approx(len(whole.train), rel=0.1)
    assert data.facts.num_held_out_sequences == whole.facts.num_held_out_sequences


def test_only_needed_parts_and_a_few_ahead_are_tokenized(tmp_path, tokenizer, monkeypatch):
    data = make_dataset(sources(tmp_path, 2000), STREAMED, tokenizer)
    count, before = len(data.train.found.parts[0].shards), num_made(tmp_path)
    assert count > 15
    maker = BatchMaker(data.without_tokenizer(), order_of(data, 4, 1), np.empty((0, 1, 1)), 0)
    pickle.loads(pickle.dumps(maker))((False, 0))
    needed = 1 + (BUFFER * LENGTH) // (data.train.tokens(0, 0).count // 2)
    assert num_made(tmp_path) - before <= needed + tokenize.AHEAD + 1 < count


def test_sources_share_the_buffer_by_weight_and_each_is_read_in_its_order(tmp_path, tokenizer):
    data = make_dataset(sources(tmp_path, 300, 200), STREAMED, tokenizer)
    assert [places for _, places in data.facts.mixture] == [8, 16]  # weights 1 and 2
    order = order_of(data, 4, 1)
    rows = np.concatenate([order.of_step(step).ravel() for step in range(2 * BUFFER // 4)])
    first, second = rows[rows < 1 << 48], rows[rows >= 1 << 48] - (1 << 48)
    assert sorted(first.tolist()) == list(range(16))
    assert sorted(second.tolist()) == list(range(32))
    assert first.tolist() != list(range(16))
    assert sorted(first[:8].tolist()) == list(range(8))  # block after block


@pytest.mark.parametrize("weights", [(1, 2), (1, 1e6)])
def test_a_buffer_above_the_data_is_one_pass_with_a_share_for_every_source(
    tmp_path, tokenizer, monkeypatch, weights
):
    monkeypatch.setattr(text, "SMALL_BUFFER", BUFFER)
    found = [
        replace(s, weight=w) for s, w in zip(sources(tmp_path, 300, 200), weights, strict=True)
    ]
    large = streamed(10**7)
    if weights[1] == 1e6:
        with pytest.raises(ConfigError, match=r"got \d+ \(at most one pass\) and none for .*0.txt"):
            make_dataset(found, large, tokenizer)
        return
    facts = make_dataset(found, large, tokenizer).facts
    one_pass = streamed(facts.num_train_sequences)
    assert facts == make_dataset(found, one_pass, tokenizer).facts  # the fingerprint, too
    assert sum(places for _, places in facts.mixture) == facts.shuffle_buffer > BUFFER


def test_a_default_buffer_above_one_small_source_reads_every_sequence_once_in_a_pass(
    tmp_path, tokenizer
):
    data = make_dataset(sources(tmp_path, 300), streamed(4096), tokenizer)
    size = data.facts.num_train_sequences
    order = order_of(data, 1, 1)
    rows = np.concatenate([order.of_step(step).ravel() for step in range(2 * size)])
    assert sorted(rows[:size].tolist()) == list(range(size))
    assert sorted(rows[size:].tolist()) == list(range(size, 2 * size))


def test_documents_without_separators_are_named_in_a_note(tmp_path, tokenizer):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    said = "the tokenizer has no end-of-text token: nothing separates the documents"
    found = sources(tmp_path, 300)
    assert said in make_dataset(found, STREAMED, endless).facts.notes
    assert said not in make_dataset(found, STREAMED, tokenizer).facts.notes


def test_another_tokenizer_is_other_data_though_the_first_part_has_none_of_its_tokens(
    tmp_path, tokenizer
):
    found, other = sources(tmp_path, 300), copy.deepcopy(tokenizer)
    other.add_tokens(["zqzq"])
    first, same, changed = (
        plan_of(make_dataset(found, STREAMED, one), 4, 1) for one in (tokenizer, tokenizer, other)
    )
    assert first.data == same.data != changed.data
    own = Resume(tmp_path, 4, in_place=True)
    check_data(own, {"data": first.data}, same)
    with pytest.raises(ConfigError, match=r"data\.path: expected the data of the run"):
        check_data(own, {"data": first.data}, changed)


def test_a_file_that_changes_during_a_run_is_refused(tmp_path, tokenizer):
    data = make_dataset(sources(tmp_path, 600), STREAMED, tokenizer)
    data.save(tmp_path / "run")
    (tmp_path / "0.txt").write_text(seeded_text(601))
    _, facts, read = load_facts(tmp_path / "run")
    again = Dataset.load(tmp_path / "run", facts, read)
    with pytest.raises(DataError, match="files that do not change, got"):
        again.train.take(np.arange(1000))


def test_an_id_out_of_range_in_a_later_part_is_named_where_it_is_reached(
    tmp_path, tokenizer, monkeypatch
):
    ids = np.arange(20_000, dtype=np.uint16) % 300
    ids[15_001] = 999
    ids.tofile(tmp_path / "a.bin")
    monkeypatch.setattr(tokenize, "permuted", lambda places, *_: places)
    data = make_dataset([text_source(tmp_path / "a.bin")], STREAMED, tokenizer)
    data.train.take(np.arange(500))
    with pytest.raises(DataError, match=r"got 999 in '.*a\.bin' at token 15,001 \(from 0\)"):
        data.train.take(np.arange(1000))


def test_concurrent_streams_tokenize_a_part_once(tmp_path, tokenizer, monkeypatch):
    data = make_dataset(sources(tmp_path, 600), STREAMED, tokenizer)
    made, make = [], tokenize.make
    monkeypatch.setattr(
        tokenize, "make", lambda file, *rest: made.append(file) or make(file, *rest)
    )
    both = [pickle.loads(pickle.dumps(data.train)) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rows: rows.take(np.arange(600)), both))
    done = list(made)  # a thread tokenizes the next part
    assert len(done) == len(set(done)) > 3


@pytest.mark.parametrize(
    ("command", "said"), [(Command.SFT, "conversations"), (Command.CACHE, "a cache of the teacher")]
)
def test_settings_that_need_all_rows_first_are_refused(tmp_path, tokenizer, command, said):
    (tmp_path / "a.txt").write_text(seeded_text(50))
    llama = {"config": {"model_type": "llama"}}
    data = {"path": str(tmp_path / "a.txt"), "streaming": True}
    config = RunConfig(model=llama, teacher=llama, data=data)
    with pytest.raises(ConfigError, match=f"data.streaming: expected a run on .*, got {said}"):
        make_data(config, command, tokenizer, 300)


def test_the_baseline_is_off_for_a_stream_and_cannot_be_asked_for():
    assert not DataConfig(streaming=True).uses_baseline
    with pytest.raises(ValueError, match=r"bigram_baseline.*expected false"):
        DataConfig(streaming=True, bigram_baseline=True)


# ---- documents -----------------------------------------------------------------------------------


def test_arrays_with_another_end_of_documents_count_as_other_data(tmp_path, tokenizer):
    """A resumed run with another eos_token would divide the same tokens differently."""
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint16))
    other = copy.deepcopy(tokenizer)
    other.eos_token = other.convert_ids_to_tokens(5)
    for apart in (True, False):
        how = DatasetSettings(32, 300, DataConfig(validation_fraction=0, separate_documents=apart))
        found = [
            make_dataset([text_source(tmp_path / "a.npy")], how, t) for t in (tokenizer, other)
        ]
        assert (found[0].facts.fingerprint != found[1].facts.fingerprint) is apart


def test_documents_of_a_sequence_are_learned_independently(tmp_path, tokenizer):
    for number in range(30):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{number:02}.txt").write_text(seeded_text(2 + number % 3))
    apart = DatasetSettings(96, 300, DataConfig(validation_fraction=0, separate_documents=True))
    data = make_dataset([text_source(tmp_path / "data")], apart, tokenizer)
    assert data.labels_per_row is None
    arrays = data.batch(np.array([0, 1, 2, -1]), held_out=False)
    assert (arrays["labels"][3] == IGNORED).all()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        max_position_embeddings=96,
        **sizes_of(32, 48, 2, layers=2),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    batch = {
        name: torch.from_numpy(arrays[name][:3]) for name in ("input_ids", "labels", "position_ids")
    }
    logits = model(**inputs_of(batch), use_cache=False).logits
    total, count = causal_lm_loss(logits, batch["labels"])
    expected, num_alone, num_documents = 0.0, 0, 0
    for row in batch["input_ids"]:
        ends = (np.flatnonzero(row == tokenizer.eos_token_id) + 1).tolist()
        for start, stop in itertools.pairwise(sorted({0, *ends, len(row)})):
            alone = row[None, start:stop]
            loss, number = causal_lm_loss(model(input_ids=alone).logits, alone)
            expected, num_alone, num_documents = (
                expected + loss,
                num_alone + number,
                num_documents + 1,
            )
    assert num_documents > 3
    assert count == num_alone
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    together = make_dataset(
        [text_source(tmp_path / "data")],
        DatasetSettings(96, 300, DataConfig(validation_fraction=0)),
        tokenizer,
    ).batch(np.array([0]), held_out=False)
    assert "position_ids" not in together
