"""Somebody asks the ranks to stop: what the loop still does, and what it makes up for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from fullshard.errors import PreemptedError
from fullshard.train.loop import Batch, Loop
from support.ragged import NUM_STEPS, RaggedRecipe, Rows, make_loop


class StopsAtTheSecondQuestion:
    """A keeper whose rank 1 is asked to stop while the held-out batches run."""

    def __init__(self, rank: int, rows: Rows) -> None:
        self._rank, self._rows = rank, rows
        self.asked, self.kept = 0, []

    def asked_to_stop(self) -> bool:
        self.asked += self._rows.phases[-1][0] == "evaluation"
        return self._rank == 1 and self.asked >= 2

    def keep(self, step, *, stopping) -> None:
        self.kept.append((step, stopping))
        if stopping:
            raise PreemptedError("asked to stop")


class ThreeBatchesHeldOut(RaggedRecipe):
    def held_out(self) -> Iterable[Batch]:
        return [*super().held_out()] * 3


def stopped_while_it_evaluates():
    rank, rows = torch.distributed.get_rank(), Rows()
    _, bare, _ = make_loop(rank, 2, 1, {}, rows)

    def loop(keeper):
        return Loop(
            replace(bare._trainee, keeper=keeper),
            ThreeBatchesHeldOut(rank, 2, 1),
            replace(bare._settings, eval_every=1),
            bare._team,
            rows,
        )

    keeper = StopsAtTheSecondQuestion(rank, rows)
    with pytest.raises(PreemptedError):
        loop(keeper).run()
    stopped = (keeper.kept, keeper.asked, len(rows.evaluations))
    loop(None).run(done=1)
    return stopped, [row.step for row in rows.evaluations]


def test_a_stop_leaves_an_evaluation_which_is_made_up_for_when_the_run_goes_on(ranks):
    for (kept, asked, num_evaluations), evaluated in ranks(2)(stopped_while_it_evaluates):
        assert kept == [(1, True)]
        assert (asked, num_evaluations) == (2, 0)
        assert evaluated == list(range(1, NUM_STEPS + 1))
