"""What this machine reaches, for `fullshard plan` to count with.

`python benchmarks/calibrate.py` is `fullshard bench calibrate`, with its options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "calibrate", *sys.argv[1:]]))
