"""Forwards and writes inside a backward: hooks evaluate the same as in one process."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fullshard as fs
from fullshard.errors import EngineError
from support.programs import SETTINGS, Chain, Layer, batch, made, said_of, square
from support.ranks import on_ranks


def sharded(setting):
    settings: dict[str, Any] = {"poison": True, **SETTINGS[setting]}
    return fs.shard(made(Chain), wrap=Chain.wrap, **settings)


def evaluated_in_backwards(student, teacher, ranks):
    """Evaluates a teacher that follows its student in a hook, the student after backward."""
    seen, optimizer = [], torch.optim.SGD(student.parameters(), lr=0.5)
    kept = teacher(batch(0, 0))  # a graph that waits for its backward

    def look(model, *, trains=False):
        time.sleep(0.02 * dist.get_rank())  # the other rank may write meanwhile
        with torch.set_grad_enabled(trains):
            seen.append(model(batch(dist.get_rank(), 7)))

    student.head.bias.register_post_accumulate_grad_hook(lambda _: look(student))
    for step in range(3):
        loss = torch.stack([square(student, batch(rank, step)) for rank in ranks]).mean()
        loss.register_hook(lambda _: look(teacher))
        loss.register_hook(lambda _: look(teacher, trains=True))
        loss.backward()
        seen[-2].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, param in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(param, 0.5)
    return torch.stack([*seen, kept]).detach()


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_an_evaluation_in_a_backward_hook_sees_earlier_writes(setting):
    models = [sharded(setting) for _ in range(2)]
    ours = evaluated_in_backwards(*models, [dist.get_rank()])
    torch.testing.assert_close(ours, evaluated_in_backwards(made(Chain), made(Chain), range(2)))


@pytest.mark.parametrize("setting", ["c10d", "shared"])
@on_ranks(2)
def test_a_write_that_the_same_backward_would_read_is_refused(setting):
    model = sharded(setting)

    def write(_):
        for p in model.parameters():
            p.data.mul_(2)

    def watch(_module, args):
        args[0].register_hook(write)

    model.head.register_forward_pre_hook(watch)
    loss = square(model, batch(0, 0))
    with pytest.raises(EngineError, match=r"expected a backward of .* that does not write"):
        loss.backward()


@pytest.mark.parametrize("setting", ["c10d", "no_shard"])
@on_ranks(2)
def test_a_backward_hook_never_reads_an_unreduced_gradient(setting):
    model: Any = sharded(setting)
    x = batch(dist.get_rank())
    modules = [model.head, model.layers[1].linear]  # gradients wait, or are moved immediately
    for module in modules:
        seen: list[Any] = []
        read = partial(lambda seen, module, *_: seen.append(module.weight.grad), seen, module)
        hook = module.register_full_backward_pre_hook(read)
        square(model, x).backward()
        torch.autograd.grad(square(model, inputs := x.clone().requires_grad_()), inputs)
        assert seen[0] is None
        assert seen[1] is module.weight.grad
        with pytest.raises(EngineError, match=r"weight.grad inside a backward: expected"):
            square(model, x).backward()  # adds to an earlier gradient
        hook.remove()
        model.zero_grad()
        hook = module.register_full_backward_hook(read)
        with pytest.raises(EngineError, match=r"weight.grad inside a backward: expected"):
            square(model, x).backward()
        hook.remove()
        model.zero_grad()


class InThreads(Layer):
    """Layers whose autograd nodes have equal sequence numbers, in different threads."""

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().forward, x).result()


def guided_by_itself(model, x):
    """Calls the model in the middle of its own backward."""

    def guide(gradient):
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            return gradient + torch.autograd.grad(square(model, y), y)[0].abs().sum()

    at = model.layers[2]
    hook = at.register_forward_hook(lambda *said: said[2].register_hook(guide) and None)
    loss = square(model, x)
    hook.remove()
    return loss


@on_ranks(2)
def test_needing_one_slot_for_two_units_is_refused_on_all_ranks():
    for build, work in ((Chain, guided_by_itself), (partial(Chain, InThreads), square)):
        said = said_of(build, lambda *of, work=work: work(*of).backward())
        assert all("expected its slot to be free; it contains" in text for text in said[:2]), said
        assert said[2:] == ["nothing", "nothing"]
