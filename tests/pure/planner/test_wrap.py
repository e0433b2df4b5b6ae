"""The choice of units by structure, size, name or callable, and refusals."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

import fullshard as fs
from fullshard.errors import ConfigError, WrapError
from fullshard.planner.wrap import Role
from support.architectures import ARCHITECTURES

BLOCKS = {  # path and number of blocks of each architecture
    "llama": {"model.layers": 3},
    "gpt2": {"transformer.h": 3},
    "qwen3_moe": {"model.layers": 3},
    "deepseek_v3": {"model.layers": 3},
    "opt": {"model.decoder.layers": 3},
    "gpt_neox": {"gpt_neox.layers": 3},
    "falcon": {"transformer.h": 3},
    "mamba": {"backbone.layers": 3},
    "bert": {"bert.encoder.layer": 3},
    "vit": {"vit.layers": 3},
    "t5": {"encoder.block": 2, "decoder.block": 2},
    "bart": {"model.encoder.layers": 2, "model.decoder.layers": 2},
    "whisper": {"model.encoder.layers": 2, "model.decoder.layers": 2},
    "clip": {"text_model.encoder.layers": 2, "vision_model.encoder.layers": 2},
}


llama = ARCHITECTURES["llama"].on_meta


def units(model, **fields):
    """Role by module name."""
    plan = fs.plan(model, world_size=2, **fields)
    return {unit.name: unit.role.value for unit in plan.units}


# ---- auto ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCKS)
def test_auto_finds_the_blocks_without_knowing_a_class_name(name):
    model = ARCHITECTURES[name].on_meta()
    wanted = {f"{path}.{at}" for path, count in BLOCKS[name].items() for at in range(count)}
    found = units(model)
    assert {n for n, role in found.items() if role == Role.BLOCK} == wanted
    assert units(model, wrap="transformer") == found
    indivisible = set(model._no_split_modules or ())  # blocks in transformers
    assert {type(model.get_submodule(block)).__name__ for block in wanted} <= indivisible


def numel(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("vocab_size", [64, 241, 242, 2000])  # 242 rows are as large as a block
def test_embedding_and_head_are_units_where_each_is_at_least_as_large_as_a_block(vocab_size):
    model = llama(vocab_size=vocab_size, tie_word_embeddings=False)
    found = units(model)
    block = numel(model.model.layers[0])
    for name, role in (("model.embed_tokens", Role.EMBEDDING), ("lm_head", Role.HEAD)):
        large = numel(model.get_submodule(name)) >= block
        assert found.get(name) == (role if large else None)


def test_tied_ends_belong_to_the_root_at_any_size():
    found = units(llama(vocab_size=2000, tie_word_embeddings=True))
    assert set(found.values()) == {Role.ROOT, Role.BLOCK}


class Stage(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.down = nn.Conv2d(width // 2, width, 2, stride=2)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3) for _ in range(count))


def test_layers_are_the_blocks_of_widening_stages():
    model = nn.Module()
    model.stages = nn.ModuleList(Stage(8 * 2**k, 3) for k in range(3))
    found = units(model)
    blocks = [n for n, role in found.items() if role == Role.BLOCK]
    assert "stages.2.layers.0" in blocks
    assert not any(name in found for name in ("stages.0", "stages.1", "stages.2"))


def test_a_model_without_lists_is_one_unit_and_transformer_refuses_it():
    model = nn.Sequential(nn.Conv1d(4, 9, 3), nn.Tanh(), nn.Linear(9, 2))
    assert units(model) == {"": Role.ROOT}
    with pytest.raises(WrapError, match="transformer expects a list of equal blocks"):
        units(model, wrap="transformer")


# ---- size ----------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Marks where torch's policy wraps."""

    def __init__(self, module, **_):
        super().__init__()
        self.inner = module


def torchs_choice(model, minimum):
    """Returns the modules that torch's size_based_auto_wrap_policy wraps."""
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
def test_size_decides_as_torchs_policy_does(name, minimum):
    fields = {"tie_word_embeddings": False} if name in ("llama", "qwen3_moe", "mamba") else {}
    make = partial(ARCHITECTURES[name].on_meta, **fields)
    found = set(units(make(), wrap="size", wrap_min_params=minimum)) - {""}
    assert found == torchs_choice(make(), minimum)


# ---- none, names, callables ----------------------------------------------------------------------


def test_none_is_one_unit():
    assert units(llama(), wrap="none") == {"": Role.ROOT}


def test_named_classes_are_units_wherever_they_are():
    found = units(llama(), wrap=["LlamaMLP", "LlamaAttention"])
    wanted = {f"model.layers.{k}.{part}" for k in range(3) for part in ("mlp", "self_attn")}
    assert set(found) == {"", *wanted}
    nested = units(llama(), wrap=["LlamaDecoderLayer", "LlamaMLP"])
    assert {"model.layers.0", "model.layers.0.mlp"} <= set(nested)


def test_a_class_may_be_given_as_a_class():
    model = llama()
    block = type(model.model.layers[0])
    assert units(model, wrap=block) == units(model, wrap=["LlamaDecoderLayer"])


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [("LlamaDecodrLayer", "LlamaDecoderLayer"), ("LamaMLP", "LlamaMLP"), ("Lineer", "Linear")],
)
def test_a_missing_class_is_answered_with_the_nearest_and_all_present(asked, nearest):
    with pytest.raises(WrapError, match=f"got '{asked}'. Did you mean '{nearest}'") as caught:
        units(llama(), wrap=["LlamaDecoderLayer", asked])
    present = str(caught.value).partition("Present: ")[2]
    assert {"LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm", "Embedding", "Linear"} <= set(
        present.rstrip(".").split(", ")
    )


def test_a_class_without_parameters_counts_as_missing():
    with pytest.raises(WrapError, match="classes of modules with parameters"):
        units(llama(), wrap=["SiLU"])


def test_a_callable_chooses_modules():
    model = llama()
    found = units(model, wrap=lambda module: isinstance(module, nn.Linear | nn.Embedding))
    wanted = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert set(found) == {"", *wanted}


def test_a_callable_that_chooses_an_uncalled_module_is_refused():
    with pytest.raises(WrapError, match=r"got 'model.layers' \(ModuleList\)"):
        units(llama(), wrap=lambda module: isinstance(module, nn.ModuleList))


def test_neither_multihead_attention_nor_its_members_are_units():
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
def test_one_unit_above_a_hundred_million_parameters_is_an_error(wrap):
    with torch.device("meta"):
        large, small = nn.Linear(10_001, 10_000), nn.Linear(9_999, 10_000)
    chosen = wrap or (lambda _: False)
    fields = {"wrap": chosen, "wrap_min_params": 10**10}
    with pytest.raises(ConfigError, match=r"more than one unit for a model of 100,020,000"):
        units(large, **fields)
    assert units(small, **fields) == {"": Role.ROOT}
    assert units(large, wrap="none") == {"": Role.ROOT}
