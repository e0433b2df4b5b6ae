"""Data from files: mixtures, arrays of tokens, and resuming a killed tokenization."""

import glob
import json
import os
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fullshard.config.files import read_job
from fullshard.config.load import load_config
from fullshard.config.schema import DataConfig, RunConfig
from fullshard.data import arrays, tokenize
from fullshard.data.arrays import mapped_once
from fullshard.data.dataset import load_facts
from fullshard.data.order import BatchShape, SampleOrder
from fullshard.data.records import WRITTEN, files_at, identity
from fullshard.data.text import Dataset, DatasetSettings, make_dataset, text_source, written
from fullshard.data.tokenize import fast_encoder, train_tokenizer
from fullshard.engine.hugging_face import read_tokenizer
from fullshard.errors import ConfigError, DataError
from fullshard.recipes.base import make_data
from fullshard.recipes.registry import Command, check_paths
from support.text import seeded_text

NO_HOLD_OUT = DatasetSettings(16, 300, DataConfig(validation_fraction=0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([seeded_text(200)], 300)


def tokens(dataset):
    return dataset.train.take(np.arange(len(dataset.train))).ravel().tolist()


def refused(path, words, settings=NO_HOLD_OUT, tokenizer=None):
    with pytest.raises(DataError, match=words):
        make_dataset([text_source(path)], settings, tokenizer)


def test_the_number_of_shards_does_not_change_the_tokens(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "data").mkdir()
    for number in range(4):
        text = "\n".join(json.dumps({"text": seeded_text(20 + number)}) for _ in range(20)) + "\n"
        (tmp_path / "data" / f"{number}.jsonl").write_text(text)
    expected = tokens(make_dataset([text_source(tmp_path / "data")], NO_HOLD_OUT, tokenizer))
    monkeypatch.setattr(tokenize, "SHARD_BYTES", 10_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    made = make_dataset([text_source(tmp_path / "data")], NO_HOLD_OUT, tokenizer)
    assert len(made.train.sources[0]) > 4
    assert tokens(made) == expected


def test_a_document_begins_with_the_start_tokens_of_its_tokenizer(tmp_path):
    from tokenizers.processors import TemplateProcessing

    made, texts = train_tokenizer([seeded_text(200)], 300), ["one two", "three", "four five"]
    bare = [made(text, add_special_tokens=False)["input_ids"] for text in texts]
    begin, end = ("b", made.vocab["b"]), ("<|endoftext|>", 0)
    (tmp_path / "data").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "data" / f"{number}.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    for form, start in (("b $A <|endoftext|>", [begin[1]]), ("$A <|endoftext|>", [])):
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=form, special_tokens=[begin, end]
        )
        expected = [token for one in bare for token in (*start, *one, 0)]
        for name in ("data", "a.jsonl"):
            settings = DatasetSettings(1, 300, DataConfig(validation_fraction=0))
            assert tokens(make_dataset([text_source(tmp_path / name)], settings, made)) == expected


def test_progress_is_reported_while_text_is_tokenized(tmp_path, tokenizer, monkeypatch, caplog):
    (tmp_path / "a.txt").write_text(seeded_text(500))
    for name, value in {"SHARD_BYTES": 4_000, "SAY_S": 0.0}.items():
        monkeypatch.setattr(tokenize, name, value)
    with caplog.at_level("INFO"):
        make_dataset([text_source(tmp_path / "a.txt")], NO_HOLD_OUT, tokenizer)
    told = [line for line in caplog.messages if line.startswith("data: tokenized [")]
    shares = [int(line.partition("] ")[2].partition(" %")[0]) for line in told]
    assert len(shares) > 4
    assert shares == sorted(shares)
    assert (shares[0] < 50, shares[-1]) == (True, 100)
    some = r"\[#{6,11}\.{13,18}\] [2-4]\d % of 0 MiB, [\d.]+ MiB/s, \d+ s left"
    assert re.search(some, "\n".join(told))
    assert told[-1].startswith("data: tokenized [########################] 100 % of")


def test_tokens_of_a_killed_start_are_not_made_again(tmp_path, tokenizer, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text(seeded_text(500))
    monkeypatch.setattr(tokenize, "SHARD_BYTES", 4_000)
    make, made = tokenize.make, []

    def killed(file, *rest):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(file)
        return make(file, *rest)

    monkeypatch.setattr(tokenize, "make", killed)
    with pytest.raises(KeyboardInterrupt):
        make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer)
    first, made = list(made), []
    monkeypatch.setattr(
        tokenize, "make", lambda file, *rest: made.append(file) or make(file, *rest)
    )
    dataset = make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer)
    assert made
    assert not set(first) & set(made)
    os.utime(text, ns=(0, text.stat().st_mtime_ns))  # now all parts are stale
    made.clear()
    assert make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer).facts == dataset.facts
    assert len(made) == len(dataset.train.sources[0])


def test_leftovers_of_a_kill_are_removed_from_the_cache_after_a_day(tmp_path, tokenizer):
    text = tmp_path / "a.txt"
    text.write_text(seeded_text(100))
    make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer)
    (part,) = (tmp_path / "cache").rglob("*.npy")
    left, live = part.with_name(".left.7"), part.with_name(".live.8")
    for file in (left, live):
        file.write_bytes(b"half of it")
    of_tokenizer = part.parent.with_name(".tokenizer-a.7")
    of_tokenizer.mkdir()
    for file in (left, of_tokenizer, lock := part.with_name(".lock")):
        os.utime(file, (0, 0))
    make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer)
    assert not left.exists()
    assert not of_tokenizer.exists()
    assert live.exists()  # it may belong to another host
    assert lock.exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("suffix", "make"),
    [
        (".npy", lambda place: place.write_bytes(b"\0" * 200)),
        (".npy", os.mkfifo),
        (".json", os.mkfifo),
    ],
    ids=["truncated", "pipe", "pipe.json"],
)
def test_a_truncated_part_or_a_pipe_in_the_cache_is_replaced(tmp_path, tokenizer, suffix, make):
    text = tmp_path / "a.txt"
    text.write_text(seeded_text(100))
    expected = tokens(make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer))
    (part,) = (tmp_path / "cache").rglob("*.npy")
    place = part.with_suffix(suffix)
    place.unlink()
    make(place)
    mapped_once.cache_clear()
    assert tokens(make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer)) == expected
    assert part.is_file()


def test_a_flipped_bit_of_the_cache_or_of_a_runs_link_to_it_is_never_trained_on(
    tmp_path, tokenizer
):
    text = tmp_path / "a.txt"
    text.write_text(seeded_text(100))
    made = make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer)
    expected = tokens(made)
    made.save(tmp_path / "run")
    (part,) = (tmp_path / "cache").rglob("*.npy")
    data = bytearray(part.read_bytes())
    data[500] ^= 1
    part.write_bytes(data)  # in place, so the run's hard link changes too
    mapped_once.cache_clear()
    again = make_dataset([text_source(text)], NO_HOLD_OUT, tokenizer)
    assert tokens(again) == expected
    assert again.facts == made.facts
    again.save(tmp_path / "run")
    _, facts, read = load_facts(tmp_path / "run")
    assert tokens(Dataset.load(tmp_path / "run", facts, read)) == expected


def test_a_file_that_changes_while_it_is_tokenized_is_refused(tmp_path, tokenizer, monkeypatch):
    text = tmp_path / "a.txt"
    text.write_text(seeded_text(100))
    make = tokenize.make

    def changing(*args):
        text.write_text(seeded_text(90))
        return make(*args)

    monkeypatch.setattr(tokenize, "make", changing)
    refused(text, "files that do not change, got .*a.txt' or one after it", tokenizer=tokenizer)
    assert not list((tmp_path / "cache").rglob("*.npy"))
    source = text_source(text)
    text.unlink()
    with pytest.raises(DataError, match=r"a.txt': expected a file that can be read"):
        make_dataset([source], NO_HOLD_OUT, tokenizer)


def test_tokens_deleted_before_ranks_map_them_are_named(tmp_path, tokenizer):
    np.save(tmp_path / "a.npy", np.arange(100, dtype="uint16"))
    made = make_dataset([text_source(tmp_path / "a.npy")], NO_HOLD_OUT, tokenizer)
    made.save(tmp_path / "data")
    _, facts, read = load_facts(tmp_path / "data")
    changes = (
        lambda: np.save(tmp_path / "a.npy", np.arange(1, 101, dtype="uint16")),  # of equal length
        lambda: np.save(tmp_path / "a.npy", np.arange(9)),
        (tmp_path / "a.npy").unlink,
    )
    for change in changes:
        change()
        mapped_once.cache_clear()
        with pytest.raises(DataError, match=r"a.npy': expected the tokens from when the run"):
            tokens(Dataset.load(tmp_path / "data", facts, read))


@pytest.mark.parametrize("kind", ["text", "array"])
def test_tokens_that_change_in_place_while_they_are_mapped_are_refused(tmp_path, tokenizer, kind):
    source = tmp_path / ("a.txt" if kind == "text" else "a.npy")
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 200, 1000, "uint16"))
    (tmp_path / "a.txt").write_text(seeded_text(100))
    make_dataset([text_source(source)], NO_HOLD_OUT, tokenizer).save(tmp_path / "run")
    _, facts, read = load_facts(tmp_path / "run")
    mapped = Dataset.load(tmp_path / "run", facts, read)
    expected = tokens(mapped)
    place = source if kind == "array" else next((tmp_path / "run" / "tokens").iterdir())
    os.utime(place, ns=(1, 1))  # the tokens do not change
    assert tokens(mapped) == expected
    data = bytearray(place.read_bytes())
    data[130] ^= 1  # the second token, which the sample of an array skips
    place.write_bytes(data)
    with pytest.raises(DataError, match="expected the tokens from when the run was prepared"):
        tokens(mapped)


@pytest.mark.parametrize("change", ["in place", "copy", "copy, in place"])
def test_one_token_that_changes_before_ranks_map_it_is_refused(tmp_path, tokenizer, change):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 200, 1000, "uint16"))
    make_dataset([text_source(tmp_path / "a.npy")], NO_HOLD_OUT, tokenizer).save(tmp_path / "run")
    _, facts, read = load_facts(tmp_path / "run")
    expected = tokens(Dataset.load(tmp_path / "run", facts, read))
    mapped_once.cache_clear()  # as of a rank that is started again
    before = (tmp_path / "a.npy").stat()
    if "copy" in change:
        shutil.copy2(tmp_path / "a.npy", tmp_path / "b.npy")
        (tmp_path / "b.npy").replace(tmp_path / "a.npy")
        assert tokens(Dataset.load(tmp_path / "run", facts, read)) == expected
        mapped_once.cache_clear()
    if "in place" in change:
        with (tmp_path / "a.npy").open("r+b") as file:
            file.seek(130)  # the second token, which is not in the sample
            file.write(b"\xff")
        os.utime(tmp_path / "a.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(DataError, match="expected the tokens from when the run was prepared"):
            tokens(Dataset.load(tmp_path / "run", facts, read))


@pytest.mark.parametrize("change", ["rights", "number"])
def test_tokens_are_not_read_whole_again_and_again(tmp_path, tokenizer, monkeypatch, change):
    """Once after a change of rights or links; never if a mount numbers its files anew."""
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 200, 1000, "uint16"))
    make_dataset([text_source(tmp_path / "a.npy")], NO_HOLD_OUT, tokenizer).save(tmp_path / "run")
    _, facts, read = load_facts(tmp_path / "run")
    fstat, compared = os.fstat, []

    def renumbered(file):
        found = fstat(file)
        told = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**{**told, "st_ino": found.st_ino + 1})

    def checksum_of(array):
        compared.append(len(array))
        return arrays.xxhash.xxh3_128_hexdigest(array.tobytes())

    monkeypatch.setattr(arrays, "checksum_of", checksum_of)
    if change == "number":
        monkeypatch.setattr(os, "fstat", renumbered)
    else:
        (tmp_path / "a.npy").chmod(0o400)
    for _ in range(3):
        mapped_once.cache_clear()  # as if a run had more files than it may map
        tokens(Dataset.load(tmp_path / "run", facts, read))
    assert compared.count(1000) == (change == "rights")


def test_a_part_of_a_stream_that_changed_before_it_was_reached_is_refused(tmp_path, tokenizer):
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 200, 1000, "uint16"))
    streamed = DatasetSettings(16, 300, DataConfig(validation_fraction=0, streaming=True))
    make_dataset([text_source(tmp_path / "a.npy")], streamed, tokenizer).save(tmp_path / "run")
    _, facts, read = load_facts(tmp_path / "run")
    with (tmp_path / "a.npy").open("r+b") as file:
        file.seek(130)
        file.write(b"\xff")
    mapped_once.cache_clear()
    with pytest.raises(DataError, match=r"expected files that do not change, got .*a\.npy'"):
        Dataset.load(tmp_path / "run", facts, read).train.take(np.arange(2))


def test_a_source_with_too_few_tokens_is_named_with_its_own_count(tmp_path, tokenizer):
    rng = np.random.default_rng(0)
    for name, count in (("a", 31), ("b", 9)):
        np.save(tmp_path / f"{name}.npy", rng.integers(0, 200, count, "uint16"))
    sources = [text_source(tmp_path / f"{name}.npy") for name in "ab"]
    with pytest.raises(DataError, match=r"16 training tokens in '.*b.npy' .*, got 9\. "):
        make_dataset(sources, NO_HOLD_OUT, tokenizer)
    (tmp_path / "c.txt").write_text("one line\n" * 50)
    most = DatasetSettings(16, 300, DataConfig(validation_fraction=0.9999))
    refused(tmp_path / "c.txt", "lower .* data.validation_fraction", most, tokenizer)


def test_errors_of_a_mixture_name_the_source_by_its_key(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(seeded_text(100))
    (tmp_path / "b.bin").write_bytes(b"123")
    (tmp_path / "c.jsonl").write_text('{"words": "a"}\n')
    (tmp_path / "d.txt").write_text("a b c\n")
    (tmp_path / "e.txt").touch()
    for name, said in (
        ("missing", r"data.mixture.1.path: expected a file or folder, got"),
        ("b.bin", r"data.mixture.1.path: '.*b.bin': expected an array of tokens"),
        ("c.jsonl", r"data.mixture.1.text_column: expected a column 'text'"),
        ("d.txt", r"data.mixture.1.path: expected at least 64 training tokens in"),
        ("e.txt", r"data.mixture.1.path: expected at least 64 training tokens in .* got 0"),
    ):
        mixture = [{"path": str(tmp_path / one)} for one in ("a.txt", name)]
        config = RunConfig(
            model={"config": {"model_type": "llama"}},
            data={"mixture": mixture},
            training={"max_seq_length": 64},
        )
        with pytest.raises(DataError, match=f"^{said}"):
            make_data(config, Command.TRAIN, tokenizer, 300)
    file = tmp_path / "train.yaml"
    file.write_text(
        "data:\n  mixture: [{path: a.txt}, {path: missing}]\n".replace("a.txt", __file__)
    )
    with pytest.raises(DataError, match=r"train.yaml:2: data.mixture.1.path: expected a file or"):
        check_paths(load_config([read_job(), file]), reads_data=True)


def test_files_of_runs_among_the_data_are_skipped_unless_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    step = "saves/step-00000001"
    for name in (
        *("a.txt", "sub/a.txt", "events.out.tfevents.1", "run/run.json", "run.1/run.json"),
        *(f"{step}/COMPLETE.json", "logits/cache.json", "logits/values.npy"),
        *(f"{place}/a.txt" for place in ("run", "run/logs", "run.1", step, "logits")),
    ):
        Path("d", name).parent.mkdir(parents=True, exist_ok=True)
        told = " ".join(WRITTEN.get(Path(name).name, ()))
        Path("d", name).write_text(f"{{{told}}}")
    for name in ("run", "sub"):
        Path("d", name).rename(f"{name} elsewhere")
        Path("d", name).symlink_to(Path(f"{name} elsewhere").absolute())
    data, runs = ["d/a.txt", "d/sub/a.txt"], ["d/run.1/a.txt", "d/run/a.txt"]
    for pattern, expected in {
        **{"d": data, "d/**/*.txt": data, "d/*/*.txt": data[1:], "d/*": data[:1]},
        **{"d/run/*.txt": runs[1:], "d/run/logs": ["d/run/logs/a.txt"]},
        **{"d/run*/a.txt": runs, "d/**/events*": ["d/events.out.tfevents.1"]},
    }.items():
        assert sorted(str(file) for file in files_at(Path(pattern)).files) == expected
    assert caplog.text.count("left out what a run wrote (run.json): 'd/run', 'd/run.1'\n") == 1
    for pattern in ("d/r*", "d/r*/logs/*", "d/run*/logs"):
        with pytest.raises(DataError, match=r"left out: 'd/run' \(what a run wrote \(run.json\)\)"):
            files_at(Path(pattern))
    with pytest.raises(DataError, match=r"got 'd/run\*/none.txt', which does not exist"):
        files_at(Path("d/run*/none.txt"))


def test_hidden_files_and_backups_of_editors_are_skipped_unless_named(tmp_path, caplog):
    left = ["#a.txt#", ".DS_Store", ".a.txt.swp", "a.txt.bak", "a.txt.orig", "a.txt~", "b.txt~"]
    for name in ("a.txt", *left):
        (tmp_path / name).write_text(name)
    for pattern in ("", "*", "**"):
        assert files_at(tmp_path / pattern).files == (tmp_path / "a.txt",)
    assert f"left out *~: '{tmp_path}/a.txt~', '{tmp_path}/b.txt~'\n" in caplog.text
    assert (
        f"left out hidden files: '{tmp_path}/.DS_Store', '{tmp_path}/.a.txt.swp'\n" in caplog.text
    )
    assert len(caplog.messages) == 5
    for pattern, found in {"*~": left[-2:], "*.bak": left[3:4], ".*p": left[2:3]}.items():
        assert [file.name for file in files_at(tmp_path / pattern).files] == found
    assert files_at(tmp_path / left[0]).files == (tmp_path / left[0],)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"got none but those that are left out: '.*a.txt#' \(#"):
        files_at(tmp_path)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_of_another_program_named_like_a_runs_hides_no_data(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / name).write_text('{"text": "a"}\n')
    for pattern in ("", "*", "*/*.json", f"*/{name}"):
        assert files_at(tmp_path / pattern).files == (tmp_path / "a" / name,)


def test_a_folder_outside_of_a_pattern_is_not_searched(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "locked").mkdir()
    stat = Path.stat

    def refused(path, **options):
        if path.parent == tmp_path / "locked":  # as for a user without permission to search it
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    assert files_at(tmp_path / "*").files == (tmp_path / "a.txt",)
    with pytest.raises(DataError, match="Permission denied"):
        files_at(tmp_path)


def test_a_run_keeps_its_tokens_when_the_cache_is_removed(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(seeded_text(100))
    settings = DatasetSettings(16, 300, DataConfig(validation_fraction=0.2))
    made = make_dataset([text_source(tmp_path / "a.txt")], settings, tokenizer)
    made.save(tmp_path / "data")
    expected = tokens(made)
    for file in (tmp_path / "cache").rglob("*.npy"):
        file.unlink()
    (tmp_path / "data").rename(tmp_path / "moved")
    _, facts, read = load_facts(tmp_path / "moved")
    again = Dataset.load(tmp_path / "moved", facts, read)
    assert (again.facts, tokens(again)) == (made.facts, expected)
    assert len(again.held_out) == made.facts.num_held_out_sequences > 0


def test_weights_divide_an_epoch_and_notes_tell_how_often_a_source_is_read(tmp_path, tokenizer):
    for name, count in (("a", 300), ("b", 100)):
        (tmp_path / f"{name}.txt").write_text(seeded_text(count))
    sources = [text_source(tmp_path / "a.txt", 1.0), text_source(tmp_path / "b.txt", 3.0)]
    made = make_dataset(sources, NO_HOLD_OUT, tokenizer)
    (size_a, places_a), (size_b, places_b) = made.facts.mixture
    assert [size_a, size_b] == made.train.sizes
    assert places_a + places_b == size_a + size_b == made.facts.num_train_sequences
    assert places_b == pytest.approx(3 * places_a, abs=3)
    assert f"{places_b / size_b:.2f} passes over the source" in made.facts.notes[1]
    order = SampleOrder(len(made.train), BatchShape(4, 1, 1), 0, made.facts.mixture)
    rows = np.concatenate([order.of_step(step).ravel() for step in range(order.steps_per_epoch)])
    assert np.count_nonzero(rows < size_a) == pytest.approx(places_a, abs=4)
    other = make_dataset([sources[0], text_source(tmp_path / "b.txt", 2.0)], NO_HOLD_OUT, tokenizer)
    assert other.facts.fingerprint != made.facts.fingerprint


def megatron(path, ids, code):
    path.write_bytes(ids.tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, 2, 3)
    lengths = np.array([10, len(ids) - 10], np.int32).tobytes()
    pointers = np.array([0, 10 * ids.itemsize, 0, 1, 2], np.int64).tobytes()
    path.with_suffix(".idx").write_bytes(header + lengths + pointers)


@pytest.mark.parametrize(
    "form", ["npy", "big-endian npy", "nanogpt", "uint32", "megatron", "llm.c"]
)
def test_arrays_of_tokens_are_mapped_in_place(form, tmp_path, tokenizer):
    ids = np.random.default_rng(0).integers(0, 300, 100)
    file, settings = tmp_path / "a.bin", NO_HOLD_OUT
    match form:
        case "npy":
            np.save(file := tmp_path / "a.npy", ids.astype(np.int32))
        case "big-endian npy":
            np.save(file := tmp_path / "a.npy", ids.astype(">u2"))
            settings = DatasetSettings(16, 300, DataConfig(validation_fraction=0, dtype="uint16"))
        case "nanogpt":
            ids.astype(np.uint16).tofile(file)
        case "uint32":
            ids.astype(np.uint32).tofile(file)
            settings = DatasetSettings(16, 300, DataConfig(validation_fraction=0, dtype="uint32"))
        case "megatron":
            megatron(file, ids.astype(np.int32), 4)
        case _:
            header = np.zeros(256, np.int32)
            header[:3] = 20240520, 1, 100
            file.write_bytes(header.tobytes() + ids.astype(np.uint16).tobytes())
    path = tmp_path if form == "megatron" else file
    (tmp_path / "cache").mkdir()
    path = file if form != "megatron" else str(tmp_path / "*.bin")
    made = make_dataset([text_source(Path(path))], settings, tokenizer)
    assert tokens(made) == ids[:96].tolist()
    assert made.facts.num_dropped_tokens == 4
    made.save(tmp_path / "run")
    assert not list((tmp_path / "run" / "tokens").iterdir())
    unnamed = make_dataset([text_source(Path(path))], settings, None)
    assert unnamed.tokenizer.decode([17, 4, 230]) == "17 4 230"


def test_arrays_that_cannot_be_tokens_of_this_tokenizer_are_refused(
    tmp_path, tokenizer, monkeypatch
):
    ids = np.arange(400)
    ids.astype(np.uint16).tofile(tmp_path / "a.bin")
    said = r"token ids below 300, .*, got 300 in '.*a\.bin' at token 300 \(from 0\)"
    refused(tmp_path / "a.bin", said, tokenizer=tokenizer)
    (ids % 300).astype(np.uint32).tofile(tmp_path / "b.bin")
    refused(tmp_path / "b.bin", "every second uint16 is 0: set data.dtype", tokenizer=tokenizer)
    ids.astype(np.int64).tofile(tmp_path / "b.bin")
    wide = DatasetSettings(16, 300, DataConfig(validation_fraction=0, dtype="uint32"))
    refused(tmp_path / "b.bin", "every second uint32 is 0: set data.dtype", wide, tokenizer)
    np.save(tmp_path / "c.npy", (ids % 200).astype(np.uint8))
    refused(
        tmp_path / "c.npy",
        "a dtype that holds the ids of 300 tokens, got uint8",
        tokenizer=tokenizer,
    )
    np.save(tmp_path / "0.npy", np.tile(ids % 200, 9).astype(np.uint16))
    streamed = DatasetSettings(16, 300, DataConfig(validation_fraction=0, streaming=True))
    monkeypatch.setattr(tokenize, "permuted", lambda places, *_: places)  # c.npy after 0.npy
    refused(tmp_path / "[0c].npy", "tokens, got uint8 in '.*c.npy'", streamed, tokenizer)
    refused(tmp_path / "c.npy", "expected uint8, which the header .* got uint32", wide, tokenizer)
    np.array([20240520, 9, 400, *range(453)], np.int32).tofile(tmp_path / "d.bin")
    refused(tmp_path / "d.bin", "version 9 of llm.c's format, not 1", tokenizer=tokenizer)
    np.save(tmp_path / "d.npy", np.zeros((3, 4), np.int32))
    refused(tmp_path / "d.npy", "one axis of integers", tokenizer=tokenizer)
    (tmp_path / "e.npy").write_bytes((tmp_path / "0.npy").read_bytes() + bytes(2))
    refused(tmp_path / "e.npy", "2 bytes follow its [0-9,]+ tokens", tokenizer=tokenizer)
    (tmp_path / "e.bin").write_bytes(b"123")
    refused(tmp_path / "e.bin", "not a whole number of uint16", tokenizer=tokenizer)
    megatron(tmp_path / "f.bin", ids.astype(np.uint16), 4)
    refused(tmp_path / "f.bin", "counts 1,600 bytes, the file has 800", tokenizer=tokenizer)
    np.save(tmp_path / "g.npy", np.array([1, -1] * 20, np.int16))
    refused(tmp_path / "g.npy", "got -1 in", tokenizer=tokenizer)


def test_patterns_name_files(tmp_path, monkeypatch):
    for name in ("a.txt", "below/b.txt", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(seeded_text(30))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "d.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    for pattern in ("**/*.txt", "*.txt", "*/b.txt", "**", "[ab]*", ".*/*", "below/*", "*/../a.*"):
        for place in (Path(), tmp_path):
            expected = sorted(
                Path(name)
                for name in glob.glob(str(place / pattern), recursive=True)  # noqa: PTH207
                if Path(name).is_file()
            )
            assert list(text_source(place / pattern).files) == expected
    with pytest.raises(DataError, match=r"got '.*\*.html', which does not exist"):
        text_source(tmp_path / "*.html")
    (tmp_path / "below" / "c").mkdir()
    for link, target in (("linked", "below"), ("below/c/back", "../../below"), ("below/z", "c")):
        (tmp_path / link).symlink_to(target)
        with pytest.raises(DataError, match=r"one way to each folder, got '.*/"):
            text_source(tmp_path / "**" / "*.txt")
        (tmp_path / link).unlink()


def test_datasets_and_row_groups_are_read_in_parts(tmp_path, tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = seeded_text(120).splitlines()
    datasets.Dataset.from_dict({"text": texts, "n": list(range(120))}).save_to_disk(tmp_path / "d")
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "p.parquet", row_group_size=7)
    (tmp_path / "j.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    monkeypatch.setattr(tokenize, "SHARD_BYTES", 1_000)
    found = [
        make_dataset([text_source(tmp_path / name)], NO_HOLD_OUT, tokenizer)
        for name in ("d", "p.parquet", "j.jsonl")
    ]
    assert tokens(found[0]) == tokens(found[1]) == tokens(found[2])
    assert min(len(one.train.sources[0]) for one in found) > 3


@pytest.mark.parametrize("left", [None, "abcd", "ab"])
def test_cache_files_appear_complete_and_keep_the_first_writers_contents(
    tmp_path, monkeypatch, left
):
    """Modification times name the parts, so a second writer would invalidate the first's."""
    (file,) = written("some", ".txt", ["abcd"])
    if left is None:
        shutil.rmtree(file.parent)
    else:
        file.write_text(left)
    before, write, seen = identity(file) if left == "abcd" else None, Path.write_bytes, []

    def at_once(path, content):
        write(path, content)
        monkeypatch.setattr(Path, "write_bytes", write)
        monkeypatch.setattr(os, "getpid", lambda: 7)
        seen.extend([file.exists() and file.read_text(), *written("some", ".txt", ["abcd"])])
        seen.append(identity(file))

    monkeypatch.setattr(Path, "write_bytes", at_once)
    assert written("some", ".txt", ["abcd"]) == (file,)
    assert file.read_text() == "abcd"
    assert not list(file.parent.parent.glob(".some*"))
    if left is None:
        assert seen == [False, file, identity(file)]
    if left == "abcd":
        assert (identity(file), seen) == (before, [])


def test_a_tokenizer_gives_the_same_tokens_every_time_or_a_typed_error(tmp_path, caplog):
    made = train_tokenizer([seeded_text(200)], 300)
    made.save_pretrained(tmp_path / "made")
    file = tmp_path / "made" / "tokenizer.json"
    parts = json.loads(file.read_text())
    parts["model"]["dropout"] = 0.5
    file.write_text(json.dumps(parts))
    found = read_tokenizer(tmp_path / "made", "FOLDER")
    assert found(seeded_text(99))["input_ids"] == made(seeded_text(99))["input_ids"]
    assert "(model.dropout); it is off here" in caplog.text
    unknown = {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "", "vocab": {}}
    parts["model"] = {**unknown, "max_input_chars_per_word": 9}
    with pytest.raises(
        ConfigError, match=r"data.tokenizer: .*Missing .* Correct its tokenizer.json"
    ):
        fast_encoder(json.dumps(parts))(["a"])


def test_a_tokenizer_is_trained_once_for_the_same_text(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(seeded_text(200))
    trained = []

    def counted(*given):
        trained.append(given)
        return train_tokenizer(*given)

    monkeypatch.setattr("fullshard.data.text.train_tokenizer", counted)
    made = [make_dataset([text_source(tmp_path / "a.txt")], NO_HOLD_OUT, None) for _ in range(2)]
    assert len(trained) == 1
    assert made[0].facts == made[1].facts
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 1  # its tokens were found in the cache
    (file,) = (tmp_path / "cache").rglob("tokenizer.json")
    file.write_text("{")
    assert make_dataset([text_source(tmp_path / "a.txt")], NO_HOLD_OUT, None).facts == made[0].facts
    (tmp_path / "a.txt").write_text(seeded_text(201))
    make_dataset([text_source(tmp_path / "a.txt")], NO_HOLD_OUT, None)
    assert len(trained) == 3
