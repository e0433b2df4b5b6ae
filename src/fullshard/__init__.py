"""fullshard: fully sharded data-parallel training, planned before it runs.

    import fullshard as fs

    fs.shard(model)                      # in place; then train as before
    fs.clip_grad_norm_(model, 1.0)
    state = fs.full_state_dict(model)

Importing this package imports neither torch nor anything else that is slow; the names below are
looked up on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.api import *  # noqa: F403
    from fullshard.config.schema import ShardConfig as ShardConfig
    from fullshard.outlook.memory import estimate_fsdp_memory as estimate_fsdp_memory
    from fullshard.planner.plan import Plan as Plan
    from fullshard.recipes.context import divide_sequences as divide_sequences

__version__ = "0.1.0"

_HOMES = {
    "fullshard.api": (
        "Sharding",
        "clip_grad_norm_",
        "full_optimizer_state_dict",
        "full_state_dict",
        "global_norm",
        "load",
        "load_full_state",
        "memory_stats",
        "no_sync",
        "num_parameters",
        "owned",
        "plan",
        "reset",
        "save",
        "shard",
        "sharding",
        "unsharded",
        "wait",
    ),
    "fullshard.config.schema": ("ShardConfig",),
    "fullshard.outlook.memory": ("estimate_fsdp_memory",),
    "fullshard.planner.plan": ("Plan",),
    "fullshard.recipes.context": ("divide_sequences",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
