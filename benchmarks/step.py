"""A training step of ours beside its peers: `python benchmarks/step.py` is `fullshard bench step`.

Takes the same options; see README.md beside this file.
"""

import sys

from fullshard.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["bench", "step", *sys.argv[1:]]))
