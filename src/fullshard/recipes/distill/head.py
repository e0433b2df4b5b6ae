"""A model's head, asked for a loss in place of logits.

[Note: the head as a loss]
A loss over a vocabulary needs the head's weight, which under sharding is there only during the
head's own forward. So that forward is what computes the loss, chunk by chunk:

    body --> hidden (tokens, width) --> head.forward: for each chunk of tokens
                                            logits --> loss, d loss / d hidden, d loss / d weight
                                        returns the summed loss

The gradients are made at once and kept, so that no chunk's logits outlive it and the head is
gathered once a forward and once a backward. Nobody ever holds logits of all tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.errors import ConfigError

# What answers in place of the head: (hidden, weight, bias) -> any tensor.
Answer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Loss of some tokens, summed: (rows of hidden, weight, bias, which rows).
ChunkLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, slice], torch.Tensor]

FP16_SCALE = 1024.0  # gradients of a chunk that is fp16 are below its smallest number without it
_AFTER_THE_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class Head:
    """The output layer of a causal language model; install it before the model is sharded.

    Raises:
        ConfigError: The model has no such layer, or does something to logits behind it.
    """

    def __init__(self, model: Any) -> None:
        layer = model.get_output_embeddings()
        after = [name for name in _AFTER_THE_HEAD if getattr(model.config, name, None)]
        if type(layer) is not nn.Linear or after:
            what = f"{after[0]} in its configuration" if after else "no plain linear head"
            raise ConfigError(
                f"distill: expected a model whose logits are its head's output, got "
                f"{type(model).__name__} with {what}. Use another architecture."
            )
        self._table = layer._parameters
        self._answer: Answer | None = None
        layer.forward = self._forward  # type: ignore[assignment]

    @contextlib.contextmanager
    def asked(self, answer: Answer) -> Iterator[None]:
        """Inside, the model's `logits` are what `answer` makes of its hidden states."""
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    def _forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self._table["weight"], self._table.get("bias")
        assert weight is not None, "a linear layer has a weight"
        if self._answer is None:
            return F.linear(input, weight, bias)
        return self._answer(input, weight, bias)


def chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    loss: ChunkLoss,
    chunk_size: int,
) -> torch.Tensor:
    """A loss over rows of hidden states, summed; see [Note: the head as a loss].

    Args:
        hidden: (num_rows, width).
        weight: (vocabulary, width) of the head.
        bias: (vocabulary,), or None.
        loss: Loss of some of the rows.
        chunk_size: Rows at a time.
    """
    how = _How(loss, chunk_size, torch.is_grad_enabled())
    return _Chunked.apply(hidden, weight, bias, how)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _How:
    """Arguments of `chunked`, and whether somebody will ask for gradients."""

    loss: ChunkLoss
    chunk_size: int
    wants_gradients: bool


class _Chunked(torch.autograd.Function):
    """Sum of `loss` over chunks; keeps the gradients that it makes on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: _How,
    ) -> torch.Tensor:
        loss, chunk_size = how.loss, how.chunk_size
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        if not how.wants_gradients:
            for start in range(0, len(hidden), chunk_size):
                rows = slice(start, min(start + chunk_size, len(hidden)))
                total += loss(hidden[rows], weight, bias, rows).to(exact)
            return total
        inputs = [hidden, weight] if bias is None else [hidden, weight, bias]
        needed = [tensor.requires_grad for tensor in inputs]
        pairs = list(zip(inputs, needed, strict=True))
        leaves = [tensor.detach().requires_grad_(need) for tensor, need in pairs]
        kept = [torch.zeros_like(t, dtype=exact) if n else None for t, n in pairs]
        scale = FP16_SCALE if hidden.dtype is torch.float16 else 1.0
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, min(start + chunk_size, len(hidden)))
            leaves[0] = hidden.detach()[rows].requires_grad_(needed[0])
            with torch.enable_grad():
                part = loss(leaves[0], leaves[1], leaves[2] if bias is not None else None, rows)
                wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
                found = iter(torch.autograd.grad(part * scale, wanted))
            total += part.detach().to(exact)
            for place, sums in enumerate(kept):
                if sums is not None:
                    (sums[rows] if place == 0 else sums).add_(next(found), alpha=1 / scale)
        ctx.save_for_backward(*(sums for sums in kept if sums is not None))
        ctx.needed, ctx.dtypes = needed, [tensor.dtype for tensor in inputs]
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = iter(ctx.saved_tensors)
        found = [
            (next(saved) * gradient).to(dtype) if need else None
            for need, dtype in zip(ctx.needed, ctx.dtypes, strict=True)
        ]
        return (*found, *[None] * (4 - len(found)))
