"""The forecast of memory follows the known memory use of frameworks."""

import csv
from statistics import median

import pytest

from fullshard.outlook.constants import FITTED
from fullshard.outlook.memory import GIB, peak_memory
from fullshard.outlook.published import read_workload
from fullshard.outlook.workload import Metric
from support import rows
from support.rows import DATA

LLAMA_8B = {**rows.LLAMA_8B, "gpus": "8", "nodes": "1"}
TOKENS, LAYERS, WIDTH, KV, MLP, VOCAB = 8192, 32, 4096, 1024, 14336, 128256


def held(**changes):
    return peak_memory(read_workload({**LLAMA_8B, **changes}))


def test_kept_tensors_are_those_of_a_block_without_recompute():
    """Two norms of four widths, attention of four, four of the mlp; a compiler saves fewer."""
    token = 2 * LAYERS * TOKENS
    eager = held(activation_checkpointing="none")
    assert eager.kept == pytest.approx(token * (12 * WIDTH + 4 * MLP))
    compiled = held(activation_checkpointing="none", torch_compile="yes")
    assert compiled.kept == pytest.approx(token * (4 * WIDTH + 2 * (WIDTH + KV) + 3 * MLP))


@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_recompute_by_operation_keeps_inputs_attention_and_every_other_matmul(compiled):
    some = held(activation_checkpointing="selective", torch_compile=compiled)
    each = WIDTH + WIDTH + WIDTH + KV + MLP + WIDTH  # input, attention; q, v, gate, down
    assert some.kept == pytest.approx(2 * LAYERS * TOKENS * each)


def test_recompute_of_blocks_keeps_their_inputs():
    assert held().kept == pytest.approx(2 * LAYERS * TOKENS * WIDTH)
    amp = held(precision="bf16/fp32/bf16 (amp)")
    assert amp.kept == pytest.approx(2 * held().kept)  # the residual stream stays float32


def test_ranks_that_share_a_sample_shard_state_like_others():
    apart, together = held(), held(strategy="FSDP2=4 x CP=2")
    for part in ("weights", "optimizer", "gradients"):
        assert getattr(together, part) == pytest.approx(getattr(apart, part))
    assert together.kept == pytest.approx(apart.kept / 2)


def test_a_pipeline_stores_its_full_stage_and_reduces_gradients_once():
    alone = held(strategy="FSDP2=4 x TP=2", gpus="8")
    staged = held(strategy="FSDP2=4 x PP=2", gpus="8")
    half = 8.03e9 / 2
    assert staged.weights == pytest.approx(alone.weights + 2 * half)
    assert staged.gradients == pytest.approx(alone.gradients + 4 * half)


def test_full_gradients_exist_at_the_loss_but_slices_only_if_accumulated():
    shape = {"activation_checkpointing": "none", "gpu_model": "B300", "micro_batch_per_gpu": "4"}
    accumulated = {**shape, "grad_accum": "4"}
    whole = held(strategy="DDP", **shape)
    assert held(strategy="DDP", **accumulated).active == pytest.approx(whole.active)
    cut = held(**shape)
    assert held(**accumulated).active == pytest.approx(cut.active + cut.gradients)


def test_a_model_gathered_for_a_save_counts_if_the_counter_keeps_running():
    lora = {"strategy": "FSDP1 FULL_SHARD LoRA", "mem_metric": "max allocated"}
    saved = held(**lora)
    assert saved.active == pytest.approx(
        saved.weights + saved.optimizer + saved.gathered + 4 * 8.03e9
    )
    assert held(**{**lora, "mem_metric": "reserved"}).active < 4 * 8.03e9
    assert held(**{**lora, "strategy": "FSDP2 LoRA"}).active < 4 * 8.03e9


def test_a_compiled_loss_needs_less_and_a_divided_one_is_not_compiled():
    size = VOCAB * TOKENS
    assert held().logits == pytest.approx(FITTED.logits_held * size)
    head_gradient = 2 * VOCAB * WIDTH
    compiled = held(torch_compile="yes")
    assert compiled.logits == pytest.approx(FITTED.fused_logits * size + head_gradient)
    cut = held(torch_compile="yes", strategy="FSDP2=4 x TP=2")
    assert cut.logits == pytest.approx(FITTED.logits_held * size / 2)


def test_a_tied_head_is_counted_once():
    shape = {"n_layers": "28", "d_model": "3072", "n_heads": "24", "d_ff": "8192"}
    tied = read_workload({**LLAMA_8B, **shape, "params_b": "3.213"}).model
    untied = read_workload({**LLAMA_8B, **shape, "params_b": "3.607"}).model
    assert tied.end_params == pytest.approx(VOCAB * 3072)
    assert untied.end_params == pytest.approx(2 * VOCAB * 3072)


def test_the_allocator_reserves_active_bytes_up_to_the_device_memory():
    with DATA.open(encoding="utf-8", newline="") as file:
        runs = [read_workload(row) for row in csv.DictReader(file)]
    for run in runs:
        found = peak_memory(run)
        assert found.active <= found.reserved
        assert found.reserved <= max(found.active, run.device.memory_gib * GIB)
        assert found.of(Metric.ACTIVE) <= found.of(Metric.UNKNOWN) <= found.of(Metric.RESERVED)


def test_published_memory_is_predicted_as_well_as_the_results_say():
    misses = []
    with DATA.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["peak_mem_gib"] and row["status"] == "ok":
                run = read_workload(row)
                said = peak_memory(run).of(run.metric) / GIB
                misses.append(abs(said / float(row["peak_mem_gib"]) - 1))
    assert len(misses) == 143
    assert median(misses) < 0.06
