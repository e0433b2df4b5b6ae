"""torchtitan's trainer on CPU ranks: python torchtitan_job.py torch|sharded RUN [NAME=VALUE ...].

RUN is the folder of the run; a checkpoint in it is resumed. Losses and norms go to RUN/MODE.json.
NAME is a field of torchtitan's parallelism, or `chunked=1` for its chunked loss. torchtitan itself
does not start on torch's CPU build, so what it asks of the device is replaced from outside.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

STEPS = 20
CPU: Any = types.SimpleNamespace(
    set_device=lambda _: None, device_count=lambda: 1, current_device=lambda: 0,
    get_device_name=lambda *_: "CPU", memory_stats=lambda *_: {}, empty_cache=lambda: None,
    reset_peak_memory_stats=lambda *_: None, synchronize=lambda *_: None,
    get_device_properties=lambda *_: types.SimpleNamespace(total_memory=2**34),
)  # fmt: skip


def on_cpu() -> None:
    """Puts torchtitan's llama3 on the CPU, with an attention that has a backward there."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", CPU
    from torchtitan.components import metrics
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models import llama3
    from torchtitan.models.common import ScaledDotProductAttention

    for one in (metrics, dist_utils):
        one.device_type, one.device_module = "cpu", CPU
    llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()
    dist_utils.set_pg_timeouts = lambda **_: None  # its barrier names a device


def take_our_fully_shard() -> None:
    """The imports that a user would change."""
    from torchtitan.distributed import fsdp

    from fullshard.compat import fsdp2

    fsdp.fully_shard = fsdp2.fully_shard
    fsdp.MixedPrecisionPolicy = fsdp2.MixedPrecisionPolicy


def assets(folder: Path) -> Path:
    """A tokenizer; beside it, text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    if os.environ["RANK"] == "0" and not folder.exists():
        folder.mkdir(parents=True)
        words = {f"w{at}": at for at in range(1000)} | {"<eos>": 1000, "<unk>": 1001}
        made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.save(str(folder / "tokenizer.json"))
        special = {"eos_token": "<eos>", "bos_token": "<eos>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        lines = [" ".join(f"w{at * i * i % 997}" for i in range(1, 90)) for at in range(400)]
        (folder / "text").mkdir()
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / "text" / "train.json").write_text(rows)
    torch.distributed.barrier()
    return folder


def configured(run: Path, given: dict[str, str]) -> Any:
    on_cpu()
    from torchtitan.models.llama3 import config_registry as registry

    chunked = given.pop("chunked", None)
    config = registry.llama3_debugmodel() if chunked else registry.llama3_debugmodel_ce_loss()
    config.training.steps, config.training.seq_len = STEPS, 64
    config.training.local_batch_size = 2
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.hf_assets_path, config.dump_folder = str(assets(run.parent / "assets")), str(run)
    config.dataloader.dataset_path = str(run.parent / "assets" / "text")
    config.checkpoint.enable, config.checkpoint.interval = True, STEPS // 2
    config.parallelism = dataclasses.replace(config.parallelism, **given)
    return config


def main() -> None:
    mode, run = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    config = configured(run, dict(word.split("=") for word in sys.argv[3:]))
    if mode == "sharded":
        take_our_fully_shard()
    trainer = config.build()
    seen, log = [], trainer.metrics_processor.log

    def keep(step: int, loss: float, most: float, norm: float, **more: Any) -> None:
        seen.append([step, loss, most, norm])
        log(step, loss, most, norm, **more)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.close()
    if os.environ["RANK"] == "0":
        (run / f"{mode}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
