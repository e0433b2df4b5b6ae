"""torch.distributed.algorithms._checkpoint.checkpoint_wrapper, acting in place."""

from fullshard.compat.callable_module import make_callable
from fullshard.compat.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

__all__ = [
    "CheckpointImpl",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "offload_wrapper",
]

make_callable(__name__, checkpoint_wrapper)
