"""The bigram baseline: a model that beats it has learned more than pairs of tokens.

    p(b | a) = lambda * c(a, b) / c(a)  +  (1 - lambda) * (c(b) + 1) / (N + V)

`c` counts tokens and pairs in the training sequences, N is the sum of c(b), V the size of the
vocabulary. lambda is chosen by EM on the last tenth of the training sequences, with the counts of
the others; then the counts of all are used. Pairs never cross the end of a sequence, so the model
and the baseline predict exactly the same tokens.

References:
    Jelinek and Mercer, Interpolated estimation of Markov source parameters, 1980.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullshard.data.tokenizer import Tokens

Floats = npt.NDArray[np.float64]
CHOOSING_SHARE = 10  # one in ten training sequences chooses lambda


@dataclass(frozen=True)
class Baseline:
    """The interpolated bigram's result.

    Attributes:
        nats: Mean negative log likelihood per held-out token.
        weight: lambda, the weight of the bigram part.
        num_tokens: Held-out tokens that were predicted.
    """

    nats: float
    weight: float
    num_tokens: int


def interpolated_bigram(train: Tokens, held_out: Tokens, vocab_size: int) -> Baseline:
    """Fits the baseline on training sequences and measures it on held-out ones.

    Args:
        train: (num_sequences, length) token ids.
        held_out: (num_sequences, length) token ids.
        vocab_size: Size of the vocabulary.
    """
    num_choosing = max(1, len(train) // CHOOSING_SHARE)
    counted = train[:-num_choosing] if len(train) > 1 else train
    weight = best_weight(*_probabilities(counted, train[-num_choosing:], vocab_size))
    bigram, unigram = _probabilities(train, held_out, vocab_size)
    nats = -np.log(weight * bigram + (1.0 - weight) * unigram).mean()
    return Baseline(float(nats), weight, len(bigram))


def best_weight(bigram: Floats, unigram: Floats, tolerance: float = 1e-7) -> float:
    """The lambda with the largest likelihood, found by EM (the target is concave in lambda).

    It stays below 1, because pairs that never occurred need some probability.
    """
    weight = 0.5
    for _ in range(1000):
        from_bigram = weight * bigram
        update = float((from_bigram / (from_bigram + (1.0 - weight) * unigram)).mean())
        if abs(update - weight) < tolerance:
            break
        weight = update
    return min(weight, 1.0 - 1e-6)


def _probabilities(counted: Tokens, predicted: Tokens, vocab_size: int) -> tuple[Floats, Floats]:
    """Bigram and unigram probability of every predicted token.

    Args:
        counted: (num_sequences, length) sequences whose tokens and pairs are counted.
        predicted: (num_sequences, length) sequences whose tokens are predicted.
        vocab_size: V.
    """
    token_counts = np.bincount(counted.ravel(), minlength=vocab_size)
    context_counts = np.bincount(counted[:, :-1].ravel(), minlength=vocab_size)
    pairs, pair_counts = np.unique(_keys(counted, vocab_size), return_counts=True)
    keys = _keys(predicted, vocab_size)
    contexts, targets = np.divmod(keys, vocab_size)
    place = np.searchsorted(pairs, keys).clip(max=max(len(pairs) - 1, 0))
    found = np.where(pairs[place] == keys, pair_counts[place], 0)
    bigram = found / np.maximum(context_counts[contexts], 1)
    return bigram, (token_counts[targets] + 1.0) / (token_counts.sum() + vocab_size)


def _keys(sequences: Tokens, vocab_size: int) -> npt.NDArray[np.int64]:
    """a * V + b for each pair of neighbours inside a sequence."""
    contexts = sequences[:, :-1].astype(np.int64)
    return (contexts * vocab_size + sequences[:, 1:].astype(np.int64)).ravel()
