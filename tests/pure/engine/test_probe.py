"""The probe distinguishes elementwise optimizers from others."""

from functools import partial

import pytest
import torch
from torch import optim

from fullshard.engine.optimizers import probe
from fullshard.errors import NotElementwiseError


class SignDescent(optim.Optimizer):
    """A custom elementwise optimizer with an argument without a default."""

    def __init__(self, params, lr, *, momentum):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["average"] = state.get("average", 0.0) * group["momentum"] + param.grad
                param.sub_(state["average"].sign(), alpha=group["lr"])


class Normalized(SignDescent):
    """Divides by the norm of the full gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class Late(SignDescent):
    """Mixes elements from the third step on."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                mixed = param.grad.mean() if state["step"] > 2 else param.grad
                param.sub_(mixed, alpha=group["lr"])


class FanIn(SignDescent):
    """Divides its rate by the number of columns, of which a shard has one."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"] / param.shape[1])


class Rounded(SignDescent):
    """Uses one scale per tensor of 4,096 elements or more, like 8-bit optimizers."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                large = param.grad.sign() if param.numel() >= 4096 else param.grad
                param.sub_(large, alpha=group["lr"])


class Wrapped(optim.Optimizer):
    """Cannot be created from its groups alone."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})


LIKE = torch.empty(0)


def settings_of(optimizer):
    return {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}


def a_parameter():
    return [torch.nn.Parameter(torch.ones(2, 2))]


def made(kind):
    more = {"momentum": 0.9} if issubclass(kind, SignDescent) else {}
    return kind(a_parameter(), lr=0.1, **more)


def test_a_custom_elementwise_optimizer_passes():
    probe(SignDescent, settings_of(SignDescent(a_parameter(), 0.1, momentum=0.9)), LIKE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Normalized, Late, FanIn, Rounded, optim.Muon, optim.Adafactor])
def test_an_optimizer_that_treats_shards_differently_is_refused(kind, dtype):
    with pytest.raises(NotElementwiseError, match=f"^{kind.__name__}: expected an elementwise"):
        probe(kind, settings_of(made(kind)), LIKE.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_16_bits_passes_and_torchs_fused_sgd_does_not(dtype):
    """Its CPU kernel skips updates, except in the remainder of a vector."""
    for make in (optim.SGD, optim.ASGD, optim.AdamW, partial(optim.Adagrad, fused=True)):
        optimizer = make(a_parameter(), lr=0.1)
        probe(type(optimizer), settings_of(optimizer), LIKE.to(dtype))
    fused = optim.SGD(a_parameter(), lr=0.1, fused=True)
    with pytest.raises(NotElementwiseError, match=r"differ\. Leave out fused=True, or use an"):
        probe(optim.SGD, settings_of(fused), LIKE.to(dtype))


def test_an_optimizer_for_16_bits_only_is_probed_with_them():
    class Half(SignDescent):
        def step(self, closure=None):
            assert {p.dtype for p in self.param_groups[0]["params"]} == {torch.bfloat16}
            return super().step(closure)

    probe(Half, settings_of(Half(a_parameter(), 0.1, momentum=0.9)), LIKE.bfloat16())


def test_optimizers_that_cannot_be_probed_are_refused():
    inner = optim.SGD(a_parameter(), lr=0.1)
    with pytest.raises(NotElementwiseError, match="that can be tried on a small tensor"):
        probe(Wrapped, settings_of(Wrapped(inner)), LIKE)


def test_the_probe_does_not_change_random_numbers():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    probe(optim.AdamW, {"lr": 0.1}, LIKE)
    assert torch.equal(torch.rand(2), wanted)
