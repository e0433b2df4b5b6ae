"""Parity, memory and events on one GPU, and on two if there are two."""

import os
from pathlib import Path

import gpu_checks
import pytest
import torch
import torch.distributed as dist

from support.launcher import run_local_ranks

HERE = Path(__file__).parent
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="torch sees no CUDA device"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """An NCCL group of one rank: this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", gpu_checks.STRATEGIES)
@pytest.mark.parametrize("dtype", gpu_checks.DTYPES)
@pytest.mark.parametrize("check", gpu_checks.CHECKS)
def test_one_gpu_has_the_planned_results_memory_and_events(one_rank, check, dtype, strategy):
    gpu_checks.CHECKS[check](dtype, strategy)


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two GPUs, torch sees {NUM_GPUS}")
def test_two_gpus_have_the_planned_results_memory_and_events(tmp_path, monkeypatch):
    paths = [str(HERE), str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    logs = tmp_path / "logs"
    code = run_local_ranks("gpu_checks", [], num_processes=2, log_dir=logs, timeout_s=500)
    assert code == 0, "\n".join(log.read_text() for log in sorted(logs.iterdir()))
