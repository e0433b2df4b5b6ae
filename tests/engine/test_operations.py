"""The operations of a trace are those that the units of a model compute."""

from collections import Counter

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard as fs
from fullshard.config.schema import ShardConfig
from fullshard.engine.model_spec import meta_model
from fullshard.engine.tracing import trace_work
from fullshard.planner.tracing import Operation
from fullshard.recipes.base import causal_lm_loss
from fullshard.run.outlook import Tracer

BATCH, LENGTH, WIDTH, INNER, HEADS, WORDS = 2, 24, 32, 48, 4, 96
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def model_of(num_blocks=2, kind="llama"):
    config = transformers.AutoConfig.for_model(kind, **SIZES, num_hidden_layers=num_blocks)
    return config, meta_model(config)


def traced(model, samples=BATCH, **sharding):
    config = ShardConfig(**sharding)
    found = Tracer(model, LENGTH).work(fs.plan(model, config, world_size=2), config, samples)
    assert found is not None
    return found


def products(done):
    return {op: count for op, count in done.items() if op.kind.startswith("matmul")}


def product(layout, *size, times=1):
    return Operation(f"matmul {layout}", "float32", size, times)


def test_a_block_has_the_products_of_its_layers():
    _, model = model_of()
    block = traced(model)["model.layers.1"]
    tokens = BATCH * LENGTH
    assert products(block.forward) == {
        product("nt", tokens, WIDTH, WIDTH): 4,
        product("nt", tokens, WIDTH, INNER): 2,
        product("nt", tokens, INNER, WIDTH): 1,
    }
    assert products(block.backward) == {
        product("nn", tokens, WIDTH, WIDTH): 4,
        product("nn", tokens, INNER, WIDTH): 2,
        product("nn", tokens, WIDTH, INNER): 1,
        product("tn", WIDTH, tokens, WIDTH): 4,
        product("tn", INNER, tokens, WIDTH): 2,
        product("tn", WIDTH, tokens, INNER): 1,
    }
    heads = Operation("attention causal", "float32", (LENGTH**2, WIDTH // HEADS), BATCH * HEADS)
    assert block.forward[heads] == 1


def test_the_head_and_the_embedding_have_their_own_operations():
    _, model = model_of()
    found = traced(model, wrap=["LlamaDecoderLayer", "Linear", "Embedding"])
    tokens = BATCH * LENGTH
    assert products(found["lm_head"].forward) == {product("nt", tokens, WIDTH, WORDS): 1}
    assert len(products(found["lm_head"].backward)) == 2
    kinds = {op.kind for op in found["model.embed_tokens"].backward}
    assert {"embedding_dense_backward", "fill", "copy"} <= kinds
    assert not products(found[""].backward)


def test_a_recomputed_block_computes_its_forward_again():
    _, model = model_of()
    plain, again = (
        traced(model, activation_checkpointing=kind)["model.layers.0"] for kind in ("none", "block")
    )
    assert products(again.forward) == products(plain.forward)
    # torch stops before the last layer computes, because backward needs only its inputs.
    last = Counter({product("nt", BATCH * LENGTH, INNER, WIDTH): 1})
    once_more = Counter(products(plain.forward)) - last
    assert products(again.backward) == Counter(products(plain.backward)) + once_more


def test_a_deep_model_has_the_operations_of_its_blocks():
    _, model = model_of(15)
    found = traced(model)
    assert sum(name.startswith("model.layers.") for name in found) == 15
    assert found["model.layers.14"] == found["model.layers.1"]


def test_every_operation_of_a_real_step_is_in_the_trace():
    """Counts operations by name on the unsharded model with real values."""
    settings, model = model_of(kind="llama")
    config = ShardConfig()
    plan = fs.plan(model, config, world_size=1)

    def work(module):
        ids = torch.zeros((BATCH, LENGTH), dtype=torch.long)
        return causal_lm_loss(module(input_ids=ids, use_cache=False).logits, ids)[0] * 1.0

    found = trace_work(model, plan, config, work)
    seen = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[func._schema.name.partition("::")[2]] += 1
            return func(*args, **(kwargs or {}))

    real = transformers.AutoModelForCausalLM.from_config(settings)
    with Count():
        work(real).backward()
    kinds = Counter()
    for unit in found.values():
        for done in (unit.forward, unit.backward):
            for op, count in done.items():
                kinds[op.kind.partition(" ")[0]] += count
    assert kinds["matmul"] == seen["mm"] + seen["bmm"] + seen["addmm"]
    assert kinds["silu"] == seen["silu"]
    assert kinds["silu_backward"] == seen["silu_backward"]
    assert kinds["log_softmax"] == seen["_log_softmax"]
    assert kinds["sum"] == seen["sum"] + seen["mean"]
    assert kinds["attention"] == 2 * 2
