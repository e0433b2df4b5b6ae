"""A small model of the same class: fewer layers, smaller width, smaller vocabulary.

The meaning of a configuration field follows from its name; Hugging Face has several names for each
meaning (small.yaml). Ratios are kept: heads to key-value heads, feed-forward to width, one layer of
each kind. If the small model cannot be built or trained for a step, less is shrunk:

    depth and width  ->  width only  ->  depth only  ->  only dropout
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fullshard.config.regular_files import packaged_table
from fullshard.engine.hugging_face import build, build_on_meta
from fullshard.errors import ConfigError
from fullshard.models.config import RANDOM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


Settings = dict[str, Any]

MOST_PARAMETERS = 30_000_000  # of the small model; more would need minutes
NUM_LAYERS = 4
VOCAB_SIZE = 96
HEAD_DIM = 16
NUM_HEADS = 4


@cache
def _names() -> dict[str, Any]:
    return cast("dict[str, Any]", packaged_table("fullshard.models", "small.yaml"))


def _means(what: str, name: str) -> bool:
    """Whether a field with this name has a meaning of small.yaml."""
    names = _names()[what]
    return name in names if isinstance(names, list) else bool(re.fullmatch(names, name))


@dataclasses.dataclass(frozen=True)
class Change:
    """A configuration field with another value in the small model."""

    key: str
    was: Any
    now: Any


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """The small configuration and its differences.

    Attributes:
        config: Configuration of the same class.
        changes: Changed fields.
        layers: Layers of the full model that remain.
    """

    config: PretrainedConfig
    changes: tuple[Change, ...]
    layers: tuple[int, ...]


def model_arguments(config: PretrainedConfig) -> dict[str, Any]:
    """Runs experts in a loop, because the grouped matmul has no float64."""
    return {"experts_implementation": "eager"} if hasattr(config, "num_experts_per_tok") else {}


def trained_once(config: PretrainedConfig) -> nn.Module:
    """Builds the model in float64 and runs a forward and backward.

    Raises:
        ValueError: It is too large, or its loss is not finite.
    """
    num_parameters = sum(param.numel() for param in build_on_meta(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters are too many for this check")
    torch.manual_seed(0)
    arguments = model_arguments(config)
    model = build(config, dtype=torch.float32, **arguments).double()
    loss = logits_of(model).logsumexp(-1).mean()
    loss.backward()
    if not bool(loss.isfinite()):
        raise ValueError("its loss is not finite")
    model.zero_grad(set_to_none=True)
    return model


def logits_of(model: nn.Module) -> torch.Tensor:
    vocab_size = model.config.get_text_config().vocab_size  # type: ignore[union-attr]
    ids = torch.arange(24).reshape(2, 12) % vocab_size
    return model(input_ids=ids, use_cache=False).logits


def shrink(
    config: PretrainedConfig,
    build: Callable[[PretrainedConfig], nn.Module] = trained_once,
    **limits: int,
) -> tuple[Shrunk, nn.Module]:
    """The smallest model that can be built and trained for a step.

    Args:
        config: Configuration of the full model.
        build: Builds the model and trains a step; raises if that is impossible.
        **limits: Sizes of the small model, as for `shrunk`.

    Raises:
        ConfigError: Not even the full model can be trained.
    """
    error: Exception | None = None
    for depth, width in ((True, True), (False, True), (True, False), (False, False)):
        try:
            small = shrunk(config, depth=depth, width=width, **limits)
            return small, build(small.config)
        except Exception as fault:  # noqa: BLE001  models may raise any error for unusual sizes
            error = error or fault
    raise ConfigError(
        "model: expected a model that trains a step in one process in float64, got "
        f"{type(error).__name__}: {error}."
    ) from error


def shrunk(
    config: PretrainedConfig,
    *,
    depth: bool,
    width: bool,
    num_layers: int = NUM_LAYERS,
    vocab_size: int = VOCAB_SIZE,
) -> Shrunk:
    """The configuration with smaller sizes; nothing is built.

    Args:
        config: Configuration of the full model.
        depth: Whether to drop layers.
        width: Whether to narrow layers, and to shrink vocabulary and experts.
        num_layers: Layers of the small model.
        vocab_size: Its vocabulary.
    """
    settings = config.to_dict()
    changes: list[Change] = []
    layers: tuple[int, ...] = ()
    for prefix, section in _sections(settings):
        found = _without_randomness(section)
        if depth:
            chosen = _choose_layers(section, num_layers)
            found |= _fewer_layers(section, chosen)
            layers = layers or chosen
        if width:
            found |= _narrower({**section, **found})
            found |= _smaller_vocabulary(section, vocab_size)
        changes += [
            Change(f"{prefix}{key}", section.get(key, {}), value)
            for key, value in found.items()
            if section.get(key, {}) != value and not isinstance(value, list)
        ]
        section.update(found)
    settings.pop("quantization_config", None)
    return Shrunk(type(config).from_dict(settings), tuple(changes), layers)


def _sections(settings: Settings) -> list[tuple[str, Settings]]:
    """The configuration, and nested configurations of the model's parts."""
    inner = [
        (f"{key}.", value)
        for key, value in settings.items()
        if isinstance(value, dict) and "model_type" in value
    ]
    return [("", settings), *inner]


def _without_randomness(section: Settings) -> Settings:
    return {
        key: 0.0
        for key, value in section.items()
        if RANDOM.search(key) and isinstance(value, float) and value > 0
    }


def _choose_layers(section: Settings, limit: int) -> tuple[int, ...]:
    """Chooses layers: the first layer of each kind, then the second of each, up to the limit.

    Four of (sliding, sliding, full, sliding, sliding, full) are 0, 1, 2, 5.
    """
    depth = next((v for k, v in section.items() if _means("depth", k) and _is_count(v)), 0)
    columns = [v for v in section.values() if isinstance(v, list) and len(v) == depth]
    kinds: dict[str, int] = {}
    turns = []
    for index in range(depth):
        kind = repr([column[index] for column in columns])
        kinds[kind] = kinds.get(kind, -1) + 1
        turns.append((kinds[kind], index))
    room = max(limit, min(len(kinds), 2 * limit))
    return tuple(sorted(index for _, index in sorted(turns)[:room]))


def _fewer_layers(section: Settings, layers: tuple[int, ...]) -> Settings:
    found: Settings = {}
    for key, value in section.items():
        if _means("depth", key) and _is_count(value):
            found[key] = min(value, len(layers))
            for name, column in section.items():
                if isinstance(column, list) and len(column) == value:
                    found[name] = [column[index] for index in layers if index < value]
        elif key.endswith(("_period", "_interval", "sparse_step")) and _is_count(value):
            found[key] = min(value, 2)
        elif key.endswith("_offset") and _is_count(value):
            found[key] = min(value, 1)
        elif key == "attention_types":  # [[["global", "local"], repeats]]
            found[key] = [
                [kinds, max(1, len(layers) // len(kinds) // len(value))] for kinds, _ in value
            ]
    return found


def _narrower(section: Settings) -> Settings:
    """Fewer and narrower heads, and the sizes that depend on them."""
    hidden = _first(section, "hidden")[1]
    if not hidden:
        return {}
    found = _fewer_heads(section)
    heads_key, heads = _first(section, "heads")
    head_key, head_dim = _first(section, "head_dim")
    latent = "qk_rope_head_dim" in section  # the width of its heads is in no single key
    head_dim = (0 if latent else head_dim) or (hidden // heads if heads else 64)
    narrow = min(head_dim, HEAD_DIM)
    width = NUM_HEADS * HEAD_DIM
    if heads:
        width = found[heads_key] * narrow * hidden / (hidden if latent else heads * head_dim)
    width = min(hidden, max(narrow, round(width / narrow) * narrow))
    if head_key:
        found[head_key] = min(narrow, _names()["at_most"]["qk_rope_head_dim"]) if latent else narrow
    for name, value in section.items():
        if _is_count(value) and (now := _narrow_size(name, value, (hidden, width))):
            found[name] = min(value, now)
    rotated = section.get("rotary_dim")
    if isinstance(rotated, int):
        found["rotary_dim"] = min(rotated, max(2, 2 * (rotated * narrow // head_dim // 2)))
    if not any(name.startswith("rope_") for name in section):  # a learned table
        found |= {
            k: min(section[k], 64) for k in _names()["positions"] if _is_count(section.get(k))
        }
    return found | _mamba_heads(section, width)


def _narrow_size(name: str, value: int, widths: tuple[int, int]) -> int | None:
    """The new value of a size when the width shrinks from the first to the second; None: kept."""
    hidden, width = widths
    if _means("hidden", name) and value == hidden:
        return width
    if _means("hidden", name) or _means("ffn", name):
        return max(8, 8 * round(value * width / hidden / 8))
    if name in ("time_step_rank", "mamba_dt_rank"):
        return math.ceil(width / 16)
    if _means("experts", name):
        return 4
    return 2 if _means("chosen_experts", name) else _names()["at_most"].get(name)


def _fewer_heads(section: Settings) -> Settings:
    """Fewer heads; keeps the ratio of heads to key-value heads, up to four."""
    _, heads = _first(section, "heads")
    kv_key, kv_heads = _first(section, "kv_heads")
    kv_heads = kv_heads or heads
    group = min(max(1, heads // kv_heads), NUM_HEADS) if heads else 1
    few = min(kv_heads, NUM_HEADS if group == 1 else 2)
    found = {key: few * group for key in _names()["heads"] if _is_count(section.get(key))}
    found |= {key: few * group for key, v in section.items() if _means("other_heads", key) and v}
    return found | ({kv_key: few} if kv_key else {})


def _mamba_heads(section: Settings, hidden: int) -> Settings:
    """State-space heads that fill the inner width, a multiple of the model's width."""
    names = ("mamba_expand", "mamba_n_heads", "mamba_d_head")
    if "expand" in section and "head_dim" in section:
        names = ("expand", "num_heads", "head_dim")
    expand, num_heads, head_dim = names
    if not all(section.get(name) for name in names):
        return {}
    return {head_dim: HEAD_DIM // 2, num_heads: int(section[expand] * hidden) // (HEAD_DIM // 2)}


def _smaller_vocabulary(section: Settings, size: int) -> Settings:
    found: Settings = {}
    if _is_count(section.get("vocab_size")):
        found["vocab_size"] = min(section["vocab_size"], size)
    for key, value in section.items():
        if key.endswith("_token_id") and isinstance(value, int) and value >= size:
            found[key] = size - 1
        elif key.endswith("_token_id") and isinstance(value, list):
            found[key] = [min(v, size - 1) for v in value]
    return found


def fit_globs(globs: Iterable[str], num_layers: int) -> tuple[str, ...]:
    """Adapts globs to the small model: the number of a missing layer becomes the last one's."""

    def fit(found: re.Match[str]) -> str:
        return str(min(int(found[0]), max(num_layers - 1, 0)))

    return tuple(re.sub(r"(?<=\.)\d+(?=\.|$)", fit, glob) for glob in globs)


def _first(section: Mapping[str, Any], what: str) -> tuple[str, int]:
    return next(((n, section[n]) for n in _names()[what] if _is_count(section.get(n))), ("", 0))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# ---- does a model keep packed documents apart? ---------------------------------------------------
#
#     logits([a a a b b b])  ==  logits([a a a]), logits([b b b])
#
# Most models of transformers do, using `position_ids` (see [Note: documents] in data/chat_rows.py).
# Some have no such argument, or layers that mix all tokens of a row.

LENGTHS = (5, 7)
TOLERANCE = 1e-5  # some models return float32 logits


@torch.no_grad()
def check_documents(config: PretrainedConfig, key: str = "sft.packing") -> None:
    """Refuses a key that packs documents, for a model that would mix them.

    Raises:
        ConfigError: The model mixes documents, or does not accept `position_ids`.
    """
    ids = torch.randint(
        0, VOCAB_SIZE, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1)
    )
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    try:
        with torch.enable_grad():
            _, model = shrink(config, num_layers=2)
        ids %= model.config.get_text_config().vocab_size  # type: ignore[union-attr]
        together = model.eval()(input_ids=ids, position_ids=places, use_cache=False).logits
        parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, 1)]
    except (ConfigError, TypeError) as error:
        why = f"which does not take positions ({error})"
    else:
        if (together - torch.cat(parts, dim=1)).abs().max() < TOLERANCE:
            return
        why = "whose tokens attend to earlier documents"
    raise ConfigError(
        f"{key}: expected a model that keeps documents apart, got {config.model_type}, {why}."
        f" Set {key}: false."
    )
