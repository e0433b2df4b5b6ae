"""Tracing micro-batches on the model: partly for deep models, not at all for unusual ones."""

import pytest
import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh

import fullshard as fs
from fullshard.config.schema import ShardConfig
from fullshard.engine._torch_compat import mesh_without_groups
from fullshard.engine.axes import one_place
from fullshard.engine.model_spec import meta_model
from fullshard.engine.tracing import Calls, trace_step
from fullshard.planner.tracing import peak
from fullshard.run import outlook
from fullshard.run.outlook import Tracer
from support.sizes import sizes_of

SIZES = sizes_of(32, 48, 4, 2, vocab_size=96, max_position_embeddings=64)
# Its keys are wider than its values.
DEEPSEEK = {
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"n_group": 2, "topk_group": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 3, "kv_lora_rank": 16},
    **{"q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}


@pytest.fixture(autouse=True)
def _traces():
    """Disables the shared cache of traces."""


def model_of(kind, num_blocks, **fields):
    config = transformers.AutoConfig.for_model(
        kind, **{**SIZES, "num_hidden_layers": num_blocks, **fields}
    )
    return meta_model(config)


def traced(model, samples=2, **sharding):
    config = ShardConfig(**sharding)
    found = Tracer(model, 32)(fs.plan(model, config, world_size=2), config, samples)
    return found and found.whole


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("kind", "recompute", "fields"),
    [
        ("llama", "none", {}),
        ("llama", "every_2", {}),
        ("llama", "every_3", {}),  # 14 is no multiple of 3
        ("deepseek_v3", "none", DEEPSEEK),  # its first three blocks are dense
        ("llama", "none", {"vocab_size": 2000}),  # its ends are units
        ("gemma2", "block", {"head_dim": 8, "sliding_window": 8}),  # two kinds of blocks in turn
    ],
)
def test_a_partial_trace_of_a_deep_model_equals_a_full_one(monkeypatch, kind, recompute, fields):
    model = model_of(kind, 14, **fields)
    in_part = traced(model, activation_checkpointing=recompute)
    monkeypatch.setattr(outlook, "MOST_BLOCKS", 14)
    assert in_part.total == traced(model, activation_checkpointing=recompute).total


def test_a_rank_of_a_tensor_axis_keeps_the_activations_of_its_part():
    model, config = model_of("llama", 2), ShardConfig(tensor=2)
    part = one_place(model, config).model
    found = Tracer(part, 32)(fs.plan(model, config, world_size=2), config, 2)
    whole, half = traced(model), found and found.whole
    assert whole.total / 2 < half.total < whole.total  # norms and logits are not sharded
    mlp = model.get_submodule("model.layers.0.mlp.up_proj").weight
    assert part.get_submodule("model.layers.0.mlp.up_proj").weight.shape[0] * 2 == mlp.shape[0]


def test_a_mesh_for_tracing_equals_no_mesh_with_groups():
    same = {"mesh_dim_names": ("tensor",), "_init_backend": False, "_rank": 0}
    assert mesh_without_groups("tensor", 2) != DeviceMesh("cpu", torch.arange(2), **same)


def test_a_large_batch_follows_from_two_smaller_ones(monkeypatch):
    model = model_of("llama", 2)
    followed = traced(model, samples=8)
    monkeypatch.setattr(outlook, "MOST_SAMPLES", 8)
    assert followed == traced(model, samples=8)


def test_a_gpus_attention_keeps_no_scores_where_keys_are_wider_than_values():
    model, config = model_of("deepseek_v3", 1, **DEEPSEEK), ShardConfig()
    plan = fs.plan(model, config, world_size=2)
    here, there = (Tracer(model, 256, on_gpu=gpu)(plan, config, 2).whole for gpu in (False, True))
    scores = 2 * 4 * 256 * 256 * 4  # of 2 samples with 4 heads, in float32
    assert here.total - there.total > scores


def test_every_strategy_needs_one_trace(monkeypatch):
    model, calls = model_of("llama", 2), []

    def counted(*args, **kwargs):
        calls.append(args)
        return trace_step(*args, **kwargs)

    monkeypatch.setattr(outlook, "trace_step", counted)
    tracer = Tracer(model, 32)
    for strategy in ("full_shard", "shard_grad_op", "no_shard"):
        config = ShardConfig(strategy=strategy)
        tracer(fs.plan(model, config, world_size=2), config, 2)
    assert len(calls) == 1


def test_reads_of_the_ledger_are_not_traced_as_calls_of_the_model(monkeypatch):
    """Otherwise a trace would take a fifth longer."""
    seen, look = [], Calls.__torch_function__

    def note(calls, func, *given):
        seen.append(func)
        return look(calls, func, *given)

    monkeypatch.setattr(Calls, "__torch_function__", note)
    assert traced(model_of("llama", 2)) is not None
    assert torch.nn.functional.silu in seen
    assert torch.Tensor.untyped_storage not in seen


def test_a_model_that_reads_values_is_counted_from_shapes():
    model = model_of("llama", 2)

    def forward(input_ids, **_):
        if torch.rand(()).item() > 2:
            raise AssertionError
        return model.lm_head(model.model.embed_tokens(input_ids))

    model.forward = forward
    assert traced(model) is None


def test_a_model_that_loops_over_its_tokens_is_counted_from_shapes(monkeypatch):
    """Torch aborts if a dispatch mode raises inside attention."""
    monkeypatch.setattr("fullshard.engine.tracing.MOST_OPERATIONS", 2_000)
    model = model_of("llama", 2)

    def forward(input_ids, **_):
        states = model.model.embed_tokens(input_ids)
        for _ in range(2_000):
            wider = torch.cat((states, states), dim=-1)
            states = torch.nn.functional.scaled_dot_product_attention(wider, wider, states)
        return model.lm_head(states)

    model.forward = forward
    assert traced(model) is None


def test_a_traced_model_is_unchanged():
    model = model_of("llama", 14)
    before = {name: (id(value), value.device.type) for name, value in model.named_parameters()}
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert traced(model, activation_checkpointing="block") is not None
    after = {name: (id(value), value.device.type) for name, value in model.named_parameters()}
    assert after == before
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    assert model.config.num_hidden_layers == 14


def test_a_large_gradient_is_freed_before_the_next_is_made():
    layers = [torch.nn.Linear(300, 300, bias=False) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to("meta")

    def work(model):
        return model(torch.zeros(1, 300)).sum()

    config = ShardConfig(wrap="none")
    plan = fs.plan(model, config, world_size=2)
    most = max(moment.gradients for moment in trace_step(model, plan, config, work).moments)
    assert 300 * 300 * 4 <= most < 2 * 300 * 300 * 4
    assert peak([]).total == 0
