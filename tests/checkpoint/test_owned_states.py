"""States of owners' optimizers: any number of ranks reads those of any other number."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import fullshard as fs
from fullshard.run.optim import Average
from support.models import perturbed
from support.scripts import NUM_TOKENS, Tiny, differences, error_of

NUM_SAMPLES = 12  # divisible by any number of ranks
STEPS = 2  # updates before the save, and after the load
WORLDS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{}, {"strategy": "no_shard"}],
    3: [{}],
    4: [{"strategy": "hybrid_shard", "replicate": 2}],
}
KINDS = ("muon", "adafactor")


def whole():
    torch.manual_seed(0)
    return perturbed(Tiny(tied=True).double())


def optimizers_of(model, kind):
    """Returns (factory, parameters) of the optimizers that one process steps."""
    if kind == "adafactor":
        return [(partial(optim.Adafactor, lr=1e-2), list(model.parameters()))]
    matrices = [p for n, p in model.named_parameters() if "blocks" in n and p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if "blocks" not in n or p.ndim != 2]
    return [
        (partial(optim.Muon, lr=0.02), matrices),
        (partial(optim.AdamW, lr=1e-2, eps=1e-4), rest),
    ]


def sharded(kind, **config):
    model = whole()
    fs.shard(model, poison=True, **config)
    (factory, params), *others = optimizers_of(model, kind)
    beside = others[0][0](others[0][1]) if others else None
    return model, fs.owned(model, factory, params, beside=beside)


def train(model, steppers, steps, ranks=1):
    rank = dist.get_rank() if ranks > 1 else 0
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, NUM_TOKENS, (NUM_SAMPLES, 5), generator=generator)
        own = tokens.chunk(ranks)[rank]
        scores = model(own[:, :-1])
        nn.functional.cross_entropy(scores.flatten(0, 1), own[:, 1:].flatten()).backward()
        for stepper in steppers:
            stepper.step()
        model.zero_grad()


def write_all(root):
    """Saves and continues; a new model that loads the save continues with the same bits."""
    ranks = dist.get_world_size()
    for number, config in enumerate(WORLDS[ranks]):
        for kind in KINDS:
            model, optimizer = sharded(kind, **config)
            train(model, [optimizer], range(STEPS), ranks)
            path = fs.save(Path(root) / f"{kind}-{ranks}-{number}", model, optimizer)
            train(model, [optimizer], range(STEPS, 2 * STEPS), ranks)
            again, its = sharded(kind, **config)
            fs.load(path, again, its)
            train(again, [its], range(STEPS, 2 * STEPS), ranks)
            found, wanted = (fs.full_state_dict(m, rank0_only=False) for m in (again, model))
            assert not list(differences(found, wanted, 0.0))


def read_all(root):
    """Every number of ranks reads what every other wrote, for one of the kinds."""
    ranks, count = dist.get_world_size(), 0
    for kind in KINDS:
        alone = whole()
        train(alone, [make(params) for make, params in optimizers_of(alone, kind)], range(4))
        wanted = dict(alone.state_dict())
        for at, path in enumerate(sorted(Path(root).glob(f"{kind}-*"))):
            if (at + ranks + KINDS.index(kind)) % 2:
                continue
            config = WORLDS[ranks][at // 2 % len(WORLDS[ranks])]
            model, optimizer = sharded(kind, **config)
            fs.load(path, model, optimizer)
            train(model, [optimizer], range(STEPS, 2 * STEPS), ranks)
            found = fs.full_state_dict(model, rank0_only=False)
            problems = list(differences(found, wanted, 1e-12))
            assert not problems, (path.name, ranks, config, problems)
            count += 1
    return count


@pytest.mark.long
def test_any_number_of_ranks_resumes_from_any_other(ranks, tmp_path):
    for world_size in WORLDS:
        ranks(world_size)(write_all, str(tmp_path), timeout=100)
    for world_size in WORLDS:
        assert ranks(world_size)(read_all, str(tmp_path), timeout=100)[0] == 5


def averages(root, world):
    """Saves and loads an average of the weights, sharded like the weights."""
    model, optimizer = sharded("adafactor")
    average = Average(optimizer, 0.5)
    ranks = dist.get_world_size()
    if ranks == world:
        for step in range(3):
            train(model, [optimizer], range(step, step + 1), ranks)
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            average.update()
            model.zero_grad()
        fs.save(root, model, optimizer, wait=False)
        fs.wait()
    else:
        fs.load(root, model, optimizer)
    with average.applied():
        found = fs.full_state_dict(model, rank0_only=False)
    torch.save(found, Path(root).parent / f"{ranks}-{dist.get_rank()}.pt")
    train(model, [optimizer], range(5, 6), ranks)


def test_an_average_of_the_weights_is_resharded_with_them(ranks, tmp_path):
    ranks(2)(averages, str(tmp_path / "c"), 2)
    ranks(3)(averages, str(tmp_path / "c"), 2)
    one, other = (torch.load(tmp_path / f"{n}-0.pt", weights_only=True) for n in (2, 3))
    assert not list(differences(one, other, 0.0))


def another_kind(root):
    model, optimizer = sharded("muon")
    fs.save(root, model, optimizer)
    return error_of(lambda: fs.load(root, *sharded("adafactor")))


def test_states_of_another_optimizer_are_refused(ranks, tmp_path):
    (text,) = set(ranks(2)(another_kind, str(tmp_path / "c")))
    assert "expected the states of owned Adafactor; it has owned Muon, AdamW" in text
