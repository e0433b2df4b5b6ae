"""Sizes of a decoder under the names of transformers."""

from typing import Any


def sizes_of(
    hidden: int,
    inner: int,
    heads: int,
    key_value_heads: int | None = None,
    layers: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Returns the given sizes; `more` keeps its names."""
    named = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "num_hidden_layers": layers,
    }
    return {name: size for name, size in named.items() if size is not None} | more
