"""The average of sharded weights equals that of unsharded ones, and is saved in checkpoints."""

from dataclasses import replace

import pytest
import torch
from torch.optim import SGD, AdamW

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.observe.metrics import StepRow
from fullshard.planner.optimizers import ADAMW
from fullshard.planner.optimizers import SGD as NO_STATES
from fullshard.run.loop import Loop
from fullshard.run.optim import Average
from fullshard.saving import SaveSettings
from support.ragged import NUM_STEPS, RATE, Rows, make_loop, tiny_model
from support.ranks import on_ranks

DECAY = 0.75


def averaged(weights):
    """Computes the average by its formula from the weights after every update."""
    average = weights[0]
    for later in weights[1:]:
        average = {name: DECAY * average[name] + (1 - DECAY) * later[name] for name in average}
    return average


def train_with_an_average(folder, optimizer_class):
    """Returns weights after every step, the average, final weights; also after a resume."""
    rank, rows, seen = torch.distributed.get_rank(), Rows(), []
    model, loop, recipe = make_loop(rank, 2, 1, {}, rows)
    optimizer = optimizer_class(model.parameters(), lr=RATE / 50)
    average = Average(optimizer, DECAY)

    class Watching(Rows):
        def tell(self, row):
            super().tell(row)
            if isinstance(row, StepRow):
                seen.append(fs.full_state_dict(model, rank0_only=False))

    trainee = replace(loop.trainee, optimizer=optimizer, average=average)
    Loop(trainee, recipe, loop.settings, loop.team, Watching()).run()
    states = {AdamW: ADAMW, SGD: NO_STATES}[optimizer_class]
    plan = engine_of(model).plan.trained_by(replace(states, num_averages=1))
    rows = {row.name: row.num_bytes for row in plan.memory}
    kept = rows[f"optimizer ({states.name})"], rows["average of the weights"]
    held = sum(v.nbytes for state in optimizer.state.values() for v in state.values())
    assert plan.staging_bytes == (2 + states.num_states) * rows["parameter shards"]
    fs.save(folder, model, optimizer)
    with average.applied():
        applied = fs.full_state_dict(model, rank0_only=False)
    after = fs.full_state_dict(model, rank0_only=False)
    other = fs.shard(tiny_model(), wrap=["Sequential"])
    fresh = optimizer_class(other.parameters(), lr=RATE)
    fs.load(folder, other, fresh)
    with Average(fresh, DECAY).applied():
        loaded = fs.full_state_dict(other, rank0_only=False)
    forgotten = (Average.forget(fresh), Average.forget(fresh))
    return seen, applied, after, loaded, forgotten, (held, sum(kept))


@pytest.mark.parametrize("optimizer_class", [SGD, AdamW])
def test_the_average_equals_that_of_full_weights_and_is_saved(ranks, tmp_path, optimizer_class):
    results = ranks(2)(train_with_an_average, tmp_path, optimizer_class)
    assert max(held for *_, (held, _) in results) == results[0][-1][1]
    for seen, applied, after, loaded, forgotten, _ in results:
        assert forgotten == (True, False)
        assert len(seen) == NUM_STEPS
        expected = averaged(seen)
        for name, value in expected.items():
            assert not torch.equal(value, seen[-1][name])
            torch.testing.assert_close(applied[name], value, rtol=0, atol=1e-12)
            assert torch.equal(after[name], seen[-1][name])
            assert torch.equal(loaded[name], applied[name])


@on_ranks(1)
def test_a_resumed_optimizer_has_the_settings_of_the_configuration(tmp_path):
    found = []
    for betas, decay in (((0.9, 0.999), 0.1), ((0.5, 0.9), 0.0)):
        model, loop, _ = make_loop(0, 1, 1, {}, Rows())
        optimizer = AdamW(model.parameters(), lr=RATE, betas=betas, weight_decay=decay)
        trainee = replace(loop.trainee, optimizer=optimizer)
        if found:
            trainee.load(tmp_path)
        trainee.save(tmp_path, {}, SaveSettings(step=1))
        found.append(
            (optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["weight_decay"])
        )
    assert found[-1] == ((0.5, 0.9), 0.0)
