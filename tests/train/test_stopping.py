"""Why a run stops or skips a step: a signal, stagnating losses, infinite gradients."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard as fs
from fullshard.errors import DataError, DivergedError, PreemptedError
from fullshard.observe.metrics import EvalRow, StepRow
from fullshard.recipes.base import blank, cross_entropy, shifted_of
from fullshard.run.loop import Loop, Patience, diverged
from fullshard.transport import streams
from support.ragged import NUM_STEPS, RaggedRecipe, Rows, make_loop
from support.ranks import RankError, on_ranks


class Keeper:
    """A run that is always asked to stop, or never; records the questions."""

    saves = True

    def __init__(self, *, stops):
        self.stops, self.kept = stops, []

    def asked_to_stop(self):
        return self.stops

    def keep(self, step, *, stopping, last):
        self.kept.append((step, stopping, last))
        if stopping:
            raise PreemptedError("asked to stop")
        return step % 2 == 0


class StopsAtTheSecondQuestion(Keeper):
    """Rank 1 is asked to stop while the held-out batches run."""

    def __init__(self, rank, rows, *, saves=True):
        super().__init__(stops=False)
        self._rank, self._rows, self.saves, self.asked = rank, rows, saves, 0

    def asked_to_stop(self):
        self.asked += self._rows.phases[-1][0] == "evaluation"
        return self._rank == 1 and self.asked >= 2


class ThreeBatchesHeldOut(RaggedRecipe):
    def held_out(self):
        return [*super().held_out()] * 3


def evaluates_every_step(rank, rows):
    _, loop, _ = make_loop(rank, 2, 1, {}, rows)
    loop.data = ThreeBatchesHeldOut(rank, 2, 1)
    loop.settings = replace(loop.settings, eval_every=1)
    return loop


@on_ranks(2)
def test_a_stop_skips_an_evaluation_that_the_resumed_run_repeats():
    rank, rows = torch.distributed.get_rank(), Rows()
    loop = evaluates_every_step(rank, rows)
    loop.keeper = keeper = StopsAtTheSecondQuestion(rank, rows)
    with pytest.raises(PreemptedError):
        loop.run()
    stopped = (keeper.kept, keeper.asked, len(rows.evaluations))
    loop = evaluates_every_step(rank, rows)
    loop.run(done=1)
    (kept, asked, num_evaluations), evaluated = stopped, [row.step for row in rows.evaluations]
    assert kept == [(1, True, False)]
    assert (asked, num_evaluations) == (2, 0)
    assert evaluated == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("saves", [True, False])
@on_ranks(2)
def test_the_last_evaluation_is_also_skipped_if_the_run_is_saved(saves):
    rank, rows = torch.distributed.get_rank(), Rows()
    loop = evaluates_every_step(rank, rows)
    loop.settings = replace(loop.settings, eval_every=0)
    loop.keeper = keeper = StopsAtTheSecondQuestion(rank, rows, saves=saves)
    with pytest.raises(PreemptedError) if saves else nullcontext():
        loop.run()
    assert keeper.kept[-1] == (NUM_STEPS, saves, True)
    assert [row.step for row in rows.evaluations] == ([] if saves else [NUM_STEPS])


class GetsNoBetter(Loop):
    """Replaces the held-out losses of the model by given ones."""

    losses = (3.0, 2.0, 1.95, 2.5, 1.0)

    def held_out_loss(self, step):
        return self.losses[step - 1]


@on_ranks(2)
def test_stagnating_losses_stop_the_run_and_keep_its_last_step():
    patience = Patience(2, threshold=0.1)
    rows = Rows()
    _, bare, recipe = make_loop(torch.distributed.get_rank(), 2, 1, {}, rows)
    keeper = Keeper(stops=False)
    settings = replace(bare.settings, num_steps=5, eval_every=1, patience=patience)
    loop = GetsNoBetter(bare.trainee, recipe, settings, bare.team, rows, keeper)
    loop.run()
    loop.run(done=keeper.kept[-1][0])  # resumes where it stopped, and stops at once
    assert [row.step for row in rows.saves] == [2, 4]
    assert all(row.save_s > 0 for row in rows.saves)
    assert [row.step for row in rows.steps] == [1, 2, 3, 4]
    assert [(step, last) for step, _, last in keeper.kept] == [
        *((n, False) for n in (1, 2, 3)),
        (4, True),
    ]
    assert patience.state_dict() == {"best": 2.0, "waited": 2, "step": 4}


def test_a_loaded_patience_continues_to_count():
    patience = Patience(2)
    patience.load_state_dict({"best": 2.0, "waited": 1})
    patience.see(1.0, 1)
    assert not patience.is_lost
    patience.see(1.0, 2)
    patience.see(1.0, 3)
    assert patience.is_lost
    never = Patience()
    for step in range(100):
        never.see(1.0, step)
    assert not never.is_lost


def count_what_was_made_up_for_before_a_crash():
    """The rows have the loss of step 2; the loaded checkpoint is older."""
    rows = Rows()
    rows.tell(EvalRow(2, GetsNoBetter.losses[1]))
    _, bare, recipe = make_loop(torch.distributed.get_rank(), 2, 1, {}, rows)
    patience = Patience(2)
    patience.load_state_dict({"best": 2.0, "waited": 1, "step": 1})
    settings = replace(bare.settings, num_steps=3, eval_every=1, patience=patience)
    GetsNoBetter(bare.trainee, recipe, settings, bare.team, rows).run(done=2)
    return len(rows.steps), patience.state_dict()


def test_an_evaluation_that_a_crash_took_from_the_checkpoint_counts(ranks):
    expected = (0, {"best": 2.0, "waited": 2, "step": 2})
    losses = GetsNoBetter.losses
    assert losses[1] >= expected[1]["best"], "the evaluation in question is not better"
    assert ranks(2)(count_what_was_made_up_for_before_a_crash) == [expected] * 2


def test_a_checkpoint_without_a_last_evaluation_lacks_no_evaluation():
    patience = Patience(2)
    assert patience.lacks(4)
    patience.load_state_dict({"best": 2.0, "waited": 1})
    assert not patience.lacks(4)
    patience.see(1.0, 4)
    assert patience.lacks(8)
    assert not Patience().lacks(4)


class SpoiledAtTheSecondStep(RaggedRecipe):
    """One rank's loss of the second update is infinite."""

    step, spoiled_rank = -1, 1

    def micro_batches(self, step):
        self.step = step
        return super().micro_batches(step)

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total * (float("inf") if self._is_spoiled() else 1.0), count

    def _is_spoiled(self):
        return self.step == 1 and self._rank == self.spoiled_rank


def train_past_an_infinity(max_skipped_steps):
    rank = torch.distributed.get_rank()
    model, loop, _ = make_loop(rank, 2, 1, {}, Rows())
    weights = []

    class Watching(Rows):
        def tell(self, row):
            super().tell(row)
            if not isinstance(row, StepRow):
                return
            weights.append(fs.full_state_dict(model, rank0_only=False)["head.weight"])

    loop.settings = replace(loop.settings, max_skipped_steps=max_skipped_steps)
    loop.data = SpoiledAtTheSecondStep(rank, 2, 1)
    loop.watcher = rows = Watching()
    loop.run()
    return [(row.loss, row.grad_norm) for row in rows.steps], weights


def test_an_update_with_an_infinity_is_skipped_on_all_ranks(ranks):
    for steps, weights in ranks(2)(train_past_an_infinity, 1):
        assert steps[1] == (None, None)
        assert None not in (*steps[0], *steps[2])
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[1], weights[2])


def test_one_infinity_more_than_allowed_ends_the_run(ranks):
    with pytest.raises(RankError, match=r"loss of step 2: expected a finite number, got (inf|nan)"):
        ranks(2)(train_past_an_infinity, 0)


class Reads(TorchDispatchMode):
    """Counts values that the host reads of tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


class WithoutCounts(RaggedRecipe):
    """Knows the number of label tokens in advance, like a recipe of text."""

    tokens_per_step = 8

    def loss(self, model, batch):
        logits = model(batch["input_ids"])
        return cross_entropy(logits.flatten(0, -2), shifted_of(batch).reshape(-1)), 8


def test_an_update_reads_its_loss_and_its_norm_at_once():
    _, loop, _ = make_loop(0, 1, 2, {}, Rows())
    loop.data = recipe = WithoutCounts(0, 1, 2)
    loop.settings = replace(loop.settings, max_grad_norm=1e-3)
    for step in range(1, 5):
        batches = recipe.micro_batches(step)
        with Reads() as reads, patch("fullshard.engine.clip.is_at_hand", lambda _: False):
            loop.trainee.update(step, batches, loop)
    assert reads.count == 0  # one `tolist`, which is not an operation


class Waits(TorchFunctionMode):
    """Records when the host reads the loss and norm of a step, for which it would wait on a GPU."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.tolist and args[0].numel() == 2:
            self.seen.append("waits")
        return func(*args, **(kwargs or {}))


class NotedBatches(WithoutCounts):
    """Records which batches are made, and fails once those of a step are requested."""

    def __init__(self, seen, last):
        super().__init__(0, 1, 1)
        self.seen, self.last = seen, last

    def micro_batches(self, step):
        self.seen.append(step)
        if step == self.last:
            raise DataError("a file is gone")
        return super().micro_batches(step)


def test_the_next_batches_are_made_before_the_host_waits_for_the_device():
    _, loop, _ = make_loop(0, 1, 1, {}, rows := Rows())
    loop.data = NotedBatches([], last=-1)
    with Waits(loop.data.seen):
        loop.run()
    made = [it for step in range(1, NUM_STEPS) for it in (step, "waits")]
    assert [it for it, _ in groupby(loop.data.seen)] == [0, *made]
    assert [row.data_s > 0 for row in rows.steps] == [True] * (NUM_STEPS - 1) + [False]


def test_batches_that_cannot_be_made_end_the_run_after_the_step_before():
    _, loop, _ = make_loop(0, 1, 1, {}, rows := Rows())
    loop.data = NotedBatches([], last=2)
    with pytest.raises(DataError, match="a file is gone"):
        loop.run()
    assert len(rows.steps) == 2


def test_a_step_without_label_tokens_is_reported(caplog):
    _, loop, recipe = make_loop(0, 1, 1, {}, rows := Rows())
    made = recipe.micro_batches
    recipe.micro_batches = lambda step: [blank(one) if step == 1 else one for one in made(step)]
    loop.run()
    assert caplog.messages == ["step 2 has no trained tokens, so its loss is 0"]
    assert [row.loss == 0 for row in rows.steps[:3]] == [False, True, False]


def test_a_step_on_a_device_ends_with_its_update():
    _, loop, recipe = make_loop(0, 1, 1, {}, Rows())
    seen, trainee = [], loop.trainee
    trainee.optimizer.register_step_post_hook(lambda *_: seen.append("update"))
    trainee.memory_bytes = lambda: seen.append("measured") or (0, 0)
    device = SimpleNamespace(event=lambda: "end", finish=seen.append)
    with patch.object(streams, "of", lambda _: device):
        trainee.update(1, recipe.micro_batches(0), loop)
    assert seen == ["update", "end", "measured"]


@on_ranks(2)
def test_a_stop_during_a_repeated_evaluation_takes_no_step():
    rows, keeper = Rows(), Keeper(stops=True)
    loop = evaluates_every_step(torch.distributed.get_rank(), rows)
    loop.keeper = keeper
    with pytest.raises(PreemptedError):
        loop.run(done=1)
    assert (keeper.kept, rows.steps, rows.evaluations) == ([(1, True, False)], [], [])


def train_a_bad_loss_in_fp16():
    options = {"param_dtype": "fp16", "master_dtype": "fp32"}
    _, loop, _ = make_loop(0, 1, 1, options, Rows())
    scaler = torch.amp.GradScaler("cpu")
    loop.trainee = replace(loop.trainee, scaler=scaler)
    loop.data = SpoiledAtTheSecondStep(0, 1, 1)
    loop.data.spoiled_rank = 0
    loop.run()


def test_an_infinite_loss_is_not_retried_at_other_fp16_scales():
    with pytest.raises(DivergedError, match=r"loss of step 2: expected a finite number"):
        train_a_bad_loss_in_fp16()


def test_infinities_before_any_update_are_not_blamed_on_the_learning_rate():
    nan = float("nan")
    assert "check initial weights (also a teacher's) and model.config" in diverged("loss", nan, 1)
    for what, step in (("held-out loss", 1), ("loss", 2)):
        assert "Lower training.learning_rate" in diverged(what, nan, step)
