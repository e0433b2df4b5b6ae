"""Runs a measurement on local ranks: `run_ranks` in the command, `main` on every rank."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError
from fullshard.launch.spawn import run_local_ranks

JOB_FILE = "job.pickle"


def run_ranks(
    measure: str, job: object, num_ranks: int, *, what: str, timeout_s: float
) -> list[Any]:
    """Runs a function on local ranks, in a process group, and returns each rank's result.

    Args:
        measure: `module:function`. It gets the job, runs on one thread, and returns JSON values.
        job: What to measure; any object that can be pickled.
        num_ranks: Local ranks.
        what: Names the group in an error, as in "bench step: the ranks of 29M".
        timeout_s: Limit for the whole group.

    Raises:
        FullshardError: A rank failed. Its own error is already on standard error.
    """
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as name:
        folder = Path(name)
        (folder / JOB_FILE).write_bytes(pickle.dumps(job))
        code = run_local_ranks(
            __name__,
            [measure, str(folder)],
            num_processes=num_ranks,
            log_dir=folder / "logs",
            timeout_s=timeout_s,
        )
        if code != 0:
            error = FullshardError(
                f"{what}: expected exit code 0, got {code}. See the error above."
            )
            error.exit_code = code
            raise error
        return [json.loads(_result_file(folder, rank).read_text()) for rank in range(num_ranks)]


def main(measure: str, folder: Path) -> None:
    """One rank: measures what the folder's job asks for and writes the result beside it."""
    import torch
    import torch.distributed as dist

    from fullshard.launch import rendezvous

    torch.set_num_threads(1)
    module, _, function = measure.partition(":")
    job = pickle.loads((folder / JOB_FILE).read_bytes())
    rendezvous.init_process_group()
    try:
        result = getattr(importlib.import_module(module), function)(job)
        _result_file(folder, dist.get_rank()).write_text(json.dumps(result))
        dist.barrier()
    finally:
        rendezvous.shutdown()


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.json"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
