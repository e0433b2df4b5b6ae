"""The traced program, which needs no device, shows what forward saves for backward."""

import itertools

import pytest

from support import decoders
from support.lazy import fj, fx, jax, jnp

SAMPLES, LENGTH = 3, 10


def kept():
    """Bytes saved by each policy, of the blocks' inputs, and of their products' weights."""
    decoder = fx.decoder.DecoderConfig.of(decoders.config_of("llama"))
    mesh = fj.make_mesh(1, 2, devices=jax.devices()[:2])
    found = {}
    policies = ("none", "selective", "block", "offload")
    for case in itertools.product(("full_shard", "shard_grad_op"), policies):
        sharding = dict(zip(("strategy", "activation_checkpointing"), case, strict=True))
        table = fj.plan(decoder.shapes(), sharding, mesh, blocks=fx.decoder.BLOCKS).table
        plan = fx.aot.without_devices(table, jax.tree.structure(decoder.shapes()))
        ids = jax.ShapeDtypeStruct((2 * SAMPLES, LENGTH), jnp.int32)
        batch = {"input_ids": ids, "labels": ids}
        one = fx.aot.trace_step(plan, fx.decoder.loss_fn(decoder, plan), batch)
        found[case] = one.activations, one.gathered
    blocks = [array for array in table.arrays if array.block]
    inputs = decoder.num_hidden_layers * SAMPLES * LENGTH * decoder.hidden_size
    read = sum(array.numel for array in blocks if len(array.shape) == 2)
    return found, 4 * inputs, 4 * read


def test_a_policy_saves_the_documented_tensors(devices):
    found, inputs, read = devices(kept)
    activations = {case: kept for case, (kept, _) in found.items()}
    for strategy in ("full_shard", "shard_grad_op"):
        assert activations[strategy, "block"] == inputs
        assert activations[strategy, "offload"] == 0  # it is on the host
        assert activations[strategy, "none"] > activations[strategy, "selective"] > inputs
    for (strategy, recompute), (_, gathered) in found.items():
        wanted = activations["full_shard", recompute]
        assert activations[strategy, recompute] == pytest.approx(wanted, rel=0.01)
        assert (gathered >= read) == (strategy == "shard_grad_op")
