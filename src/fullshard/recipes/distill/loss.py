"""The objective of distillation: the loss against a teacher, or against its logits on disk.

    teacher body --> teacher's head -----> student body --> student's head
                     (its weight gathered)                  (both weights gathered)
                                                            chunks of tokens: see head.py

The student runs inside the teacher's head, so both heads are gathered once and at the same time.
Only predicted tokens count. Evaluation uses only the student's cross-entropy.

With p the teacher's and q the student's probabilities at temperature T, a token adds T^2 times

    forward_kl   sum p (log p - log q)
    reverse_kl   sum q (log q - log p)
    jsd          beta KL(p || m) + (1 - beta) KL(q || m)        m = beta p + (1 - beta) q

T^2 restores the size of the gradient, which the temperature divides by T^2.

References:
    Hinton et al., Distilling the knowledge in a neural network, 2015. Agarwal et al., On-policy
    distillation of language models, 2024 (jsd by beta).

[Note: cached logits]
The k largest logits of every training token, for runs without the teacher:

    CACHE/values.npy   (num_tokens, k) float16     row after row of the training data
    CACHE/ids.npy      (num_tokens, k) int32
    CACHE/bounds.npy   (num_rows + 1,)             where each row begins
    CACHE/cache.json   facts of the data, a sample of the teacher and a checksum: a run with other
                       data, tokenizer or teacher is refused, as are arrays that were not written to
                       their end
    CACHE/.new/        the arrays while they are written; runs continue with the older ones
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fullshard.checkpoint.files import write_text
from fullshard.checkpoint.storage import remove_tree
from fullshard.config.regular_files import open_regular
from fullshard.config.schema import DistillConfig
from fullshard.config.values import DistillLoss
from fullshard.data.arrays import checksum_of
from fullshard.data.dataset import ROWS, DatasetFacts
from fullshard.errors import DataError, DivergedError, untrusted
from fullshard.models.lora import PROJECTION
from fullshard.planner.text import SCHEMA_VERSION, check_version
from fullshard.recipes.base import Batch, cross_entropy, placed
from fullshard.recipes.head import ChunkLoss, Head, Tokens, next_token

FACTS, CHECKSUM, TEACHER = "cache.json", "checksum", "teacher"
ARRAYS, NEW = ("values.npy", "ids.npy", "bounds.npy"), ".new"
TOP_VALUES, TOP_IDS = "teacher_values", "teacher_ids"  # keys of a batch with cached logits


@dataclass(frozen=True)
class TopK:
    """Cached logits, as memory-mapped arrays; see [Note: cached logits].

    `part` is the part of every row that the batches of this rank have.
    """

    values: Any
    ids: Any
    bounds: Any
    part: int = 0

    @classmethod
    def load(cls, folder: Path, mode: Literal["r", "r+"] = "r", part: int = 0) -> TopK:
        """Maps a cache to be read, or the arrays that are to be written (`r+`).

        Raises:
            DataError: There is none, or it is not complete.
        """
        if mode == "r" and not (folder / FACTS).is_file():
            raise DataError(
                f"distill.cache: expected a cache of `fullshard distill cache`, got '{folder}' "
                f"without {FACTS}. Write it first, or set its folder."
            )
        place = folder if mode == "r" else folder / NEW
        with _readable(folder):
            for name in ARRAYS:
                os.close(open_regular(place / name))  # a pipe would be waited for
            arrays = [np.load(place / name, mmap_mode=mode) for name in ARRAYS]
        return cls(*arrays, part=part)

    @classmethod
    def create(cls, folder: Path, lengths: Any, top_k: int) -> None:
        """Creates empty arrays of the right size, to be written by all ranks."""
        new = folder / NEW
        new.mkdir(parents=True, exist_ok=True)
        values, ids, bounds = (new / name for name in ARRAYS)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        np.save(bounds, ends)
        for file, dtype in ((values, np.float16), (ids, np.int32)):
            np.lib.format.open_memmap(file, "w+", dtype=dtype, shape=(int(ends[-1]), top_k))
            with file.open("r+b") as opened:  # a full disk would kill a rank that writes to the map
                os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)

    def put(
        self,
        row: int,
        hidden: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        chunk_size: int,
        vocab_size: int,
    ) -> None:
        """Write the largest logits of a row, chunk by chunk, except those of padded entries.

        Raises:
            DivergedError: They are not finite, or become so in float16.
        """
        begin, end = self.place(row, len(hidden))
        for start in range(begin, end, chunk_size):
            stop = min(start + chunk_size, end)
            logits = head(hidden[start - begin : stop - begin])[:, :vocab_size]
            top = logits.topk(self.values.shape[1])
            self.values[start:stop] = top.values.half().cpu().numpy()
            if not np.isfinite(self.values[start:stop]).all():
                raise DivergedError(
                    "teacher: expected finite logits below 65,504, which float16 holds, got "
                    "others. Check its weights and config.json, or distill without a cache."
                )
            self.ids[start:stop] = top.indices.cpu().numpy()

    def place(self, row: int, width: int) -> tuple[int, int]:
        """Returns the range of tokens of a row's part; parts of a row have `width` tokens."""
        begin, end = (int(bound) for bound in self.bounds[row : row + 2])
        begin += self.part * width
        return begin, min(begin + width, max(begin, end))

    def checksum(self) -> str:
        """Checksum of all arrays."""
        return checksum_of(self.values, self.ids, self.bounds)

    def flush(self) -> None:
        """Writes everything to disk."""
        self.values.flush()
        self.ids.flush()


def write_facts(folder: Path, facts: DatasetFacts, teacher: str | None = None) -> None:
    """Puts the arrays in place, then the facts of the data; a cache with them is complete.

    Args:
        folder: Folder of the cache.
        facts: Facts of the data.
        teacher: Sample of the teacher's files; None: its weights are random.
    """
    checksum = TopK.load(folder, "r+").checksum()
    table = {"schema_version": SCHEMA_VERSION, **_told(facts), CHECKSUM: checksum, TEACHER: teacher}
    (folder / FACTS).unlink(missing_ok=True)  # those of an older cache here
    for name in ARRAYS:
        (folder / NEW / name).replace(folder / name)
    write_text(folder / FACTS, json.dumps(table, indent=2) + "\n")
    remove_tree(folder / NEW)


def check_facts(folder: Path, facts: DatasetFacts, teacher: str | None = None) -> None:
    """Raises DataError if a cache was made from other data or by another teacher, or is damaged.

    Args:
        folder: Folder of the cache.
        facts: Facts of the run's data.
        teacher: Sample of the files of the teacher that the run names; None if it names none.
    """
    arrays = TopK.load(folder)
    with _readable(folder):
        found: dict[str, Any] = dict(json.loads((folder / FACTS).read_text(encoding="utf-8")))
        check_version(found.get("schema_version", 1), folder / FACTS)
    for key, value in _told(facts).items():
        if found.get(key) != value:
            raise DataError(
                f"distill.cache: expected logits of this run's data, with {key} {value}; got "
                f"{found.get(key)} in '{folder}'. Write the cache again (fullshard distill cache), "
                "from the same data."
            )
    written_by = found.get(TEACHER)
    if teacher and written_by and teacher != written_by:
        raise DataError(
            f"distill.cache: expected logits of the run's teacher, got another one's in "
            f"'{folder}'. Write the cache again (fullshard distill cache), or leave teacher out."
        )
    fits = arrays.values.shape == arrays.ids.shape and len(arrays.ids) == arrays.bounds[-1]
    if not fits or found.get(CHECKSUM) != arrays.checksum():
        raise DataError(
            f"distill.cache: expected the arrays that were written, got others in '{folder}' "
            f"(checksum {found.get(CHECKSUM)}). Write the cache again."
        )


def _readable(folder: Path) -> AbstractContextManager[None]:
    """A context for reading the files of a cache."""
    wanted = "a cache of `fullshard distill cache`"
    return untrusted(f"distill.cache: '{folder}'", wanted, DataError, "Write the cache again.")


def _told(facts: DatasetFacts) -> dict[str, Any]:
    names = "sequence_length num_train_sequences num_train_tokens vocab_size separator fingerprint"
    return {name: value for name in names.split() if (value := getattr(facts, name)) != ""}


def with_logits(batch: Batch, kept: TopK) -> Batch:
    """The batch with the teacher's logits; empty places get zeros."""
    shape = (*batch["input_ids"].shape, kept.values.shape[1])
    values, ids = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    for at, row in enumerate(batch[ROWS].tolist()):
        if row >= 0:
            begin, end = kept.place(row, shape[1])
            values[at, : end - begin] = kept.values[begin:end]
            ids[at, : end - begin] = kept.ids[begin:end]
    return batch | placed({TOP_VALUES: values, TOP_IDS: ids}, batch["input_ids"].device)


# ---- the loss ------------------------------------------------------------------------------------


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, settings: DistillConfig
) -> torch.Tensor:
    """The divergence, summed over tokens.

    Args:
        student: (num_tokens, vocabulary) logits of the student.
        teacher: (num_tokens, vocabulary) logits of the teacher.
        settings: Loss, temperature and beta.
    """
    q = log_probabilities(student, settings.temperature)
    p = log_probabilities(teacher, settings.temperature).to(q.dtype)
    match settings.loss:
        case DistillLoss.FORWARD_KL:
            value = _kl(p, q)
        case DistillLoss.REVERSE_KL:
            value = _kl(q, p)
        case DistillLoss.JSD:
            middle = torch.logaddexp(p + math.log(settings.beta), q + math.log(1 - settings.beta))
            value = settings.beta * _kl(p, middle) + (1 - settings.beta) * _kl(q, middle)
        case DistillLoss.HIDDEN:
            raise AssertionError("hidden states have no vocabulary")
    return value * settings.temperature**2


def top_k_divergence(
    student: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, settings: DistillConfig
) -> torch.Tensor:
    """forward_kl against k cached logits per token, as if there were no others.

    Args:
        student: (num_tokens, vocabulary) logits of the student.
        values: (num_tokens, k) logits of the teacher.
        ids: (num_tokens, k) token ids of these logits.
        settings: Settings with the temperature.
    """
    q = log_probabilities(student, settings.temperature).gather(1, ids)
    p = log_probabilities(values, settings.temperature).to(q.dtype)
    return _kl(p, q) * settings.temperature**2


def log_probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-softmax in float32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.log_softmax(logits.to(dtype) / temperature, dim=-1)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


class Distillation:
    """The objective of a student.

    Args:
        head: Head of the student.
        teacher: A model without gradients in which a head is installed, or cached logits of one.
        settings: Loss, and number of tokens whose logits are in memory at a time.
    """

    def __init__(self, head: Head, teacher: nn.Module | TopK, settings: DistillConfig) -> None:
        self._head = head
        self._teacher = teacher
        self._settings = settings

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        if not model.training:
            return next_token(self._head, self._settings.tokens_at_once)(model, batch)
        tokens = Tokens.of(batch)
        if isinstance(self._teacher, TopK):
            known = batch if TOP_VALUES in batch else with_logits(batch, self._teacher)
            beside = self._beside_cache(tokens, known)
            total = self._head.loss(model, tokens, beside, self._settings.tokens_at_once)
        else:
            total = self._inside_teacher(self._teacher, model, tokens)
        return total, len(tokens.targets)

    def _inside_teacher(self, teacher: nn.Module, model: nn.Module, tokens: Tokens) -> torch.Tensor:
        found: list[torch.Tensor] = []
        share, size = 1 - self._settings.alpha, self._settings.tokens_at_once

        def labels(student: torch.Tensor, at: slice) -> torch.Tensor:
            return share * cross_entropy(student, tokens.targets[at])

        def see(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
            rows, loss, apart = tokens.rows(h), labels, None
            if self._settings.loss is DistillLoss.HIDDEN:
                apart = partial(self._apart, model, rows)
            else:
                loss = self._beside(tokens, rows, w, b)
            with torch.enable_grad():
                found.append(self._head.loss(model, tokens, loss, size, apart))

        with torch.no_grad():
            Head.of(teacher).show(teacher, tokens.inputs, see)
        return found[0]

    def _beside(
        self, tokens: Tokens, rows: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
    ) -> ChunkLoss:
        """Loss against the teacher's logits, which are computed chunk by chunk too."""

        def loss(student: torch.Tensor, at: slice) -> torch.Tensor:
            with torch.no_grad():
                teacher = F.linear(rows[at], w, b)
            size = min(student.shape[1], teacher.shape[1])  # the rest is padding
            value = divergence(student[:, :size], teacher[:, :size], self._settings)
            return self._mixed(value, student, tokens.targets[at])

        return loss

    def _beside_cache(self, tokens: Tokens, batch: Batch) -> ChunkLoss:
        """Loss against the logits that `distill cache` wrote."""
        values, ids = tokens.rows(batch[TOP_VALUES]), tokens.rows(batch[TOP_IDS])

        def loss(student: torch.Tensor, at: slice) -> torch.Tensor:
            value = top_k_divergence(student, values[at], ids[at], self._settings)
            return self._mixed(value, student, tokens.targets[at])

        return loss

    def _mixed(
        self, value: torch.Tensor, student: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        alpha = self._settings.alpha
        if alpha == 1:
            return value
        return alpha * value + (1 - alpha) * cross_entropy(student, targets)

    def _apart(self, model: nn.Module, other: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Mean squared difference of hidden states over the width, summed over tokens."""
        projection = getattr(model, PROJECTION, None)
        seen = own if projection is None else projection(own)
        dtype = torch.promote_types(seen.dtype, torch.float32)
        return self._settings.alpha * (seen.to(dtype) - other.to(dtype)).square().mean(-1).sum()
