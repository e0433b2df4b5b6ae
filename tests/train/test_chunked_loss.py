"""The chunked loss in the head of `train` and `sft` equals the loss of full logits."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

import fullshard as fs
from fullshard.config.load import load_config
from fullshard.config.schema import LoraConfig
from fullshard.errors import ConfigError, EngineError
from fullshard.models.lora import add_adapters
from fullshard.recipes.base import IGNORED, cross_entropy, whole_logits_loss
from fullshard.recipes.head import Head, next_token, whole_logits
from support.grid import marked
from support.logits import LargestTensor

VOCAB, CHUNK, RATE = 203, 7, 0.3
SIZES = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama(*, tied, frozen=False, adapters=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, tie_word_embeddings=tied, use_cache=False, **SIZES
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    if adapters:
        add_adapters(model, LoraConfig(target_modules=("q_proj", "down_proj"), r=2))
        model.double()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.3 * torch.randn_like(param)
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_(".1." in name)
    return model


def batches(rank):
    """One batch with two documents per row, one with prompts that are not learned."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCAB, (2, 3, 13), generator=draw)
    labels = ids.clone()
    labels[1, :, : 5 + rank] = IGNORED
    places = torch.cat([torch.arange(6), torch.arange(7)]).expand(3, 13)
    return [
        {"input_ids": ids[0], "labels": labels[0], "position_ids": places},
        {"input_ids": ids[1], "labels": labels[1]},
    ]


def plain(model, batch):
    """Computes the loss from full logits in plain torch."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum"), int((targets != IGNORED).sum())


def steps(model, loss, ranks):
    """Losses of three steps of SGD over these ranks' batches, and of an evaluation."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    found = []
    for _ in range(3):
        for rank in ranks:
            for batch in batches(rank):
                total, count = loss(model, batch)
                (total / 30).backward()
                found.append(total.item() / count)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(loss(model, batches(ranks[0])[1])[0].item())
    return found


def on_ranks(kind, sharding):
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = llama(**kind)
    head = Head(model)
    fs.shard(model, grad_reduction="sum", **sharding)
    found = steps(model, next_token(head, CHUNK), range(rank, rank + 1))
    return found, fs.full_state_dict(model, rank0_only=False)


KINDS = {
    "own": ({"tied": False}, {"strategy": "full_shard"}),
    "tied": ({"tied": True}, {"strategy": "shard_grad_op", "transport": "c10d"}),
    "frozen": ({"tied": False, "frozen": True}, {"transport": "direct"}),
    "adapters": ({"tied": False, "adapters": True}, {"transport": "direct"}),
    "recomputed": ({"tied": True}, {"strategy": "no_shard", "activation_checkpointing": "block"}),
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    marked(
        itertools.product(KINDS, (1, 2, 3)),
        lambda name, ranks: ranks == (3 if name == "own" else 2),
        pytest.mark.long,
    ),
)
def test_losses_and_weights_equal_those_of_full_logits(ranks, name, world_size):
    kind, sharding = KINDS[name]
    expected = llama(**kind)
    wanted = steps(expected, plain, range(world_size))
    found = ranks(world_size)(on_ranks, kind, sharding)
    for rank, (losses, state) in enumerate(found):
        own = [
            wanted[step * 2 * world_size + 2 * rank + at] for step in range(3) for at in range(2)
        ]
        torch.testing.assert_close(losses[:-1], own, rtol=1e-12, atol=1e-12)
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-11, atol=1e-12, msg=name)
    assert found[0][0][-1] == pytest.approx(wanted[-1], rel=1e-12)


def test_the_head_keeps_its_own_forward_and_hooks_of_the_user():
    model, shapes, given = llama(tied=True), [], batches(0)[0]
    Head(model)
    model.lm_head.register_forward_hook(lambda *found: shapes.append(found[-1].shape))
    assert "forward" not in vars(model.lm_head)
    for each in (model, copy.deepcopy(model)):
        next_token(Head.of(each), CHUNK)(each, given)
        each(given["input_ids"])
    assert shapes == [(1, 1, 1), (*given["input_ids"].shape, VOCAB)] * 2


def losses_of_a_float32_head():
    found = []
    for chunk in (CHUNK, 0):
        model = llama(tied=False).float()
        head = Head(model)
        fs.shard(model, param_dtype="bf16", fp32_modules=["lm_head"], wrap=["Linear"])
        loss = next_token(head, chunk) if chunk else whole_logits_loss
        total, count = loss(model, batches(0)[0])
        (total / count).backward()
        found.append((total.detach(), *(p.grad.to_local().clone() for p in model.parameters())))
    return found


def test_a_head_in_float32_gets_float32_inputs_and_returns_a_float32_loss(ranks):
    for found in (losses_of_a_float32_head(), *ranks(2)(losses_of_a_float32_head)):
        assert found[0][0].dtype is torch.float32
        torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_no_tensor_of_tokens_by_vocabulary_exists():
    model = llama(tied=False)
    objective, given = next_token(Head(model), CHUNK), batches(0)[0]
    with LargestTensor(VOCAB) as made:
        objective(model, given)[0].backward()
    assert made.numel == model.lm_head.weight.numel() < given["input_ids"].numel() * VOCAB
    with LargestTensor(VOCAB) as made:
        whole_logits_loss(model, given)[0].backward()
    assert made.numel >= given["input_ids"].numel() * VOCAB


def test_the_loss_and_its_gradient_make_one_tensor_as_large_as_the_logits():
    large = set()

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.numel() == logits.numel():
                large.add(found.untyped_storage().data_ptr())
            return found

    logits = torch.randn(11, VOCAB, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (11,)).index_fill(0, torch.tensor([2, 7]), IGNORED)
    with Large():
        total = cross_entropy(logits, targets)
        (total * 0.3).backward()
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    gradient = torch.autograd.grad(wanted * 0.3, logits)[0]
    torch.testing.assert_close((total, logits.grad), (wanted, gradient), rtol=0, atol=1e-13)
    assert len(large) == 1
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # hides its version
        again = cross_entropy(logits, targets)
    again.backward(retain_graph=True)
    with pytest.raises(EngineError, match="expected one backward"):
        again.backward()


def test_a_batch_without_labels_has_no_loss_and_no_gradient():
    model, given = llama(tied=False), batches(0)[1]
    given["labels"].fill_(IGNORED)
    total, count = next_token(Head(model), CHUNK)(model, given)
    total.backward()
    assert (total.item(), count) == (0.0, 0)
    assert all(not param.grad.any() for param in model.parameters())


class Doubled(torch.nn.Module):
    """A causal language model that changes its logits without a configuration key."""

    def __init__(self):
        super().__init__()
        self.inner = llama(tied=False)
        self.config = self.inner.config

    def get_output_embeddings(self):
        return self.inner.lm_head

    def forward(self, **inputs):
        found = self.inner(**inputs)
        found.logits = 2 * found.logits
        return found


def test_a_model_that_changes_its_heads_output_is_refused_once_a_loss_shows_it():
    model, given = Doubled(), batches(0)[0]
    objective = next_token(Head(model), CHUNK)
    nothing = {**given, "labels": torch.full_like(given["labels"], IGNORED)}
    assert objective(model, nothing)[0].item() == 0
    with pytest.raises(ConfigError, match=r"loss_chunk_size.*Doubled, which changes them.*to 0"):
        objective(model, given)


def test_the_reason_is_reported_if_the_head_cannot_make_the_loss():
    config = load_config(None, ["model.config.model_type=llama"]).config
    assert whole_logits(llama(tied=True), config) is None
    softcapped = Gemma2Config(hidden_size=16, intermediate_size=24, head_dim=8, **SIZES)
    model = AutoModelForCausalLM.from_config(softcapped)
    assert whole_logits(model, config) == (
        "Gemma2ForCausalLM has final_logit_softcapping in its configuration"
    )
    off = load_config(None, ["model.config.model_type=llama", "loss_chunk_size=0"]).config
    assert whole_logits(llama(tied=True), off) == "training.loss_chunk_size is 0"
