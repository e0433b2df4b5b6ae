"""Blocks of Llama 3 8B on one GPU, as a rank of 8 and 64.

`python benchmarks/gpu.py` is `fullshard bench gpu`, with the same options: see README.md.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "gpu", *sys.argv[1:]]))
