"""Step times that the plan says beside those of ten runs.

`python benchmarks/times.py` is `fullshard bench time`, with the same options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "time", *sys.argv[1:]]))
