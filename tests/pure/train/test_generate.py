"""Going on from tokens: what is drawn, and what of the process it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fullshard.models.generate import SamplingSettings, continued

TOKENIZER: Any = SimpleNamespace(pad_token_id=0)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_most_likely_tokens_leave_the_random_numbers_of_a_run_alone(model):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    new = continued(model, [1, 2, 3], 4, TOKENIZER, SamplingSettings(temperature=0))
    assert len(new) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_drawn_tokens_follow_from_the_seed(model):
    def drawn(seed: int) -> list[int]:
        return continued(model, [1], 8, TOKENIZER, SamplingSettings(temperature=2.0, seed=seed))

    assert drawn(1) == drawn(1) != drawn(2)


def test_processors_change_the_scores_of_every_token(model):
    def only_seven(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(64) == 7, scores, -torch.inf)

    assert continued(model, [1], 3, TOKENIZER, SamplingSettings(), [only_seven]) == [7, 7, 7]
