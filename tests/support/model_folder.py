"""Small models of transformers in folders, as commands read them."""

import json
from pathlib import Path
from typing import Any

from support.sizes import sizes_of

VOCABULARY = 300
SIZES = sizes_of(32, 64, 2, layers=2, vocab_size=VOCABULARY, max_position_embeddings=64)


def small_config(kind: str = "llama", **fields: Any) -> Any:
    """Returns a small configuration of this model_type with these fields."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**SIZES, **fields})


def write_model(folder: Path, config: Any, text: str, *, seed: int = 0, sure: float = 1) -> None:
    """Writes a tokenizer and a random model whose head is scaled by `sure`."""
    import torch
    from transformers import AutoModelForCausalLM

    from fullshard.data.tokenize import train_tokenizer

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(sure)
    model.save_pretrained(folder)
    train_tokenizer([text], VOCABULARY).save_pretrained(folder)


def write_chats(file: Path, count: int) -> str:
    """Writes conversations of one question, with answers of many lengths; returns their text."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{n} and one?"},
                {"role": "assistant", "content": f"{n + 1}, of course" + " yes" * (n % 7)},
            ]
        }
        for n in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return json.dumps(lines)
