"""The recipe of chat data: rows as batches, next-token loss of what is learned."""

from __future__ import annotations

from typing import Any

import numpy as np

from fullshard.data.chat_rows import ChatDataset, dealt
from fullshard.data.order import Indices, SampleOrder
from fullshard.recipes.base import IGNORED, RecipeKind, RowBatches, Seat
from fullshard.recipes.pretrain.recipe import build


class Chats(RowBatches):
    """Batches of one rank; answers have their own lengths, so the loop counts their tokens.

    Args:
        data: Rows to train and evaluate on.
        per_device_eval: Held-out rows that a rank takes at a time.
        order: Which rows each step sees.
        seat: Rank and device.
    """

    def __init__(
        self, data: ChatDataset, per_device_eval: int, order: SampleOrder, seat: Seat
    ) -> None:
        super().__init__(len(data.held_out), per_device_eval, order, seat)
        self._data = data
        self._lengths = data.train.lengths
        pad = data.tokenizer.pad_token_id
        self._pad = pad if isinstance(pad, int) else 0
        self.row_length = max(2, data.facts.sequence_length)

    @property
    def train_lengths(self) -> Indices:
        """Tokens of each row."""
        return self._lengths

    def _of_step(self, step: int) -> Indices:
        return dealt(self._order.of_step(step), self._lengths)

    def _arrays(self, chosen: Indices, *, held_out: bool) -> dict[str, Any]:
        """Rows, filled up to the longest; what fills is a document of its own, and not learned.

        [Note: documents]
        transformers takes a fall in `position_ids` for the border of a document, and lets no token
        see another document. Rows of one example need no borders: what fills them stands behind.
        """
        rows = self._data.held_out if held_out else self._data.train
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
        arrays = {"input_ids": ids, "labels": labels}
        if any(len(documents) > 1 for documents in members):
            arrays["position_ids"] = places
        return arrays


KINDS = {"sft": RecipeKind(build, uses_chats=lambda _: True)}
