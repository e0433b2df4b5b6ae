"""A launcher as a process of its own: `python -m support.launcher LOG_DIR WHAT [ARGUMENT ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from fullshard.launch.spawn import run_local_ranks

if __name__ == "__main__":
    log_dir, *words = sys.argv[1:]
    sys.exit(run_local_ranks("support.launch_job", words, num_processes=2, log_dir=Path(log_dir)))
