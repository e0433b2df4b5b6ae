"""Values that are not tensors of model or optimizer, as JSON: numbers, texts, lists, state dicts.

    {"betas": (0.9, 0.95), "best": inf, "noise": <tensor>}
    {"betas": {"$tuple": [0.9, 0.95]}, "best": {"$float": "inf"}, "noise": {"$tensor": "noise"}}

Nothing else is written: reading a pickle could execute code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from fullshard.checkpoint.format import OWN
from fullshard.errors import CheckpointError

MARKS = ("$tuple", "$float", "$items", "$tensor", OWN)

KeepTensor = Callable[[str, Any], str | None]
GetTensor = Callable[[str], Any]


def encode(value: Any, path: str, keep_tensor: KeepTensor) -> Any:
    """A value as JSON.

    Args:
        value: Numbers, texts, None, lists, tuples, mappings, tensors, objects with `state_dict()`.
        path: Its path in the state, for errors and the names of its tensors.
        keep_tensor: Stores a tensor and returns its name; returns None for other values.

    Raises:
        CheckpointError: It is none of these; the error names its path.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, tuple | list):
        items = cast("list[Any]", value)
        coded = [encode(item, f"{path}.{at}", keep_tensor) for at, item in enumerate(items)]
        return {"$tuple": coded} if isinstance(value, tuple) else coded
    if isinstance(value, Mapping):
        return _encode_mapping(cast("Mapping[Any, Any]", value), path, keep_tensor)
    name = keep_tensor(path, value)
    if name is not None:
        return {"$tensor": name}
    get_state = getattr(value, "state_dict", None)
    if callable(get_state):
        return encode(get_state(), path, keep_tensor)
    raise CheckpointError(
        f"{path}: expected numbers, texts, lists, mappings, tensors or an object with "
        f"state_dict(); got {type(value).__name__}, which only a pickle could hold. Save what it "
        "is made of."
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, keep_tensor: KeepTensor) -> Any:
    coded = {key: encode(item, f"{path}.{key}", keep_tensor) for key, item in value.items()}
    if all(isinstance(key, str) and key not in MARKS for key in coded):
        return coded
    for key in coded:
        if not isinstance(key, str | int):
            raise CheckpointError(
                f"{path}: expected texts or integers as keys; got {key!r} "
                f"({type(key).__name__}). Save it as a list of pairs."
            )
    return {"$items": [[key, item] for key, item in coded.items()]}


def decode(value: Any, get_tensor: GetTensor) -> Any:
    """Decodes a value; objects are returned as their state dicts."""
    if isinstance(value, list):
        return [decode(item, get_tensor) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    table = cast("dict[str, Any]", value)
    if len(table) == 1:
        (mark, inner), *_ = table.items()
        match mark:
            case "$tuple":
                return tuple(decode(item, get_tensor) for item in inner)
            case "$float":
                return float(inner)
            case "$items":
                return {key: decode(item, get_tensor) for key, item in inner}
            case "$tensor":
                return get_tensor(inner)
            case _:
                pass
    return {key: decode(item, get_tensor) for key, item in table.items()}
