"""A tiny configuration, and `fullshard` in this process with real rank processes."""

import pytest

from support.text import seeded_text
from support.traces import traced_once

CONFIG = """\
model:
  config:
    model_type: llama
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 2
    max_position_embeddings: 64
    tie_word_embeddings: true
data:
  path: {text}
  vocab_size: 300
  validation_fraction: 0.1
  bigram_baseline: true
training:
  output_dir: {output}
  max_steps: 6
  per_device_train_batch_size: 4
  per_device_eval_batch_size: 5
  max_seq_length: 32
  learning_rate: 2e-2
  logging_steps: 2
  eval_steps: 3
  seed: 7
launch:
  num_processes: 2
"""


@pytest.fixture(scope="module", autouse=True)
def _traces():
    with traced_once():
        yield


@pytest.fixture(scope="session")
def write_config():
    """Writes the tiny configuration and its text into a folder; the run uses FOLDER/run."""

    def write(folder):
        text = folder / "text.txt"
        text.write_text(seeded_text(500))
        config = folder / "config.yaml"
        config.write_text(CONFIG.format(text=text, output=folder / "run"))
        return config

    return write
