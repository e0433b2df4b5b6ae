"""Parts of a model that are called, read or frozen outside the model's forward."""

from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fullshard as fs
from support.grid import chequered
from support.models import backward_of, perturbed
from support.parity import assert_parity
from support.ranks import on_ranks

WIDTH, WORDS = 8, 40
TRANSPORTS = ("c10d", "direct", "shared")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.uses_adapter = True

    def forward(self, x):
        y = self.linear(x)
        return x + torch.tanh(y + self.adapter(y) if self.uses_adapter else y)


class Base(nn.Module):
    """Blocks between an embedding and a norm, which are not units."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


class Lm(nn.Module):
    """A base and a head; `wrap="auto"` makes the head a unit."""

    def __init__(self):
        super().__init__()
        self.base = Base()
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.lm_head(self.base(x))


def plain(model, x):
    return model(x).square().mean()


def by_its_parts(model, x):
    return model.lm_head(model.base(x)).square().mean()


def by_a_part_twice(model, x):
    with torch.no_grad():
        before = model.base(x)
    return (model.base(x) - before.flip(0)).square().mean() + plain(model, x)


def recomputed_part(model, x):
    return checkpoint(model.base, x, use_reentrant=False).square().mean() + plain(model, x)


def by_one_layer(model, x):
    return model.base.norm(model.base.words(x)).square().mean() + plain(model, x)


def adapters_off_in_between(model, x):
    """Like PEFT's `disable_adapter`, which DPO uses for its reference."""
    out = model(x)
    adapters = [block.adapter.weight for block in model.base.blocks]
    for on in (False, True):
        for block, weight in zip(model.base.blocks, adapters, strict=True):
            block.uses_adapter = on
            weight.requires_grad_(on)
        if not on:
            with torch.no_grad():
                reference = model(x)
    return (out - 0.5 * reference).square().mean()


def head_read_in_chunks(model, x):
    """Like TRL's `add_fused_lm_head`."""

    def forward(self, x):
        rows, bias = self.lm_head.weight, self.lm_head.bias
        kept = self.base(x)
        halves = (slice(0, WORDS // 2), slice(WORDS // 2, None))
        sums = [torch.logsumexp(kept @ rows[at].T + bias[at], -1) for at in halves]
        return torch.logaddexp(*sums)

    if "forward" not in vars(model):
        model.forward = MethodType(forward, model)
        model(x)
    return model(x).mean()


PROGRAMS = (
    *(by_its_parts, by_a_part_twice, recomputed_part, by_one_layer),
    *(adapters_off_in_between, head_read_in_chunks),
)


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, WORDS, (4, 3), generator=generator)


def made(work):
    torch.manual_seed(0)
    model = perturbed(Lm().double())
    if work is head_read_in_chunks:  # before sharding, as trainers do
        with torch.no_grad():
            work(model, batch(0, 0))
    return model


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("name", "transport"),
    chequered([work.__name__ for work in PROGRAMS], TRANSPORTS, len(TRANSPORTS)),
)
@on_ranks(2)
def test_parts_used_outside_of_forward_equal_one_process(name, transport):
    program = next(work for work in PROGRAMS if work.__name__ == name)
    build = partial(made, program)

    def work(model, step, rank):
        return backward_of(program(model, batch(rank, step)))

    assert_parity(build, work, {"transport": transport}, kinds=("sgd",))


def units(patched):
    model = made(head_read_in_chunks if patched else plain)
    plan = fs.plan(model, world_size=2)
    return [unit.name for unit in plan.units]


def test_a_head_belongs_to_the_model_with_the_replaced_forward():
    assert "lm_head" in units(patched=False)
    assert "lm_head" not in units(patched=True)
