"""`fullshard distill` with this folder's configuration, as a script for torchrun.

    torchrun --nproc_per_node=2 scripts/run_distillation.py
    torchrun --nproc_per_node=8 scripts/run_distillation.py distillation.training.fsdp=shard_grad_op
    python scripts/run_distillation.py max_steps=50          two local ranks are started

Arguments after the script override values of conf/distillation/default.yaml.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fullshard.cli.app import run

CONFIG = Path(__file__).resolve().parents[1] / "conf" / "distillation" / "default.yaml"

if __name__ == "__main__":
    sys.exit(run(["distill", str(CONFIG), *sys.argv[1:]]))
