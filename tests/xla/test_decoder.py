"""The decoder computes the same as transformers' torch models, from the same files."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fullshard.errors import ConfigError
from support import decoders
from support.lazy import fj, fx, jax


def differences(name, folder):
    """Largest differences of logits: in float64 from a widened model, in float32 as it is."""
    hf_config = decoders.config_of(name)
    model = decoders.build(hf_config)
    model.save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = fx.decoder.DecoderConfig.of(hf_config)
    mesh = fj.make_mesh(1, 2, devices=jax.devices()[:2])
    ids = np.random.default_rng(0).integers(0, 96, (2, 40))
    places = np.stack([np.arange(40), np.r_[0:13, 0:20, 0:7]])  # one document, then three
    found = {}
    for dtype, other in (("float64", model), ("float32", plain)):
        sharding = {"master_dtype": dtype}
        plan = fj.plan(config.shapes(), sharding, mesh, blocks=fx.decoder.BLOCKS)
        state = fj.load(plan, folder)

        def logits(params, batch, plan=plan):
            return fx.decoder.logits_of(config, plan, fx.step.whole_but_blocks(plan, params), batch)

        spec = plan.batch_sharding().spec
        run = jax.jit(
            jax.shard_map(
                logits, mesh=mesh, in_specs=(plan.specs, spec), out_specs=spec, check_vma=False
            )
        )
        for what, batch in (
            ("texts", {"input_ids": ids}),
            ("documents", {"input_ids": ids, "position_ids": places}),
        ):
            given = {key: torch.from_numpy(value) for key, value in batch.items()}
            with torch.no_grad():
                wanted = other(**given, use_cache=False).logits.numpy()
            got = np.asarray(run(state.params, batch))
            error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
            found[dtype, what] = (str(got.dtype), error)
    return found


@pytest.mark.short(1)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_logits_equal_those_of_transformers(devices, tmp_path, name):
    found = devices(differences, name, tmp_path)
    for what in ("texts", "documents"):
        assert found["float64", what] == ("float64", pytest.approx(0, abs=1e-12))
        assert found["float32", what] == ("float32", pytest.approx(0, abs=1e-5))


def refused():
    code = {"AutoModelForCausalLM": "its_own.Llama"}
    with pytest.raises(ConfigError) as error:
        fx.decoder.DecoderConfig.of(decoders.config_of("llama", auto_map=code))
    return str(error.value)


def test_a_model_with_code_of_its_folder_is_refused_and_not_replaced(devices):
    assert "model.config.auto_map: expected one of None" in devices(refused)


def frozen(*globs):
    return fx.decoder.DecoderConfig.of(decoders.config_of("qwen3_moe")).frozen(globs)


def test_freeze_takes_names_of_parameters_as_on_torch(devices):
    cubes = {f"model.layers.mlp.experts.{name}_proj" for name in ("gate_up", "down")}
    assert {*devices(frozen, "*_proj")} == cubes  # not the modules q_proj, k_proj, ...
    norms = {"input_layernorm", "post_attention_layernorm"}
    found = devices(frozen, "model.layers.*.*layernorm.weight")
    assert {*found} == {f"model.layers.{name}.weight" for name in norms}


def shapes(name, more):
    config = fx.decoder.DecoderConfig.of(decoders.config_of(name, **more))
    return jax.tree.structure(config.shapes()).num_leaves


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_biases_that_transformers_does_not_read_are_not_expected(devices, name):
    key = "mlp_bias" if name == "qwen3" else "attention_bias"
    assert devices(shapes, name, {key: True}) == devices(shapes, name, {})


def padding(token):
    return fx.decoder.DecoderConfig.of(decoders.config_of("llama", pad_token_id=token)).pad_token_id


def test_padding_outside_of_the_vocabulary_is_not_another_token(devices):
    assert [devices(padding, token) for token in (-1, 96, None)] == [95, 96, None]
