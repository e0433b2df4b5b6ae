"""A teacher's k largest logits of every training token, on disk, for runs without the teacher.

CACHE/values.npy   (num_tokens, k) float16     row after row of the training data
CACHE/ids.npy      (num_tokens, k) int32
CACHE/bounds.npy   (num_rows + 1,)             where each row begins
CACHE/cache.json   facts of the data: a run with other data or another tokenizer is refused
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fullshard.data.dataset import DatasetFacts
from fullshard.errors import DataError
from fullshard.recipes.base import Batch

FACTS = "cache.json"
TOP_VALUES, TOP_IDS = "teacher_values", "teacher_ids"  # keys of a batch with cached logits
ROWS = "rows"  # key of a batch: numbers of its training rows, -1 for empty places


@dataclass(frozen=True)
class TopK:
    """Cached logits, as memory-mapped arrays; see the module's docstring."""

    values: Any
    ids: Any
    bounds: Any

    @classmethod
    def load(cls, folder: Path, mode: Literal["r", "r+"] = "r") -> TopK:
        """Maps a cache, to be read or (`r+`) to be written.

        Raises:
            DataError: There is none, or it is not complete.
        """
        if mode == "r" and not (folder / FACTS).is_file():
            raise DataError(
                f"distill.cache: expected what `fullshard distill cache` wrote, got '{folder}' "
                f"without {FACTS}. Write it first, or name its folder."
            )
        names = ("values", "ids", "bounds")
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode=mode) for name in names))

    @classmethod
    def create(cls, folder: Path, lengths: Any, top_k: int) -> None:
        """Creates empty arrays of the right size, to be written by all ranks."""
        folder.mkdir(parents=True, exist_ok=True)
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        np.save(folder / "bounds.npy", bounds)
        for name, dtype in (("values", np.float16), ("ids", np.int32)):
            made = np.lib.format.open_memmap(
                folder / f"{name}.npy", "w+", dtype=dtype, shape=(int(bounds[-1]), top_k)
            )
            made.flush()

    def put(
        self,
        row: int,
        hidden: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        chunk_size: int,
    ) -> None:
        """Writes the largest logits of a row, chunk by chunk."""
        begin, end = (int(bound) for bound in self.bounds[row : row + 2])
        for start in range(begin, end, chunk_size):
            stop = min(start + chunk_size, end)
            top = head(hidden[start - begin : stop - begin]).topk(self.values.shape[1])
            self.values[start:stop] = top.values.float().cpu().numpy()
            self.ids[start:stop] = top.indices.cpu().numpy()

    def flush(self) -> None:
        """Writes everything to disk."""
        self.values.flush()
        self.ids.flush()


def write_facts(folder: Path, facts: DatasetFacts) -> None:
    """Writes the facts of the data; a cache with them is complete."""
    text = json.dumps(_told(facts), indent=2) + "\n"
    (folder / FACTS).write_text(text, encoding="utf-8")


def check_facts(folder: Path, facts: DatasetFacts) -> None:
    """Raises DataError if a cache was made from other data than the run's."""
    TopK.load(folder)
    found = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    for key, value in _told(facts).items():
        if found.get(key) != value:
            raise DataError(
                f"distill.cache: expected logits of this run's data, with {key} {value}; got some "
                f"with {found.get(key)} in '{folder}'. Write the cache again (fullshard distill "
                "cache), from the same data and seed."
            )


def _told(facts: DatasetFacts) -> dict[str, Any]:
    names = ("sequence_length", "num_train_sequences", "num_train_tokens", "vocab_size")
    names = (*names, *(("fingerprint",) if facts.fingerprint else ()))
    return {name: getattr(facts, name) for name in names}


def with_logits(batch: Batch, kept: TopK) -> Batch:
    """The batch with the teacher's logits; empty places get zeros."""
    shape = (*batch["input_ids"].shape, kept.values.shape[1])
    values, ids = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    for at, row in enumerate(batch[ROWS].tolist()):
        if row >= 0:
            begin, end = kept.bounds[row : row + 2]
            values[at, : end - begin] = kept.values[begin:end]
            ids[at, : end - begin] = kept.ids[begin:end]
    device = batch["input_ids"].device
    arrays = {TOP_VALUES: values, TOP_IDS: ids}
    return batch | {name: torch.from_numpy(a).to(device) for name, a in arrays.items()}
