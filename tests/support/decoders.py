"""Small Hugging Face decoders entirely in float64; the originals have float32 norms."""

from contextlib import nullcontext
from typing import Any

import torch

from fullshard.verify.reference import Wide
from support.sizes import sizes_of

SIZES = sizes_of(
    32, 48, 4, 2, layers=2, vocab_size=96, max_position_embeddings=64, pad_token_id=3
)  # torch does not train its embedding
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# A loop over experts, because the grouped product does not support float64.
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
CONFIGS = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3, "attention_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **EXPERTS},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 24,
        "attention_bias": True,
        "pad_token_id": 3 - 96,  # index 3, counted from the end
        **EXPERTS,
    },
}


def config_of(name: str, **more: Any) -> Any:
    from transformers import AutoConfig

    fields = {**SIZES, **CONFIGS[name], **more}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def build(config: Any, seed: int = 0) -> Any:
    """Adds noise to every weight, because ones and zeros would hide faults."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with Wide():  # computes rotary frequencies in float64
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    forward = model.forward

    def wide(*args: Any, **inputs: Any) -> Any:
        is_wide = next(model.parameters()).dtype is torch.float64
        with Wide() if is_wide else nullcontext():
            return forward(*args, **inputs)

    model.forward = wide
    return model


def batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns (ids, labels) of 12 sequences a step; ids of few values repeat, labels are ragged."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(num):
        ids = torch.randint(0, 16, (12, 10), generator=generator)
        labels = ids.clone()
        for row, cut in zip(labels, torch.randint(1, 8, (12,), generator=generator), strict=True):
            row[:cut] = -100
        found.append((ids, labels))
    return found
