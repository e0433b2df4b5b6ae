"""`activation_checkpointing` in all its words: the bits of no recompute, and less memory."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.compat.fsdp2 import apply_activation_checkpointing
from fullshard.engine.engine import engine_of
from fullshard.errors import ConfigError, EngineError, WrapError
from support.models import CASES, LLAMA, Chain, hugging_face, perturbed
from support.parity import train_sharded
from support.ranks import on_ranks

KINDS = ("block", "selective", "every_2")
WRAPS = ("auto", "none", ["LlamaDecoderLayer", "LlamaMLP"])


def run(case, settings):
    torch.manual_seed(dist.get_rank())  # dropout's numbers
    model, steps = train_sharded(case.build, case.work, settings, num_steps=2)
    return engine_of(model), steps


def check_bits(name, settings):
    """Every step has the bits of the same run without recompute."""
    case = CASES[name]
    _, wanted = run(case, settings)
    for kind in KINDS:
        engine, found = run(case, {**settings, "activation_checkpointing": kind})
        assert len(engine.plan.recompute) == (2 if kind == "every_2" else 3)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours.losses[0], theirs.losses[0]), kind
            for key, gradient in theirs.gradients.items():
                assert torch.equal(ours.gradients[key], gradient), (kind, key)
            for key, param in theirs.params.items():
                assert torch.equal(ours.params[key], param), (kind, key)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_recompute_gives_the_bits_of_no_recompute(ranks, strategy):
    ranks(2)(check_bits, "llama", {"strategy": strategy}, timeout=100)


@pytest.mark.short(2)
@pytest.mark.parametrize("wrap", WRAPS)
def test_recompute_gives_the_same_bits_with_any_units(ranks, wrap):
    ranks(2)(check_bits, "llama", {"wrap": wrap}, timeout=100)


@pytest.mark.slow
def test_recompute_gives_the_same_bits_on_hybrid_meshes(ranks):
    ranks(4)(check_bits, "llama", {"strategy": "hybrid_shard", "replicate": 2}, timeout=100)


CACHES = {  # of models whose blocks get the cache by name and by place
    "llama": {**LLAMA, "use_cache": True},
    "gpt2": {"n_layer": 3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@pytest.mark.parametrize("model_type", CACHES)
def test_blocks_that_recompute_get_no_cache_of_keys(model_type):
    """Models of transformers make a cache in each forward unless they are told not to."""
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
    """Counts the bytes that autograd would keep; it keeps none, and there is no backward."""

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


def test_recompute_keeps_less(ranks):
    (found,) = zip(*ranks(1)(all_saved_bytes), strict=True)
    none, block, every = found[0]
    assert block < every < none


def all_saved_bytes():
    return [[saved_bytes(kind) for kind in ("none", "block", "every_2")]]


SPELLINGS = ("gradient_checkpointing_enable", "activation_checkpointing_enable")


def enable(model, spelling, reentrant):
    """Turn Hugging Face's switch on; the older of its names is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        getattr(model, spelling)({"use_reentrant": reentrant})


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_hugging_faces_switch_beside_ours_is_refused(spelling):
    model = CASES["llama"].build()
    enable(model, spelling, reentrant=False)
    with pytest.raises(ConfigError, match=r"one switch; model.layers.0 recomputes already"):
        fs.shard(model, activation_checkpointing="block")


def test_a_model_without_blocks_is_refused():
    with pytest.raises(WrapError, match="activation_checkpointing: block expects a list of like"):
        fs.shard(nn.Linear(3, 3), activation_checkpointing="block")


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_reentrant_recompute_is_converted(early, spelling):
    """It is converted, whether it was turned on before sharding or after."""
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
