"""The gradient of a step is that of the mean over all label tokens, for any distribution."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fullshard as fs
from fullshard.config.values import GradReduction, GradSync
from fullshard.data.dataset import PREDICTED, ROWS
from fullshard.errors import DataError, DivergedError
from fullshard.recipes.base import IGNORED, causal_lm_loss, placed, predicted_of, whole_logits_loss
from fullshard.recipes.distill.loss import TOP_VALUES, TopK, with_logits
from fullshard.run.optim import apply_scaled
from support.ragged import (
    GLOBAL_BATCH,
    NUM_STEPS,
    RATE,
    RaggedRecipe,
    Rows,
    make_loop,
    ragged_samples,
    tiny_model,
)


def reference():
    """One process with one joined batch per step: parameters, losses, held-out loss."""
    model = tiny_model()
    losses = []
    for step in range(NUM_STEPS):
        ids, labels = ragged_samples(step)
        total, count = causal_lm_loss(model(ids), labels)
        losses.append(total.item() / count)
        model.zero_grad()
        (total / count).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    ids, labels = ragged_samples(1000)
    with torch.no_grad():
        total, count = causal_lm_loss(model(ids[4:6]), labels[4:6])
    return model.state_dict(), losses, total.item() / count


def train_on_ranks(world_size, accumulation, options, recipe=RaggedRecipe):
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    rows = Rows()
    model, loop, _ = make_loop(rank, world_size, accumulation, options, rows)
    loop.data = recipe(rank, world_size, accumulation)
    loop.run()
    return fs.full_state_dict(model, rank0_only=False), rows.steps, rows.evaluations[-1].eval_loss


def assert_joined(results):
    """Compares losses and weights on every rank with those of joined batches."""
    expected, losses, held_out = reference()
    for state, rows, rank_held_out in results:
        assert [row.loss for row in rows] == pytest.approx(losses, abs=1e-12)
        assert rank_held_out == pytest.approx(held_out, abs=1e-12)
        assert all(row.tokens_per_s > 0 for row in rows)
        assert state.keys() == expected.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


COMBINATIONS = [
    {"grad_sync": str(sync), "grad_reduction": str(reduction)}
    for sync, reduction in itertools.product(
        (GradSync.EVERY_MICRO_BATCH, GradSync.LAST_MICRO_BATCH), GradReduction
    )
]


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 2)])
def test_ranks_and_micro_batches_train_as_one_joined_batch(
    ranks, world_size, accumulation, options
):
    results = (
        [train_on_ranks(1, accumulation, options)]
        if world_size == 1
        else ranks(world_size)(train_on_ranks, world_size, accumulation, options)
    )
    assert_joined(results)
    for _, (*_, row), _ in results:
        assert (row.memory_bytes, row.memory_peak_bytes) == (1000 * world_size, 2000 * world_size)
        assert row.epoch == NUM_STEPS / 2


def test_the_loop_records_its_phase_for_hang_reports():
    rows = Rows()
    make_loop(0, 1, 2, {}, rows)[1].run()
    expected = [("data loading", 1)]
    for step in range(1, NUM_STEPS + 1):  # it waits after making the next batches
        ahead = [("data loading", step + 1), ("forward and backward", step)]
        expected += [("forward and backward", step), *(ahead if step < NUM_STEPS else [])]
        expected += [("optimizer", step), ("end of step", step)]
    assert rows.phases == [*expected, ("evaluation", NUM_STEPS)]


def test_batches_for_a_gpu_are_copied_from_pinned_memory_without_waiting(monkeypatch):
    pinned, moved = [], []
    rows = {"input_ids": np.arange(6).reshape(2, 3), ROWS: np.arange(2)}

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor, *, device, non_blocking):
        moved.append((any(tensor is one for one in pinned), str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch = placed(rows, torch.device("cuda"))
    assert moved == [(True, "cuda", True)]  # the host reads which rows these are
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        name: array.tolist() for name, array in rows.items()
    }


def test_the_loss_counts_the_same_tokens_as_transformers():
    ids, labels = ragged_samples(2)
    logits = tiny_model()(ids)
    total, count = causal_lm_loss(logits, labels)
    mean = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
    assert count == len(predicted_of({"labels": labels}))
    torch.testing.assert_close(total / count, mean)


def test_loss_of_bfloat16_logits_is_summed_in_float32():
    logits = tiny_model()(ragged_samples(0)[0]).bfloat16()
    total, _ = causal_lm_loss(logits, ragged_samples(0)[1])
    exact, _ = causal_lm_loss(logits.double(), ragged_samples(0)[1])
    assert total.dtype is torch.float32
    assert exact.dtype is torch.float64
    assert total.item() == pytest.approx(exact.item(), rel=1e-6)


def spoil_on_rank_0(world_size):
    rank, rows = torch.distributed.get_rank(), Rows()
    model, loop, recipe = make_loop(rank, world_size, 1, {}, rows)
    before = fs.full_state_dict(model, rank0_only=False)
    recipe.spoil_step = 0
    try:
        loop.run()
    except DivergedError as error:
        after = fs.full_state_dict(model, rank0_only=False)
        same = all(torch.equal(before[name], after[name]) for name in before)
        return str(error), [row.step for row in rows.steps], same
    raise AssertionError("a NaN loss must end the run")


def test_loss_that_is_nan_on_one_rank_ends_all_ranks_before_the_update(ranks):
    for message, steps, same in ranks(2)(spoil_on_rank_0, 2):
        assert message.startswith("loss of step 1: expected a finite number, got nan.")
        assert steps == []
        assert same


# ---- ranks with fewer batches, sums that wait, fp16 ----------------------------------------------

# Samples of each rank's micro-batches, by step: unequal numbers, and zero.
SPREADS = (
    (((0, 1), (2, 3), (4, 5)), ((6, 7),)),
    (((0,), (1, 2, 3, 4, 5, 6)), ((7,),)),
    (((0, 1, 2, 3), (4, 5, 6, 7)), ()),
)


class UnevenRecipe(RaggedRecipe):
    """Distributes the samples of a step as in SPREADS."""

    def micro_batches(self, step):
        ids, labels = ragged_samples(step)
        mine = SPREADS[step % len(SPREADS)][self._rank]
        chosen = [torch.tensor(samples) for samples in mine]
        return [{"input_ids": ids[samples], "labels": labels[samples]} for samples in chosen]


@pytest.mark.parametrize("grad_sync", ["every_micro_batch", "last_micro_batch"])
def test_unequal_numbers_of_batches_train_as_one_joined_batch(ranks, grad_sync):
    assert sum(len(s) for rank in SPREADS[0] for s in rank) == GLOBAL_BATCH
    assert_joined(ranks(2)(train_on_ranks, 2, 1, {"grad_sync": grad_sync}, UnevenRecipe))


class EmptyRecipe(RaggedRecipe):
    """No rank has a batch."""

    def micro_batches(self, step):
        return []


def test_no_batch_at_all_is_an_error():
    _, loop, _ = make_loop(0, 1, 1, {}, Rows())
    loop.data = EmptyRecipe(0, 1, 1)
    with pytest.raises(DataError, match=r"batches of step 1: expected at least one; all ranks"):
        loop.run()


@pytest.mark.short(1)
@pytest.mark.parametrize("grad_sync", ["every_micro_batch", "last_micro_batch_outer"])
def test_sums_over_replicas_that_wait_train_as_one_joined_batch(ranks, grad_sync):
    options = {"strategy": "hybrid_shard", "replicate": 2, "grad_sync": grad_sync}
    assert_joined(ranks(4)(train_on_ranks, 4, 2, options))


def scaled_loop():
    """A loop in fp16."""
    rows = Rows()
    options = {"param_dtype": "fp16", "master_dtype": "fp32"}
    _, loop, _ = make_loop(0, 1, 1, options, rows)
    scaler = torch.amp.GradScaler("cpu")
    loop.trainee = replace(loop.trainee, scaler=scaler)
    return loop, rows


def test_fp16_skips_steps_that_overflow_until_the_scale_fits():
    loop, rows = scaled_loop()
    loop.run()
    _, losses, _ = reference()
    norms = [row.grad_norm for row in rows.steps]
    assert norms[-1] is not None
    assert math.isfinite(norms[-1])
    assert [row.loss for row in rows.steps] == pytest.approx(losses, rel=1e-3)


def overflow(scaler, parameter, optimizer):
    for step in range(1, 100):
        scaler.scale((parameter * float("inf")).sum()).backward()
        scaler.unscale_(optimizer)
        apply_scaled(scaler, optimizer, step)
        parameter.grad = None


def test_fp16_that_overflows_at_every_scale_ends_the_run():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    with pytest.raises(DivergedError, match="expected finite numbers at some loss scale"):
        overflow(torch.amp.GradScaler("cpu"), parameter, optimizer)
    assert torch.equal(parameter.detach(), torch.ones(2))


class Logits(torch.nn.Module):
    """Logits of a vocabulary of 5 tokens."""

    def forward(self, input_ids, *, use_cache):
        return SimpleNamespace(logits=input_ids.new_zeros(*input_ids.shape, 5, dtype=torch.float32))


def test_losses_and_a_teachers_logits_do_not_wait_for_the_device():
    """On meta, reading a value is impossible."""
    ids, rows = np.arange(8).reshape(2, 4) % 5, np.array([1, -1])
    arrays = {"input_ids": ids, "labels": ids, ROWS: rows, PREDICTED: np.arange(3)}
    batch = placed(arrays, torch.device("meta"))
    total, count = whole_logits_loss(Logits(), batch)
    assert total.is_meta
    assert count == 3
    top = np.ones((9, 2))
    kept = TopK(top, top.astype(int), np.array([0, 4, 8]))
    known = with_logits(batch, kept)
    assert known[TOP_VALUES].shape == (2, 4, 2)
    assert known[TOP_VALUES].is_meta
