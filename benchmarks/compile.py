"""Compiled blocks beside FSDP2's.

`python benchmarks/compile.py` is `fullshard bench compile`, with the same options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "compile", *sys.argv[1:]]))
