"""Does a model keep packed documents apart? Asked of a small model of its class.

    logits([a a a b b b])  ==  logits([a a a]), logits([b b b])

Most of transformers' models do, told by `position_ids` (see [Note: documents]); some have no such
argument, or layers that mix along the whole row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fullshard.errors import ConfigError
from fullshard.train.verify import trained_once
from fullshard.train.verify_shrink import Limits, shrink

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LENGTHS = (5, 7)
TOLERANCE = 1e-5  # some models make their logits float32


def check_documents(config: PretrainedConfig) -> None:
    """Refuses to pack for a model that would mix documents.

    Raises:
        ConfigError: It would, or takes no `position_ids`.
    """
    try:
        small, model = shrink(config, Limits(num_layers=2), trained_once)
        difference = _difference(model.eval(), small.config)
    except (ConfigError, TypeError) as error:
        raise _refused(config, f"which does not take positions ({error})") from error
    if not difference < TOLERANCE:
        raise _refused(config, "whose tokens see the documents before their own")


@torch.no_grad()
def _difference(model: Any, config: PretrainedConfig) -> float:
    vocab = config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    places = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    together = model(input_ids=ids, position_ids=places, use_cache=False).logits
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    return float((together - torch.cat(parts, dim=1)).abs().max())


def _refused(config: PretrainedConfig, why: str) -> ConfigError:
    return ConfigError(
        f"sft.packing: expected a model that keeps documents apart, got {config.model_type}, {why}."
        " Set sft.packing: false."
    )
