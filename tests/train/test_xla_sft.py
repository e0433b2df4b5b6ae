"""`fullshard sft` with `backend: jax` learns the same from chats as torch."""

from pathlib import Path

import pytest

from support.model_folder import small_config, write_chats, write_model
from support.runs import same_losses

# A large epsilon: rounding noise of gradients that should be zero must not decide a step.
WORDS = [
    *("max_steps=8", "max_length=64", "per_device_train_batch_size=2"),
    *("gradient_accumulation_steps=2", "learning_rate=1e-2", "warmup_steps=0", "eval_steps=4"),
    *("adam_epsilon=1e-4", "max_grad_norm=0.5", "data.validation_fraction=0.1"),
    "launch.num_processes=2",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Arguments of the command for a model folder and chats of many lengths."""
    folder: Path = tmp_path_factory.mktemp("chats")
    text = write_chats(folder / "chat.jsonl", 96)
    write_model(folder / "base", small_config(), text)
    return [f"model={folder / 'base'}", f"data={folder / 'chat.jsonl'}", *WORDS]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("packing", [True, False])
def test_losses_are_those_of_torch(words, fullshard, tmp_path, monkeypatch, packing):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = same_losses(fullshard, tmp_path, "sft", *words, f"packing={packing}")
    assert len(found) == 10
    assert found["loss 8"] < found["loss 1"]  # the rate is large enough to change weights
    for backend in ("torch", "jax"):
        assert (tmp_path / backend / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("sft", ("lora.r=4",), "lora: a mapping is not yet supported"),
        ("sft", ("sft.num_samples=3",), "sft.num_samples: 3 with backend: jax is not yet"),
    ],
)
def test_features_that_the_backend_lacks_are_refused_before_ranks_start(
    words, fullshard, command, more, said
):
    done = fullshard(command, *words, "backend=jax", "--dry-run", *more, code=2)
    assert said in done.err
