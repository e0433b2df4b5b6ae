"""The causal language modelling loss, and the scale that makes its gradient a global mean.

[Note: global token mean]
The loss that a step minimises is the mean over all label tokens of the global batch,

    L = (1 / N) * sum over ranks r, micro-batches a of S_ra        N = sum of n_ra

with S_ra the summed loss and n_ra the number of label tokens of one micro-batch. Each rank calls
backward on `scale * S_ra`; the engine adds the micro-batches of a rank and takes the mean (or the
sum) over W ranks, so

    grad_reduction mean:   (1 / W) * sum_ra scale * dS_ra = dL    where scale = W / N
    grad_reduction sum:              sum_ra scale * dS_ra = dL    where scale = 1 / N

N must be known before the first backward of the step. A mean per micro-batch, averaged over ranks
and micro-batches, is a different number as soon as the counts differ: micro-batches with few label
tokens weigh too much.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fullshard.config.values import GradReduction

IGNORED = -100  # a label that counts nothing, as everywhere in torch and transformers


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Sum of the next-token cross-entropy, and how many tokens it was summed over.

    Args:
        logits: (batch, length, vocabulary), any float dtype; position t predicts token t + 1.
        labels: (batch, length) token ids, -100 where nothing is to be predicted.

    Returns:
        The sum in float32 (float64 logits: float64) and the count.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    targets = labels[:, 1:].reshape(-1)
    predictions = logits[:, :-1].reshape(-1, logits.shape[-1]).to(dtype)
    total = F.cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")
    return total, num_label_tokens(labels)


def num_label_tokens(labels: torch.Tensor) -> int:
    """Tokens that a batch's labels ask for: the first position of a sequence predicts nothing."""
    return int((labels[:, 1:] != IGNORED).sum())


def backward_scale(num_tokens: int, world_size: int, reduction: GradReduction) -> float:
    """Factor of every micro-batch's summed loss; see [Note: global token mean].

    Args:
        num_tokens: N, label tokens of the whole global batch.
        world_size: W, ranks that the engine reduces over.
        reduction: What the engine makes of the ranks' gradients.
    """
    if num_tokens == 0:
        return 0.0
    return (world_size if reduction is GradReduction.MEAN else 1) / num_tokens
