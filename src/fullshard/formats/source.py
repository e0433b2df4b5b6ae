"""Tensors by name, read one at a time from any format and compared; atomic output folders."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from os.path import realpath
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.commit import Paths, failure, put_in_place
from fullshard.checkpoint.files import sync_folder
from fullshard.checkpoint.format import SAVING
from fullshard.errors import CheckpointError, untrusted

CHECKPOINT = "a checkpoint"
IN_RUN = "0"  # token of folders that only the run itself writes

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
        check: Raises CheckpointError if its files were replaced since it was opened; called before
            the result gets its name.
    """

    what: str
    tensors: Mapping[str, Entry]
    tied: Mapping[str, str] = field(default_factory=dict[str, str])
    optimizer: OptimizerSource | None = None
    companions: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    step: int | None = None
    left_out: tuple[str, ...] = ()
    check: Callable[[], None] = lambda: None

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.tensors.values())


def check_once(known: Collection[str], names: Collection[str], file: Path) -> None:
    """Raises CheckpointError if two files contain the same tensor, which is ambiguous."""
    if twice := sorted({*known} & {*names}):
        raise CheckpointError(
            f"'{file}': expected each tensor in one file; got {twice[0]} in another one too. Copy "
            "the folder again."
        )


def check_empty(folder: Path, what: str) -> None:
    """Raises CheckpointError if the folder exists and is not empty."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"{what}: expected a new or empty folder; '{folder}' contains files."
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
    place = Paths(folder, token or f"{os.getpid():x}")
    try:
        for left in {place.aside, *(() if token else _of_dead_processes(folder))}:
            shutil.rmtree(left, ignore_errors=True)  # left by a kill
        place.aside.mkdir(parents=True)
        yield place.aside
        sync_folder(place.aside)
        if token is None and folder.exists():
            folder.rmdir()  # refuses files that were added since the start
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


# ---- comparison of two sources -------------------------------------------------------------------


CHUNK = 1 << 22  # elements compared at a time, to bound the memory of wider copies


class Match(StrEnum):
    """How two tensors of one name compare."""

    SAME = "same"
    ROUNDED = "same but for rounding to the other's dtype"
    DIFFERENT = "different values"
    SHAPE = "different shapes"
    ONLY_A = "only in A"
    ONLY_B = "only in B"


@dataclass(frozen=True, slots=True)
class Row:
    """Result for one name.

    Attributes:
        name: Name of the tensor; PARAMETER/STATE for an optimizer's state.
        verdict: The result.
        max_abs: Largest absolute difference; None if the tensors cannot be subtracted.
        about: Dtypes and shapes, if they differ.
    """

    name: str
    verdict: Match
    max_abs: float | None = None
    about: str = ""


def compare(a: Source, b: Source) -> Iterator[Row]:
    """Yields one row for each tensor of either source."""
    yield from _pairs(a.tensors, b.tensors, {**a.tied, **b.tied})
    one, other = a.optimizer, b.optimizer
    if one is not None and other is not None:
        yield from _pairs(_states(one), _states(other), {})
    elif (one is not None or other is not None) and a.what == b.what == CHECKPOINT:
        yield Row("optimizer", Match.ONLY_B if one is None else Match.ONLY_A)


def _pairs(
    a: Mapping[str, Entry], b: Mapping[str, Entry], tied: Mapping[str, str]
) -> Iterator[Row]:
    for name, entry in a.items():
        other = b.get(name) or b.get(tied.get(name, name))
        yield Row(name, Match.ONLY_A) if other is None else _compared(name, entry, other)
    for name in b:
        if name not in a and tied.get(name) not in a:
            yield Row(name, Match.ONLY_B)


def _compared(name: str, a: Entry, b: Entry) -> Row:
    if a.shape != b.shape:
        return Row(name, Match.SHAPE, None, f"{a.shape} and {b.shape}")
    one, other = a.read(), b.read()
    worst = _max_abs(one, other)
    if one.dtype is other.dtype:
        return Row(name, Match.DIFFERENT if worst > 0 else Match.SAME, worst)
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    rounded = _max_abs(one.to(narrow), other.to(narrow)) == 0
    verdict = Match.ROUNDED if rounded else Match.DIFFERENT
    return Row(name, verdict, worst, f"{one.dtype} and {other.dtype}")


def _max_abs(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference; NaN equals NaN, and differs infinitely from a number."""
    worst = 0.0
    for x, y in zip(one.reshape(-1).split(CHUNK), other.reshape(-1).split(CHUNK), strict=True):
        left, right = x.double(), y.double()
        gap = (left - right).abs()
        gap[(left == right) | (left.isnan() & right.isnan())] = 0.0
        worst = max(worst, gap.nan_to_num(nan=math.inf).max().item() if gap.numel() else 0.0)
    return worst


def _states(optimizer: OptimizerSource) -> dict[str, Entry]:
    """States by PARAMETER/STATE, numbers too."""
    numbers = {
        f"{param}/{state}": Entry.of(torch.tensor(float(value), dtype=torch.float64))
        for param, values in optimizer.scalars.items()
        for state, value in values.items()
    }
    states = {"/".join(names): entry for names, entry in optimizer.tensors.items()}
    return {**states, **optimizer.own, **numbers}
