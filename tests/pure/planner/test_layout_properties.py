"""Flat layouts, for any shapes and world sizes."""

import math

from hypothesis import given
from hypothesis import strategies as st

from fullshard.planner.layout import ALIGNMENT, FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=12)
NUM_PARTS = st.integers(1, 70)


def _layout(shapes, num_parts):
    return FlatLayout.build([(f"p{i}", shape, 1) for i, shape in enumerate(shapes)], num_parts)


@given(SHAPES, NUM_PARTS)
def test_offsets_are_aligned_and_parameters_do_not_overlap(shapes, num_parts):
    layout = _layout(shapes, num_parts)
    end = 0
    for placement, shape in zip(layout.placements, shapes, strict=True):
        assert placement.offset % ALIGNMENT == 0
        assert placement.offset >= end
        end = placement.offset + math.prod(shape)
    assert end <= layout.numel
    assert layout.numel == num_parts * layout.part_numel
    assert layout.part_numel % ALIGNMENT == 0


@given(SHAPES, NUM_PARTS)
def test_the_parts_contain_every_element_exactly_once_at_its_place(shapes, num_parts):
    layout = _layout(shapes, num_parts)
    covered = {f"p{i}": 0 for i in range(len(shapes))}
    for part in range(num_parts):
        for piece, placement in zip(layout.slices(part), layout.placements, strict=True):
            if not piece.numel:
                continue
            assert piece.start == covered[piece.name]  # parts are contiguous
            covered[piece.name] = piece.stop
            assert 0 <= piece.offset <= layout.part_numel - piece.numel
            assert part * layout.part_numel + piece.offset == placement.offset + piece.start
    assert covered == {f"p{i}": math.prod(shape) for i, shape in enumerate(shapes)}


@given(SHAPES, NUM_PARTS)
def test_padding_belongs_to_no_parameter_and_stays_small(shapes, num_parts):
    layout = _layout(shapes, num_parts)
    assert layout.padding == layout.numel - sum(math.prod(shape) for shape in shapes)
    assert layout.padding < ALIGNMENT * (len(shapes) + num_parts)
