"""A table of scripts in which only one line changes; every row gives the right result."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn, optim

import fullshard as fs
from support.grid import marked
from support.scripts import WIDTH, Block, Tiny, compare, loss_of, train

# ---- optimizers ----------------------------------------------------------------------------------


def learning_rate_in_a_tensor(run):
    model = run.shard(run.model())
    train(run, model, optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False))
    return run.result(model)


# ---- parameter groups ----------------------------------------------------------------------------


def decay_as_the_trainer_groups(run):
    from transformers.trainer_pt_utils import get_parameter_names

    model = run.shard(run.model())
    decay = get_parameter_names(model, [nn.LayerNorm], ["bias", "scale"])
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in decay], "weight_decay": 0.3},
        {"params": [p for n, p in model.named_parameters() if n not in decay], "weight_decay": 0.0},
    ]
    train(run, model, optim.AdamW(groups, lr=1e-2))
    return run.result(model, decay=sorted(decay))


def head_added_later_at_another_rate(run):
    model = run.shard(run.model())
    optimizer = optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9)
    train(run, model, optimizer, 2)
    model.zero_grad()
    optimizer.add_param_group({"params": [model.head.weight], "lr": 0.5})
    train(run, model, optimizer, 2)
    return run.result(model)


def parameters_with_elements_alone(run):
    """Each rank gives its optimizer only parameters of which it has elements."""
    model = run.shard(run.model())
    train(run, model, optim.AdamW([p for p in model.parameters() if p.numel()], lr=1e-2))
    return run.result(model)


# ---- weights -------------------------------------------------------------------------------------


def noise_in_weights_that_is_taken_back_before_backward(run):
    """Autograd reads the current slots, and `.data` hides the write from it."""
    model = run.shard(run.model(), transport="direct")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for param in model.parameters():
            param.data.mul_(1.5)
        loss = run.loss(model, step)
        for param in model.parameters():
            param.data.div_(1.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return run.result(model)


class Twins(Tiny):
    """Its forward averages blocks into earlier ones."""

    def __init__(self):
        super().__init__()
        self.keys = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        hidden = target = self.embed(tokens)
        with torch.no_grad():
            for old, new in zip(self.keys.parameters(), self.blocks.parameters(), strict=True):
                old.zero_().add_(new, alpha=0.5)
            for block in self.keys:
                target = block(target)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden - target)


def momentum_encoder_averaged_in_forward(run):
    results = []
    for transport in ("direct", "shared"):
        model = run.model(Twins).requires_grad_(True)  # so that both are sharded alike
        run.shard(model, transport=transport, wrap=["Block"]).keys.requires_grad_(False)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        train(run, model, optimizer, 3)
        results.append(run.result(model))
    return results


def an_embedding_whose_hook_reads_its_weight(run):
    """Like weight_norm and spectral_norm, its backward needs more than indices."""
    model = run.model()
    model.embed.register_forward_hook(lambda m, _, found: found * m.weight.square().mean())
    run.shard(model, transport="direct", wrap=["Block", "Embedding"])
    train(run, model, optim.SGD(model.parameters(), lr=0.1))
    return run.result(model)


def gradients_of_activations_between_micro_batches(run):
    """A backward that reaches no parameter but passes through units reduces nothing."""
    results = []
    for settings in ({"transport": "direct"}, {"strategy": "no_shard", "transport": "direct"}):
        model = run.shard(run.model(), **settings)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            with fs.no_sync(model) if run.sharded else nullcontext():
                run.loss(model, step).backward()
            hidden = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
            torch.autograd.grad(model.blocks[0](hidden).sum(), hidden)
            run.loss(model, 9 + step).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(run.result(model))
    return results


# ---- schedulers ----------------------------------------------------------------------------------


def scheduled(run, make):
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


def warmup_from_zero(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))


def one_cycle(optimizer):
    return optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)


# ---- models that reshape their own weights -------------------------------------------------------


def reparametrized(run, change):
    model = run.model()
    for block in model.blocks:
        change(block.mid)
    run.shard(model)
    train(run, model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return run.result(model)


def with_weight_norm(linear):
    nn.utils.parametrizations.weight_norm(linear)


def with_old_weight_norm(linear):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, but still used in scripts
        nn.utils.weight_norm(linear)


def with_old_spectral_norm(linear):
    nn.utils.spectral_norm(linear, n_power_iterations=400)  # converges in the first forward


def with_orthogonal_weights(linear):
    nn.utils.parametrizations.orthogonal(linear, use_trivialization=False)


class Symmetric(nn.Module):
    """A parametrization that makes a square weight symmetric."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def with_own_parametrization(linear):
    nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())


# ---- whole scripts -------------------------------------------------------------------------------


def everything_at_once(run):
    """A typical loop: accumulation, clipping, schedule, average, evaluation."""
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
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return run.result(model, log=log, sizes=sizes)


def averaged_model_made_before(run):
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


def two_models_in_turn(run):
    """Trains two models in turn, then both on the sum of their losses."""
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


SCRIPTS = [
    learning_rate_in_a_tensor,
    decay_as_the_trainer_groups,
    head_added_later_at_another_rate,
    parameters_with_elements_alone,
    noise_in_weights_that_is_taken_back_before_backward,
    momentum_encoder_averaged_in_forward,
    an_embedding_whose_hook_reads_its_weight,
    gradients_of_activations_between_micro_batches,
    *(partial(scheduled, make=make) for make in (warmup_from_zero, one_cycle)),
    *(
        partial(reparametrized, change=change)
        for change in (
            with_weight_norm,
            with_old_weight_norm,
            with_old_spectral_norm,
            with_orthogonal_weights,
            with_own_parametrization,
        )
    ),
    everything_at_once,
    averaged_model_made_before,
    two_models_in_turn,
]


def name_of(script):
    if isinstance(script, partial):
        return next(iter(script.keywords.values())).__name__
    return script.__name__


ALIKE = (
    "with_weight_norm",
    "with_old_spectral_norm",
    "with_own_parametrization",
    "warmup_from_zero",
)


@pytest.mark.parametrize(
    "script",
    marked(zip(SCRIPTS), lambda script: name_of(script) not in ALIKE, pytest.mark.long),
    ids=name_of,
)
def test_a_script_around_an_optimizer_gives_what_one_process_gives(ranks, script):
    ranks(2)(compare, script)


def bfloat16_autocast(run):
    """One context around all steps; in one process, each forward has its own context.

    torch caches casts per context, even of weights that have changed, or without a graph.
    """
    model = run.shard(run.model().float(), transport="direct")
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)

    def loss(step, rank):
        with nullcontext() if run.sharded else autocast():
            return loss_of(model, step, rank) / len(run.ranks)

    with autocast() if run.sharded else nullcontext():
        for step in range(3):
            for rank in run.ranks:
                with torch.no_grad():
                    loss(step, rank)
                loss(step, rank)  # its graph ends here
                for _ in range(2):
                    loss(step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.result(model)


def test_autocast_gives_what_one_process_gives(ranks):
    ranks(2)(compare, bfloat16_autocast, 1e-5)  # float32
