"""Every value of `activation_checkpointing` gives the bits of no recompute with less memory."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.compat.fsdp2 import apply_activation_checkpointing
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError, EngineError, WrapError
from support.grid import STRATEGIES
from support.models import CASES, LLAMA, Chain, hugging_face, perturbed
from support.ranks import on_ranks
from support.recompute import assert_bits, trained

KINDS = ("block", "selective", "every_2")
WRAPS = ("auto", "none", ["LlamaDecoderLayer", "LlamaMLP"])


HYBRID = {"strategy": "hybrid_shard", "replicate": 2}


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        *((2, {"strategy": strategy}) for strategy in STRATEGIES),
        *((2, {"wrap": wrap}) for wrap in WRAPS),
        pytest.param(4, HYBRID, marks=pytest.mark.slow),
    ],
    ids=str,
)
@on_ranks("world_size", timeout=100)
def test_recompute_gives_the_bits_of_no_recompute(settings):
    case, plans = CASES["llama"], []
    settings = {"transport": "direct", **settings}
    wanted = trained(case.build, case.work, settings)

    def note(model):
        plans.append(engine_of(model).plan)

    for kind in KINDS:
        given = {**settings, "activation_checkpointing": kind}
        assert_bits(trained(case.build, case.work, given, after=note), wanted)
    assert [len(plan.recompute) for plan in plans] == [3, 3, 2]


CACHES = {  # models that pass the cache by name and by position
    "llama": {**LLAMA, "use_cache": True},
    "gpt2": {"n_layer": 3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@pytest.mark.parametrize("model_type", CACHES)
def test_blocks_that_recompute_get_no_cache_of_keys(model_type):
    """Models of transformers create a cache in each forward unless told otherwise."""
    ids = torch.arange(16).view(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    found = []
    for kind in ("none", "of compat", "block"):
        model = hugging_face(model_type, **CACHES[model_type])
        if kind == "of compat":
            apply_activation_checkpointing(model)
        fs.shard(model, activation_checkpointing="block" if kind == "block" else "none")
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        found.append([param.grad.to_local().clone() for param in model.parameters()])
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))
    cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
    with pytest.raises(EngineError, match="expected a forward without earlier keys"):
        model(input_ids=ids[:, 4:], past_key_values=cache)


class Saved:
    """Counts the bytes that autograd would save, without saving them; backward is impossible."""

    def __init__(self):
        self.num_bytes = 0

    def pack(self, tensor):
        self.num_bytes += tensor.nbytes


def saved_bytes(kind):
    model = fs.shard(perturbed(Chain(4)), activation_checkpointing=kind)
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        model(torch.randn(64, 12))
    return saved.num_bytes


def test_recompute_saves_fewer_bytes():
    none, block, every = map(saved_bytes, ("none", "block", "every_2"))
    assert block < every < none


SPELLINGS = ("gradient_checkpointing_enable", "activation_checkpointing_enable")


def enable(model, spelling, reentrant):
    """Turns Hugging Face's switch on; its older name is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        getattr(model, spelling)({"use_reentrant": reentrant})


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_hugging_faces_switch_together_with_ours_is_refused(spelling):
    model = CASES["llama"].build()
    enable(model, spelling, reentrant=False)
    with pytest.raises(ConfigError, match=r"one switch; model.layers.0 already recomputes"):
        fs.shard(model, activation_checkpointing="block")


def test_a_model_without_blocks_is_refused():
    with pytest.raises(WrapError, match="activation_checkpointing: block expects a list of equal"):
        fs.shard(nn.Linear(3, 3), activation_checkpointing="block")


@pytest.mark.short(2)
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_reentrant_recompute_is_converted(early, spelling):
    """Converts it whether it was turned on before sharding or after."""
    case = CASES["llama"]
    found = []
    for switch in (False, True):
        model = case.build()
        if switch and early:
            enable(model, spelling, reentrant=True)
        fs.shard(model, poison=True)
        if switch and not early:
            enable(model, spelling, reentrant=True)
        case.work(model, 0, dist.get_rank())
        found.append([p.grad.to_local().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
