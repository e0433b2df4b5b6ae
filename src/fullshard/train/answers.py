"""What a model in training answers: greedily, all ranks together, without a cache of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


@torch.no_grad()
def answer(model: nn.Module, prompt: Sequence[int], most: int, end: int | None) -> list[int]:
    """The most likely tokens after a prompt, up to `end` or `most` of them. A collective.

    Every rank sees the same tokens, so all of them stop together.
    """
    was_training = model.training
    model.eval()
    device = next(model.buffers(), torch.empty(0)).device
    ids = torch.tensor([list(prompt)], device=device)
    for _ in range(most):
        logits = model(input_ids=ids, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        if int(ids[0, -1]) == end:
            break
    model.train(was_training)
    return ids[0, len(prompt) :].tolist()
