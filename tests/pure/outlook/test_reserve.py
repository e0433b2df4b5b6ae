"""What an allocator holds beyond what is asked of it, by its documented sizes."""

import pytest

from fullshard.outlook.memory import BLOCK, MIB, segments

LARGE = 300 * MIB


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([], 0),
        ([1], 2 * MIB),
        ([4] * 4096, 2 * MIB),  # 512 bytes each
        ([4] * 4097, 4 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB + 1], 20 * MIB),
        ([8 * MIB, 8 * MIB], 20 * MIB),
        ([8 * MIB, 8 * MIB, 8 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([11 * MIB], 12 * MIB),
        ([11 * MIB, MIB], 14 * MIB),  # what is left of a large segment is for large ones alone
        ([LARGE - MIB + BLOCK, 2 * MIB], LARGE + 20 * MIB),  # less than 1 MiB is left
        ([LARGE - 2 * MIB + BLOCK], LARGE),
        ([9 * MIB, 12 * MIB, 5 * MIB], 32 * MIB),  # the smallest that fits: of the 20 MiB
    ],
)
def test_segments_are_those_of_the_documented_sizes(sizes, reserved):
    assert segments(sizes) == reserved


def test_the_order_counts_as_it_does_for_the_allocator():
    assert segments([3 * MIB, 18 * MIB]) == 38 * MIB
    assert segments([17 * MIB, 3 * MIB]) == 38 * MIB
    assert segments([9 * MIB, 2 * MIB, 9 * MIB]) == 20 * MIB
