"""The program of every rank: `python -m fullshard.run.rank RUN_DIR`."""

from __future__ import annotations

import atexit
import gc
import sys
from pathlib import Path

from fullshard.launch.rank_entry import run_rank


def main() -> None:
    """Trains on this rank from the run's folder."""
    from fullshard.config.load import load_config
    from fullshard.run.session import run

    atexit.register(gc.freeze)  # skips garbage collection at exit, which needs a second
    run_dir = Path(sys.argv[1])
    run(load_config(run_dir / "config.yaml", []).config, run_dir)


if __name__ == "__main__":
    run_rank(main)
