"""Tensors by name, read one at a time, whatever files they lie in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

CHECKPOINT = "a checkpoint"

# Beside the weights in a Hugging Face folder: what these names match goes along with them.
COMPANIONS = ("config.json", "generation_config.json", "chat_template*", "tokenizer*")
COMPANIONS += ("special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")
COMPANIONS += ("preprocessor_config.json", "processor_config.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that can be read.

    Attributes:
        dtype: Of its elements.
        shape: Global shape.
        read: The whole of it, on the CPU; reads anew at each call.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Entry:
        """A tensor that is there already, or mapped from a file."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor.detach())

    def cast(self, dtype: torch.dtype | None) -> Entry:
        """The same in another dtype, if it is of floating point; None changes nothing."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        return Entry(dtype, self.shape, lambda: self.read().to(dtype))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OptimizerSource:
    """What an optimizer holds.

    Attributes:
        kind: Name of its class.
        tensors: (parameter, state) -> a tensor with the parameter's shape.
        scalars: Parameter -> state -> a number, or a tensor of one element.
        groups: Settings of each group, with its parameters' names under "params".
        own: States that mean something to one rank alone, by what they are.
    """

    kind: str
    tensors: Mapping[tuple[str, str], Entry]
    scalars: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    own: Mapping[str, Entry] = field(default_factory=dict[str, Entry])


@dataclass(frozen=True)
class Source:
    """What a folder or a file holds.

    Attributes:
        what: What it is, in words.
        tensors: Parameters and buffers by name, tied ones once.
        tied: Further names of parameters: second name -> first name.
        optimizer: None where there is none, or none that could be read.
        companions: Files of a Hugging Face folder beside the weights: name -> bytes.
        step: How many steps the run had made; None where nobody says.
        left_out: What it also holds and is not taken, in words.
    """

    what: str
    tensors: Mapping[str, Entry]
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    optimizer: OptimizerSource | None = None
    companions: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    step: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors.values())
