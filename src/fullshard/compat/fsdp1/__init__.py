"""The interface of torch's FSDP1: change the imports, keep the script.

from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP, ShardingStrategy
from fullshard.compat.fsdp1.wrap import transformer_auto_wrap_policy
"""

from torch.distributed.fsdp import OptimStateKeyType

from fullshard.compat.fsdp1 import api, checkpoint_wrapper, wrap
from fullshard.compat.fsdp1.api import *  # noqa: F403
from fullshard.compat.fsdp1.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    offload_wrapper,
)
from fullshard.compat.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.compat.fsdp1.sharded_grad_scaler import ShardedGradScaler
from fullshard.compat.fsdp1.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from fullshard.outlook.memory import estimate_fsdp_memory

FSDP = FullyShardedDataParallel

__all__ = [
    "FSDP",
    "CheckpointImpl",
    "CustomPolicy",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "always_wrap_policy",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "enable_wrap",
    "estimate_fsdp_memory",
    "lambda_auto_wrap_policy",
    "offload_wrapper",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
__all__ += api.__all__
