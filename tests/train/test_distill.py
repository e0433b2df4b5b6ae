"""Distillation: loss and gradient equal those of full logits, which no rank allocates."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3MoeConfig

import fullshard as fs
from fullshard.config.schema import DistillConfig
from fullshard.config.values import DistillLoss
from fullshard.errors import ConfigError
from fullshard.models.lora import PROJECTION
from fullshard.recipes.base import IGNORED
from fullshard.recipes.distill.loss import TOP_IDS, TOP_VALUES, Distillation, TopK
from fullshard.recipes.head import Head
from support.logits import LargestTensor
from support.parity import whole_gradients

VOCAB, LENGTH, BATCH = 97, 24, 4
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 32}
LOSSES = [loss for loss in DistillLoss if loss is not DistillLoss.HIDDEN]


def student(*, tied=False):
    torch.manual_seed(1)
    config = LlamaConfig(hidden_size=16, intermediate_size=24, tie_word_embeddings=tied, **SIZES)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def teacher():
    """A teacher with another architecture and width."""
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        **SIZES,
    )
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # peaked distributions
    return model.eval().requires_grad_(requires_grad=False)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = ids.clone()
    labels[torch.rand(ids.shape, generator=generator) < 0.4] = IGNORED
    return {"input_ids": ids, "labels": labels}


def reference(own, other, mix, given):
    """Computes the loss from full logits, with torch's own losses if possible."""
    z, t = (model(input_ids=given["input_ids"]).logits[:, :-1] for model in (own, other))
    predicted = given["labels"][:, 1:] != IGNORED
    z, t, targets = z[predicted], t[predicted], given["labels"][:, 1:][predicted]
    q, p = (F.log_softmax(x / mix.temperature, -1) for x in (z, t))
    if mix.loss is DistillLoss.FORWARD_KL:
        apart = F.kl_div(q, p, reduction="sum", log_target=True)
    elif mix.loss is DistillLoss.REVERSE_KL:
        apart = F.kl_div(p, q, reduction="sum", log_target=True)
    else:
        middle = (mix.beta * p.exp() + (1 - mix.beta) * q.exp()).log()
        apart = mix.beta * F.kl_div(middle, p, reduction="sum", log_target=True)
        apart = apart + (1 - mix.beta) * F.kl_div(middle, q, reduction="sum", log_target=True)
    labels = F.cross_entropy(z, targets, reduction="sum")
    return mix.alpha * mix.temperature**2 * apart + (1 - mix.alpha) * labels


def mixed(loss, temperature, alpha, beta, chunk_size=7):
    numbers = {"temperature": temperature, "alpha": alpha, "beta": beta}
    return DistillConfig(loss=loss, chunk_size=chunk_size, **numbers)


def recipe_of(own, other, mix):
    Head(other)
    return Distillation(Head(own), other, mix)


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_equal_those_of_full_logits(loss):
    mix, given = mixed(loss, 1.7, 0.6, 0.3), batch()
    expected = student()
    wanted = reference(expected, teacher(), mix, given)
    wanted.backward()
    own, other = student(), teacher()
    total, count = recipe_of(own.train(), other, mix).loss(own, given)
    (total * 1.0).backward()
    assert count == int((given["labels"][:, 1:] != IGNORED).sum())
    assert total.item() == pytest.approx(wanted.item(), rel=1e-12)
    for (name, found), param in zip(own.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.grad, param.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_no_tensor_has_logits_of_all_tokens():
    own, other, given = student(), teacher(), batch()
    recipe = recipe_of(own.train(), other, mixed(DistillLoss.JSD, 2.0, 0.5, 0.5, chunk_size=8))
    with LargestTensor(VOCAB) as made:
        recipe.loss(own, given)[0].backward()
    weights = max(model.lm_head.weight.numel() for model in (own, other))
    assert weights >= made.numel >= 8 * VOCAB
    assert weights < int((given["labels"][:, 1:] != IGNORED).sum()) * VOCAB


def test_evaluation_is_the_cross_entropy_of_the_student():
    own, given = student().eval(), batch()
    recipe = recipe_of(own, teacher(), mixed(DistillLoss.FORWARD_KL, 2.0, 0.5, 0.5))
    with torch.no_grad():
        total, _ = recipe.loss(own, given)
        logits = own(input_ids=given["input_ids"]).logits  # the head works as usual without a loss
        wanted = F.cross_entropy(
            logits[:, :-1].reshape(-1, VOCAB), given["labels"][:, 1:].reshape(-1), reduction="sum"
        )
    assert total.item() == pytest.approx(wanted.item(), rel=1e-12)


def test_a_cache_of_all_logits_equals_the_teacher():
    mix, given = mixed(DistillLoss.FORWARD_KL, 2.0, 0.8, 0.5), batch()
    own, other = student().train(), teacher()
    with torch.no_grad():
        top = other(input_ids=given["input_ids"]).logits.topk(VOCAB)
    kept = {TOP_VALUES: top.values, TOP_IDS: top.indices}
    recipe = recipe_of(own, other, mix)
    beside, _ = recipe.loss(own, given)
    other_chunks = mixed(DistillLoss.FORWARD_KL, 2.0, 0.8, 0.5, chunk_size=5)
    cached = Distillation(Head.of(own), TopK(None, None, None), other_chunks)
    assert cached.loss(own, given | kept)[0].item() == pytest.approx(beside.item(), rel=1e-12)


def test_hidden_states_are_compared_through_a_projection():
    given, mix = batch(), mixed(DistillLoss.HIDDEN, 1.0, 0.7, 0.5)
    own, other = student().train(), teacher()
    torch.manual_seed(3)
    own.add_module(PROJECTION, torch.nn.Linear(16, 32, bias=False, dtype=torch.float64))
    total, _ = recipe_of(own, other, mix).loss(own, given)
    total.backward()
    predicted = given["labels"][:, 1:] != IGNORED
    h, t = (model.model(given["input_ids"])[0][:, :-1][predicted] for model in (own, other))
    z = F.linear(h, own.lm_head.weight)
    apart = (F.linear(h, own.distill_projection.weight) - t).square().mean(-1).sum()
    labels = F.cross_entropy(z, given["labels"][:, 1:][predicted], reduction="sum")
    assert total.item() == pytest.approx((0.7 * apart + 0.3 * labels).item(), rel=1e-12)
    assert own.distill_projection.weight.grad.abs().sum() > 0


def test_a_model_with_operations_after_its_head_is_refused():
    config = Gemma2Config(hidden_size=16, intermediate_size=24, head_dim=8, **SIZES)
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        Head(AutoModelForCausalLM.from_config(config))


def test_a_teacher_whose_code_changes_its_logits_is_refused():
    own, other = student().train(), teacher()
    recipe, plain = recipe_of(own, other, mixed(LOSSES[0], 1.0, 0.5, 0.5)), other.forward

    def doubled(**inputs):
        found = plain(**inputs)
        found.logits = 2 * found.logits
        return found

    other.forward = doubled
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM with code that changes them"):
        recipe.loss(own, batch())


# ---- sharded -------------------------------------------------------------------------------------


def distill_on_ranks(strategy, teacher_strategy, tied):
    rank = dist.get_rank()
    mix = mixed(DistillLoss.REVERSE_KL, 1.5, 0.5, 0.5)
    own, other = student(tied=tied).train(), teacher()
    recipe = recipe_of(own, other, mix)
    options = {"poison": True, "grad_reduction": "sum"}
    fs.shard(own, strategy=strategy, wrap=["LlamaDecoderLayer"], **options)
    fs.shard(other, strategy=teacher_strategy, wrap=["Qwen3MoeDecoderLayer"], poison=True)
    for _ in range(2):  # the second step runs in the order learned in the first
        own.zero_grad()
        total, _ = recipe.loss(own, batch(rank))
        total.backward()
    return total.item(), whole_gradients(own)


@pytest.mark.parametrize(
    ("strategy", "teacher_strategy", "tied"),
    [("full_shard", "full_shard", False), ("shard_grad_op", "full_shard", True)],
)
def test_sharded_teacher_and_student_give_the_unsharded_gradient(
    ranks, strategy, teacher_strategy, tied
):
    mix = mixed(DistillLoss.REVERSE_KL, 1.5, 0.5, 0.5)
    whole, losses = student(tied=tied), []
    for rank in range(2):
        loss = reference(whole, teacher(), mix, batch(rank))
        loss.backward()
        losses.append(loss.item())
    found = ranks(2)(distill_on_ranks, strategy, teacher_strategy, tied)
    for rank, (total, gradients) in enumerate(found):
        assert total == pytest.approx(losses[rank], rel=1e-12)
        for name, param in whole.named_parameters():
            torch.testing.assert_close(gradients[name], param.grad, rtol=1e-9, atol=1e-12)
