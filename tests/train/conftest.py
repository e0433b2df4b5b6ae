"""A tiny configuration, and `fullshard` called in this process (its ranks are real processes)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.text import seeded_text

SOURCE = Path(__file__).parents[2] / "src"

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


@pytest.fixture(scope="session", autouse=True)
def importable_ranks():
    """Ranks are started as `python -m fullshard...`, which must find this source."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SOURCE), before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it and its ranks wrote."""

    exit_code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def fullshard(tmp_path_factory) -> Callable[..., Done]:
    """`fullshard("train", "x.yaml")` runs the command in this process."""
    from fullshard.cli.app import run

    def call(*words: object) -> Done:
        folder = tmp_path_factory.mktemp("output")
        with output_in(folder):
            exit_code = run([str(word) for word in words])
        return Done(exit_code, (folder / "out").read_text(), (folder / "err").read_text())

    return call


@contextlib.contextmanager
def output_in(folder: Path) -> Iterator[None]:
    """Everything that this process and its children write goes to files `out` and `err`."""
    saved = [os.dup(number) for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(stack.enter_context((folder / name).open("w")).fileno(), number)
        # Streams of their own, which follow the descriptor when the command moves it for --json.
        streams = [stack.enter_context(open(number, "w", closefd=False)) for number in (1, 2)]
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                yield
        finally:
            for stream, number, old in zip(streams, (1, 2), saved, strict=True):
                stream.flush()
                os.dup2(old, number)
                os.close(old)


@pytest.fixture(scope="session")
def write_config() -> Callable[[Path], Path]:
    """Writes the tiny configuration and its text into a folder; the run goes to FOLDER/run."""

    def write(folder: Path) -> Path:
        text = folder / "text.txt"
        text.write_text(seeded_text(500))
        config = folder / "config.yaml"
        config.write_text(CONFIG.format(text=text, output=folder / "run"))
        return config

    return write
