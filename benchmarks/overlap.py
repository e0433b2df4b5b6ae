"""How much of a slow wire's time hides behind compute, and a trace of it.

`python benchmarks/overlap.py` is `fullshard bench overlap`, with the same options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "overlap", *sys.argv[1:]]))
