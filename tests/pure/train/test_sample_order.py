"""Every sample is used once per epoch, by one rank, for any world size."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fullshard.data.order import (
    BatchShape,
    SampleOrder,
    apportioned,
    evaluation_samples,
    permuted,
)
from fullshard.errors import DataError

shapes = st.builds(BatchShape, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))


@given(shapes, st.integers(0, 50), st.integers(0, 3))
def test_an_epoch_visits_each_sample_at_most_once_and_drops_only_the_rest(shape, extra, seed):
    order = SampleOrder(shape.global_batch + extra, shape, seed)
    steps = [order.of_step(step) for step in range(order.steps_per_epoch)]
    seen = np.concatenate([step.ravel() for step in steps])
    assert len(set(seen.tolist())) == len(seen) == order.num_samples - order.num_dropped
    assert steps[0].shape == (shape.accumulation, shape.world_size, shape.per_device)
    assert order.num_dropped < shape.global_batch


def test_epochs_are_shuffled_differently_and_seeds_too():
    shape = BatchShape(4, 1, 1)
    order = SampleOrder(8, shape, seed=0)
    first = np.concatenate([order.of_step(0), order.of_step(1)]).ravel()
    second = np.concatenate([order.of_step(2), order.of_step(3)]).ravel()
    other = SampleOrder(8, shape, seed=1)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first.tolist() != second.tolist()
    assert other.of_step(0).tolist() != order.of_step(0).tolist()


def test_fewer_samples_than_a_step_needs_are_refused():
    with pytest.raises(
        DataError, match=r"at least 16 sequences .*4 per rank x 2 .*x 2 ranks.*got 5"
    ):
        SampleOrder(5, BatchShape(4, 2, 2), seed=0)


@given(st.integers(1, 5000), st.integers(0, 9), st.integers(0, 9))
def test_a_keyed_permutation_is_a_bijection(size, seed, epoch):
    found = permuted(np.arange(size), size, (seed, epoch))
    assert sorted(found.tolist()) == list(range(size))
    some = np.arange(size)[::7]
    assert permuted(some, size, (seed, epoch)).tolist() == found[some].tolist()


def test_a_permutation_of_small_and_large_ranges_is_as_good_as_a_random_one():
    """Checks each of 3! orders, the places of one index, and neighbours that stay neighbours."""
    small = [tuple(permuted(np.arange(3), 3, (seed, 0)).tolist()) for seed in range(1800)]
    counts = np.unique(small, axis=0, return_counts=True)[1]
    assert counts.tolist() == pytest.approx([300] * 6, abs=80)
    places = [int(permuted(np.array([0]), 1000, (0, epoch))[0]) for epoch in range(1500)]
    assert np.histogram(places, 10)[0].tolist() == pytest.approx([150] * 10, abs=50)
    size = 1_000_003
    found = permuted(np.arange(size), size, (1, 2))
    assert abs(np.corrcoef(np.arange(size), found)[0, 1]) < 0.005
    assert np.count_nonzero(np.abs(np.diff(found)) == 1) < 20


def test_a_range_that_no_memory_holds_is_permuted():
    order = SampleOrder(10**15, BatchShape(2, 2, 2), seed=5)
    assert len(set(order.of_step(10**13).ravel().tolist())) == 8
    assert order.of_step(10**13).max() < 10**15


def test_a_mixture_gives_each_source_its_places_and_uses_all_of_it():
    shape = BatchShape(5, 1, 2)
    order = SampleOrder(100, shape, seed=3, mixture=((30, 60), (70, 40)))
    epochs = [
        np.concatenate([order.of_step(10 * epoch + step).ravel() for step in range(10)])
        for epoch in range(7)
    ]
    for rows in epochs:
        assert np.count_nonzero(rows < 30) == 60
        counts = np.bincount(rows, minlength=100)
        assert set(counts[:30].tolist()) == {2}
        assert counts[30:].sum() == 40
    # 7 epochs of 40 places read 70 sequences 4 times.
    assert np.bincount(np.concatenate(epochs), minlength=100)[30:].tolist() == [4] * 70
    assert set(order.of_step(3).ravel()) == set(
        SampleOrder(100, BatchShape(1, 10, 1), 3, order.mixture).of_step(3).ravel()
    )


@given(
    st.integers(1, 1000),
    st.lists(st.floats(0, exclude_min=True, allow_infinity=False), min_size=1, max_size=5),
)
@example(308, [1e308] * 2)
def test_a_count_can_be_divided_by_any_weights(total, weights):
    places, whole = apportioned(total, weights), sum(map(Fraction, weights))
    assert sum(places) == total
    for place, weight in zip(places, weights, strict=True):
        assert abs(place - float(total * Fraction(weight) / whole)) < 1 + 1e-9


def test_counts_of_a_mixture_stay_those_of_older_runs():
    """Runs resume with them; shares of the largest weight would round differently."""
    assert apportioned(26, [0.3, 0.1]) == [20, 6]
    assert apportioned(1056, [717, 205, 102]) == [740, 211, 105]


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4))
def test_evaluation_gives_ranks_equal_batches_and_each_sample_once(count, per_device, world_size):
    samples = evaluation_samples(count, per_device, world_size)
    assert samples.shape[1:] == (world_size, per_device)
    real = samples[samples >= 0]
    assert sorted(real.tolist()) == list(range(count))
    assert samples.size - count < per_device * world_size
