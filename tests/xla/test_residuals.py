"""What forward keeps for backward is read off the traced program, which needs no device."""

from __future__ import annotations

SAMPLES, LENGTH = 3, 10


def kept():
    """Of each policy, activations and shards; a block's input and a layer's part, in bytes."""
    import jax
    import jax.numpy as jnp

    import fullshard.jax as fj
    from fullshard.xla.decoder import BLOCKS, DecoderConfig, loss_fn
    from fullshard.xla.residuals import kept_for_backward, without_devices
    from support import decoders

    decoder = DecoderConfig.of(decoders.config_of("llama"))
    mesh = fj.make_mesh(1, 2, devices=jax.devices()[:2])
    found = {}
    for recompute in ("none", "selective", "block", "offload"):
        sharding = {"activation_checkpointing": recompute}
        table = fj.plan(decoder.shapes(), sharding, mesh, blocks=BLOCKS).table
        plan = without_devices(table, jax.tree.structure(decoder.shapes()))
        ids = jax.ShapeDtypeStruct((2 * SAMPLES, LENGTH), jnp.int32)
        batch = {"input_ids": ids, "labels": ids}
        one = kept_for_backward(plan, loss_fn(decoder, plan), batch)
        found[recompute] = one.activations, one.shards
    parts = sum(array.part_numel(2) * 4 for array in table.arrays if array.block)
    return found, decoder.num_hidden_layers * SAMPLES * LENGTH * decoder.hidden_size * 4, parts


def test_a_policy_keeps_what_it_says(devices):
    found, inputs, parts = devices(kept)
    assert found["block"][0] == inputs
    assert found["offload"][0] == 0  # it waits on the host
    assert found["none"][0] > found["selective"][0] > found["block"][0]
    assert all(0 < shards <= parts for _, shards in found.values())
