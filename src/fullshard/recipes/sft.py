"""The recipe of chat data: rows as batches, next-token loss of what is learned."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from fullshard.data.chat_rows import ChatDataset, Rows, dealt
from fullshard.data.order import Indices, SampleOrder, evaluation_samples
from fullshard.recipes.base import IGNORED, Batch, causal_lm_loss

INPUTS = ("input_ids", "position_ids")  # of a model; the rest of a batch is the recipe's


class Chats:
    """Batches of one rank.

    Args:
        data: Rows to train and evaluate on.
        order: Which rows each step sees.
        per_device_eval: Held-out rows that a rank takes at a time.
        rank: This rank.
        device: Where batches go.
    """

    tokens_per_step = None  # answers have their own lengths: the loop counts

    def __init__(
        self,
        data: ChatDataset,
        order: SampleOrder,
        per_device_eval: int,
        rank: int,
        device: torch.device,
    ) -> None:
        self._data = data
        self._order = order
        self._lengths = data.train.lengths
        self._rank = rank
        self._device = device
        pad = data.tokenizer.pad_token_id
        self._pad = pad if isinstance(pad, int) else 0
        self._evaluation = evaluation_samples(
            len(data.held_out), per_device_eval, order.shape.world_size
        )

    @property
    def row_length(self) -> int:
        """Most tokens of a row."""
        return max(2, self._data.facts.sequence_length)

    @property
    def samples_per_step(self) -> int:
        return self._order.shape.global_batch

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    def micro_batches(self, step: int) -> list[Batch]:
        mine = dealt(self._order.of_step(step), self._lengths)[:, self._rank]
        return [self._batch(self._data.train, chosen) for chosen in mine]

    @property
    def train_lengths(self) -> Indices:
        """Tokens of each row."""
        return self._lengths

    def train_rows(self, chosen: Indices) -> Batch:
        """Some rows as a batch."""
        return self._batch(self._data.train, chosen)

    def held_out(self) -> Iterable[Batch]:
        for chosen in self._evaluation[:, self._rank]:
            yield self._batch(self._data.held_out, chosen)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        return causal_lm_loss(model(**inputs, use_cache=False).logits, batch["labels"])

    def _batch(self, rows: Rows, chosen: Indices) -> Batch:
        """Rows, filled up to the longest; what fills is a document of its own, and not learned.

        [Note: documents]
        transformers takes a fall in `position_ids` for the border of a document, and lets no token
        see another document. Rows of one example need no borders: what fills them stands behind.
        """
        members = [rows.examples_of(int(row)) if row >= 0 else [] for row in chosen]
        sizes = [sum(stop - start for start, stop in documents) for documents in members]
        shape = len(members), max(2, *sizes)
        ids = np.full(shape, self._pad, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        places = np.tile(np.arange(shape[1]), (shape[0], 1))
        for at, documents in enumerate(members):
            cursor = 0
            for start, stop in documents:
                here = slice(cursor, cursor + stop - start)
                ids[at, here] = rows.tokens[start:stop]
                labels[at, here] = np.where(rows.learned[start:stop], ids[at, here], IGNORED)
                places[at, here] = np.arange(stop - start)
                cursor = here.stop
            places[at, cursor:] = np.arange(shape[1] - cursor)
        arrays = {"input_ids": ids, "labels": labels, "rows": chosen.copy()}
        if any(len(documents) > 1 for documents in members):
            arrays["position_ids"] = places
        return {name: torch.from_numpy(a).to(self._device) for name, a in arrays.items()}
