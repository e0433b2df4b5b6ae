"""Runs a launcher as a process: `python -m support.launcher LOG_DIR WHAT [ARGUMENT ...]`.

INTERRUPT_S in its environment is how long it waits for ranks that ignore Ctrl-C. With FORKS, its
ranks are forked from a server that imports the modules named there.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from fullshard.launch import supervise
from fullshard.launch.spawn import LocalLaunch, fork_server, launch_local_ranks, print_failure


def run_local_ranks(module, args=(), *, num_processes, log_dir, timeout_s=None, server=None) -> int:
    """Runs a module on local ranks, prints the first failure, and returns the exit code."""
    launch = LocalLaunch(module, tuple(args), num_processes, log_dir, timeout_s, server=server)
    result = launch_local_ranks(launch)
    print_failure(launch, result)
    return result.exit_code


if __name__ == "__main__":
    supervise.INTERRUPT_S = float(os.environ.get("INTERRUPT_S", supervise.INTERRUPT_S))
    log_dir, *words = sys.argv[1:]
    modules = os.environ.get("FORKS")
    with nullcontext() if modules is None else fork_server(modules.split()) as found:
        job = ("support.launch_job", words)
        sys.exit(run_local_ranks(*job, num_processes=2, log_dir=Path(log_dir), server=found))
