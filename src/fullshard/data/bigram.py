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
class Bigram:
    """Counts of tokens and pairs.

    Attributes:
        vocab_size: V.
        token_counts: (V,) how often each token occurs.
        context_counts: (V,) how often each token has a successor in its sequence.
        pairs: Sorted keys a * V + b of the pairs that occur.
        pair_counts: How often each of them occurs.
    """

    vocab_size: int
    token_counts: Floats
    context_counts: Floats
    pairs: npt.NDArray[np.int64]
    pair_counts: Floats

    @classmethod
    def count(cls, sequences: Tokens, vocab_size: int) -> Bigram:
        """Counts sequences, shape (num_sequences, length)."""
        contexts = sequences[:, :-1].ravel()
        keys, pair_counts = np.unique(_keys(sequences, vocab_size), return_counts=True)
        return cls(
            vocab_size,
            np.bincount(sequences.ravel(), minlength=vocab_size).astype(np.float64),
            np.bincount(contexts, minlength=vocab_size).astype(np.float64),
            keys,
            pair_counts.astype(np.float64),
        )

    def parts(self, sequences: Tokens) -> tuple[Floats, Floats]:
        """The bigram and the unigram probability of every predicted token of the sequences."""
        keys = _keys(sequences, self.vocab_size)
        contexts, targets = np.divmod(keys, self.vocab_size)
        place = np.searchsorted(self.pairs, keys).clip(max=max(len(self.pairs) - 1, 0))
        pair_counts = np.where(self.pairs[place] == keys, self.pair_counts[place], 0.0)
        bigram = pair_counts / np.maximum(self.context_counts[contexts], 1.0)
        total = self.token_counts.sum() + self.vocab_size
        return bigram, (self.token_counts[targets] + 1.0) / total


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
    weight = best_weight(*Bigram.count(counted, vocab_size).parts(train[-num_choosing:]))
    bigram, unigram = Bigram.count(train, vocab_size).parts(held_out)
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


def _keys(sequences: Tokens, vocab_size: int) -> npt.NDArray[np.int64]:
    """a * V + b for each pair of neighbours inside a sequence."""
    contexts = sequences[:, :-1].astype(np.int64)
    return (contexts * vocab_size + sequences[:, 1:].astype(np.int64)).ravel()
