"""The next-token loss, computed by a model's head chunk by chunk in place of logits.

[Note: the head as a loss]
A loss over a vocabulary needs the head's weight, which under sharding is gathered only during the
head's own forward. So a hook after the head's forward computes the loss, chunk by chunk. A hook
before it keeps the hidden states and passes none of their tokens on, so that the layer itself
computes nothing:

    body --> hidden (tokens, width) --> hook, (0, width) --> head --> hook: for each chunk of tokens
                                            logits --> loss, d loss / d hidden, d loss / d weight
                                        returns the summed loss

The gradients are computed in the same pass and kept. So the logits of a chunk are freed with it,
the head is gathered once per forward and once per backward, and the logits of all tokens never
exist together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fullshard.config.schema import RunConfig
from fullshard.config.values import DType
from fullshard.errors import ConfigError
from fullshard.recipes.base import (
    Batch,
    Objective,
    cross_entropy,
    inputs_of,
    predicted_of,
    shifted_of,
)

# Replaces the head's output: (hidden, weight, bias) -> any tensor.
Answer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Summed loss of a chunk: (logits of the chunk, its rows).
ChunkLoss = Callable[[torch.Tensor, slice], torch.Tensor]

FP16_SCALE = 1024.0  # without it, gradients of a fp16 chunk underflow
# Up to this many chunks, the weight's gradient is summed in its own dtype: each addition rounds, in
# bfloat16 to 2^-9. More chunks are summed in float32, which needs twice the memory and a copy.
MOST_ROUNDED = 8
MOST_TRACED = 16  # chunks in a trace; more would need seconds
_AFTER_THE_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
_SHOWN = 16.0  # output of a head that computes none; soft caps change it in bfloat16, too


def obstacle(model: Any) -> str | None:
    """Why a model's head cannot compute the loss; None if it can."""
    after = [name for name in _AFTER_THE_HEAD if getattr(model.config, name, None)]
    if type(model.get_output_embeddings()) is not nn.Linear:
        return "no plain linear head"
    return f"{after[0]} in its configuration" if after else None


def _changes(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        "distill: expected a model whose logits are its head's output, got "
        f"{type(model).__name__} with {why}. Use another architecture."
    )


class Head:
    """The output layer of a causal language model; install it before the model is sharded.

    Raises:
        ConfigError: The model has no such layer, or changes logits after it.
    """

    replaces_output = True  # the engine casts the layer's output before

    def __init__(self, model: Any) -> None:
        if (why := obstacle(model)) is not None:
            raise _changes(model, why)
        layer = model.get_output_embeddings()
        self._answer: Answer | None = None
        self._hidden: torch.Tensor | None = None
        self._is_proven = False
        layer.register_forward_pre_hook(self._keep)
        layer.register_forward_hook(self._replace)
        layer.loss_head = self

    @staticmethod
    def of(model: Any) -> Head:
        """The head that was installed in this model, or in the model that it is a copy of."""
        found = model.get_output_embeddings().loss_head
        assert isinstance(found, Head), "it was installed before"
        return found

    def ask(self, model: nn.Module, inputs: Batch, answer: Answer) -> torch.Tensor:
        """Runs the model's forward, whose logits are the result of `answer`, and returns them."""
        self._answer = answer
        try:
            return model(**inputs, use_cache=False).logits
        finally:
            self._answer = self._hidden = None

    def show(self, model: nn.Module, inputs: Batch, see: Callable[..., None]) -> None:
        """Runs the model's forward and calls `see` with what its head would compute logits from.

        Raises:
            ConfigError: The model changes its head's output.
        """

        def answer(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            see(h, w, b)
            return h.new_full((1, 1, 1), _SHOWN)

        logits = self.ask(model, inputs, answer)
        if not self._is_proven and not isinstance(logits, FakeTensor):
            self._is_proven = logits.numel() == 1 and logits.item() == _SHOWN
            if not self._is_proven:
                raise _changes(model, "code that changes them")

    def loss(
        self,
        model: nn.Module,
        tokens: Tokens,
        loss: ChunkLoss,
        chunk_size: int,
        hidden_loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Runs the model's forward and returns the loss that its head computes.

        Args:
            model: The model of this head.
            tokens: Tokens of the micro-batch.
            loss: Loss of one chunk's logits.
            chunk_size: Rows per chunk.
            hidden_loss: Loss of the predicting rows of hidden states, to be added.

        Raises:
            ConfigError: The model changes its head's output.
        """
        found: list[torch.Tensor] = []

        def answer(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            rows = tokens.rows(h)
            total = chunked(rows, w, b, loss, chunk_size)
            if hidden_loss is not None:
                total = total + hidden_loss(rows)
            found.append(total.detach())
            return total.reshape(1, 1, 1)

        logits = self.ask(model, tokens.inputs, answer)
        if not self._is_proven:  # comparing numbers waits for the GPU
            self._prove(model, logits, found)
        return logits.reshape(())

    def _prove(self, model: nn.Module, logits: torch.Tensor, found: list[torch.Tensor]) -> None:
        """Checks that the model returns its head's output unchanged, until one loss proves it."""
        is_one = len(found) == 1 and logits.numel() == 1
        if is_one and isinstance(logits, FakeTensor):
            return
        own = found[0].to(logits.dtype) if is_one else None
        if own is not None and (own == 0 or not own.isfinite()):
            return  # a changed output could be equal
        self._is_proven = own is not None and torch.equal(logits.detach().reshape(()), own)
        if not self._is_proven:
            raise ConfigError(
                "training.loss_chunk_size: expected a model whose logits are its head's output, "
                f"got {type(model).__name__}, which changes them. Set it to 0 to compute the loss "
                "from the logits of all tokens."
            )

    def _keep(self, _: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor | None:
        """The hook before the layer's forward."""
        if self._answer is None:
            return None
        self._hidden = args[0]
        return args[0].detach()[:0]

    def _replace(self, layer: nn.Linear, _args: Any, _output: Any) -> torch.Tensor | None:
        """The hook after the layer's forward, while the layer shows its whole weight."""
        if self._answer is None or self._hidden is None:
            return None
        return self._answer(self._hidden, layer.weight, layer.bias)


@dataclass(frozen=True)
class Tokens:
    """The predicted tokens of a micro-batch.

    Attributes:
        inputs: Arguments of the model.
        positions: (num_predicted,) flat positions that predict them.
        targets: (num_predicted,) the predicted tokens.
    """

    inputs: Batch
    positions: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, batch: Batch) -> Tokens:
        """The tokens of a batch's labels."""
        positions = predicted_of(batch)
        return cls(inputs_of(batch), positions, shifted_of(batch).reshape(-1)[positions])

    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """(num_predicted, ...), selected from the states of all positions, (batch, length, ...)."""
        return states.flatten(0, 1).index_select(0, self.positions)


def next_token(head: Head, chunk_size: int) -> Objective:
    """The objective of pre-training and fine-tuning: the cross-entropy of the next tokens.

    Args:
        head: Head of the model, which computes the loss.
        chunk_size: Tokens whose logits are in memory at a time.
    """

    def objective(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        tokens = Tokens.of(batch)

        def loss(logits: torch.Tensor, rows: slice) -> torch.Tensor:
            return cross_entropy(logits, tokens.targets[rows])

        return head.loss(model, tokens, loss, chunk_size), len(tokens.targets)

    return objective


def whole_logits(model: Any, config: RunConfig) -> str | None:
    """Why the loss of a run needs the logits of all tokens at once; None if it does not."""
    if config.training.loss_chunk_size == 0:
        return "training.loss_chunk_size is 0"
    if config.sharding.output_dtype in (DType.BFLOAT16, DType.FLOAT16):
        return "sharding.output_dtype would round the loss"
    why = obstacle(model)
    return None if why is None else f"{type(model).__name__} has {why}"


def chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    loss: ChunkLoss,
    chunk_size: int,
) -> torch.Tensor:
    """A loss over rows of hidden states, summed; see [Note: the head as a loss].

    Args:
        hidden: (num_rows, width) hidden states.
        weight: (vocabulary, width) weight of the head.
        bias: (vocabulary,) bias of the head, or None.
        loss: Loss of a chunk of rows.
        chunk_size: Rows per chunk.

    Returns:
        The sum, in float32 at least. Its backward may run only once.
    """
    how = (loss, chunk_size, torch.is_grad_enabled())
    return _Chunked.apply(hidden, weight, bias, how)  # type: ignore[no-any-return]


class _Chunked(torch.autograd.Function):
    """Sum of `loss` over chunks; forward also computes and keeps the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: tuple[ChunkLoss, int, bool],
    ) -> torch.Tensor:
        loss, chunk_size, wants_gradients = how
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        inputs, is_half = (hidden, weight, bias), hidden.dtype is torch.float16
        many = is_half or len(hidden) > MOST_ROUNDED * chunk_size
        kept = [
            torch.zeros_like(t, dtype=exact if wide else t.dtype)
            if t is not None and t.requires_grad and wants_gradients
            else None
            for t, wide in zip(inputs, (is_half, many, True), strict=True)
        ]
        scale = FP16_SCALE if is_half else 1.0
        starts: Sequence[int] = range(0, len(hidden), chunk_size)
        if isinstance(hidden, FakeTensor) and len(starts) > MOST_TRACED:
            starts = [*starts[:2], starts[-1]]  # the others are like the second
        for start in starts:
            rows = slice(start, min(start + chunk_size, len(hidden)))
            logits = F.linear(hidden[rows], weight, bias)
            if not wants_gradients:
                total += loss(logits, rows).to(exact)
                continue
            with torch.enable_grad():
                part = loss(logits.requires_grad_(), rows)
                (gradient,) = torch.autograd.grad(part * scale, logits)
            total += part.detach().to(exact)
            _add_products(kept, gradient, hidden[rows], weight, rows)
        ctx.save_for_backward(*(sums for sums in kept if sums is not None))
        pairs = zip(kept, inputs, strict=True)
        ctx.dtypes = [t.dtype if k is not None and t is not None else None for k, t in pairs]
        ctx.scale = scale
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, factor = iter(ctx.saved_tensors), gradient / ctx.scale
        # In place, because a copy of the weight's gradient may be the largest tensor of a step.
        found = [None if d is None else next(saved).mul_(factor).to(d) for d in ctx.dtypes]
        return (*found, None)


def _add_products(
    kept: list[torch.Tensor | None],
    gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    rows: slice,
) -> None:
    """Adds a chunk's gradients of hidden states, weight and bias."""
    to_hidden, to_weight, to_bias = kept
    if to_hidden is not None:
        to_hidden[rows] = gradient @ weight
    if to_weight is not None and to_weight.dtype is gradient.dtype:
        to_weight.addmm_(gradient.T, hidden)
    elif to_weight is not None:
        to_weight += gradient.T @ hidden
    if to_bias is not None:
        to_bias += gradient.sum(0, dtype=to_bias.dtype)
