"""The table of scripts that change nothing but one line: right, in every row."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

from support.scripts import NUM_TOKENS, Run, compare, loss_of, tokens_of, train

# ---- optimizers ----------------------------------------------------------------------------------


def default_settings(run: Run) -> Any:
    model = run.shard(run.model())
    train(run, model, optim.AdamW(model.parameters()))
    return run.result(model)


def learning_rate_in_a_tensor(run: Run) -> Any:
    model = run.shard(run.model())
    train(run, model, optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False))
    return run.result(model)


# ---- parameter groups ----------------------------------------------------------------------------


def decay_by_ndim(run: Run) -> Any:
    model = run.shard(run.model())
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    optimizer = optim.AdamW(
        [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
    )
    train(run, model, optimizer)
    return run.result(model, sizes=[len(group["params"]) for group in optimizer.param_groups])


def decay_as_the_trainer_groups(run: Run) -> Any:
    from transformers.trainer_pt_utils import get_parameter_names

    model = run.shard(run.model())
    decay = get_parameter_names(model, [nn.LayerNorm], ["bias", "scale"])
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decay], "weight_decay": 0.3},
        {"params": [p for n, p in model.named_parameters() if n not in decay], "weight_decay": 0.0},
    ]
    train(run, model, optim.AdamW(groups, lr=1e-2))
    return run.result(model, decay=sorted(decay))


def head_added_later_at_another_rate(run: Run) -> Any:
    model = run.shard(run.model())
    optimizer = optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9)
    train(run, model, optimizer, 2)
    model.zero_grad()
    optimizer.add_param_group({"params": [model.head.weight], "lr": 0.5})
    train(run, model, optimizer, 2)
    return run.result(model)


def one_optimizer_a_parameter_in_a_dict(run: Run) -> Any:
    model = run.shard(run.model())
    optimizers = {p: optim.AdamW([p], lr=1e-2, foreach=False) for p in model.parameters()}
    for step in range(3):
        run.loss(model, step).backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    return run.result(model)


def optimizer_inside_backward(run: Run) -> Any:
    model = run.shard(run.model())
    optimizers = {p: optim.SGD([p], lr=0.1, foreach=False) for p in model.parameters()}

    def step_and_forget(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_and_forget)
    for step in range(3):
        run.loss(model, step).backward()
    return run.result(model, left=[p.grad is None for p in model.parameters()])


# ---- gradients at zero, or none ------------------------------------------------------------------


def zeros_instead_of_none(run: Run) -> Any:
    model = run.shard(run.model())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for step in range(3):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return run.result(model, shown=[p.grad is not None for p in model.parameters()])


def gradients_summed_over_two_backwards(run: Run) -> Any:
    model = run.shard(run.model())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        (run.loss(model, step) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return run.result(model)


def gradients_replaced_by_the_user(run: Run) -> Any:
    model = run.shard(run.model())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        run.loss(model, step).backward()
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad * 0.5 + 0.1 * param.detach()
        run.loss(model, step + 10).backward()  # onto what was put there
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model)


def requires_grad_off_and_on_between_steps(run: Run) -> Any:
    model = run.shard(run.model())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        model.blocks[1].requires_grad_(step % 3 != 1)
        model.embed.weight.requires_grad = step % 2 == 0
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model)


def frozen_blocks(run: Run) -> Any:
    model = run.model()
    model.blocks[0].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    run.shard(model)
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    train(run, model, optimizer)
    return run.result(model)


# ---- schedulers ----------------------------------------------------------------------------------


def scheduled(run: Run, make: Any) -> Any:
    model = run.shard(run.model())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = make(optimizer)
    rates = []
    for step in range(5):
        run.loss(model, step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return run.result(model, rates=rates)


def warmup_from_zero(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))


def one_cycle(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)


def cosine(optimizer: optim.Optimizer) -> Any:
    return optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


def warmup_then_cosine(optimizer: optim.Optimizer) -> Any:
    first = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return optim.lr_scheduler.SequentialLR(optimizer, [first, cosine(optimizer)], [2])


def of_transformers(optimizer: optim.Optimizer) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, 2, 6)


# ---- models that reshape their own weights -------------------------------------------------------


def reparametrized(run: Run, change: Any) -> Any:
    model = run.model()
    for block in model.blocks:
        change(block.mid)
    run.shard(model)
    train(run, model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return run.result(model)


def with_weight_norm(linear: nn.Linear) -> None:
    nn.utils.parametrizations.weight_norm(linear)


def with_old_weight_norm(linear: nn.Linear) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in scripts
        nn.utils.weight_norm(linear)


def with_orthogonal_weights(linear: nn.Linear) -> None:
    nn.utils.parametrizations.orthogonal(linear, use_trivialization=False)


class Symmetric(nn.Module):
    """Makes a square weight symmetric."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


def with_own_parametrization(linear: nn.Linear) -> None:
    nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())


# ---- whole scripts -------------------------------------------------------------------------------


def everything_at_once(run: Run) -> Any:
    """Accumulation, clipping, schedule, average, evaluation: a loop as people have them."""
    model = run.shard(run.model(tied=True))
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
    )
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=4)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    log = []
    for step in range(3):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        for micro_batch in range(2):
            (run.loss(model, 10 * step + micro_batch) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                average[name].mul_(0.9).add_(param.data, alpha=0.1)
        log.append([norm.item(), scheduler.get_last_lr()[0]])
        model.eval()
        with torch.no_grad():
            run.loss(model, 99)
    for name, param in model.named_parameters():
        param.data.copy_(average[name])
    return run.result(model, log=log)


def averaged_model_made_before(run: Run) -> Any:
    model = run.model()
    update = optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=update)
    run.shard(model)
    run.shard(average)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        run.loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return run.result(average)


def saved_and_continued(run: Run) -> Any:
    first = run.shard(run.model())
    train(run, first, optim.SGD(first.parameters(), lr=0.1), 2)
    saved = run.result(first)["weights"]
    again = run.model()
    again.load_state_dict(saved)
    run.shard(again)
    train(run, again, optim.SGD(again.parameters(), lr=0.1), 2)
    later = run.shard(run.model())
    later.load_state_dict(saved)
    train(run, later, optim.SGD(later.parameters(), lr=0.1), 2)
    return [run.result(again), run.result(later)]


def two_models_in_turn(run: Run) -> Any:
    """One model learns from another's outputs, which learns too."""
    one, two = run.shard(run.model()), run.shard(run.model())
    optimizers = [optim.SGD(one.parameters(), lr=0.1), optim.AdamW(two.parameters(), lr=1e-2)]
    for step in range(3):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            run.loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        (run.loss(one, step) + 2 * run.loss(two, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [run.result(one), run.result(two)]


def with_transformers(run: Run) -> Any:
    """A causal language model, its own loss, the Trainer's groups, its own gradient tools."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=NUM_TOKENS,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    run.shard(model)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(3):
        batches = [tokens_of(step, rank) for rank in run.ranks]
        losses = [model(input_ids=batch, labels=batch).loss for batch in batches]
        torch.stack(losses).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model, count=[model.get_input_embeddings().weight.ndim])


SCRIPTS = [
    default_settings,
    learning_rate_in_a_tensor,
    decay_by_ndim,
    decay_as_the_trainer_groups,
    head_added_later_at_another_rate,
    one_optimizer_a_parameter_in_a_dict,
    optimizer_inside_backward,
    zeros_instead_of_none,
    gradients_summed_over_two_backwards,
    gradients_replaced_by_the_user,
    requires_grad_off_and_on_between_steps,
    frozen_blocks,
    *(
        partial(scheduled, make=make)
        for make in (warmup_from_zero, one_cycle, cosine, warmup_then_cosine, of_transformers)
    ),
    *(
        partial(reparametrized, change=change)
        for change in (
            with_weight_norm,
            with_old_weight_norm,
            with_orthogonal_weights,
            with_own_parametrization,
        )
    ),
    everything_at_once,
    averaged_model_made_before,
    saved_and_continued,
    two_models_in_turn,
    with_transformers,
]


def name_of(script: Any) -> str:
    if isinstance(script, partial):
        return next(iter(script.keywords.values())).__name__
    return script.__name__


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_a_script_around_an_optimizer_gives_what_one_process_gives(ranks, script):
    ranks(2)(compare, script)


def bfloat16_autocast(run: Run) -> Any:
    model = run.shard(run.model().float())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        for rank in run.ranks:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step, rank)
            (loss / len(run.ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model)


def test_autocast_gives_what_one_process_gives(ranks):
    ranks(2)(compare, bfloat16_autocast, 1e-5)  # float32
