"""`per_device_train_batch_size: auto` stays that word until a size is chosen."""

import pytest

from fullshard.config.load import load_config
from fullshard.config.training import TrainingConfig
from fullshard.config.values import Strategy
from fullshard.errors import ConfigError

AUTO = "per_device_train_batch_size=auto"


def test_the_word_is_kept_as_it_is_written(load_file):
    resolved = load_config(None, [AUTO])
    assert resolved.config.training.leaves_micro_batch
    assert resolved.config.training.to_dict()["per_device_train_batch_size"] == "auto"
    assert load_file(resolved.to_yaml()).config == resolved.config


@pytest.mark.parametrize("word", ["auto", "AUTO"])
@pytest.mark.parametrize("typed", ["per_device_train_batch_size", "train_batch_size"])
def test_auto_does_not_change_the_size_of_an_update(load_file, typed, word):
    sizes = {"per_device_train_batch_size": word, "train_batch_size": "64"}
    text = "training:\n" + "".join(f"  {k}: {v}\n" for k, v in sizes.items() if k != typed)
    training = load_file(text, f"{typed}={sizes[typed]}", needs_model=False).config.training
    assert training.leaves_micro_batch
    assert training.train_batch_size == 64
    assert training.undivided(2).per_device_train_batch_size == 32


@pytest.mark.parametrize("word", ["auto", "AUTO"])
def test_auto_does_not_change_the_size_of_an_update_in_other_dialects(load_file, word):
    text = '{"train_batch_size": 64, "zero_optimization": {"stage": 3}}'
    words = [f"per_device_train_batch_size={word}", f"strategy={word}"]
    config = load_file(text, *words, needs_model=False).config
    assert config.training.leaves_micro_batch
    assert config.training.train_batch_size == 64
    assert config.sharding.strategy is Strategy.AUTO


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        ({}, 8),
        ({"gradient_accumulation_steps": 4}, 32),
        ({"train_batch_size": 24}, 12),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 4}, 12),
    ],
)
def test_the_divided_number_is_a_ranks_share_of_an_update(words, samples):
    training = TrainingConfig(per_device_train_batch_size="auto", **words)
    assert training.divided(2) is training
    whole = training.undivided(2)
    assert (whole.per_device_train_batch_size, whole.gradient_accumulation_steps) == (samples, 1)
    assert whole.train_batch_size is None


def test_sequences_that_ranks_cannot_share_are_refused():
    training = TrainingConfig(per_device_train_batch_size="auto", train_batch_size=7)
    with pytest.raises(ConfigError, match="expected a multiple of 2 ranks, got 7"):
        training.undivided(2)


def test_xla_cannot_choose_yet():
    resolved = load_config(None, [AUTO, "backend=jax"])
    with pytest.raises(ConfigError, match="per_device_train_batch_size: 'auto' is not yet"):
        resolved.check_supported()
