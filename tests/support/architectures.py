"""Tiny Hugging Face architectures with default settings, and the inputs that each takes.

Dropout is off, since ranks and one process draw different numbers. Everything except sizes is the
configuration's default.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from support import inputs
from support.inputs import VOCABULARY, language
from support.models import Batch, backward_of, perturbed
from support.reference import TOLERANCE

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    """A model of transformers and its training data.

    Attributes:
        kind: Its model_type.
        auto: Class that builds the model from a configuration.
        fields: Fields of its configuration, which replace the common sizes.
        batch: Arguments of forward, by step and rank.
        sizes: Whether its configuration uses the names of the common sizes.
        tolerance: 1e-12, or more if float32 layers round weights that differ by less.
    """

    kind: str
    auto: str = "AutoModelForCausalLM"
    fields: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[int, int], Batch] = language
    sizes: bool = True
    tolerance: float = TOLERANCE

    def build(self) -> nn.Module:
        """Builds the model with perturbed weights in float64, in training mode."""
        torch.manual_seed(0)
        return perturbed(self.initialised().double())

    def on_meta(self, **fields: Any) -> nn.Module:
        """Builds the model on meta, with these fields of its configuration."""
        with torch.device("meta"):
            return self.initialised(**fields)

    def initialised(self, **fields: Any) -> nn.Module:
        """Builds the model as transformers initialises it."""
        import transformers

        fields = {**(SIZES if self.sizes else {}), **self.fields, **fields}
        config = transformers.AutoConfig.for_model(self.kind, **fields)
        without_dropout(config)
        return getattr(transformers, self.auto).from_config(config)

    def work(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """Runs forward and backward; returns the model's own loss."""
        return backward_of(model(**self.batch(step, rank)).loss)


def without_dropout(config: Any) -> None:
    """Sets every probability to zero, in nested configurations too."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and name != "quantization_config":
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)


def _architectures() -> dict[str, Architecture]:
    """Reads the rows of architectures.yaml by name."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        name: Architecture(
            **{"kind": name, **row, "batch": getattr(inputs, row.get("batch", "language"))}
        )
        for name, row in rows.items()
    }


ARCHITECTURES = _architectures()
