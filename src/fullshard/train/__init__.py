"""One training loop and the small recipes that feed it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.train.compare import create_fsdp_config as create_fsdp_config
    from fullshard.train.compare import print_comparison_table as print_comparison_table
    from fullshard.train.compare import train as train

__all__ = ["create_fsdp_config", "print_comparison_table", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fullshard.train' has no attribute {name!r}")
    return getattr(import_module("fullshard.train.compare"), name)
