"""Tensors by name, read one at a time, whatever files they lie in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fullshard.errors import untrusted

CHECKPOINT = "a checkpoint"

# Beside the weights in a Hugging Face folder: what these names match goes along with them.
COMPANIONS = ("config.json", "generation_config.json", "chat_template*", "tokenizer*")
COMPANIONS += ("special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")
COMPANIONS += ("preprocessor_config.json", "processor_config.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that can be read.

    Attributes:
        dtype: Dtype of its elements.
        shape: Global shape.
        load: Gives the whole of it, on the CPU; reads anew at each call.
        origin: File and name, for errors.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    origin: str = "tensor"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Entry:
        """A tensor that is there already, or mapped from a file."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor.detach())

    def read(self) -> torch.Tensor:
        """The tensor: every door's tensors come through here.

        Raises:
            CheckpointError: It cannot be read, or is not what its table says.
        """
        wanted = f"a dense tensor of {self.dtype} and shape {self.shape}"
        with untrusted(self.origin, wanted):
            found = self.load()
            if (found.dtype, tuple(found.shape)) != (self.dtype, self.shape) or (
                found.layout is not torch.strided or found.is_quantized or found.is_meta
            ):
                kind = f"{found.layout} {found.dtype} {tuple(found.shape)}"
                raise ValueError(kind + " without values" * found.is_meta)
            return found

    def cast(self, dtype: torch.dtype | None) -> Entry:
        """The same in another dtype, if it is of floating point; None changes nothing."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        return replace(self, dtype=dtype, load=lambda: self.read().to(dtype))

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
