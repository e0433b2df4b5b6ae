"""The loss in the model's head on XLA: chunks of tokens give the results of full logits."""

import numpy as np
import pytest

from support import decoders
from support.lazy import fj, fx, jax, jnp, optax

LENGTH, VOCABULARY = 9, 96


def trained(shard, tied, chunk_size):
    """Loss, norm and weights after a step of SGD in float64, with documents and ignored labels."""
    decoder = fx.decoder.DecoderConfig.of(
        decoders.config_of("qwen3", tie_word_embeddings=tied, vocab_size=VOCABULARY)
    )
    mesh = fj.make_mesh(1, shard, devices=jax.devices()[:shard])
    plan = fj.plan(decoder.shapes(), {"master_dtype": "float64"}, mesh, blocks=fx.decoder.BLOCKS)
    numbers = np.random.default_rng(0)
    weights = jax.tree.map(lambda s: numbers.normal(0, 0.1, s.shape), decoder.shapes())
    tx = optax.inject_hyperparams(optax.sgd)(0.5)
    state = fj.init(plan, lambda _: weights, tx)
    ids = numbers.integers(0, VOCABULARY, (6, LENGTH))
    labels = np.where(numbers.random(ids.shape) < 0.3, -100, ids)
    places = np.tile(np.r_[:4, : LENGTH - 4], (6, 1))  # two documents per row
    batch = {"input_ids": ids, "labels": labels, "position_ids": places}
    step = fj.train_step(plan, fx.loss.next_token(fx.loss.Decoder(decoder, plan), chunk_size), tx)
    state, found = step(state, batch, learning_rate=0.5)
    whole = [np.asarray(leaf) for leaf in jax.tree.leaves(fj.full_params(state))]
    return float(found["loss"]), float(found["grad_norm"]), whole


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("shard", "tied"), [pytest.param(1, False, marks=pytest.mark.long), (2, True), (3, False)]
)
@pytest.mark.parametrize("chunk_size", [5, 1024])  # the last chunk is padded; one chunk
def test_chunks_learn_the_same_as_full_logits(devices, shard, tied, chunk_size):
    loss, norm, weights = devices(trained, shard, tied, 0)
    found = devices(trained, shard, tied, chunk_size)
    assert found[:2] == pytest.approx((loss, norm), rel=1e-12)
    for here, there in zip(found[2], weights, strict=True):
        assert abs(here - there).max() <= 1e-12 * abs(there).max()


def temporary():
    """Bytes of a compiled step's temporaries, by number of tokens per chunk."""
    decoder = fx.decoder.DecoderConfig.of(
        decoders.config_of("qwen3", vocab_size=2048, tie_word_embeddings=False)
    )
    plan = fj.plan(
        decoder.shapes(),
        {},
        fj.make_mesh(1, 2, devices=jax.devices()[:2]),
        blocks=fx.decoder.BLOCKS,
    )
    tx = optax.inject_hyperparams(optax.sgd)(0.5)
    ids = jax.ShapeDtypeStruct((4, 65), jnp.int32, sharding=plan.batch_sharding())
    sizes = {}
    for chunk_size in (0, 16):
        step = fj.train_step(
            plan, fx.loss.next_token(fx.loss.Decoder(decoder, plan), chunk_size), tx
        )
        batch = {"input_ids": ids, "labels": ids}
        program = step.compile(fx.aot.abstract_state(plan, tx), batch, learning_rate=1e-3)
        sizes[chunk_size] = program.memory_analysis().temp_size_in_bytes
    return sizes


@pytest.mark.long
def test_no_device_allocates_logits_of_all_tokens(devices):
    sizes = devices(temporary)
    assert sizes[0] - sizes[16] > 2 * 64 * 2048 * 4  # of one device in float32
