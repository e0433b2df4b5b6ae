"""Call a function on local ranks, in a process group, and return the results of all ranks.

    call_on_ranks("module:function", job, 2)   -->   function(job) on two ranks   -->   two results

`call_on_ranks` runs in the command, `_main` on every rank. Job and results are pickled into a
temporary folder.
"""

from __future__ import annotations

import importlib
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

from fullshard.config.environment import hide_accelerators, read_launch_environment
from fullshard.launch import rendezvous
from fullshard.launch.spawn import LocalLaunch, launch_local_ranks
from fullshard.launch.supervise import LaunchResult

JOB_FILE = "job.pickle"


def call_on_ranks(
    function: str,
    job: object,
    num_ranks: int,
    timeout_s: float | None = None,
    stuck_s: float = 600.0,
    *,
    on_cpu: bool = False,
) -> tuple[LocalLaunch, LaunchResult, list[Any]]:
    """Calls a function on local ranks.

    Args:
        function: `module:function`, called with the job.
        job: Any object that can be pickled.
        num_ranks: Number of ranks.
        timeout_s: Maximum duration; None: unlimited.
        stuck_s: Seconds after which a rank that others wait for is stuck.
        on_cpu: Hide the accelerators of this machine from the ranks.

    Returns:
        The launch, its result, and the results of all ranks (none if the launch failed).
    """
    with tempfile.TemporaryDirectory(prefix="fullshard-ranks-") as name:
        folder = Path(name)
        (folder / JOB_FILE).write_bytes(pickle.dumps(job))
        words = (function, name, *(["cpu"] if on_cpu else []))
        launch = LocalLaunch(__name__, words, num_ranks, folder / "logs", timeout_s, stuck_s)
        result = launch_local_ranks(launch)
        ranks = range(0 if result.exit_code else num_ranks)
        found = [pickle.loads(_result_file(folder, rank).read_bytes()) for rank in ranks]
        return launch, result, found


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.pickle"


def _main(function: str, folder: Path, *, on_cpu: bool) -> None:
    if on_cpu:
        hide_accelerators()
    launch = read_launch_environment()
    assert launch is not None, "the launcher sets it"
    rendezvous.init_process_group()
    module, _, name = function.partition(":")
    job = pickle.loads((folder / JOB_FILE).read_bytes())
    result = getattr(importlib.import_module(module), name)(job)
    _result_file(folder, launch.rank).write_bytes(pickle.dumps(result))
    rendezvous.shutdown()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), on_cpu="cpu" in sys.argv[3:])
