"""Context parallelism: ranks divide a sequence, and attention exchanges heads for tokens (Ulysses).

    layers      (rows, length / N, width)        each rank has its tokens, all heads
                     |  all-to-all
    attention   (rows, heads / N, length, ...)   each rank has its heads, all tokens
                     |  all-to-all
    layers      (rows, length / N, width)

Attention is the only layer that reads other tokens, and it runs as it does in one process. From
https://arxiv.org/abs/2309.14509. Names of transformers that concern attention are used here alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.config.schema import RunConfig
from fullshard.data.dataset import DOCUMENTS
from fullshard.errors import ConfigError
from fullshard.models.small import Limits, shrink
from fullshard.recipes.base import Batch, Objective, Seat
from fullshard.transport.groups import exchanged_parts, own_group

# Arguments of attention that change it; None in models that do not use them.
_OTHERS = ("softcap", "s_aux", "position_bias", "sliding_window")
_DIVIDED: WeakKeyDictionary[nn.Module, DividedAttention] = WeakKeyDictionary()


def check_context(model: Any, config: RunConfig) -> None:
    """Checks that a model's sequences can be divided.

    Raises:
        ConfigError: Its attention cannot exchange heads, or sizes do not divide.
    """
    size, training, settings = config.sharding.context, config.training, model.config
    if size == 1:
        return
    text = settings.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ["full_attention"])} - {"full_attention"}
    others = sorted(kinds) + ["sliding_window"] * bool(getattr(text, "sliding_window", None))
    rope = getattr(text, "rope_parameters", None) or {}
    tables = [table for table in (rope, *rope.values()) if isinstance(table, dict)]
    by_length = {"dynamic", "longrope"} & {table.get("rope_type") for table in tables}
    others += [f"rope_type {name}, which depends on the length" for name in sorted(by_length)]
    takes = inspect.signature(model.forward).parameters
    if not (model._supports_sdpa and model._supports_attention_backend and "position_ids" in takes):
        others.append("attention of its own")
    if not others and _mixes_tokens(settings):
        others.append(
            "layers that read other tokens without attention, or with a mask of their own"
        )
    if others:
        raise ConfigError(
            f"sharding.context: expected a model whose layers attend to all tokens before them by "
            f"transformers' attention interface; got {type(model).__name__} with {others[0]}. "
            "Leave it out: these ranks then shard all parameters."
        )
    heads = text.num_attention_heads // config.sharding.tensor
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    kv_heads //= config.sharding.tensor
    for key, number in (
        ("training.max_seq_length", training.max_seq_length),
        ("num_attention_heads / tensor", heads),
    ):
        if number % size:
            fitting = [n for n in range(1, number + 1) if number % n == 0]
            nearest = min(fitting, key=lambda n: abs(n - size))
            raise ConfigError(
                f"sharding.context: expected a divisor of {number} ({key}); got {size}. The "
                f"nearest is {nearest}."
            )
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"sharding.context: expected a divisor or a multiple of {kv_heads} "
            f"(num_key_value_heads / tensor); got {size}. Use {kv_heads}."
        )


def _mixes_tokens(config: Any) -> bool:
    """Whether other layers than attention read other tokens, or a layer makes its own mask.

    Without attention, a small copy must compute the same for a sequence as for its half.
    """
    masks: list[Any] = []

    def nothing(
        _: nn.Module, query: torch.Tensor, __: Any, value: torch.Tensor, *mask: Any, **more: Any
    ) -> tuple[torch.Tensor, None]:
        """In place of attention."""
        masks.extend([*mask[:1], more.get("attention_mask")])
        rows, heads, tokens, _size = query.shape
        return value.new_zeros(rows, tokens, heads, value.shape[-1]), None

    with torch.random.fork_rng(), torch.no_grad():
        with torch.enable_grad():
            _, model = shrink(config, Limits())
        _attend_with(model, nothing, lambda *_, **__: None)
        ids = torch.arange(8)[None]
        whole, half = (
            model(input_ids=part, position_ids=part, use_cache=False).logits  # type: ignore[operator]
            for part in (ids, ids[:, 4:])
        )
    has_own = any(mask is not None for mask in masks)
    return has_own or not torch.allclose(whole[:, 4:], half, rtol=1e-9, atol=1e-12)


def _attend_with(model: nn.Module, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Replaces a model's attention and the mask that it gets."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"ulysses_{id(attend)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = name


class DividedAttention:
    """Attention of one model whose sequences are divided.

    Args:
        model: The model; its layers use this attention from now on.
        seat: This rank, which holds one part. A collective of all ranks.
    """

    def __init__(self, model: Any, seat: Seat) -> None:
        from transformers.masking_utils import sdpa_mask

        sharding = seat.sharding
        stride, size = sharding.expert * sharding.tensor, sharding.context
        blocks = range(0, seat.world_size, stride * size)
        layout = [
            list(range(first + at, first + stride * size, stride))
            for first in blocks
            for at in range(stride)
        ]
        self._group, self._size = own_group("context", layout), size
        self._is_on, self._calls, self._mask = False, 0, None
        self._plain_mask = sdpa_mask
        _attend_with(model, self._attend, self._mask_of)
        _DIVIDED[model] = self

    @staticmethod
    def of(model: nn.Module) -> DividedAttention | None:
        """The attention of a model, if its sequences are divided."""
        return _DIVIDED.get(model)

    def divide(self, objective: Objective) -> Objective:
        """The objective of parts of sequences."""

        def of_parts(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
            # Set until the next forward, because recomputed layers attend in backward.
            self._is_on, self._calls, self._mask = True, 0, _mask_of(batch)
            found = objective(model, batch)
            wanted = model.config.get_text_config().num_hidden_layers
            if self._calls != wanted:
                raise ConfigError(
                    f"sharding.context: expected one attention in each of {wanted} layers; got "
                    f"{self._calls} calls of {type(model).__name__}. Leave it out."
                )
            return found

        return of_parts

    def stop(self) -> None:
        """Attends to whole sequences again, as in generation."""
        self._is_on = False

    def _mask_of(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._is_on else self._plain_mask(*args, **kwargs)

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention as transformers calls it; takes (rows, heads, tokens, size).

        Returns:
            (rows, tokens, heads, size), and no weights of attention.
        """
        if given := [name for name in _OTHERS if settings.get(name) is not None]:
            raise ConfigError(
                f"sharding.context: expected plain attention; {type(module).__name__} has "
                f"{given[0]}. Leave it out."
            )
        if self._is_on and attention_mask is not None:
            raise ConfigError(
                f"sharding.context: expected plain attention; {type(module).__name__} makes a mask "
                "of its own. Leave it out."
            )
        if self._is_on:
            self._calls += 1
            attention_mask = self._mask
            more = max(1, self._size // key.shape[1])
            key, value = (x.repeat_interleave(more, 1) for x in (key, value))
            query, key, value = self._whole((query, key, value))
        found = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=settings.get("dropout", 0.0),
            scale=settings.get("scaling"),
            is_causal=attention_mask is None and query.shape[2] > 1,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return (self._part(found) if self._is_on else found.transpose(1, 2)), None

    def _whole(self, parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """All tokens of this rank's heads, from (rows, heads, tokens of a part, size), at once."""
        shapes = [(self._size, x.shape[0], x.shape[1] // self._size, *x.shape[2:]) for x in parts]
        sent = [
            x.unflatten(1, (self._size, -1)).transpose(0, 1).reshape(self._size, -1) for x in parts
        ]
        received = exchanged_parts(torch.cat(sent, 1), self._group)
        found = received.split([x.shape[1] for x in sent], 1)
        return [
            x.view(shape).movedim(0, 2).flatten(2, 3)
            for x, shape in zip(found, shapes, strict=True)
        ]

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of all heads, (rows, tokens of a part, heads, size)."""
        sent = x.unflatten(2, (self._size, -1)).movedim(2, 0)
        return exchanged_parts(sent, self._group).movedim(0, 1).flatten(1, 2).transpose(1, 2)


def _mask_of(batch: Batch) -> torch.Tensor | None:
    """(rows, 1, length, length) whether a token attends to another; None: to all before it."""
    if DOCUMENTS not in batch:
        return None
    documents = batch[DOCUMENTS]
    return (documents[:, :, None] == documents[:, None, :]).tril().unsqueeze(1)
