"""The forecast reads tables, ignores measurements, and obeys physics."""

import csv
import itertools
import math
import random
from dataclasses import replace

import pytest
from benchmarks.forecast_fit import BOUNDS

from fullshard.outlook.constants import FITTED, Constants
from fullshard.outlook.devices import DEVICES
from fullshard.outlook.memory import GIB, peak_memory
from fullshard.outlook.published import COLUMNS, DROPPED, predict, read_workload
from fullshard.outlook.speed import step_times, tokens_per_s, traffic
from fullshard.outlook.workload import Architecture, Stage
from support.rows import DATA, LLAMA_8B


@pytest.fixture(scope="module")
def public():
    with DATA.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def speed(**changes):
    return tokens_per_s(read_workload({**LLAMA_8B, **{k: str(v) for k, v in changes.items()}}))


def memory(**changes):
    run = read_workload({**LLAMA_8B, **{k: str(v) for k, v in changes.items()}})
    return peak_memory(run).active / GIB


def test_answers_source_and_group_change_no_prediction(public):
    rng = random.Random(0)
    for row in rng.sample(public, 60):
        blank = {key: "" if key in DROPPED else value for key, value in row.items()}
        noise = {key: "oom 99 llm-foundry" if key in DROPPED else row[key] for key in row}
        assert predict(row) == predict(blank) == predict(noise)


def test_measurements_and_sources_are_dropped():
    assert {"step_time_s", "peak_mem_gib", "mfu_pct", "samples_per_sec"} <= DROPPED
    assert {"source", "group", "row_id", "notes", "status", "reliability"} <= DROPPED


def test_every_public_row_has_finite_ordered_intervals_around_its_predictions(public):
    for row in public:
        found = predict(row)
        assert set(found) == set(COLUMNS)
        assert found["pred_fits"] in ("true", "false")
        for name in ("tokens_per_sec_per_gpu", "step_time_s", "peak_mem_gib"):
            low, mid, high = (float(found[f"pred_{name}{end}"]) for end in ("_lo", "", "_hi"))
            assert 0 < low < mid < high < math.inf


@pytest.mark.parametrize("blank", sorted(LLAMA_8B))
def test_a_missing_column_widens_an_interval_or_is_assumed(blank):
    row = {key: value for key, value in LLAMA_8B.items() if key != blank}
    found = predict(row)
    assert found["pred_tokens_per_sec_per_gpu"], found["pred_note"]


@pytest.mark.parametrize(
    "column", ["params_b", "seq_len", "gpus", "nodes", "micro_batch_per_gpu", "vocab"]
)
@pytest.mark.parametrize("odd", ["many", "-3", "0", "nan", "inf"])
def test_a_malformed_number_is_reported_in_its_row(column, odd):
    found = predict({**LLAMA_8B, column: odd})
    assert not found["pred_tokens_per_sec_per_gpu"]
    assert f"{column}: expected a positive number" in found["pred_note"]
    assert repr(odd) in found["pred_note"]


def test_unknown_hardware_gets_a_guess_and_a_wide_interval():
    def width(**changes):
        found = predict({**LLAMA_8B, **changes})
        ends = [float(found[f"pred_tokens_per_sec_per_gpu{end}"]) for end in ("_lo", "_hi")]
        return ends[1] / ends[0]

    assert width(gpu_model="Dojo D1", gpu_mem_gb="32") > 2 * width()
    assert width(micro_batch_per_gpu="") > 1.2 * width()
    assert "device" in predict({**LLAMA_8B, "gpu_model": "Dojo D1"})["pred_note"]


@pytest.mark.parametrize(
    ("strategy", "gpus", "mesh"),
    [
        ("FSDP2=32 x TP=8 +AsyncTP", 256, (32, 1, 8, 1, 1)),
        ("FSDP2=4 x CP=2 x TP=8 x PP=8 (1F1B, AsyncTP)", 512, (4, 1, 8, 2, 8)),
        ("FSDP=256 x DCN-DP=4", 1024, (256, 4, 1, 1, 1)),
        ("FSDP1 HYBRID_SHARD", 96, (8, 12, 1, 1, 1)),
        ("ZeRO-1 within node (shard 8)", 64, (8, 8, 1, 1, 1)),
        ("DDP (ZeRO-0)", 16, (1, 16, 1, 1, 1)),
        ("PyTorch/XLA SPMD FSDP x TP (mesh 32x4)", 128, (32, 1, 4, 1, 1)),
        ("FSDP2=7", 64, (64, 1, 1, 1, 1)),  # does not divide evenly
    ],
)
def test_prose_of_a_strategy_becomes_a_mesh_of_all_ranks(strategy, gpus, mesh):
    found = read_workload(
        {**LLAMA_8B, "strategy": strategy, "gpus": str(gpus), "nodes": str(gpus // 8)}
    ).mesh
    named = (found.shard, found.replicate, found.tensor, found.context, found.pipeline)
    assert named == mesh
    assert found.world_size == gpus


@pytest.mark.parametrize(
    ("device", "strategy", "gpus", "chips"),
    [
        ("TPU v5p", "FSDP=64 x TP=8", 512, 8960),
        ("TPU v5e", "FSDP=256", 256, 256),
        ("TPU v5p", "FSDP=64 x TP=8 x DCN-DP=2", 1024, 512),
        ("H100-SXM5-80GB", "HSDP: ici FSDP=8 x DCN-DP=4", 32, 8),
    ],
)
def test_fast_links_join_a_slice_of_tpus_or_a_host(device, strategy, gpus, chips):
    changes = {"gpu_model": device, "strategy": strategy, "gpus": str(gpus), "nodes": ""}
    assert read_workload({**LLAMA_8B, **changes}).domain == chips


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("NVLink intra; 1600 Gbps/node RoCE", 25),
        ("NVLink intra; 400 Gb/s RDMA per GPU", 50),
        ("NVLink intra; 4x100 Gb RoCE per node", 6.25),
        ("NVLink intra; 3.2 Tbps per node", 50),
        ("NVLink intra; fabric not stated", 50),
    ],
)
def test_prose_of_a_fabric_becomes_bytes_a_second_and_device(text, gigabytes):
    assert read_workload({**LLAMA_8B, "interconnect": text}).fabric == gigabytes * 1e9


def test_more_work_never_makes_a_step_faster():
    assert speed(activation_checkpointing="none") > speed(activation_checkpointing="selective")
    assert speed(activation_checkpointing="selective") > speed()
    assert speed(torch_compile="yes") > speed()
    assert speed(micro_batch_per_gpu=4) > speed()
    assert speed(interconnect="400 Gbps per node") < speed()
    assert speed(gpu_model="A100-SXM4-80GB") < speed() < speed(gpu_model="B200")
    assert speed(precision="bf16/fp32/fp8") > speed()


def test_a_position_table_makes_heads_no_wider():
    """MPT-125m has 12 heads of 64 at any length; only its position table grows."""
    mpt = {"n_layers": "12", "d_model": "768", "n_heads": "12", "n_kv_heads": "12", "d_ff": "3072"}
    for length in (2048, 65536):
        size = str((12 * 12 * 768**2 + (50368 + length) * 768) / 1e9)
        row = {**LLAMA_8B, **mpt, "vocab": "50368", "seq_len": str(length), "params_b": size}
        assert read_workload(row).model.query_width == 768


def test_a_block_with_experts_runs_slower_than_a_dense_one_of_the_same_work():
    row = {**LLAMA_8B, "params_b": "46.7", "n_kv_heads": "8", "vocab": "32000"}
    sparse = read_workload({**row, "model_name": "Mixtral-8x7B"})
    dense = replace(sparse, model=replace(sparse.model, is_sparse=False))
    assert step_times(sparse).work > step_times(dense).work


def test_waiting_for_the_slowest_rank_grows_slower_than_their_number():
    def waits(gpus):
        row = {**LLAMA_8B, "gpus": str(gpus), "nodes": str(gpus // 8)}
        return traffic(read_workload(row), replace(FITTED, link_share=1e9, fabric_share=1e9))[0]

    assert waits(512) == pytest.approx(waits(8) * 3)


def test_divided_matmuls_hide_half_of_their_communication():
    alone = {**LLAMA_8B, "gpus": "8", "nodes": "1"}
    plain, cut = (
        step_times(read_workload({**alone, "strategy": f"FSDP2=1 x TP=8{more}"}))
        for more in ("", " +AsyncTP")
    )
    assert plain.step - cut.step == pytest.approx(plain.exposed / 2)


def test_a_pipelines_bubble_shrinks_with_the_micro_batches_of_a_step():
    def share(accumulation):
        row = {**LLAMA_8B, "strategy": "FSDP2=8 x PP=8", "grad_accum": str(accumulation)}
        times = step_times(read_workload({**row, "micro_batch_per_gpu": "8"}))
        return times.bubble / (times.step - times.bubble - times.update)

    assert share(1) == pytest.approx(7 / 8)  # cut into as many as there are stages
    assert share(32) == pytest.approx(7 / 32)


def test_larger_settings_never_need_less_memory():
    assert memory(activation_checkpointing="none") > memory()
    assert memory(gpus=8, nodes=1) > memory()
    assert memory(micro_batch_per_gpu=2) > memory()
    assert memory(strategy="DDP") > memory(strategy="ZeRO-1") > memory()
    assert memory(optimizer="AdamW8bit") < memory()


def test_states_of_full_sharding_are_sixteen_bytes_a_parameter_over_the_ranks():
    run = read_workload({**LLAMA_8B, "gpus": "8", "nodes": "1"})
    held = peak_memory(run)
    assert run.sharding is Stage.PARAMETERS
    assert held.weights + held.optimizer + held.gradients == pytest.approx(16 * 8.03e9 / 8)


def test_times_add_up_to_the_step():
    times = step_times(read_workload(LLAMA_8B))
    parts = (times.work, times.exposed, times.launch, times.update, times.bubble)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(times.step)


def test_constants_are_few_and_within_physical_bounds():
    assert set(BOUNDS) == set(Constants.__slots__)
    assert len(BOUNDS) <= 25
    for name, (low, high) in BOUNDS.items():
        assert low <= getattr(FITTED, name) <= high, name


def test_no_device_is_better_than_its_data_sheet():
    for device in DEVICES.values():
        assert device.matmul <= device.peak
    for one, other in itertools.pairwise(("V100", "A100", "H100", "B200")):
        assert DEVICES[one].matmul < DEVICES[other].matmul


def test_public_rows_are_predicted_as_well_as_the_results_say(public):
    misses = []
    for row in public:
        if row["status"] == "ok" and row["tokens_per_sec_per_gpu"]:
            found = float(predict(row)["pred_tokens_per_sec_per_gpu"])
            misses.append(abs(found / float(row["tokens_per_sec_per_gpu"]) - 1))
    assert len(misses) > 400
    assert sorted(misses)[len(misses) // 2] < 0.08


def test_utilization_is_counted_as_palm_counts_it():
    """PaLM 540B: 238.3 thousand tokens per second on 6,144 TPU v4 are 46.2 % (its table 3)."""
    head = 256_000 * 18_432
    palm = Architecture(
        num_params=540.35e9,
        layers=118,
        width=18_432,
        vocab=256_000,
        query_width=48 * 256,
        kv_width=256,
        mlp_width=4 * 18_432,
        gated=True,
        block_params=(540.35e9 - head) / 118,
        head_params=head,
    )
    assert 238.3e3 * palm.flops_per_token(2048) / (6144 * 275e12) == pytest.approx(0.462, abs=5e-4)
