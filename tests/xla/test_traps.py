"""Silent faults of sharded JAX that test_step.py does not cover."""

import numpy as np
import pytest

from fullshard.errors import ConfigError
from support.lazy import fj, fx, jax, jnp, optax, user_models, xla
from support.tanh_layers import LAYERS, WIDTH, compiled


def many_steps():
    step, state, batch, _ = compiled({"strategy": "full_shard"}, shard=8)
    for _ in range(200):
        state, _ = step(state, batch)
    return int(state.step)


@pytest.mark.slow
def test_two_hundred_chained_steps_on_devices_of_one_process_do_not_deadlock(devices):
    assert devices(many_steps) == 200


def gathers_in_loops():
    """Whether gathers of a step are in loops, and temporary bytes, with and without resharding."""
    found = {}
    for strategy in ("full_shard", "shard_grad_op"):
        step, state, batch, _ = compiled({"strategy": strategy}, shard=8)
        program = step.compile(state, step.place(batch))
        inside, name = set(), ""
        for line in program.as_text().splitlines():
            name = line if line.startswith(("%", "ENTRY")) else name
            if " all-gather(" in line:
                inside.add(not name.startswith("ENTRY"))
        found[strategy] = inside, program.memory_analysis().temp_size_in_bytes
    return found


def test_gathers_stay_in_the_loop_and_no_gathered_weight_is_kept(devices):
    found = devices(gathers_in_loops)
    assert {inside for where, _ in found.values() for inside in where} == {True}
    kept, others = LAYERS * WIDTH * WIDTH * 4, 8 << 10
    saved = found["shard_grad_op"][1] - found["full_shard"][1]
    assert kept - kept // 8 - others <= saved <= kept + others  # backward's loop copies the shards


def one_layer():
    config = {"strategy": "full_shard", "activation_checkpointing": "every_3"}
    step, state, batch, plan = compiled(config, num_layers=7)
    census = fj.census(step.compile(state, step.place(batch)))
    return census["all-gather"].count, plan.table.collectives()["all-gather"].count


def test_a_tail_outside_of_the_loop_is_planned_as_compiled_on_cpus(devices):
    found, planned = devices(one_layer)
    assert (found, planned) == (13, 13)  # XLA on CPU drops the barrier of a loop of one turn


def bytes_in_bf16():
    step, state, batch, plan = compiled({"strategy": "full_shard", "param_dtype": "bf16"})
    moved = plan.table.collectives()
    text = jax.jit(step).lower(state, step.place(batch)).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line]
    scatters = [line for line in text.splitlines() if "reduce_scatter" in line]
    return gathers, scatters, {kind: c.num_bytes for kind, c in moved.items()}


def in_micro_batches():
    """Collectives of steps without a loop over blocks, as compiled and as planned."""
    found = []
    for num_layers, recompute in ((1, "none"), (1, "block"), (3, "every_2")):
        tree = {"layers": {"w": jnp.ones((num_layers, 16, 16)), "b": jnp.ones((num_layers, 16))}}
        config = {"activation_checkpointing": recompute}
        plan = fj.plan(tree, config, fj.make_mesh(1, 8), blocks=["layers"])

        def loss(params, batch, plan=plan):
            def block(layer, x):
                return x + jnp.tanh(x @ layer["w"] * layer["b"])

            x = fj.scan_blocks(block, batch["x"], params["layers"], plan)
            return jnp.square(x).sum(), len(x)

        tx = optax.sgd(0.1)
        step = fj.train_step(plan, loss, tx, num_micro_batches=3)
        batch = {"x": np.ones((3, 16, 16))}
        both = user_models.moved(plan, step, fj.shard(plan, tree, tx), batch)
        found.append((3 * num_layers, *both))
    return found


def test_blocks_without_a_loop_are_gathered_in_each_micro_batch(devices):
    for num_turns, census, planned in devices(in_micro_batches):
        assert census == planned
        assert census["all-gather"].count >= num_turns  # both small arrays together
        assert census["reduce-scatter"].count == num_turns


def test_gathers_use_the_compute_dtype_and_reductions_the_reduce_dtype(devices):
    gathers, scatters, moved = devices(bytes_in_bf16)
    assert gathers
    assert all("bf16" in line for line in gathers)
    assert scatters
    assert not any("bf16" in line for line in scatters)
    assert moved["all-gather"] == 2 * LAYERS * WIDTH * WIDTH * 2
    assert moved["reduce-scatter"] == LAYERS * WIDTH * WIDTH * 4


def compiles():
    """Programs compiled for steps with other learning rates and a padded last batch."""
    step, state, batch, _ = compiled({})
    for rate in (1, 0.5, np.float32(0.25)):
        state, _ = step(state, batch, learning_rate=rate)
    last = fj.pad_batch({"x": batch["x"][:3], "labels": np.ones(3, int)}, 4)
    state, _ = step(state, {"x": last["x"]}, learning_rate=0.1)
    return step.num_compiled(), last["labels"].tolist(), last["x"].shape


def test_other_numbers_and_a_padded_batch_compile_no_new_program(devices):
    assert devices(compiles) == (1, [1, 1, 1, -100], (4, WIDTH))


def initial_bits():
    found = []
    for shard in (1, 2, 8):
        mesh = fj.make_mesh(1, shard, devices=jax.devices()[:shard])
        shapes = jax.eval_shape(xla.init_fn, jax.random.key(0))
        plan = fj.plan(shapes, None, mesh, blocks=xla.BLOCKS)
        state = fj.init(plan, xla.init_fn, key=jax.random.key(3))
        found.append([np.asarray(x).tobytes() for x in jax.tree.leaves(fj.full_params(state))])
    return [bits == found[0] for bits in found]


def test_a_model_is_initialised_with_equal_bits_on_any_number_of_devices(devices):
    assert devices(initial_bits) == [True] * 3


def born():
    """Bytes on a device while a model is initialised, and of the whole model."""
    shapes = {"w": jax.ShapeDtypeStruct((1024, 512), jnp.float32)}
    plan = fj.plan(shapes, None, fj.make_mesh(1, 8))
    build = fx.step.born_sharded(plan, lambda key: {"w": jax.random.normal(key, (1024, 512))})
    found = build.lower(jax.random.key(0)).compile().memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes, plan.table.num_parameters * 4


def test_no_device_initialises_the_whole_model(devices):
    held, whole = devices(born)
    assert held < 5 * whole // 8  # its eighth, and three more temporarily


def partitioned():
    """Sharding that XLA gives a weight's gradient: gathered by us, and derived by jax."""
    from benchmarks.xla_auto import whole

    shapes = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
    plan = fj.plan(shapes, None, fj.make_mesh(1, 8))
    (array,) = plan.table.arrays

    def lies(gathered):
        def loss(w, x):
            return jnp.tanh(x @ gathered(w)).sum()

        weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=plan.shardings["w"])
        rows = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32, sharding=plan.batch_sharding())
        return jax.jit(jax.grad(loss)).lower(weight, rows).compile().output_shardings.spec

    ours = lies(lambda w: whole(plan, array, w))
    return tuple(ours), tuple(lies(lambda w: jax.lax.with_sharding_constraint(w, plan.replicated)))


def test_the_gradient_of_a_gathered_weight_is_sharded_again(devices):
    ours, derived = devices(partitioned)
    assert ours == ("shard", None)
    assert not any(derived)  # the constraint's transpose is the same constraint


RECORDED = """\
HloModule step

%body (p: f32[8]) -> f32[8] {
  %ag = f32[64,8]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %r = f32[8,8]{1,0} reduce-scatter(%ag), replica_groups=mesh['a'=2,'b'=4] {'b'}, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = f32[8] while(%p), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %s = (f32[8], f32[16]) all-reduce(%w, %w), replica_groups={{0,1},{2,3}}, to_apply=%add
  %g = (bf16[4], bf16[8]) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}
  ROOT %o = bf16[8] all-gather-done(%g)
}
"""


def recorded():
    found = {kind: (c.count, c.num_bytes) for kind, c in fj.census(RECORDED).items()}
    unknown = RECORDED.replace("known_trip_count", "unknown")
    try:
        fj.census(unknown)
    except ConfigError as error:
        return found, str(error)
    return found, ""


def test_the_census_reads_each_way_of_writing_groups(devices):
    found, said = devices(recorded)
    assert found == {
        "all-gather": (4, 3 * 64 * 8 * 4 + 16),
        "reduce-scatter": (3, 3 * 8 * 8 * 4 * 4),
        "all-reduce": (2, 96),
    }
    assert said.startswith("census: expected the trip count of loop body")
