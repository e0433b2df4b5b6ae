"""`verify` detects and names each of its faults, on models that its other tests do not use.

Both sides are real; the ranks belong to a standing pool instead of new processes.
"""

import dataclasses
import math
import shutil
import time
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import fullshard as fs
from fullshard.config.load import load_config
from fullshard.recipes import base, head
from fullshard.verify import check as verify
from fullshard.verify.compare import LOW, ROUTED, WEIGHTS
from fullshard.verify.faults import Fault
from fullshard.verify.rank import run_passes
from support import forked
from support.grid import chequered
from support.processes import python

SMALL = "hidden_size: 64, num_hidden_layers: 6, num_attention_heads: 4, vocab_size: 300"
# A parallel residual without ties, learned positions and a tied head, a mixture of experts.
MODELS = {
    "gpt_neox": f"{{model_type: gpt_neox, {SMALL}, intermediate_size: 128}}",
    "opt": f"{{model_type: opt, {SMALL}, ffn_dim: 128, word_embed_proj_dim: 64, "
    "max_position_embeddings: 64}",
    "granitemoe": f"{{model_type: granitemoe, {SMALL}, intermediate_size: 96, "
    "num_key_value_heads: 2, num_local_experts: 8, num_experts_per_tok: 2, "
    "tie_word_embeddings: true}",
}


def prepared_in(folder, model, fault, *settings):
    folder.mkdir()
    resolved = load_config(None, [f"model={{config: {MODELS[model]}}}", *settings])
    prepared = verify.prepare(resolved.config, fault)
    verify.write(prepared, folder)
    return prepared


def run_reference(*folders):
    python("-P", verify.REFERENCE, *folders, run=forked.run)


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """Folders with the reference's results, by model and by tying."""
    root = tmp_path_factory.mktemp("verify")
    found = {}
    for model in MODELS:
        found[model, False] = root / model, prepared_in(root / model, model, None)
    place = root / "gpt_neox-tied"
    found["gpt_neox", True] = place, prepared_in(place, "gpt_neox", Fault.LOST_TIE)
    run_reference(*(folder for folder, _ in found.values()))
    for model in ("opt", "granitemoe"):
        found[model, True] = found[model, False]
    return found


def on_a_rank(folder):
    run_passes(Path(folder))


def verdict_of(ranks, folder, prepared, fault):
    job = dataclasses.replace(prepared.job, fault=fault)
    job.write(folder)
    ranks(job.world_size)(on_a_rank, str(folder), timeout=100)
    return verify.judge(job, folder, time.perf_counter())


@pytest.mark.short(2)
@pytest.mark.parametrize("model", MODELS)
def test_sound_model_is_equal_in_every_row(ranks, checks, model):
    verdict = verdict_of(ranks, *checks[model, False], None)
    assert verdict.diagnosis is None
    assert [row.name for row in verdict.rows] == [
        "loss",
        "gradient norm",
        "gradients",
        "updated parameters",
        "saved state",
        "step after loading",
    ]
    assert max(row.worst_error for row in verdict.rows) < 1e-11


@pytest.mark.parametrize(("fault", "model"), chequered(Fault, MODELS, 3))
def test_fault_is_seen_and_named(ranks, checks, fault, model):
    folder, prepared = checks[model, fault is Fault.LOST_TIE]
    verdict = verdict_of(ranks, folder, prepared, fault)
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.kind == fault, verdict.diagnosis.says


def on_a_rank_whose_head_is_wrong(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "cross_entropy", lambda *of: 1.5 * base.cross_entropy(*of))
        run_passes(Path(folder))


def test_fault_in_the_loss_that_runs_compute_in_chunks_is_found(ranks, checks):
    folder, prepared = checks["gpt_neox", False]
    assert prepared.job.loss_chunk_size == 6  # several chunks in a batch
    ranks(2)(on_a_rank_whose_head_is_wrong, str(folder), timeout=100)
    verdict = verify.judge(prepared.job, folder, time.perf_counter())
    assert next(row.name for row in verdict.rows if not row.is_equal) == "loss"


def on_a_rank_that_always_clips(folder):
    right = fs.clip_grad_norm_

    def wrong(model, max_norm):
        norm = right(model, max_norm)
        for param in model.parameters():
            param.grad.mul_(max(1.0, max_norm / norm))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, "clip_grad_norm_", wrong)
        run_passes(Path(folder))


def test_gradients_that_are_clipped_without_need_are_found(ranks, checks):
    folder, prepared = checks["gpt_neox", False]
    prepared.job.write(folder)  # without the fault of another test
    ranks(2)(on_a_rank_that_always_clips, str(folder), timeout=100)
    verdict = verify.judge(prepared.job, folder, time.perf_counter())
    assert [row.name for row in verdict.rows if not row.is_equal] == ["step after loading"]


@pytest.fixture(scope="module")
def sound(ranks, checks, tmp_path_factory):
    """A folder with both sides of a check without differences."""
    folder, prepared = checks["opt", False]
    assert verdict_of(ranks, folder, prepared, None).diagnosis is None
    return shutil.copytree(folder, tmp_path_factory.mktemp("sound") / "opt"), prepared.job


def spoil(folder, name, kind):
    """Changes one element in a file of tensors; returns its key."""
    tensors = load_file(folder / name)
    key = next(key for key, value in tensors.items() if kind in key and value.numel())
    tensors[key].view(-1)[0] += 1e-6
    save_file(tensors, folder / name)
    return key.removeprefix(kind)


@pytest.mark.parametrize(
    ("name", "kind", "row"),
    [
        ("rank_1.safetensors", "1/gradient/", "gradients"),
        ("rank_0.safetensors", "2/parameter/", "updated parameters"),
        ("state.safetensors", "", "saved state"),
        ("rank_1.safetensors", "3/parameter/", "step after loading"),
    ],
)
def test_one_wrong_element_on_one_rank_is_found(sound, tmp_path, name, kind, row):
    folder, job = shutil.copytree(sound[0], tmp_path / "opt"), sound[1]
    parameter = spoil(folder / "float64", name, kind)
    verdict = verify.judge(job, folder, time.perf_counter())
    wrong = [found for found in verdict.rows if not found.is_equal]
    assert [found.name for found in wrong] == [row]
    assert parameter in wrong[0].where
    assert verdict.diagnosis is not None
    assert parameter in verdict.diagnosis.says


def test_an_element_that_no_rank_has_is_found(sound, tmp_path):
    folder, job = shutil.copytree(sound[0], tmp_path / "opt"), sound[1]
    file = folder / "float64" / "rank_1.safetensors"
    tensors = load_file(file)
    places = {key[5:]: at for key, at in tensors.items() if key.startswith("0/at/")}
    name = next(name for name, at in places.items() if at.numel())
    of_trained = [
        f"0/at/{name}",
        *(f"{i}/{kind}/{name}" for i in range(3) for kind in ("gradient", "parameter")),
    ]
    for key in of_trained:
        tensors[key] = tensors[key][:-1].clone()
    save_file(tensors, file)
    wrong = [row for row in verify.judge(job, folder, 0.0).rows if not row.is_equal]
    assert [row.name for row in wrong] == ["gradients", "updated parameters"]
    assert all(math.isinf(row.worst_error) and name in row.where for row in wrong)


def test_a_weight_that_is_never_updated_is_found_below_float32(sound, tmp_path):
    folder, job = shutil.copytree(sound[0], tmp_path / "opt"), sound[1]
    settings = {"tolerance": LOW, "compute_dtype": "bfloat16", "rounds_alike": True}
    low = dataclasses.replace(job.passes[0], **settings)
    job = dataclasses.replace(job, passes=(low,))
    assert verify.judge(job, folder, 0.0).diagnosis is None
    name = "model.decoder.layers.0.fc1.weight"
    first = load_file(folder / WEIGHTS)[name].double().reshape(-1)
    for file in (folder / "float64").glob("rank_*.safetensors"):
        tensors = load_file(file)
        for step in range(job.num_steps + 1):
            at = tensors[f"{step // job.num_steps}/at/{name}"]
            tensors[f"{step}/parameter/{name}"] = first[at]
        save_file(tensors, file)
    wrong = [row for row in verify.judge(job, folder, 0.0).rows if not row.is_equal]
    assert [row.name for row in wrong] == ["updated parameters", "step after loading"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard"])
def test_faults_are_named_under_other_strategies(ranks, tmp_path, strategy):
    settings = (f"strategy={strategy}", "gradient_accumulation_steps=2")
    folder = tmp_path / "opt"
    prepared = prepared_in(folder, "opt", None, *settings)
    run_reference(folder)
    assert verdict_of(ranks, folder, prepared, None).diagnosis is None
    for fault in Fault:
        if strategy == "no_shard" and fault in (Fault.MISSED_GATHER, Fault.STALE_SLOT):
            continue
        diagnosis = verdict_of(ranks, folder, prepared, fault).diagnosis
        assert diagnosis is not None
        assert diagnosis.kind == fault, diagnosis.says


# ---- with other axes -----------------------------------------------------------------------------

DIVIDED = f"num_key_value_heads: 2, {SMALL}, intermediate_size: 128"
AXES = {
    "tensor": (f"{{model_type: llama, {DIVIDED}}}", ["sharding.tensor=2", "num_processes=4"]),
    "experts": (
        f"{{model_type: qwen3_moe, {DIVIDED}, moe_intermediate_size: 32, num_experts: 8, "
        "num_experts_per_tok: 2}",
        ["sharding.tensor=2", "sharding.expert=4"],
    ),
    "context": (f"{{model_type: llama, {DIVIDED}}}", ["sharding.context=2", "num_processes=4"]),
}


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """A folder with the reference's results of a model that other axes shard, on four ranks."""

    @cache
    def divided(name):
        MODELS[name], settings = AXES[name]
        folder = tmp_path_factory.mktemp("axes") / name
        prepared = prepared_in(folder, name, None, *settings)
        run_reference(folder)
        return folder, prepared

    return divided


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("experts", None),
        ("context", None),
        ("tensor", None),
        ("context", Fault.WRONG_DIVISOR),
        ("context", Fault.REPEATED_DATA),
        ("tensor", Fault.SKIPPED_REDUCTION),
        ("tensor", Fault.WRONG_DIVISOR),
        ("tensor", Fault.REPEATED_DATA),
    ],
)
def test_other_axes_are_equal_and_their_faults_are_named(ranks, divided, name, fault):
    folder, prepared = divided(name)
    assert prepared.job.world_size == 4
    assert prepared.job.num_batches == 2
    found = verdict_of(ranks, folder, prepared, fault).diagnosis
    assert (found and found.kind) == fault
    if name == "experts":
        assert prepared.facts()["axes"] == "replicate 1 x shard 1 x expert 2 x tensor 2"
        assert "expert 2 instead of 4." in prepared.notes


@pytest.mark.parametrize("model", MODELS)
def test_a_token_may_go_to_another_expert_below_float32(model):
    settings = [f"model={{config: {MODELS[model]}}}", "sharding.param_dtype=bfloat16"]
    prepared = verify.prepare(load_config(None, settings).config, None)
    assert prepared.job.passes[1].tolerance == (ROUTED if model == "granitemoe" else LOW)
