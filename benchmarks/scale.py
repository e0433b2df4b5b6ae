"""Planning and bookkeeping of one rank over the world size.

`python benchmarks/scale.py` is `fullshard bench scale`, with the same options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "scale", *sys.argv[1:]]))
