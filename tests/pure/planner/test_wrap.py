"""The choice of units: structure, sizes, names, callables, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

import fullshard as fs
from fullshard.errors import ConfigError, WrapError
from fullshard.planner.wrap import Role

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def on_meta(auto: str, model_type: str, **fields: Any) -> nn.Module:
    """A model of transformers without memory."""
    config = transformers.AutoConfig.for_model(model_type, **fields)
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(config)


def causal(model_type: str, **fields: Any) -> Any:
    return on_meta("AutoModelForCausalLM", model_type, **{**SMALL, **fields})


def clip() -> nn.Module:
    text = {**SMALL, "max_position_embeddings": 16}
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    return on_meta("AutoModel", "clip", text_config=text, vision_config=vision, projection_dim=8)


def whisper() -> nn.Module:
    return on_meta(
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        pad_token_id=0,
    )


def bart() -> nn.Module:
    return on_meta(
        "AutoModelForSeq2SeqLM",
        "bart",
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    )


def t5() -> nn.Module:
    return on_meta(
        "AutoModelForSeq2SeqLM",
        "t5",
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
    )


def deepseek() -> nn.Module:
    return causal(
        "deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )


MODELS = {
    "llama": partial(causal, "llama", num_key_value_heads=2),
    "gpt2": partial(on_meta, "AutoModelForCausalLM", "gpt2", n_layer=3, n_embd=32, n_head=4),
    "qwen3": partial(causal, "qwen3", head_dim=8, num_key_value_heads=2),
    "gemma2": partial(causal, "gemma2", head_dim=8, num_key_value_heads=2),
    "qwen3_moe": partial(causal, "qwen3_moe", num_experts=4, moe_intermediate_size=16),
    "mixtral": partial(causal, "mixtral", num_key_value_heads=2, num_local_experts=4),
    "deepseek_v3": deepseek,
    "opt": partial(causal, "opt", ffn_dim=96, word_embed_proj_dim=32),
    "gpt_neox": partial(causal, "gpt_neox"),
    "falcon": partial(causal, "falcon"),
    "phi": partial(causal, "phi"),
    "mamba": partial(causal, "mamba", state_size=4),
    "bert": partial(on_meta, "AutoModelForMaskedLM", "bert", **SMALL),
    "vit": partial(on_meta, "AutoModelForImageClassification", "vit", **SMALL),
    "t5": t5,
    "bart": bart,
    "whisper": whisper,
    "clip": clip,
}
BLOCKS = {  # where the blocks are and how many; all else is one list of three
    "gpt2": {"transformer.h": 3},
    "opt": {"model.decoder.layers": 3},
    "gpt_neox": {"gpt_neox.layers": 3},
    "falcon": {"transformer.h": 3},
    "mamba": {"backbone.layers": 3},
    "bert": {"bert.encoder.layer": 3},
    "vit": {"vit.layers": 3},
    "t5": {"encoder.block": 2, "decoder.block": 3},
    "bart": {"model.encoder.layers": 2, "model.decoder.layers": 3},
    "whisper": {"model.encoder.layers": 2, "model.decoder.layers": 3},
    "clip": {"text_model.encoder.layers": 3, "vision_model.encoder.layers": 3},
}


def units(model: nn.Module, **fields: Any) -> dict[str, str]:
    """Role by module name."""
    plan = fs.plan(model, world_size=2, **fields)
    return {unit.name: unit.role.value for unit in plan.units}


# ---- auto ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_auto_finds_the_blocks_without_knowing_a_class_name(name: str) -> None:
    model = MODELS[name]()
    lists = BLOCKS.get(name, {"model.layers": 3})
    wanted = {f"{path}.{at}" for path, count in lists.items() for at in range(count)}
    found = units(model)
    assert {n for n, role in found.items() if role == Role.BLOCK} == wanted
    assert units(model, wrap="transformer") == found
    indivisible = set(model._no_split_modules or ())  # what transformers itself calls blocks
    assert {type(model.get_submodule(block)).__name__ for block in wanted} <= indivisible


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("vocab_size", [64, 200, 412, 2000])
def test_embedding_and_head_are_units_where_each_is_at_least_as_large_as_a_block(
    vocab_size: int,
) -> None:
    model = causal("llama", vocab_size=vocab_size, tie_word_embeddings=False)
    found = units(model)
    block = numel(model.model.layers[0])
    for name, role in (("model.embed_tokens", Role.EMBEDDING), ("lm_head", Role.HEAD)):
        large = numel(model.get_submodule(name)) >= block
        assert found.get(name) == (role if large else None)


def test_tied_ends_are_the_roots_however_large() -> None:
    found = units(causal("llama", vocab_size=2000, tie_word_embeddings=True))
    assert set(found.values()) == {Role.ROOT, Role.BLOCK}


class Stage(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(width // 2, width, 2, stride=2)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3) for _ in range(count))


def test_stages_that_widen_are_not_the_blocks_their_layers_are() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(Stage(8 * 2**k, 3) for k in range(3))
    found = units(model)
    blocks = [n for n, role in found.items() if role == Role.BLOCK]
    assert "stages.2.layers.0" in blocks
    assert not any(name in found for name in ("stages.0", "stages.1", "stages.2"))


def test_a_model_without_lists_is_one_unit_and_transformer_refuses_it() -> None:
    model = nn.Sequential(nn.Conv1d(4, 9, 3), nn.Tanh(), nn.Linear(9, 2))
    assert units(model) == {"": Role.ROOT}
    with pytest.raises(WrapError, match="transformer expects a list of like blocks"):
        units(model, wrap="transformer")


# ---- size ----------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Stands where torch's policy wraps."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.inner = module


def torchs_choice(model: nn.Module, minimum: int) -> set[str]:
    """The modules that torch's size_based_auto_wrap_policy wraps."""
    policy = partial(size_based_auto_wrap_policy, min_num_params=minimum)
    _recursive_wrap(
        model,
        auto_wrap_policy=policy,
        wrapper_cls=Wrapped,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    names = [name for name, module in model.named_modules() if isinstance(module, Wrapped)]
    return {".".join(part for part in name.split(".") if part != "inner") for name in names}


@pytest.mark.parametrize("minimum", [1, 100, 1000, 2000, 3100, 5000, 20_000, 10**9])
@pytest.mark.parametrize("name", ["llama", "bert", "bart", "vit", "qwen3_moe", "mamba"])
def test_size_decides_as_torchs_policy_does(name: str, minimum: int) -> None:
    fields = {"tie_word_embeddings": False} if name in ("llama", "qwen3_moe", "mamba") else {}
    make = partial(MODELS[name], **fields)
    found = set(units(make(), wrap="size", wrap_min_params=minimum)) - {""}
    assert found == torchs_choice(make(), minimum)


# ---- none, names, callables ----------------------------------------------------------------------


def test_none_is_one_unit() -> None:
    assert units(MODELS["llama"](), wrap="none") == {"": Role.ROOT}


def test_named_classes_are_units_wherever_they_are() -> None:
    found = units(MODELS["llama"](), wrap=["LlamaMLP", "LlamaAttention"])
    wanted = {f"model.layers.{k}.{part}" for k in range(3) for part in ("mlp", "self_attn")}
    assert set(found) == {"", *wanted}
    nested = units(MODELS["llama"](), wrap=["LlamaDecoderLayer", "LlamaMLP"])
    assert {"model.layers.0", "model.layers.0.mlp"} <= set(nested)


def test_a_class_may_be_given_as_a_class() -> None:
    model = MODELS["llama"]()
    block = type(model.model.layers[0])
    assert units(model, wrap=block) == units(model, wrap=["LlamaDecoderLayer"])


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("LlamaDecodrLayer", "LlamaDecoderLayer"), ("LamaMLP", "LlamaMLP"), ("Lineer", "Linear")],
)
def test_a_class_that_is_missing_names_the_nearest_and_all_present(
    asked: str, nearest: str
) -> None:
    with pytest.raises(WrapError, match=f"got '{asked}'. Did you mean '{nearest}'") as caught:
        units(MODELS["llama"](), wrap=["LlamaDecoderLayer", asked])
    present = str(caught.value).partition("Present: ")[2]
    assert {"LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm", "Embedding", "Linear"} <= set(
        present.rstrip(".").split(", ")
    )


def test_a_class_without_parameters_is_as_if_missing() -> None:
    with pytest.raises(WrapError, match="classes of modules with parameters"):
        units(MODELS["llama"](), wrap=["SiLU"])


def test_a_callable_chooses_modules() -> None:
    model = MODELS["llama"]()
    found = units(model, wrap=lambda module: isinstance(module, nn.Linear | nn.Embedding))
    wanted = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert set(found) == {"", *wanted}


def test_a_callable_that_chooses_what_is_not_called_is_refused() -> None:
    with pytest.raises(WrapError, match=r"got 'model.layers' \(ModuleList\)"):
        units(MODELS["llama"](), wrap=lambda module: isinstance(module, nn.ModuleList))


def test_multihead_attention_is_no_unit_nor_what_lies_in_it() -> None:
    """Its forward reads its members' weights without calling them."""
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32), 3, enable_nested_tensor=False
    )
    assert {n for n, role in units(model).items() if role == Role.BLOCK} == {
        f"layers.{k}" for k in range(3)
    }
    with pytest.raises(WrapError, match="MultiheadAttention"):
        units(model, wrap=["MultiheadAttention"])


# ---- one unit for a large model ------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["auto", "size", None])
def test_one_unit_above_a_hundred_million_parameters_is_an_error(wrap: str | None) -> None:
    with torch.device("meta"):
        large, small = nn.Linear(10_001, 10_000), nn.Linear(9_999, 10_000)
    chosen = wrap or (lambda _: False)
    fields = {"wrap": chosen, "wrap_min_params": 10**10}
    with pytest.raises(ConfigError, match=r"more than one unit for a model of 100,020,000"):
        units(large, **fields)
    assert units(small, **fields) == {"": Role.ROOT}
    assert units(large, wrap="none") == {"": Role.ROOT}
