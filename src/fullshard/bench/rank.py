"""What every rank of a benchmark does around its measurement."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.bench.job import result_file
from fullshard.launch import rendezvous


def write_result(folder: Path, measure: Callable[[], Any]) -> None:
    """Joins the ranks on one thread each, measures, and writes what this rank found."""
    torch.set_num_threads(1)
    rendezvous.init_process_group()
    try:
        result = measure()
        (folder / result_file(dist.get_rank())).write_text(json.dumps(result))
        dist.barrier()
    finally:
        rendezvous.shutdown()
