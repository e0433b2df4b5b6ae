"""The interpolated bigram compared with a computation token by token."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from fullshard.data.dataset import best_weight, interpolated_bigram


def slow_parts(train, target, vocab_size):
    """Returns p(b | a) and p(b) for every pair of `target`, counted in dictionaries."""
    tokens = Counter(int(token) for row in train for token in row)
    contexts = Counter(int(token) for row in train for token in row[:-1])
    pairs = Counter((int(a), int(b)) for row in train for a, b in itertools.pairwise(row))
    total = sum(tokens.values())
    for row in target:
        for a, b in itertools.pairwise(row):
            a, b = int(a), int(b)
            bigram = pairs[a, b] / contexts[a] if contexts[a] else 0.0
            yield bigram, (tokens[b] + 1) / (total + vocab_size)


def slow_nats(parts, weight):
    parts = list(parts)
    return -sum(math.log(weight * b + (1 - weight) * u) for b, u in parts) / len(parts)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(7, np.uint16), (70_000, np.uint32)])
def test_baseline_equals_the_computation_token_by_token(vocab_size, dtype):
    chance = np.random.default_rng(0)
    train = (chance.integers(0, 6, (40, 9)) ** 2 % vocab_size).astype(dtype)
    held_out = (chance.integers(0, 7, (5, 9)) % vocab_size).astype(dtype)
    result = interpolated_bigram(train, held_out, vocab_size)
    choosing = list(slow_parts(train[:-4], train[-4:], vocab_size))
    weights = np.linspace(0.0, 1.0, 2001)[:-1]
    best = min(weights, key=lambda weight: slow_nats(choosing, weight))
    assert result.weight == pytest.approx(best, abs=1e-3)
    expected = slow_nats(slow_parts(train, held_out, vocab_size), result.weight)
    assert result.nats == pytest.approx(expected, abs=1e-12)
    assert result.num_tokens == 40


def test_text_that_a_bigram_predicts_has_almost_no_loss():
    train = np.tile(np.arange(5, dtype=np.uint16), (50, 4))
    assert interpolated_bigram(train, train[:3], 5).nats < 1e-4


def test_an_unseen_pair_keeps_the_loss_finite():
    train = np.tile(np.arange(5, dtype=np.uint16), (50, 4))
    held_out = np.array([[4, 3, 2, 1]], dtype=np.uint16)
    assert 10 < interpolated_bigram(train, held_out, 5).nats < 30


def test_a_single_training_sequence_is_enough():
    train = np.array([[1, 2, 1, 2, 3]], dtype=np.uint16)
    assert math.isfinite(interpolated_bigram(train, train, 4).nats)


def test_a_useless_bigram_gets_no_weight():
    unigram = np.full(100, 0.2)
    assert best_weight(np.full(100, 0.1), unigram) < 0.01
    assert best_weight(np.full(100, 0.9), unigram) > 0.99
