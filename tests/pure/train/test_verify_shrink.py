"""`verify` shrinks a configuration to a small one of the same class and ratios."""

import pytest

from fullshard.models.config import config_from_settings
from fullshard.models.small import fit_globs, shrink, shrunk
from support.sizes import sizes_of


def small_of(settings, **limits):
    config = config_from_settings(settings)
    found = shrunk(config, **limits, depth=True, width=True)
    assert type(found.config) is type(config)
    return found


def test_heads_and_feed_forward_keep_their_ratios():
    small = small_of(
        sizes_of(
            4096, 14336, 32, 8, model_type="llama", vocab_size=128256, tie_word_embeddings=True
        )
    ).config
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 2)
    assert small.hidden_size == 8 * 16
    assert small.intermediate_size == 448
    assert small.tie_word_embeddings


def test_layers_of_every_kind_are_kept_in_order():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    found = small_of(
        {"model_type": "gemma3_text", "num_hidden_layers": 12, "layer_types": kinds * 2}
    )
    assert found.layers == (0, 1, 5, 11)
    assert found.config.layer_types == [*kinds[:2], *kinds[-1:], *kinds[-1:]]
    assert small_of({"model_type": "llama"}, num_layers=3).layers == (0, 1, 2)


def test_mixture_stays_a_mixture():
    small = small_of({"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8})
    assert (small.config.num_experts, small.config.num_experts_per_tok) == (4, 2)


def test_dropout_is_off_and_reported():
    found = small_of({"model_type": "gpt2", "n_layer": 12})
    told = {change.key: (change.was, change.now) for change in found.changes}
    assert told["resid_pdrop"] == (0.1, 0.0)
    assert told["n_layer"] == (12, 4)
    assert found.config.embd_pdrop == 0.0


def test_table_of_positions_is_shrunk_where_it_is_learned():
    assert small_of({"model_type": "gpt2"}).config.n_positions == 64
    assert small_of({"model_type": "llama"}).config.max_position_embeddings == 2048


def test_small_model_is_left_as_it_is():
    settings = sizes_of(32, 48, 4, layers=2, model_type="llama", vocab_size=50)
    assert small_of(settings).changes == ()


def test_token_ids_stay_inside_the_vocabulary():
    small = small_of({"model_type": "llama", "eos_token_id": 128001, "pad_token_id": 7}).config
    assert (small.eos_token_id, small.pad_token_id) == (95, 7)


def test_less_is_shrunk_if_a_model_cannot_be_built_otherwise():
    config = config_from_settings({"model_type": "llama", "num_hidden_layers": 7})

    def build(small):
        if small.num_hidden_layers != 7:
            raise ValueError("an odd number of layers is needed")
        return small

    found, built = shrink(config, build)
    assert built.num_hidden_layers == 7
    assert found.config.hidden_size < config.hidden_size


def test_removed_layers_refer_to_the_last_one():
    globs = ("model.layers.31.mlp.*", "model.layers.1.*", "*.bias", "lm_head")
    fitted = fit_globs(globs, 4)
    assert fitted == ("model.layers.3.mlp.*", "model.layers.1.*", "*.bias", "lm_head")


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "mamba2", "bloom", "gpt_neo", "gptj", "jamba"]
)
def test_unusual_models_still_train_a_step(model_type):
    from fullshard.models.small import trained_once

    config = config_from_settings({"model_type": model_type})
    found = shrunk(config, depth=True, width=True)
    num_parameters = sum(param.numel() for param in trained_once(found.config).parameters())
    assert num_parameters < 3_000_000
