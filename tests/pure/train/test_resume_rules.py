"""What a run resumes from, given its folder, and how a kept batch size is divided again."""

import json
import logging
import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DbrxConfig, LlamaConfig, Mamba2Config

from fullshard.checkpoint.commit import Documents, claim, conclude, join, report
from fullshard.checkpoint.retain import newest_complete
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig
from fullshard.config.training import TrainingConfig
from fullshard.data.arrays import checksum_of
from fullshard.data.dataset import DatasetFacts
from fullshard.data.order import BatchShape, SampleOrder
from fullshard.data.tokenize import numbers_tokenizer
from fullshard.errors import CheckpointError, ConfigError, DataError, DivergedError
from fullshard.recipes.distill.loss import TopK, check_facts, write_facts
from fullshard.run.folder import RunFolder
from fullshard.run.optim import StepPlan
from fullshard.run.resume import (
    Resume,
    check_checkpoint_dir,
    check_data,
    check_model,
    check_same,
    check_settings,
    continues,
    find_resume,
    own_resume,
    sample_of_teacher,
)


def run_folder(path, **record):
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"status": "failed", **record}))
    return RunFolder(path)


POSITION = {"global_batch": 6}


def checkpoint(path, position=POSITION, **texts):
    """Writes a real checkpoint without tensors."""
    place = claim(path)
    join(place, 0)
    report(place, 0, [])
    step = int(path.name[-1])
    state = {"step": step, "world_size": 1, "extra": {}, "state": {"position": position}}
    conclude(place, 1, Documents(step, {"state.json": json.dumps(state), **texts}, {}))


def test_a_run_started_from_a_path_keeps_it_until_its_first_checkpoint(tmp_path):
    named = Resume(tmp_path / "other", 6, required=True)
    folder = run_folder(tmp_path / "run", resume=named.as_json())
    found = own_resume(folder)
    assert (found.path, found.global_batch) == (tmp_path / "other", 6)
    assert found.in_place
    assert found.required
    folder.checkpoints.mkdir()
    assert own_resume(folder) == found
    checkpoint(folder.checkpoints / "step-00000003")
    assert own_resume(folder) == Resume(folder.checkpoints, 6, in_place=True)


def test_the_batch_size_is_kept_if_no_rank_recorded_it(tmp_path):
    before = Resume(None, 12, in_place=True)
    folder = run_folder(tmp_path / "run", planned={}, resume=before.as_json())
    assert own_resume(folder).global_batch == 12
    folder.update_record(planned={"samples_per_step": 8})
    assert own_resume(folder).global_batch == 8


def test_a_path_defines_the_batch_size_and_needs_a_checkpoint(tmp_path):
    checkpoint(tmp_path / "step-00000003")
    found = find_resume(str(tmp_path), tmp_path / "run")
    assert (found.global_batch, found.required, found.in_place) == (6, True, False)
    with pytest.raises(CheckpointError, match="which does not exist"):
        find_resume(str(tmp_path / "nothing"), tmp_path / "run")


@pytest.mark.parametrize("status", ["failed", "finished"])
@pytest.mark.parametrize("there", ["a link to a disk that is away", "a file"])
def test_a_run_with_unreachable_checkpoints_does_not_start_again(tmp_path, there, status):
    folder = run_folder(tmp_path / "run", status=status)
    if there == "a file":
        folder.checkpoints.touch()
    else:
        folder.checkpoints.symlink_to(tmp_path / "away" / "checkpoints")
    with pytest.raises(CheckpointError, match="expected the folder of the run's checkpoints at"):
        find_resume("auto", folder.path)
    assert find_resume("never", folder.path) == Resume()


@pytest.mark.parametrize("position", [None, {}, {"step": 3}])
def test_a_checkpoint_without_a_batch_size_uses_that_of_the_configuration(tmp_path, position):
    checkpoint(tmp_path / "step-00000003", position)
    found = find_resume(str(tmp_path), tmp_path / "run")
    assert (found.path, found.global_batch, found.required) == (tmp_path.resolve(), None, True)


@pytest.mark.parametrize(
    ("status", "asked", "expected"),
    [("failed", 5, True), ("interrupted", 5, True), ("finished", 5, False), ("finished", 9, True)],
)
def test_unfinished_runs_resume_and_finished_ones_only_for_more_steps(
    tmp_path, status, asked, expected
):
    folder = run_folder(tmp_path / "run", status=status, measured={"num_steps": 5})
    folder.checkpoints.mkdir()
    checkpoint(folder.checkpoints / "step-00000005")
    resume = find_resume("auto", folder.path)
    assert continues(resume, folder.path, asked) is expected
    assert continues(find_resume("never", folder.path), folder.path, asked) is False


@pytest.mark.parametrize("status", ["failed", "finished"])
@pytest.mark.parametrize("began_from", [None, "another run"])
def test_a_run_with_deleted_checkpoints_does_not_start_again(tmp_path, status, began_from):
    checkpoint(tmp_path / "other" / "step-00000003")
    first = Resume(began_from and tmp_path / "other", required=bool(began_from))
    record = {"status": status, "measured": {"num_steps": 5}, "resume": first.as_json()}
    folder = run_folder(tmp_path / "run", **record, last_saved_step=5)
    folder.checkpoints.mkdir()  # the mount point of an absent disk
    resume = find_resume("auto", folder.path)
    with pytest.raises(CheckpointError, match="the run's own checkpoints, of steps up to 5, in"):
        continues(resume, folder.path, 9)
    if status == "finished":  # without additional steps the run is moved aside
        assert continues(resume, folder.path, 5) is False
    checkpoint(folder.checkpoints / "step-00000004")
    assert continues(find_resume("auto", folder.path), folder.path, 9)


@pytest.mark.parametrize(("status", "expected"), [("failed", True), ("finished", False)])
def test_a_finished_run_without_a_checkpoint_is_not_trained_over(tmp_path, status, expected):
    folder = run_folder(tmp_path / "run", status=status, measured={"num_steps": 5})
    folder.checkpoints.mkdir()
    resume = find_resume("auto", folder.path)
    assert (resume.path, continues(resume, folder.path, 9)) == (None, expected)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (None, None),
        (True, "auto"),
        ("true", "auto"),
        (False, "never"),
        ("no", "never"),
        ("never", "never"),
        ("a/b",) * 2,
    ],
)
def test_resume_from_checkpoint_accepts_common_spellings(written, found):
    assert TrainingConfig(resume_from_checkpoint=written).resume_from_checkpoint == found


@pytest.mark.parametrize(
    ("trained", "key"), [({"data": "b"}, "data.path"), ({"data": "a", "seed": 2}, "training.seed")]
)
def test_a_checkpoint_of_another_run_is_not_resumed_instead_of_the_runs_own(
    tmp_path, caplog, trained, key
):
    order = SampleOrder(60, BatchShape(4, 1, 1), seed=1)
    steps = StepPlan(9, 0, 1, 0, 3, order, data="a")
    own = Resume(tmp_path, 4, in_place=True)
    for position in (None, {}, {"data": "a", "seed": 1}):
        check_data(own, position, steps)
    with caplog.at_level(logging.INFO):
        check_data(replace(own, required=True), trained, steps)  # it may have used other data
    told = f"the {key.split('.')[0].replace('training', 'seed')} of the new run is not that of"
    assert caplog.messages == [f"{told} '{tmp_path}'"]
    with pytest.raises(ConfigError, match=f"^{key}: expected"):
        check_data(own, trained, steps)


def test_a_run_without_a_configuration_file_uses_that_of_its_checkpoint(tmp_path):
    folder, began = run_folder(tmp_path / "run"), tmp_path / "other"
    own, other = load_config(None), load_config(None, ["freeze=[lm_head.*]"])
    checkpoint(folder.checkpoints / "step-00000003", **{"config.yaml": own.to_yaml()})
    checkpoint(began / "step-00000003", **{"config.yaml": own.to_yaml()})
    check_same(own, folder.path, folder.checkpoints)
    check_same(other, folder.path, began)  # from another run, which may have other settings
    with pytest.raises(ConfigError, match=r"^freeze: expected the value of the run that resumes"):
        check_same(other, folder.path, folder.checkpoints)
    checkpoint(folder.checkpoints / "step-00000004")  # saved by an earlier version
    check_same(other, folder.path, folder.checkpoints)


def test_the_log_names_no_key_that_has_kept_its_default(tmp_path, caplog):
    folder = run_folder(tmp_path / "run")
    folder.config.write_text(load_config(None).to_yaml())
    checkpoint(folder.checkpoints / "step-00000003")
    with caplog.at_level(logging.INFO):
        check_same(load_config(None, ["sft.packing=true"]), folder.path, folder.checkpoints)
    assert caplog.messages == ["changed since the checkpoint was saved: sft.packing None -> True"]


def test_a_checkpoint_that_was_copied_from_another_run_is_told(tmp_path, caplog):
    folder, own = run_folder(tmp_path / "run"), load_config(None)
    folder.config.write_text(own.to_yaml())
    other = load_config(None, ["model=m", "learning_rate=2"]).to_yaml()
    checkpoint(folder.checkpoints / "step-00000003", **{"config.yaml": other})
    with caplog.at_level(logging.INFO):
        check_same(own, folder.path, folder.checkpoints)
    assert "model.name_or_path m -> None" in caplog.text
    assert "training.learning_rate 2.0 -> " in caplog.text
    for step, damaged in enumerate(("no_key: 1", "{", ""), 4):
        checkpoint(folder.checkpoints / f"step-{step:08d}", **{"config.yaml": damaged})
        check_same(own, folder.path, folder.checkpoints)
    assert len(caplog.messages) == 1


def test_weights_for_another_model_or_tokenizer_are_refused(tmp_path, caplog):
    before = LlamaConfig(hidden_size=64)
    texts = {"config.json": before.to_json_string()}
    texts["tokenizer.json"] = numbers_tokenizer(9).backend_tokenizer.to_str()
    checkpoint(tmp_path / "step-00000003", **texts)
    found, own = newest_complete(tmp_path), Resume(tmp_path, 6, in_place=True)
    kept, learned = numbers_tokenizer(9), numbers_tokenizer(8)
    same = LlamaConfig(hidden_size=64, use_cache=False, bos_token_id=7)
    check_model(own, found, same, learned)
    other = LlamaConfig(hidden_size=64, rms_norm_eps=0.5)  # the default is not in config.json
    with caplog.at_level(logging.INFO):
        check_model(replace(own, required=True), found, other, kept)
    assert caplog.messages[0].endswith("the checkpoint's: 'rms_norm_eps' 1e-06 -> 0.5")
    with pytest.raises(ConfigError, match=r"with the weights .*\('rms_norm_eps' 1e-06 -> 0\.5\)"):
        check_model(own, found, other, kept)
    padded = LlamaConfig(hidden_size=64, pad_token_id=2)  # torch does not train the row of padding
    with pytest.raises(ConfigError, match=r"with the weights .*\('pad_token_id' None -> 2\)"):
        check_model(own, found, padded, kept)
    with pytest.raises(ConfigError, match=r"tokenizer\.json .* has changed \('8' 8 -> None\)"):
        check_model(Resume(tmp_path, required=True), found, same, learned)
    more = numbers_tokenizer(9)
    more.add_tokens(["<chat>"])
    check_model(Resume(tmp_path, required=True), found, same, more)


def test_a_key_of_the_model_that_only_the_new_run_sets_is_named(tmp_path, caplog):
    before = ["model.config.model_type=llama"]
    checkpoint(tmp_path / "step-00000003", **{"config.yaml": load_config(None, before).to_yaml()})
    with caplog.at_level(logging.INFO):
        now = load_config(None, [*before, "model.config.rope_theta=5"])
        check_settings(now, tmp_path, Resume(tmp_path))
    told = "the new run differs from that of the checkpoint: model.config.rope_theta None -> 5"
    assert caplog.messages == [told]


def test_settings_that_give_the_same_weights_another_meaning_are_named(tmp_path, caplog):
    before = ["lora.r=2", "lora.lora_alpha=8", "freeze=[lm_head.*]", "model.name_or_path=a"]
    checkpoint(tmp_path / "step-00000003", **{"config.yaml": load_config(None, before).to_yaml()})
    now = ["lora.lora_alpha=16", "model.name_or_path=b", "optim=sgd", "data.path=b", "seed=3"]
    now = load_config(None, [*before, *now, "max_seq_length=64"])
    with caplog.at_level(logging.INFO):
        check_settings(load_config(None, before), tmp_path, Resume(tmp_path))
        check_settings(now, tmp_path, Resume(tmp_path))
    told = "model.name_or_path a -> b, data.path None -> b, training.max_seq_length 128 -> 64, "
    told += "training.seed 0 -> 3, lora.lora_alpha 8.0 -> 16.0"
    assert caplog.messages == [f"the new run differs from that of the checkpoint: {told}"]


@pytest.mark.parametrize("kind", [Mamba2Config, DbrxConfig])
def test_a_configuration_that_does_not_survive_a_round_trip_is_resumed(tmp_path, kind):
    config = kind()  # one contains infinity, the other loses nested defaults
    checkpoint(tmp_path / "step-00000003", **{"config.json": config.to_json_string()})
    found, own = newest_complete(tmp_path), Resume(tmp_path, 6, in_place=True)
    check_model(own, found, config, numbers_tokenizer(9))


@given(st.integers(1, 24), st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_a_kept_batch_has_each_sample_once_for_any_division(batch, per_device, ranks, step):
    shape = BatchShape.of_batch(batch, per_device, ranks)
    found = SampleOrder(60, shape, seed=1).of_step(step)
    assert found.shape == (shape.accumulation, ranks, shape.per_device)
    assert shape.per_device <= per_device
    assert shape.accumulation == math.ceil(batch / (per_device * ranks))
    reference = SampleOrder(60, BatchShape(batch, 1, 1), seed=1).of_step(step).ravel()
    assert sorted(found[found >= 0].tolist()) == sorted(reference.tolist())
    assert shape.global_batch == batch
    assert shape.places - batch < shape.accumulation * ranks, (
        "a rank has none, though others have more"
    )


def test_a_run_cannot_save_its_checkpoints_among_its_own_files(tmp_path):
    """Its first save would wait forever for a lock that the run itself holds."""
    run, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(run)
    for place in (run, link):
        with pytest.raises(ConfigError, match=r"expected another folder than training\.output_dir"):
            check_checkpoint_dir(str(place), Resume(), run)
    check_checkpoint_dir(str(run / "checkpoints"), Resume(), run)


def test_a_teachers_cache_of_other_tokens_is_refused_even_at_equal_length(tmp_path):
    counts = {"sequence_length": 4, "num_train_sequences": 2, "num_held_out_sequences": 0}
    counts |= {"num_train_tokens": 8, "num_held_out_tokens": 0, "num_dropped_tokens": 0}
    facts = DatasetFacts("a.txt", **counts, vocab_size=300, baseline=None, prompt="")
    made = [replace(facts, fingerprint=checksum_of(np.arange(8) + i)) for i in range(2)]
    TopK.create(tmp_path, [4, 4], 2)
    padded = torch.arange(4.0).expand(4, 4)  # the teacher has one more entry than the tokenizer
    TopK.load(tmp_path, "r+").put(1, padded, torch.clone, 3, 3)
    assert TopK.load(tmp_path, "r+").ids[4:].tolist() == [[2, 1]] * 4
    for odd in (float("nan"), 7e4):
        with pytest.raises(DivergedError, match="teacher: expected finite logits below 65,504"):
            TopK.load(tmp_path, "r+").put(0, padded.clone().fill_(odd), torch.clone, 3, 3)
    write_facts(tmp_path, made[0], "a sample of A")
    check_facts(tmp_path, made[0])
    check_facts(tmp_path, made[0], "a sample of A")
    with pytest.raises(DataError, match="expected logits of the run's teacher, got another one's"):
        check_facts(tmp_path, made[0], "a sample of B")
    with pytest.raises(DataError, match="expected logits of this run's data, with fingerprint"):
        check_facts(tmp_path, made[1])
    told = json.loads((tmp_path / "cache.json").read_text())
    (tmp_path / "cache.json").write_text(json.dumps(told | {"schema_version": 2}))
    with pytest.raises(ConfigError, match=r"cache\.json: expected schema_version 1 or older"):
        check_facts(tmp_path, made[0])
    (tmp_path / "cache.json").write_text(json.dumps(told))
    for name in ("values.npy", "ids.npy"):  # with equal bytes
        np.save(tmp_path / name, np.load(tmp_path / name).reshape(-1, 4))
    with pytest.raises(DataError, match="expected the arrays that were written, got others"):
        check_facts(tmp_path, made[0])
    for name in ("values.npy", "ids.npy"):
        np.save(tmp_path / name, np.load(tmp_path / name).reshape(-1, 2))
    np.load(tmp_path / "values.npy", mmap_mode="r+")[1, 0] = 2.0
    with pytest.raises(DataError, match="expected the arrays that were written, got others"):
        check_facts(tmp_path, made[0])
    (tmp_path / "ids.npy").unlink()
    os.mkfifo(tmp_path / "ids.npy")
    with pytest.raises(DataError, match=r"expected a cache of .*; got OSError: a pipe"):
        check_facts(tmp_path, made[0])
    (tmp_path / "ids.npy").unlink()
    (tmp_path / "ids.npy").write_bytes(b"x")
    with pytest.raises(DataError, match=r"expected a cache of `fullshard distill cache`; got"):
        check_facts(tmp_path, made[0])
    (tmp_path / "cache.json").unlink()
    with pytest.raises(DataError, match=r"without cache\.json"):
        check_facts(tmp_path, made[0])


def test_a_cache_stays_complete_for_readers_until_it_is_rewritten(tmp_path):
    counts = {"sequence_length": 4, "num_train_sequences": 2, "num_held_out_sequences": 0}
    counts |= {"num_train_tokens": 8, "num_held_out_tokens": 0, "num_dropped_tokens": 0}
    facts = DatasetFacts("a.txt", **counts, vocab_size=300, baseline=None, prompt="")

    def write(value, *, whole):
        TopK.create(tmp_path, [4, 4], 1)
        kept = TopK.load(tmp_path, "r+")
        kept.values[:] = value
        if whole:
            kept.flush()
            write_facts(tmp_path, facts)

    write(1.0, whole=True)
    before = TopK.load(tmp_path)
    write(2.0, whole=False)  # it is killed
    check_facts(tmp_path, facts)
    assert TopK.load(tmp_path).values.max() == 1.0
    write(3.0, whole=True)
    check_facts(tmp_path, facts)
    assert TopK.load(tmp_path).values.min() == 3.0
    assert (before.values == 1.0).all()  # a run that learns from it
    names = {"values.npy", "ids.npy", "bounds.npy", "cache.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_sample_detects_changed_weights_or_caches_of_a_teacher(tmp_path):
    teacher, cache = tmp_path / "teacher", tmp_path / "cache"
    for file in (
        teacher / "config.json",
        teacher / "model.safetensors",
        teacher / "training_args.bin",
        teacher / "pytorch_model.bin",  # never read
        cache / "cache.json",
    ):
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"0" * 9000)
    learned = {"model": {"name_or_path": "x"}, "teacher": str(teacher)}
    config, cached = RunConfig(**learned), RunConfig(**learned, distill={"cache": str(cache)})
    before = sample_of_teacher(config), sample_of_teacher(cached)
    (teacher / "training_args.bin").write_bytes(b"1")  # no weights
    (teacher / "pytorch_model.bin").unlink()
    assert (sample_of_teacher(config), sample_of_teacher(cached)) == before
    (teacher / "model.safetensors").write_bytes(b"0" * 8999 + b"1")
    assert sample_of_teacher(config) != before[0]
    assert sample_of_teacher(cached) == before[1]
    (teacher / "model.safetensors").write_bytes(b"0" * 9000)
    assert sample_of_teacher(config) == before[0]
    (teacher / "config.json").write_bytes(b"1")  # a different forward of equal weights
    assert sample_of_teacher(config) != before[0]
    (cache / "cache.json").write_bytes(b"1" * 9000)
    assert sample_of_teacher(cached) != before[1]
    assert sample_of_teacher(RunConfig(model={"name_or_path": "x"})) is None
