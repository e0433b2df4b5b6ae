"""Context parallelism: ranks divide a sequence, and attention exchanges heads for tokens (Ulysses).

    layers      (rows, length / N, width)        each rank has its tokens, all heads
                     |  all-to-all
    attention   (rows, heads / N, length, ...)   each rank has its heads, all tokens
                     |  all-to-all
    layers      (rows, length / N, width)

Attention is the only layer that reads other tokens, and it runs as it does in one process. From
https://arxiv.org/abs/2309.14509. Only this file uses transformers' names for attention.

[Note: parts of sequences]
A batch with parts of sequences has `documents`. A forward takes them from its
arguments and makes the mask of the whole sequences, which transformers hands to every attention. So
layers that are recomputed in backward get the mask of their own forward, and a forward without
`documents` (in generation) attends to its own tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fullshard.config.schema import ShardConfig
from fullshard.data.dataset import DOCUMENTS, IGNORED, SHIFTED, divided
from fullshard.errors import ConfigError, DataError
from fullshard.models.small import shrink
from fullshard.planner.mesh import Topology, check_divides, mesh_of
from fullshard.recipes.base import Batch, Seat, placed, shifted_of
from fullshard.transport.groups import exchanged_parts, own_group

# Arguments of attention that change it; None in models that do not use them.
_OTHERS = ("softcap", "s_aux", "position_bias", "sliding_window")


def check_context(model: Any, sharding: ShardConfig, length: int | None = None) -> None:
    """Checks that a model's sequences can be divided, of `length` tokens if they have one length.

    Raises:
        ConfigError: Its attention cannot exchange heads, or sizes do not divide.
    """
    size: int = sharding.context
    settings: Any = getattr(model, "config", None)
    if size == 1:
        return
    if not hasattr(settings, "get_text_config"):
        raise ConfigError(
            "sharding.context: expected a causal language model of transformers; got "
            f"{type(model).__name__}. Leave it out, so that these ranks shard all parameters."
        )
    text = settings.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ["full_attention"])} - {"full_attention"}
    others = sorted(kinds) + ["sliding_window"] * bool(getattr(text, "sliding_window", None))
    others += ["is_causal: false"] * (not getattr(text, "is_causal", True))
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
            "sharding.context: expected a model whose layers attend to all tokens before them by "
            f"transformers' attention interface; got {type(model).__name__} with {others[0]}. "
            "Leave it out, so that these ranks shard all parameters."
        )
    heads = text.num_attention_heads // sharding.tensor
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    kv_heads //= sharding.tensor
    check_divides("sharding.context", size, length or size, "training.max_seq_length")
    check_divides("sharding.context", size, heads, "num_attention_heads / tensor")
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
            _, model = shrink(config)
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


def divide_sequences(
    model: nn.Module, context: int, *, expert: int = 1, tensor: int = 1
) -> Callable[[Mapping[str, torch.Tensor]], dict[str, Any]]:
    """Let groups of `context` ranks divide every sequence of a training loop. A collective.

    Ranks that divide a sequence must see the same batch, which is not checked: without other axes,
    ranks `r * context` to `r * context + context - 1`. `fs.shard(model)`, called afterwards, shards
    parameters over all ranks (docs/mesh.md).

        part = fs.divide_sequences(model, 2)
        fs.shard(model)
        loss = model(**part(batch)).loss

    Args:
        model: A causal language model of transformers, not yet sharded.
        context: Ranks that divide a sequence.
        expert: Size of an expert axis, whose ranks have numbers between those of the context axis.
        tensor: Size of a tensor axis, likewise.

    Returns:
        A function that takes a batch of whole rows (`input_ids`, `labels`, `position_ids` and
        `attention_mask`, as transformers reads them) and returns the model's arguments for this
        rank's part. The mean over the ranks of the loss that the model returns is the loss of whole
        rows.

    Raises:
        ConfigError: The model's attention cannot exchange heads, or sizes do not divide.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sharding = ShardConfig(context=context, expert=expert, tensor=tensor)
    mesh_of(sharding, Topology(world_size))
    check_context(model, sharding)
    seat = Seat(rank, world_size, torch.device("cpu"), sharding)
    divide(model, seat)

    def part(batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        num_labels = int((shifted_of(dict(batch)) != IGNORED).sum())
        # The divisor of the model's loss. A cache would grow again where layers are recomputed.
        more = {"num_items_in_batch": num_labels / context, "use_cache": False}
        return {**part_of(batch, seat), **more}

    return part


def part_of(batch: Mapping[str, torch.Tensor], seat: Seat) -> Batch:
    """This rank's part of every row of a batch; see `divide_sequences`.

    Raises:
        DataError: The batch has something that cannot be divided.
    """
    if seat.sharding.context == 1:
        return dict(batch)
    known = ("input_ids", "labels", "position_ids", "attention_mask")
    others = [name for name in batch if name not in known or batch[name].ndim != 2]
    if others or not {*known[:2]} <= {*batch}:
        raise DataError(
            f"sharding.context: expected a batch of {', '.join(known)} of (rows, length), at least "
            f"the first two; got {', '.join(batch)}. Remove the others."
        )
    (part, num_parts), shifted = seat.parts, shifted_of(dict(batch))
    arrays = {name: x.cpu().numpy() for name, x in {**batch, SHIFTED: shifted}.items()}
    mask = arrays.pop("attention_mask", None)
    if "position_ids" in arrays:  # one row may stand for all
        arrays["position_ids"] = np.broadcast_to(arrays["position_ids"], shifted.shape)
    elif mask is not None and (np.diff(mask != 0) & (mask[:, 1:] != 0)).any():
        raise DataError(
            "sharding.context: expected position_ids for an attention_mask with padding before "
            "tokens, which models number differently; got none. Add them, or pad on the right."
        )
    found = divided(arrays, part, num_parts)
    if mask is not None:  # as in transformers, positions then do not divide rows into documents
        real = np.pad(mask != 0, ((0, 0), (0, -mask.shape[1] % num_parts)))
        found[DOCUMENTS] = real[:, : 0 if mask.all() else None].astype(np.int64) - 1
    return placed(found, shifted.device)


def divide(model: nn.Module, seat: Seat) -> None:
    """Divides the model's sequences if this rank has a part; before it is sharded. A collective."""
    if seat.sharding.context > 1:
        DividedAttention(model, seat)


class DividedAttention:
    """Attention of one model whose sequences may be divided; see [Note: parts of sequences].

    Args:
        model: The model, not yet sharded; its layers use this attention from now on.
        seat: This rank, which has one part. A collective of all ranks.
    """

    def __init__(self, model: Any, seat: Seat) -> None:
        from transformers import PreTrainedModel
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
        self._calls, self._mask, self._called = 0, None, id(model)
        self._plain_mask = sdpa_mask
        _attend_with(model, self._attend, self._mask_of)
        for module in model.modules():  # a user may call only the model's body
            if isinstance(module, PreTrainedModel):
                module.register_forward_pre_hook(self._begin, with_kwargs=True)
                module.register_forward_hook(self._end)

    def __deepcopy__(self, _: Any) -> DividedAttention:
        """Itself, which layers of a copy of the model call by name."""
        return self

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        documents = kwargs.pop(DOCUMENTS, None)
        if documents is not None or id(model) == self._called:  # the latter after a failed forward
            self._called, self._calls = id(model), 0
            self._mask = None if documents is None else mask_of(documents)
        return args, kwargs

    def _end(self, model: Any, *_: Any) -> None:
        if self._mask is None or id(model) != self._called:
            return
        wanted = model.config.get_text_config().num_hidden_layers
        if self._calls != wanted:
            raise ConfigError(
                f"sharding.context: expected one attention in each of {wanted} layers, with the "
                f"mask of transformers; got {self._calls} of {type(model).__name__}. Divide a "
                "model once, with its own config, or leave it out."
            )
        self._mask = None

    def _mask_of(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain_mask(*args, **kwargs) if self._mask is None else self._mask

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention with transformers' interface, for (rows, heads, tokens, size).

        Returns:
            (rows, tokens, heads, size), and no weights of attention.
        """
        if given := [name for name in _OTHERS if settings.get(name) is not None]:
            raise ConfigError(
                f"sharding.context: expected plain attention; {type(module).__name__} has "
                f"{given[0]}. Leave it out."
            )
        tokens = 0 if attention_mask is None else attention_mask.shape[-2]
        is_part = attention_mask is not None and tokens in (0, self._size * query.shape[2])
        if is_part:
            self._calls += 1
            attention_mask = attention_mask if tokens else None
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
        return (self._part(found) if is_part else found.transpose(1, 2)), None

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


def mask_of(documents: torch.Tensor) -> torch.Tensor:
    """(rows, 1, length, length) whether a token attends to another, from (rows, length) documents.

    A document's number n is ~n at padding, to which no token attends. Length 0 stands for whole
    rows of one document: a token attends to all before it.
    """
    is_real = documents >= 0
    numbers = torch.where(is_real, documents, ~documents)
    same = numbers[:, :, None] == numbers[:, None, :]
    return (same & is_real[:, None, :]).tril().unsqueeze(1)
