"""A model with its state on disk, in a memory group (cgroup) smaller than its weights.

A process of its own builds the model from random weights, trains it for two steps and exports it.
Its anonymous memory is compared with the plan and with what the process took after a smaller model.
The limit leaves no room for a second copy of the weights, and little for dirty pages of files.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support.memory_groups import MIB, memory_group
from support.sizes import sizes_of

LIMIT_MIB = 560  # modules: about 360; slots and buffers: 77; the weights would add 204
ROOT = Path(__file__).parents[2]
SIZES = sizes_of(512, 1408, 8, 8, vocab_size=2048)
NUM_LAYERS = 16

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")


# ---- in the process under the limit --------------------------------------------------------------


def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Peak:
    """The peak of this process's anonymous memory, sampled every few milliseconds."""

    def __init__(self):
        self.num_bytes = 0
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self):
        while not self._ended.wait(0.005):
            self.num_bytes = max(self.num_bytes, anonymous_bytes())

    def end(self):
        self._ended.set()
        return self.num_bytes


class NoTokenizer:
    def save_pretrained(self, folder):
        """Writes nothing."""


def life(num_layers, folder):
    """Trains from random weights to an export; returns planned bytes, and those of the weights."""
    import torch
    import transformers

    import fullshard as fs
    from fullshard.engine.engine import engine_of
    from fullshard.models.build import save_model

    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=num_layers)
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config)
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
    fs.shard(model, strategy="full_shard", offload={**kinds, "folder": str(folder)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.arange(8)[None]
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        fs.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    tokenizer: Any = NoTokenizer()
    save_model(model, config, tokenizer, folder / f"model{num_layers}")
    plan = engine_of(model).plan
    return sum(plan.peak_bytes[place] for place in ("device", "host")), 4 * plan.num_parameters


def main(folder):
    import torch

    torch.set_num_threads(1)
    life(1, folder)
    base = anonymous_bytes()
    peak = Peak()
    planned, weights = life(NUM_LAYERS, folder)
    found = {"base": base, "peak": peak.end(), "planned": planned, "weights": weights}
    print(json.dumps(found))


# ---- in the test ---------------------------------------------------------------------------------


@pytest.mark.long
def test_weights_on_disk_never_fill_memory_from_their_creation_to_the_exported_model(tmp_path):
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with memory_group(LIMIT_MIB * MIB) as group:
        done = group.run([sys.executable, __file__, str(tmp_path)], 110, env)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-2000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    print({name: f"{value / MIB:.1f} MiB" for name, value in found.items()})
    assert found["base"] + found["planned"] + found["weights"] > LIMIT_MIB * MIB
    assert found["peak"] <= 1.05 * (found["base"] + found["planned"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
