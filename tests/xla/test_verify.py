"""`fullshard verify` with `backend: jax`: the real reference, and a step on eight CPU devices."""

import dataclasses
import json
import runpy
import time

import pytest

from fullshard.config.load import load_config
from fullshard.errors import ConfigError
from fullshard.verify import check as verify
from fullshard.verify.faults import Fault
from support.lazy import jax

MODEL = (
    "model={config: {model_type: qwen3, vocab_size: 500, hidden_size: 96, intermediate_size: 200, "
    "num_hidden_layers: 9, num_attention_heads: 6, num_key_value_heads: 2}}"
)
ROWS = ("loss", "gradient norm", "gradients", "updated parameters", "saved state")
# Strategy, replicate and shard.
GRID = [
    *(("full_shard", 1, shard) for shard in (1, 2, 3, 8)),
    *(("shard_grad_op", 1, shard) for shard in (1, 2, 3, 8)),
    *(("no_shard", copies, 1) for copies in (1, 2, 3, 8)),
    *(("hybrid_shard", 2, shard) for shard in (1, 2, 3)),
    *(("hybrid_shard_zero2", copies, 2) for copies in (2, 4)),
]


def prepared_of(*words, fault=None):
    from fullshard.verify.xla import prepare

    return prepare(load_config(None, [MODEL, "backend=jax", *words]).config, fault)


def in_reference(folder):
    """Runs the reference in a process that has imported torch already."""
    reference = runpy.run_path(str(verify.REFERENCE))
    job = json.loads((folder / "job.json").read_text())
    for settings in job["passes"]:
        reference["run_pass"](folder, job, settings)


def on_devices(folder):
    from fullshard.verify.xla import run_passes

    before = jax.config.jax_enable_x64
    try:
        run_passes(folder)
    finally:
        jax.config.update("jax_enable_x64", before)


def verdict_of(devices, prepared, folder, fault=None):
    job = dataclasses.replace(prepared.job, fault=fault)
    job.write(folder)
    devices(on_devices, folder)
    return verify.judge(job, folder, time.perf_counter())


MIXTURE = MODEL.replace(
    "qwen3,", "qwen3_moe, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 64,"
)
AXES = {
    "tensor": ("launch.num_processes=6", "freeze=['*.mlp.up_proj.*']", "sharding.tensor=2"),
    "expert": ("launch.num_processes=4", MIXTURE, "sharding.expert=2", "freeze=['*.gate.*']"),
}


@pytest.fixture(scope="module", params=["tensor", pytest.param("expert", marks=pytest.mark.long)])
def checked(devices, tmp_path_factory, request):
    """A short check in float64 with frozen and unsharded arrays, and its reference."""
    folder, words = tmp_path_factory.mktemp("verify"), AXES[request.param]
    prepared = prepared_of(*words, "gradient_accumulation_steps=2")
    job = dataclasses.replace(prepared.job, passes=prepared.job.passes[:1], num_steps=2)
    prepared = dataclasses.replace(prepared, job=job)
    verify.write(prepared, folder)
    devices(in_reference, folder)
    return prepared, folder


def test_a_sharded_run_equals_one_process_of_torch(devices, checked):
    verdict = verdict_of(devices, *checked)
    assert verdict.diagnosis is None, verdict.diagnosis
    assert [row.name for row in verdict.rows] == [*ROWS, "step after loading"]
    assert {row.tolerance for row in verdict.rows} == {1e-10}
    assert 0 < max(row.worst_error for row in verdict.rows) < 1e-10


@pytest.mark.slow
def test_a_device_with_data_of_another_is_detected(devices, checked):
    verdict = verdict_of(devices, *checked, Fault.REPEATED_DATA)
    assert verdict.diagnosis is not None
    assert "loss" in [row.name for row in verdict.rows if not row.is_equal]


def on_devices_with_wrong_chunks(folder):
    """Chunks with the right loss and 1.001 times the right gradient."""
    from fullshard.xla import loss

    right = loss.cross_entropy

    def wrong(*chunk):
        value = right(*chunk)
        return value + 0.001 * (value - jax.lax.stop_gradient(value))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "cross_entropy", wrong)
        on_devices(folder)


@pytest.mark.long
def test_a_wrong_gradient_of_loss_chunks_is_detected(devices, checked):
    prepared, folder = checked
    prepared.job.write(folder)
    devices(on_devices_with_wrong_chunks, folder)
    verdict = verify.judge(prepared.job, folder, time.perf_counter())
    wrong = {row.name for row in verdict.rows if not row.is_equal}
    assert {"gradients", "gradient norm"} <= wrong


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_twenty_steps_of_every_strategy_in_float64_and_float32(devices, tmp_path, world_size):
    """The reference is independent of the strategy, so one run serves a world size."""
    cases = [case for case in GRID if case[1] * case[2] == world_size]
    for at, (strategy, replicate, shard) in enumerate(cases):
        sizes = (f"sharding.replicate={replicate}", f"sharding.shard={shard}")
        words = (f"strategy={strategy}", f"launch.num_processes={world_size}", *sizes)
        prepared = prepared_of(*words)
        assert prepared.job.num_steps == 20
        assert [choice.tolerance for choice in prepared.job.passes] == [1e-10, 1e-5]
        if at == 0:
            verify.write(prepared, tmp_path)
            devices(in_reference, tmp_path)
        verdict = verdict_of(devices, prepared, tmp_path)
        assert verdict.diagnosis is None, (strategy, replicate, shard, verdict)


def test_the_mesh_of_the_run_is_checked_if_it_is_small():
    def mesh_of(*words):
        prepared = prepared_of(*words)
        return prepared.plan.mesh.replicate, prepared.plan.mesh.shard, prepared.notes

    assert mesh_of("launch.num_processes=8") == (1, 8, ())
    assert mesh_of("launch.num_processes=64") == (1, 2, ("2 devices instead of 64.",))
    hybrid = ("strategy=hybrid_shard", "sharding.replicate=2")
    assert mesh_of(*hybrid, "launch.num_processes=6") == (2, 3, ())


def test_layers_are_frozen_by_their_numbers_in_the_full_model():
    frozen = prepared_of(
        "freeze=['model.layers.[0-4].mlp.*', 'model.layers.[5-8].mlp.*']"
    ).job.frozen
    assert [name for name in frozen if "layers.3." in name] == [
        f"model.layers.3.mlp.{name}_proj.weight" for name in ("down", "gate", "up")
    ]


def test_low_precision_is_checked_in_a_separate_pass():
    passes = prepared_of("param_dtype=bf16").job.passes
    assert [(choice.name, choice.tolerance) for choice in passes] == [
        ("float64", 1e-10),
        ("float32", 1e-5),
        ("bfloat16", 0.2),
    ]
    assert [choice.wide for choice in passes] == [True, False, False]


@pytest.mark.parametrize(
    ("words", "fault", "said"),
    [
        ((), Fault.STALE_SLOT, "--inject: expected repeated_data with backend: jax"),
        (("sharding.transport=direct",), None, "transport: 'direct' is not yet supported"),
        (("model.config.attention_dropout=0.5",), None, "attention_dropout: expected one of 0.0"),
        (("sharding.tensor=4",), None, "tensor: expected a divisor of 2"),
        (("freeze=['model.layers.[0-3].mlp.*']",), None, "which match 4 of 9 layers"),
        (("sharding.expert=2",), None, "expert: expected 1 for a model without experts; got 2"),
        (
            ("launch.num_processes=64", "sharding.replicate=8", "sharding.shard=8"),
            None,
            "expected a mesh of at most 8 devices",
        ),
    ],
)
def test_settings_that_cannot_be_checked_are_configuration_errors(words, fault, said):
    with pytest.raises(ConfigError, match=said):
        prepared_of(*words, fault=fault)
