"""Small Hugging Face decoders in float64 all through: theirs make norms and positions float32."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3, "attention_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}


def config_of(name: str, **more: Any) -> Any:
    from transformers import AutoConfig

    fields = {**SIZES, **CONFIGS[name], **more}
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def build(config: Any, seed: int = 0) -> Any:
    """With noise on every weight, so that ones and zeros hide nothing."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return widen(model)


def widen(model: Any) -> Any:
    """Norms and rotary positions in the dtype of the weights."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _Norm(module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = _Positions(module)
    return model


class _Norm:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return self.module.weight * (x * torch.rsqrt(mean + self.module.variance_epsilon))


class _Positions:
    """Frequencies anew, by transformers' own function under a default dtype of float64."""

    def __init__(self, module: Any) -> None:
        self.config = module.config

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        rope, config = self.config.rope_parameters, self.config
        dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        steps = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
        frequencies = 1.0 / rope["rope_theta"] ** steps
        if rope["rope_type"] == "llama3":
            frequencies = _llama3(frequencies, rope)
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _llama3(frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """As in transformers' `_compute_llama3_parameters`: long waves slower, between them a blend."""
    waves = 2 * torch.pi / frequencies
    context, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    slow = torch.where(waves > context / low, frequencies / rope["factor"], frequencies)
    share = (context / waves - low) / (high - low)
    blend = (1 - share) * slow / rope["factor"] + share * slow
    between = (waves >= context / high) & (waves <= context / low)
    return torch.where(between, blend, slow)


def batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels) of 12 sequences a step; ids of few values repeat, labels are ragged."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(num):
        ids = torch.randint(0, 16, (12, 10), generator=generator)
        labels = ids.clone()
        for row, cut in zip(labels, torch.randint(1, 8, (12,), generator=generator), strict=True):
            row[:cut] = -100
        found.append((ids, labels))
    return found
