"""The dimension along which arrays are sharded."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.planner.arrays import PADDED_ABOVE, ArrayCut, cut_of

SHAPES = st.lists(st.integers(1, 400), max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("shape", "parts", "cut"),
    [
        ((50257, 768), (8,), ArrayCut(1)),  # the larger dimension does not divide evenly
        ((64, 64), (2,), ArrayCut(0)),  # the first of equal dimensions
        ((257, 257), (2,), ArrayCut(0, 1)),
        ((7,), (2,), ArrayCut()),
        ((), (2,), ArrayCut()),
        ((64, 64), (1,), ArrayCut()),
        ((0, 8), (2,), ArrayCut()),
        ((64, 32), (4, 0, 2), ArrayCut(1, 0, 0, 2)),  # a different dimension than the tensor axis
        ((64,), (2, 0, 2), ArrayCut(None, 0, 0, 2)),
    ],
)
def test_the_largest_divisible_dimension_is_sharded(shape, parts, cut):
    assert cut_of(shape, *parts) == cut


@given(SHAPES, st.integers(1, 9))
def test_parts_are_equal_and_only_small_arrays_stay_whole(shape, num_parts):
    cut = cut_of(shape, num_parts)
    if cut.dim is None:
        divides = any(size % num_parts == 0 for size in shape)
        assert num_parts == 1 or not (divides or math.prod(shape) >= PADDED_ABOVE)
        return
    assert (shape[cut.dim] + cut.padding) % num_parts == 0
    assert cut.padding < num_parts
    assert cut.padding == 0 or not any(size % num_parts == 0 for size in shape)
