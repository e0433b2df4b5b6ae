"""Compares training with recompute to training without, bit for bit."""

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from support.parity import whole_gradients, whole_params
from support.reference import make_optimizer

NUM_STEPS = 3
WRAPPED = "_checkpoint_wrapped_module."
_WANTED = {}  # results without recompute, cached for the checks of a rank


def trained(make, work, settings, before=None, after=None):
    """Returns (loss, gradients, parameters) of each step, and how often linear layers ran."""
    model, calls = make(), []
    if before:
        before(model)
    fs.shard(model, poison=True, **settings)
    if after:
        after(model)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: calls.append(1))
    optimizer = make_optimizer("adamw", model.parameters())
    steps = []
    for step in range(NUM_STEPS):
        loss = work(model, step, dist.get_rank())
        gradients = whole_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss, _plain(gradients), _plain(whole_params(model))))
    return steps, len(calls)


def _plain(named):
    return {name.replace(WRAPPED, ""): value for name, value in named.items()}


def assert_bits(found, wanted, tolerance=0.0):
    """Nothing differs in any bit (or by more than `tolerance`), and something was recomputed."""
    for step, (ours, theirs) in enumerate(zip(found[0], wanted[0], strict=True)):
        said = f"step {step}: loss {ours[0]}, not {theirs[0]}"
        assert is_same(ours[0], theirs[0], tolerance), said
        for kind in (1, 2):
            assert ours[kind].keys() == theirs[kind].keys()
            wrong = [n for n, v in theirs[kind].items() if not is_same(ours[kind][n], v, tolerance)]
            assert not wrong, f"step {step}: {wrong}"
    assert found[1] > wanted[1], "nothing was recomputed"


def is_same(one, other, tolerance=0.0):
    if one is None or other is None:
        return one is other
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def compare(make, work, settings, tolerance=0.0, **ways):
    """Compares runs with and without recompute under the same settings."""
    try:
        key = (make, work, str(settings), torch.get_default_dtype())
        if key not in _WANTED:
            _WANTED[key] = trained(make, work, settings)
        assert_bits(trained(make, work, settings, **ways), _WANTED[key], tolerance)
    except Exception as error:
        raise AssertionError(f"{getattr(work, '__name__', work)}, {settings}") from error
