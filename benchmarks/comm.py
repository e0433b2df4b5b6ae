"""Each transport beside a memory copy.

`python benchmarks/comm.py` is `fullshard bench comm`, with the same options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "comm", *sys.argv[1:]]))
