"""Modules that are imported when they are first used.

jax reads its environment when it is imported, so the process of the tests must not import it. Tests
run functions on devices in another process, which imports the test files.
"""

import importlib
from importlib.util import find_spec
from typing import Any


class Lazy:
    """Imports the module of this name at first use; its attributes include its submodules."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks up its own attributes during collection
            raise AttributeError(name)
        module = importlib.import_module(self._name)
        if hasattr(module, name) or find_spec(f"{self._name}.{name}") is None:
            return getattr(module, name)
        return importlib.import_module(f"{self._name}.{name}")


jax, jnp, optax, nnx, eqx = map(Lazy, ("jax", "jax.numpy", "optax", "flax.nnx", "equinox"))
flax, train_state, orbax = map(Lazy, ("flax", "flax.training.train_state", "orbax"))
fj, fx, fxs = map(Lazy, ("fullshard.jax", "fullshard.xla", "fullshard.xla_state"))
xla, user_models = Lazy("support.xla"), Lazy("support.user_models")
