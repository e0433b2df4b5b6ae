"""Owners of whole tensors are chosen from sizes only, equally on every rank."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.planner.layout import FlatLayout
from fullshard.planner.optimizers import Owners, takes_muon

sizes = st.lists(st.integers(0, 5000), max_size=40)
parts = st.integers(1, 9)


@given(sizes, parts)
def test_every_tensor_has_one_owner_and_one_round(numels, num_parts):
    owners = Owners.choose(numels, num_parts)
    assert len(owners.of) == len(numels)
    assert set(owners.of) <= set(range(num_parts))
    assert [index for indices in owners.rounds for index in indices] == list(range(len(numels)))


@given(sizes, parts)
def test_loads_differ_by_no_more_than_the_largest_tensor(numels, num_parts):
    owners = Owners.choose(numels, num_parts)
    loads = [0] * num_parts
    for numel, owner in zip(numels, owners.of, strict=True):
        loads[owner] += numel
    assert max(loads) - min(loads) <= max(numels, default=0)


@given(sizes, parts)
def test_no_owner_gathers_more_at_once_than_the_largest_tensor(numels, num_parts):
    owners = Owners.choose(numels, num_parts)
    for indices in owners.rounds:
        held = [0] * num_parts
        for index in indices:
            held[owners.of[index]] += numels[index]
        assert max(held) <= max(numels)


def test_small_tensors_share_a_round():
    owners = Owners.choose([9, 4, 4, 9], 2)
    assert owners == Owners((0, 0, 1, 1), ((0,), (1, 2), (3,)))
    assert Owners.choose([9] * 8, 4).rounds == ((0, 1, 2, 3), (4, 5, 6, 7))


@given(st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=8), parts)
def test_holders_are_the_ranks_whose_slices_are_not_empty(shapes, num_parts):
    layout = FlatLayout.build([(str(i), tuple(s), 1) for i, s in enumerate(shapes)], num_parts)
    for index, placement in enumerate(layout.placements):
        slices = [layout.slices(part)[index] for part in range(num_parts)]
        wanted = [(part, s.start, s.stop) for part, s in enumerate(slices) if s.numel]
        assert layout.holders(placement) == wanted
        assert sum(stop - start for _, start, stop in wanted) == math.prod(placement.shape)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), True),
        ("transformer.h.11.mlp.c_fc.weight", (8, 32), True),
        ("0.weight", (8, 8), True),
        ("model.embed_tokens.weight", (100, 8), False),
        ("lm_head.weight", (100, 8), False),
        ("model.layers.0.input_layernorm.weight", (8,), False),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 16, 8), False),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 4), False),
    ],
)
def test_muon_takes_matrices_of_blocks(name, shape, wanted):
    assert takes_muon(name, shape) is wanted
