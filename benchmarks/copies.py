"""Bytes that a step's copies read and write, beside FSDP2's.

`python benchmarks/copies.py` is `fullshard bench copies`, with the same options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "copies", *sys.argv[1:]]))
