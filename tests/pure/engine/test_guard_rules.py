"""The guard's lists: a function on none of them is refused."""

import pytest
import torch
from torch import nn
from torch.overrides import get_overridable_functions, get_testing_overrides, resolve_name

from fullshard.engine.guard import ALIASES, Rule, rule_of, written_by

WHOLE = """prod median cumsum sort topk argmax matmul mm bmm addmm einsum conv2d linear layer_norm
softmax log_softmax cross_entropy cat stack split chunk index_select gather scatter flip roll
transpose permute squeeze unsqueeze flatten dot outer cdist svd qr cholesky inverse det trace histc
unique nonzero equal allclose renorm logsumexp cumprod aminmax"""
RANDOM = "normal_ uniform_ bernoulli_ exponential_ dropout rand_like randn_like multinomial"
NUMBERS = ["sum", "mean", "max", "min", "amax", "amin", "std", "var", "any", "all", "count_nonzero"]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_full_tensors_are_combined_over_ranks(name):
    """They are never listed as elementwise or plain, which would give this rank's result."""
    for function in (getattr(torch, name), getattr(torch.Tensor, name)):
        assert rule_of(function) == (Rule.NUMBER, name)


@pytest.mark.parametrize(("rule", "names"), [(Rule.REFUSED, WHOLE), (Rule.RANDOM, RANDOM)])
def test_functions_of_full_tensors_and_random_fills_are_refused(rule, names):
    for name in names.split():
        functions = (getattr(place, name, None) for place in (torch, torch.Tensor, nn.functional))
        found = {rule_of(function)[0] for function in functions if function is not None}
        assert found == {rule}, name


def test_properties_and_functions_of_one_name_are_distinguished():
    assert rule_of(torch.Tensor.grad.__get__) == (Rule.PLAIN, "grad")
    assert rule_of(torch.Tensor.grad.__set__) == (Rule.ASSIGN, "grad=")
    assert rule_of(torch.autograd.grad)[0] is Rule.AUTOGRAD
    assert rule_of(torch.Tensor.data.__get__) == (Rule.ELEMENTWISE, "data")
    assert rule_of(torch.Tensor.data.__set__) == (Rule.REPLACE, "data=")
    assert rule_of(torch.Tensor.T.__get__)[0] is Rule.REFUSED


def is_same(found, wanted):
    return list(map(id, found)) == list(map(id, wanted))


def test_writing_functions_are_recognized_by_name():
    one, other = torch.zeros(2), torch.ones(2)
    assert is_same(written_by("mul_", (one, other), {}), [one])
    assert is_same(written_by("_foreach_mul_", ([one], [other]), {}), [one])
    assert is_same(written_by("__setitem__", (one, other > 0, 1.0), {}), [one])
    for name in ("mul", "__eq__", "__rsub__", "detach_"):
        assert not written_by(name, (one, other), {}), name
    assert {"data", "detach"} <= ALIASES
    assert "clone" not in ALIASES


def test_written_arguments_are_found_by_position_or_name():
    one, other, third = torch.zeros(2), torch.ones(2), torch.ones(2)
    for key in ("self", "input", "tensor"):
        assert is_same(written_by("fill_", (), {key: one, "value": other}), [one])
    assert is_same(written_by("relu", (one,), {"inplace": True}), [one])
    assert is_same(written_by("relu", (one,), {"inplace": False}), [])
    assert is_same(written_by("mul", (one, other), {"out": third}), [third])
    assert is_same(written_by("frexp", (one,), {"out": (other, third)}), [other, third])


def test_list_functions_write_their_first_list_and_fused_ones_also_gradients():
    params, grads = [torch.zeros(2), torch.zeros(2)], [torch.ones(2), torch.ones(2)]
    scale = torch.ones(())
    assert is_same(written_by("_foreach_mul_", (params, grads), {}), params)
    assert is_same(written_by("_foreach_mul", (params, grads), {}), [])
    assert is_same(written_by("_fused_sgd_", (params, grads), {"grad_scale": None}), params)
    written = params + grads
    assert is_same(written_by("_fused_sgd_", (params, grads), {"grad_scale": scale}), written)
    named = {"grads": grads, "grad_scale": scale}
    assert is_same(written_by("_fused_sgd_", (params,), named), written)


def test_elementwise_functions_give_equal_results_on_parts():
    """For every function that the guard passes, f(parts) equals the parts of f(whole)."""
    torch.manual_seed(0)
    whole = torch.rand(6, 4, dtype=torch.float64) + 0.5
    tried = set()
    for function in _one_tensor_functions():
        try:
            wanted = function(whole.clone())
            parts = [function(part.clone()) for part in whole.split(3)]
        except (TypeError, RuntimeError, ValueError):
            continue  # needs more arguments, or integers
        if isinstance(wanted, torch.Tensor) and "empty" not in function.__name__:
            assert wanted.shape == whole.shape, function
            torch.testing.assert_close(
                torch.cat(parts), wanted, rtol=1e-13, atol=1e-15, equal_nan=True
            )
            tried.add(function.__name__)
    assert len(tried) > 80
    assert {"sqrt", "sqrt_", "tanh", "nan_to_num", "zeros_like"} <= tried


def _one_tensor_functions():
    """Overridable functions of torch that the guard passes as elementwise."""
    seen = set()
    for functions in get_overridable_functions().values():
        for function in functions:
            name = resolve_name(function) or ""
            other = ("__get__", "__set__", "__delete__", "cuda")
            passes = rule_of(function)[0] is Rule.ELEMENTWISE and "foreach" not in name
            if passes and not name.endswith(other) and name not in seen:
                seen.add(name)
                yield function


OLDER = {"names", "has_names"}  # until torch 2.12


def test_every_listed_name_is_one_of_torchs():
    """A misspelled name would be a rule without effect."""
    from fullshard.engine import guard

    names = {rule_of(function)[1] for function in get_testing_overrides()}
    names |= set(dir(torch)) | set(dir(torch.Tensor)) | set(dir(nn.functional))
    for text in (guard.UNARY, guard.BINARY, guard.COPIES, guard.PLAIN, guard.RANDOM):
        listed = {word for word in text.split() if not word.startswith("__")}
        unknown = {w for w in listed if not {w, w + "_"} & names} - OLDER
        assert not unknown, unknown
