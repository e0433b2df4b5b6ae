"""Weights from a Hugging Face folder: each rank reads the bytes of its own elements."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fullshard.errors import ConfigError

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


class FolderWeights:
    """The tensors of `model.safetensors`, or of the files that its index lists.

    Args:
        folder: A Hugging Face folder.
        prefix: The model's `base_model_prefix`: a checkpoint of the base model alone lacks it.

    Raises:
        ConfigError: There is no such folder, or no safetensors in it.
    """

    def __init__(self, folder: str | Path, prefix: str = "") -> None:
        self.folder = Path(folder)
        self._prefix = f"{prefix}." if prefix else ""
        index, one = self.folder / INDEX, self.folder / ONE_FILE
        if index.is_file():
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            self._files = {name: self.folder / file for name, file in names.items()}
        elif one.is_file():
            with self._open(one) as file:
                self._files = dict.fromkeys(file.keys(), one)
        else:
            there = "there is none of these" if self.folder.is_dir() else "there is no such folder"
            raise ConfigError(
                f"weights: expected a folder with {ONE_FILE} or {INDEX}; got '{folder}', {there}. "
                "Save the model with save_pretrained(FOLDER)."
            )

    def find(self, names: Sequence[str]) -> str | None:
        """The first of a tensor's names that the files have, with or without the base's prefix."""
        others = [
            name.removeprefix(self._prefix)
            if name.startswith(self._prefix)
            else self._prefix + name
            for name in names
            if self._prefix
        ]
        return next((name for name in (*names, *others) if name in self._files), None)

    def missing(self, tensors: Sequence[Sequence[str]]) -> list[str]:
        """First names of the tensors that the files lack."""
        return [names[0] for names in tensors if self.find(names) is None]

    def read(
        self, names: Sequence[str], shape: tuple[int, ...], start: int, stop: int
    ) -> torch.Tensor:
        """(stop - start,): elements [start, stop) of a tensor in row-major order.

        Reads the rows that these lie in, no others. A copy: views would keep every file mapped,
        and change with it.

        Raises:
            ConfigError: The tensor has another shape in the files.
        """
        name = self.find(names)
        assert name is not None, names
        with self._open(self._files[name]) as file:
            found = file.get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise ConfigError(
                    f"weights: expected {names[0]} of shape {shape}; "
                    f"{self._files[name].name} has {tuple(found.get_shape())}. "
                    "Use the config.json of the same folder."
                )
            if not shape:
                return file.get_tensor(name).reshape(-1)[start:stop].clone()
            row = max(1, math.prod(shape[1:]))
            first, last = start // row, -(-stop // row)
            rows: torch.Tensor = found[first:last]
            return rows.reshape(-1)[start - first * row : stop - first * row].clone()

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"weights: expected '{file}' to be a whole safetensors file; {error}. "
                "Copy or download it again."
            ) from error
