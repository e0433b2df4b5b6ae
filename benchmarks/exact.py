"""The memory that the plan says of XLA's engine, beside XLA's own figure.

`python benchmarks/exact.py` is `fullshard bench exact`, with the same options: see README.md.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, in which `import jax` would find jax.py
    from fullshard.cli.app import run

    sys.exit(run(["bench", "exact", *sys.argv[1:]]))
