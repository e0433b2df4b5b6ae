"""The larger of two memory peaks of a step on XLA, from shapes alone."""

from dataclasses import replace

import pytest

from fullshard.config.values import DType, Recompute, RecomputeKind, Strategy
from fullshard.outlook.memory import StepShape, at_peak
from fullshard.planner.arrays import ArrayPlan, ArraysPlan, cut_of
from fullshard.planner.mesh import Mesh
from fullshard.planner.optimizers import SGD
from fullshard.planner.units import DtypeContract

WIDE, VOCABULARY, LAYERS, PARTS = 8, 64, 3, 4
EMBEDDING, BLOCK = 4 * VOCABULARY * WIDE, 4 * WIDE * WIDE  # bytes
FLOATS = DtypeContract(*[DType.FLOAT32] * 4)


def table(strategy=Strategy.FULL_SHARD, *, tied=False):
    """Two matrices per block; an embedding, and a head unless tied."""

    def array(name, shape, block="", layers=0):
        return ArrayPlan(name, shape, cut_of(shape, PARTS), FLOATS, True, block, layers)

    blocks = [array(f"layers.{name}", (WIDE, WIDE), "layers", LAYERS) for name in "ab"]
    outside = [array("embed", (VOCABULARY, WIDE)), array("head", (VOCABULARY, WIDE))]
    arrays = (*blocks, *outside[: 1 if tied else 2])
    return ArraysPlan("tiny", strategy, Mesh(1, PARTS), arrays, Recompute(RecomputeKind.NONE))


def peak(plan, **sizes):
    shape = {"num_logits": 1, "kept_bytes": 10, "gathered_bytes": 0, "block_bytes": 0}
    shape |= {"accumulates": False, "on_cpu": True, **sizes}
    return {row.name: row.num_bytes for row in at_peak(plan, StepShape(**shape))}


def test_many_logits_put_the_peak_at_the_head():
    found = peak(table(), num_logits=1000)
    assert found["gathered arrays"] == EMBEDDING  # gradient of the head; the embedding was read
    assert found["gradient of the embedding"] == EMBEDDING
    assert found["gradient shards"] == 2 * LAYERS * BLOCK // PARTS  # gradients of blocks
    assert found["logits"] + found["gradient of the head"] == 3 * 4000


def test_a_tied_embedding_has_one_gradient():
    found = peak(table(tied=True), num_logits=400)
    assert found["gradient of the embedding"] == 0  # is added to the head's
    assert found["gradient of the head"] == EMBEDDING


def test_a_heads_gradient_takes_the_place_of_the_third_array_of_logits():
    found = peak(table(), num_logits=400)
    assert found["logits"] == 2 * 1600
    assert found["gradient of the head"] == EMBEDDING


def test_a_sum_over_chunks_is_allocated_with_the_gradient_of_one():
    one = peak(table(), num_logits=1000, num_chunks=1)
    assert one["logits"] == one["gradient of the head"] == 4000  # gradients overwrite logits
    several = peak(table(), num_logits=1000, num_chunks=3)
    assert several["gradient of the head"] == 4000 + EMBEDDING
    at_a_block = peak(table(), block_bytes=1 << 20, num_chunks=3)
    assert at_a_block["gradient of the head"] == EMBEDDING


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_block_puts_the_peak_in_the_block(tied):
    found = peak(table(tied=tied), block_bytes=1 << 20)
    assert found["one block"] == 1 << 20
    assert found["gathered arrays"] == 2 * BLOCK
    assert found["its gradients"] == BLOCK  # each is sharded when it is created
    assert found["gradient of the embedding"] == EMBEDDING


def test_weights_that_are_kept_gathered_count_once():
    kept = 2 * LAYERS * BLOCK
    for sizes in ({"num_logits": 1000}, {"block_bytes": 1 << 20}):
        plan = table(Strategy.SHARD_GRAD_OP)
        more, without = peak(plan, gathered_bytes=kept, **sizes), peak(plan, **sizes)
        assert sum(more.values()) == sum(without.values()) + kept


def test_any_optimizer_has_its_states():
    plain = replace(table(), optimizer=SGD)
    assert sum(peak(table()).values()) - sum(peak(plain).values()) == 2 * plain.state_bytes
