"""Weights from a Hugging Face folder: each rank reads the bytes of its own elements.

Most tensors have one name in the files and in the model. The experts of a layer are one tensor in
the model and many in the files:

    model    ...mlp.experts.gate_up_proj   [experts, 2 x inner, hidden]
    files    ...mlp.experts.0.gate_proj.weight   ...0.up_proj.weight   ...1.gate_proj.weight   ...
             |------------- the model's elements in row-major order -------------|

A range of the model's elements therefore consists of ranges of the stored tensors.

References:
    transformers' conversion_mapping.py, "qwen2_moe" and "mixtral" with those that name them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fullshard.config.regular_files import open_regular, read_regular
from fullshard.errors import ConfigError, untrusted

_VALUES = ("F16", "BF16", "F32", "F64")  # other dtypes are used by quantized tensors

# The names that a folder stores tensors under.
_IN_FILES = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
# Leaf name in the model -> names of its stored parts in order, per family.
_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
# Mixtral's files use another name for the block than the model.
_BLOCKS = ((".mlp.", ".block_sparse_moe."),)

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class FileNames:
    """The names of tensors in files, by those that a model has.

    Args:
        names: All names in the files.
        prefix: The model's `base_model_prefix`, which files of the base model lack.
    """

    def __init__(self, names: Collection[str], prefix: str = "") -> None:
        self._names = names
        self._prefix = f"{prefix}." if prefix else ""
        experts: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
        for name in names:
            if found := _IN_FILES.fullmatch(name):
                experts[found[1], found[3]][int(found[2])] = name
        full = {key: of for key, of in experts.items() if of.keys() == {*range(len(of))}}
        self._experts = {key: [of[n] for n in range(len(of))] for key, of in full.items()}

    def parts(self, names: Sequence[str]) -> tuple[str, ...]:
        """The stored tensors with a tensor's elements, in order; () if there are none.

        Args:
            names: All names of the tensor in the model.
        """
        for name in names:
            for spelling in self._spellings(name):
                found = (spelling,) if spelling in self._names else self._of_experts(spelling)
                scales = (f"{part}{end}" for part in found for end in _SCALES)
                if found and not any(scale in self._names for scale in scales):  # quantized
                    return found
        return ()

    def _spellings(self, name: str) -> list[str]:
        spellings = [name]
        if self._prefix:
            bare = name.removeprefix(self._prefix)
            spellings.append(bare if bare != name else self._prefix + name)
        others = [s.replace(ours, theirs) for s in spellings for ours, theirs in _BLOCKS]
        return spellings + [other for other in others if other not in spellings]

    def _of_experts(self, name: str) -> tuple[str, ...]:
        block, _, leaf = name.rpartition(".")
        for family in _PARTS.get(leaf, ()):
            columns = [self._experts.get((block, part), []) for part in family]
            if columns[0] and len({len(column) for column in columns}) == 1:
                return tuple(name for row in zip(*columns, strict=True) for name in row)
        return ()


_SCALES = "_scale_inv", "_scale"  # of quantized values


class FolderWeights(FileNames):
    """The tensors of `model.safetensors`, or of the files that its index lists.

    Args:
        folder: A Hugging Face folder.
        prefix: The model's `base_model_prefix`, which checkpoints of the base model lack.

    Raises:
        ConfigError: The folder does not exist, or has no safetensors.
    """

    def __init__(self, folder: str | Path, prefix: str = "") -> None:
        self.folder = Path(folder)
        index, one = self.folder / INDEX, self.folder / ONE_FILE
        self._known: dict[Path, tuple[int, int] | None] = {}  # of the files, when they were found
        if index.is_file() and not one.is_file():  # as transformers does
            with untrusted(f"weights: {index}", "an index with a weight_map", ConfigError):
                names: dict[str, str] = json.loads(read_regular(index))["weight_map"]
                self._files = {name: self.folder / Path(file).name for name, file in names.items()}
        elif one.is_file():
            with self._open(one) as file:
                self._files = dict.fromkeys(file.keys(), one)
        else:
            there = "it has neither" if self.folder.is_dir() else "there is no such folder"
            raise ConfigError(
                f"weights: expected a folder with {ONE_FILE} or {INDEX}; got '{folder}', {there}. "
                "Save the model with save_pretrained(FOLDER)."
            )
        for file in {*self._files.values()}:
            self._known.setdefault(file, size_and_time(file))
        super().__init__(self._files, prefix)

    def unused(self, model: torch.nn.Module) -> list[str]:
        """The stored tensors that the model lacks, which hints at a wrong configuration."""
        taken = {part for name in model.state_dict() for part in self.parts([name])}
        ignored = *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), "inv_freq$"
        spare = sorted({*self._files} - taken)
        return [name for name in spare if not any(re.search(one, name) for one in ignored)]

    def missing(self, tensors: Sequence[Sequence[str]]) -> list[str]:
        """The first names of the tensors that the files lack."""
        return [names[0] for names in tensors if not self.parts(names)]

    @contextmanager
    def elements(
        self, names: Sequence[str], shape: tuple[int, ...], start: int, stop: int
    ) -> Generator[list[torch.Tensor]]:
        """Elements [start, stop) of a tensor in row-major order, part by part.

        They are views of mapped files: copy them inside the block. A copy of each tensor before
        that would leave holes in the heap, which grew by 20 to 60 MiB while a model was loaded.

        Raises:
            ConfigError: The stored shape differs.
        """
        pieces: list[torch.Tensor] = []
        with self._opened(names, shape) if start < stop else nullcontext(()) as found:
            at = 0
            for part in found:
                own = tuple(part.get_shape())
                numel = math.prod(own)
                first, last = max(start - at, 0), min(stop - at, numel)
                if first < last:
                    pieces.append(_rows(part, own, first, last))
                at += numel
            yield pieces

    def check(self, names: Sequence[str], shape: tuple[int, ...]) -> None:
        """Checks that a tensor can be read; reads only values of tied tensors stored twice.

        Raises:
            ConfigError: As for `read`.
        """
        with self._opened(names, shape):
            first, *others = [name for name in names if name in self._files] or [""]
        span = shape, 0, math.prod(shape)
        for other in others:
            with self.elements([first], *span) as ours, self.elements([other], *span) as theirs:
                differ = any((a != b).any() for a, b in zip(ours, theirs, strict=True))
            if differ:
                raise ConfigError(
                    f"weights: expected {other} to equal {first}, because the model ties them; "
                    f"they differ in '{self.folder}'. Correct tie_word_embeddings in config.json."
                )

    def check_numbers(self, names: Iterable[str]) -> None:
        """Checks that tensors, where the files have them, are numbers and not quantized codes.

        Raises:
            ConfigError: A tensor is not in floating point, or has scales.
        """
        for name in names:
            scales = (f"{one}{end}" for one in self._spellings(name) for end in _SCALES)
            if found := next((scale for scale in scales if scale in self._names), None):
                raise ConfigError(
                    f"weights: expected {name} in floating point; '{self.folder}' has {found}, so "
                    "it is quantized. Restore quantization_config in its config.json."
                )
            with self._opened([name], None) if self.parts([name]) else nullcontext():
                pass

    def check_files(self) -> None:
        """Checks that every file exists, is complete and contains the tensors of the index.

        Raises:
            ConfigError: A file fails the check.
        """
        for file in dict.fromkeys(self._files.values()):
            with self._open(file) as opened:
                there = {*opened.keys()}
            listed = {n for n in {*self._files} | there if self._files.get(n, file) == file}
            if wrong := listed ^ there:
                raise ConfigError(
                    f"weights: expected {min(wrong)} only in '{self._files[min(wrong)]}', as "
                    f"{INDEX} says; '{file}' {'has' if min(wrong) in there else 'lacks'} it. Copy "
                    "or download the folder again."
                )

    @contextmanager
    def _opened(self, names: Sequence[str], shape: tuple[int, ...] | None) -> Generator[list[Any]]:
        """Open the stored parts of a tensor; check their dtypes, and a shape if one is given."""
        parts = self.parts(names)
        assert len(parts) > 0, names
        with ExitStack() as closing:
            at = {self._files[part] for part in parts}
            files = {file: closing.enter_context(self._open(file)) for file in at}
            expected = f"{names[0]} in the file that {INDEX} names"
            with untrusted(f"weights: {self.folder}", expected, ConfigError):
                found = [files[self._files[part]].get_slice(part) for part in parts]
            shapes: list[tuple[int, ...]] = [tuple(one.get_shape()) for one in found]
            coded = next((kind for one in found if (kind := one.get_dtype()) not in _VALUES), None)
            if coded is not None:
                raise ConfigError(
                    f"weights: expected {names[0]} in floating point; {self._files[parts[0]].name} "
                    f"has {coded} codes, which are quantized values. Use a folder in "
                    "floating point, or give fs.shard the model that from_pretrained loads."
                )
            if shape is not None and not is_made_of(shape, shapes):
                more = f" in {len(parts)} parts, the first" if len(parts) > 1 else ""
                raise ConfigError(
                    f"weights: expected {names[0]} of shape {shape}; "
                    f"{self._files[parts[0]].name} has{more} {shapes[0]}. "
                    "Use the config.json of the same folder."
                )
            yield found

    def _open(self, file: Path) -> Any:
        try:
            os.close(open_regular(file))  # the library would block on a pipe
            opened = safe_open(file, framework="pt")
            if self._known.setdefault(file, found := size_and_time(file)) != found:
                raise OSError("it was replaced while the folder was read")
            return opened
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"weights: expected '{file}' to be a whole safetensors file; {error}. "
                "Copy or download it again."
            ) from error


def size_and_time(file: Path) -> tuple[int, int] | None:
    """Shows that a file was written again; file systems over networks may renumber inodes."""
    with suppress(OSError):
        found = file.stat()
        return found.st_size, found.st_mtime_ns
    return None


def is_made_of(shape: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> bool:
    """Whether the parts form a tensor: the tensor itself, or rows of experts."""
    if [*parts] == [shape]:
        return True
    rows = {part[1:] for part in parts}
    return rows == {shape[2:]} and sum(map(math.prod, parts)) == math.prod(shape)


def _rows(found: Any, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a stored tensor."""
    if len(shape) == 0:
        return found[...].reshape(-1)[start:stop]
    row = max(1, math.prod(shape[1:]))
    first, last = start // row, -(-stop // row)
    return found[first:last].reshape(-1)[start - first * row : stop - first * row]
