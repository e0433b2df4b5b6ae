"""Tensors by name, read one at a time from files of any format; and atomic output folders."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os.path import realpath
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.commit import Place, failure, put_in_place
from fullshard.checkpoint.files import sync_folder
from fullshard.checkpoint.format import SAVING
from fullshard.errors import CheckpointError, untrusted

CHECKPOINT = "a checkpoint"

# Files of a Hugging Face folder that are copied together with the weights.
COMPANIONS = ("config.json", "generation_config.json", "chat_template*", "tokenizer*")
COMPANIONS += ("special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt")
COMPANIONS += ("preprocessor_config.json", "processor_config.json", "spiece.model")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that can be read.

    Attributes:
        dtype: Dtype of its elements.
        shape: Global shape.
        load: Reads the full tensor to the CPU, at each call.
        origin: File and name of the tensor, for errors.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    origin: str = "tensor"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Entry:
        """A tensor in memory, or mapped from a file."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: tensor.detach())

    def read(self) -> torch.Tensor:
        """Reads and checks the tensor.

        Raises:
            CheckpointError: The tensor cannot be read, or differs from its entry.
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
        """Casts a floating-point tensor to another dtype; None changes nothing."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        return replace(self, dtype=dtype, load=lambda: self.read().to(dtype))

    def without_storage(self) -> torch.Tensor:
        """A tensor of this dtype and shape on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OptimizerSource:
    """State of an optimizer.

    Attributes:
        kind: Name of the optimizer's class.
        tensors: (parameter, state) -> a tensor with the parameter's shape.
        scalars: Parameter -> state -> a number, or a tensor of one element.
        groups: Settings of each group, with its parameters' names under "params".
        own: States of single ranks, by description.
    """

    kind: str
    tensors: Mapping[tuple[str, str], Entry]
    scalars: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    own: Mapping[str, Entry] = field(default_factory=dict[str, Entry])


@dataclass(frozen=True)
class Source:
    """Content of a folder or a file.

    Attributes:
        what: Description of its format.
        tensors: Parameters and buffers by name; a tied parameter has one entry.
        tied: Further names of parameters: second name -> first name.
        optimizer: State of the optimizer; None if there is none that can be read.
        companions: Configuration and tokenizer files: name -> bytes.
        step: Number of steps of the run; None if unknown.
        left_out: Descriptions of content that is not read.
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


def check_empty(folder: Path, what: str) -> None:
    """Raises CheckpointError if the folder exists and is not empty."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"{what}: expected a new or empty folder; '{folder}' holds something. Name another."
            )
    except OSError as error:  # the path is too long, or may not be read
        raise failure(folder, 0, error) from error


@contextmanager
def whole_or_nothing(folder: Path, token: str | None = None) -> Generator[Path]:
    """A temporary folder that becomes `folder` at the end of the block, unless the block fails.

    Args:
        folder: Folder to write.
        token: Ends the temporary folder's name. An existing `folder` is then replaced: it has no
            other writer. None: `folder` must be missing or empty, also at the end.

    Raises:
        CheckpointError: The file system refused.
    """
    folder = Path(realpath(folder))  # links stay
    place = Place(folder, token or f"{os.getpid():x}")
    try:
        for left in {place.aside, *(() if token else _of_dead_processes(folder))}:
            shutil.rmtree(left, ignore_errors=True)  # left by a kill
        place.aside.mkdir(parents=True)
        yield place.aside
        sync_folder(place.aside)
        if token is None and folder.exists():
            folder.rmdir()  # refuses what was put there since the start
        put_in_place(place)
    except OSError as error:
        raise failure(folder, 0, error) from error
    finally:
        shutil.rmtree(place.aside, ignore_errors=True)


def _of_dead_processes(folder: Path) -> Generator[Path]:
    """Temporary folders beside `folder` whose processes have ended."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.{SAVING}-([0-9a-f]{{1,8}})")
    for left in folder.parent.iterdir() if folder.parent.is_dir() else ():
        if match := pattern.fullmatch(left.name):
            try:
                os.kill(int(match[1], 16), 0)
            except (ProcessLookupError, OverflowError):
                yield left
            except PermissionError:
                continue  # another user's process lives
