"""The engine's host time a unit beside FSDP2's.

`python benchmarks/host.py` is `fullshard bench host`, with the same options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "host", *sys.argv[1:]]))
