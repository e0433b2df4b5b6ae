"""torchtitan's trainer on CPU ranks: python torchtitan_job.py RESULT [torchtitan's options].

torchtitan does not start on torch's CPU build, so its calls of the device are replaced. It writes
[step, loss, largest loss, gradient norm] of each step to the file RESULT.
"""

import json
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

CPU: Any = types.SimpleNamespace(
    __name__="cpu", set_device=lambda _: None, device_count=lambda: 1, current_device=lambda: 0,
    get_device_name=lambda *_: "CPU", memory_stats=lambda *_: {}, empty_cache=lambda: None,
    reset_peak_memory_stats=lambda *_: None, synchronize=lambda *_: None,
    get_device_properties=lambda *_: types.SimpleNamespace(total_memory=2**34),
)  # fmt: skip


def on_cpu() -> None:
    """Adds what a CPU and gloo lack, before torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: CPU
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **_: None  # its barrier names a device
    plain = FSDPModule.set_gradient_divide_factor

    def divide(self: Any, factor: float) -> None:
        plain(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo does not multiply before a sum

    FSDPModule.set_gradient_divide_factor = divide
    if version("torchtitan") >= "0.3":  # FlexAttention has no backward on CPUs
        from torchtitan.models import llama3
        from torchtitan.models.common import ScaledDotProductAttention

        llama3.get_attention_config = lambda _: ScaledDotProductAttention.Config()


def main() -> None:
    on_cpu()
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    torch.set_num_threads(1)
    config = ConfigManager().parse_args(sys.argv[2:])
    trainer = config.build() if hasattr(config, "build") else Trainer(config)
    seen, log = [], trainer.metrics_processor.log

    def keep(step: int, loss: float, most: float, norm: float, **more: Any) -> None:
        seen.append([step, loss, most, norm])
        log(step, loss, most, norm, **more)

    trainer.metrics_processor.log = keep
    if config.checkpoint.create_seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
