"""Packed rows give the loss and gradient of their examples, for any division over ranks."""

import itertools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, Qwen3MoeConfig

from fullshard.config.schema import DataConfig, SftConfig
from fullshard.data.chat_rows import chat_source, make_chat_dataset
from fullshard.data.order import BatchShape, SampleOrder
from fullshard.data.text import DatasetSettings
from fullshard.data.tokenize import train_tokenizer
from fullshard.errors import ConfigError
from fullshard.models.small import check_documents
from fullshard.recipes.base import RowBatches, Seat

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": 300}
WORDS = ["the", "harbour", "has", "three", "boats", "and", "a", "red", "tower", "of", "stone"]
PAIRS = tuple(
    (" ".join(WORDS[: 1 + n % 7]), " ".join(WORDS[n % 4 : 2 + n % 9 + n % 4])) for n in range(24)
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join(WORDS)] * 2, 300)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(intermediate_size=48, **SIZES)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def settings_of(length, fraction, sft):
    return DatasetSettings(length, 300, DataConfig(validation_fraction=fraction), sft=sft)


def dataset(tokenizer, folder, *, packing):
    settings = settings_of(48, 0.0, SftConfig(packing=packing, num_samples=0))
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in PAIRS))
    return make_chat_dataset(chat_source(file), settings, tokenizer)


def reference(model, tokenizer):
    """Runs each example alone and picks its answer's tokens by hand: sums, counts, the gradient."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for pair in PAIRS:
        parts = [tokenizer(text)["input_ids"] for text in pair]
        ids = torch.tensor([*parts[0], *parts[1], tokenizer.eos_token_id])
        chances = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            if place >= len(parts[0]):
                total = total - chances[place - 1, ids[place]]
                count += 1
    (total / count).backward()
    return total.item() / count, gradient_of(model)


def gradient_of(model):
    return torch.cat([param.grad.reshape(-1) for param in model.parameters()]).clone()


@pytest.mark.short(3)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_any_split_of_a_step_gives_the_gradient_of_its_separate_examples(
    model, tokenizer, packing, world_size, tmp_path
):
    loss, gradient = reference(model, tokenizer)
    data = dataset(tokenizer, tmp_path, packing=packing)
    shape = BatchShape.of_batch(len(data.train), 2, world_size)
    order = SampleOrder(len(data.train), shape, seed=1)
    seats = [Seat(rank, world_size, torch.device("cpu")) for rank in range(world_size)]
    recipes = [RowBatches(data, 2, order, seat) for seat in seats]
    batches = list(itertools.chain.from_iterable(r.micro_batches(0) for r in recipes))
    assert any("position_ids" in batch for batch in batches) == packing
    model.zero_grad()
    found = [recipes[0].loss(model, batch) for batch in batches]
    count = sum(number for _, number in found)
    sum(total for total, _ in found).div(count).backward()
    assert sum(total.item() for total, _ in found) / count == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(gradient_of(model), gradient, rtol=1e-10, atol=1e-14)


def test_models_that_keep_documents_apart_are_found_and_others_refused():
    check_documents(LlamaConfig())
    check_documents(Qwen3MoeConfig())
    with pytest.raises(ConfigError, match=r"Set sft\.packing: false"):
        check_documents(BloomConfig(n_layer=2, hidden_size=64, n_head=4))
