"""A launcher as a process of its own: `python -m support.launcher LOG_DIR WHAT [ARGUMENT ...]`.

INTERRUPT_S in its environment is its patience with ranks that do not hear Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fullshard.launch import supervise
from fullshard.launch.spawn import run_local_ranks

if __name__ == "__main__":
    supervise.INTERRUPT_S = float(os.environ.get("INTERRUPT_S", supervise.INTERRUPT_S))
    log_dir, *words = sys.argv[1:]
    sys.exit(run_local_ranks("support.launch_job", words, num_processes=2, log_dir=Path(log_dir)))
