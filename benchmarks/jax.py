"""The JAX engine on two gloo processes, beside one process and XLA's partitioner.

`python benchmarks/jax.py` is `fullshard bench jax`, with the same options: see README.md.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, in which `import jax` would find this file
    from fullshard.cli.app import run

    sys.exit(run(["bench", "jax", *sys.argv[1:]]))
