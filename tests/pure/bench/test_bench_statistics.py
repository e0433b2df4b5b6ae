"""Statistics of the tables, on numbers with known results."""

import random

import pytest

from fullshard.bench.measurement import (
    bootstrap,
    paired_ratio,
    removed_share,
)


def test_a_constant_ratio_has_an_interval_of_no_width():
    theirs = [1.0, 2.0, 3.0, 10.0, 4.0]
    found = paired_ratio([0.5 * t for t in theirs], theirs)
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


def test_pairing_cancels_load_on_both_sides_of_a_round():
    draw = random.Random(1)
    load = [draw.uniform(1.0, 5.0) for _ in range(15)]
    ours = [0.7 * x * draw.uniform(0.99, 1.01) for x in load]
    found = paired_ratio(ours, load)
    assert 0.69 < found.low <= found.value <= found.high < 0.71


def test_the_interval_has_about_its_nominal_coverage():
    draw = random.Random(2)
    hits = 0
    for _ in range(60):
        ratios = [draw.gauss(0.8, 0.05) for _ in range(15)]
        found = paired_ratio(ratios, [1.0] * 15)
        hits += found.low <= 0.8 <= found.high
    assert 51 <= hits <= 60


def test_the_interval_is_the_same_in_every_run():
    found = [bootstrap(15, lambda rounds: sum(0.7**at for at in rounds)) for _ in range(2)]
    assert found[0] == found[1]


def test_unequal_numbers_of_rounds_are_refused():
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0, 2.0], [1.0])


def test_bootstrap_draws_whole_rounds():
    seen = set()
    bootstrap(3, lambda rounds: float(len(seen.update(rounds) or rounds)))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize(("ours", "share"), [(1.0, 1.0), (2.0, 0.0), (1.5, 0.5), (3.0, -1.0)])
def test_removed_share_is_one_at_the_floor_and_zero_at_the_peer(ours, share):
    found = removed_share([ours] * 5, [2.0] * 5, [1.0] * 5)
    assert found is not None
    assert found.value == pytest.approx(share)


def test_there_is_no_removed_share_where_the_peer_has_no_overhead():
    assert removed_share([1.0] * 3, [1.0] * 3, [1.0] * 3) is None
