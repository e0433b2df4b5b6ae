"""Helpers of tests of other libraries' trainers: launched scripts, small models, words."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import forked


def launched(
    folder: Path, script: Path, *words: object, run: Callable[..., Any] = forked.run, **how: Any
) -> str:
    """Runs a script on two ranks of `fullshard launch`; returns its standard output."""
    command = [sys.executable, "-m", "fullshard", "launch", "--nproc-per-node", "2"]
    command += [str(word) for word in ("--log-dir", folder / "logs", script, *words)]
    options = {"timeout": 290, "env": os.environ, **how}
    done = run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def word_tokenizer(num_words: int) -> Any:
    """Returns a tokenizer of w0, w1 and so on, after three special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{at}" for at in range(num_words - 3))]
    plain = Tokenizer(models.WordLevel({w: at for at, w in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama_config(num_words: int, **fields: Any) -> Any:
    """Returns the configuration of a Llama with two layers."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaConfig(vocab_size=num_words, **{**sizes, **tokens, **fields})


def t5(num_words: int) -> Any:
    """Its answers end at different lengths, so that ranks stop at different times."""
    import torch
    import transformers

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.T5Config(vocab_size=num_words, **sizes, dropout_rate=0.0, **tokens)
    found = transformers.T5ForConditionalGeneration(config).double()
    with torch.no_grad():
        for param in found.parameters():
            param.mul_(3)
    found.generation_config.eos_token_id = list(range(1, 24))
    return found
