"""The decoder computes what transformers' torch models compute, from the same files."""

from __future__ import annotations

import pytest


def differences(name, folder):
    """Largest differences of logits: in float64 from a widened model, in float32 from theirs."""
    import jax
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    import fullshard.jax as fj
    from fullshard.xla.decoder import BLOCKS, DecoderConfig, logits_of
    from fullshard.xla.plan import batch_spec
    from fullshard.xla.step import whole_but_blocks
    from support import decoders

    hf_config = decoders.config_of(name)
    model = decoders.build(hf_config)
    model.save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = DecoderConfig.of(hf_config)
    mesh = fj.make_mesh(1, 2, devices=jax.devices()[:2])
    ids = np.random.default_rng(0).integers(0, 96, (2, 40))
    found = {}
    for dtype, other in (("float64", model), ("float32", plain)):
        sharding = {"master_dtype": dtype}
        plan = fj.plan(config.shapes(), sharding, mesh, blocks=BLOCKS)
        state = fj.load(plan, folder)

        def logits(params, ids, plan=plan):
            return logits_of(config, plan, whole_but_blocks(plan, params), ids)

        spec = batch_spec(mesh, 1)
        run = jax.jit(
            jax.shard_map(
                logits, mesh=mesh, in_specs=(plan.specs, spec), out_specs=spec, check_vma=False
            )
        )
        with torch.no_grad():
            wanted = other(input_ids=torch.from_numpy(ids)).logits.numpy()
        got = np.asarray(run(state.params, ids))
        found[dtype] = (str(got.dtype), float(np.abs(got - wanted).max() / np.abs(wanted).max()))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(devices, tmp_path, name):
    found = devices(differences, name, tmp_path)
    assert found["float64"] == ("float64", pytest.approx(0, abs=1e-12))
    assert found["float32"] == ("float32", pytest.approx(0, abs=1e-5))
