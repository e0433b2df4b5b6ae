"""The interface of torch's FSDP2, and FSDP2 with a configuration object.

from fullshard.compat.fsdp2 import fully_shard, MixedPrecisionPolicy
from fullshard.compat.fsdp2 import FSDP2Config, wrap_model_fsdp2
"""

import torch.distributed.fsdp as _torch_fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fullshard.compat.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from fullshard.compat.fsdp2.config import (
    FSDP2Config,
    FSDP2Wrapper,
    apply_activation_checkpointing,
    load_fsdp2_checkpoint,
    save_fsdp2_checkpoint,
    wrap_model_fsdp2,
)
from fullshard.compat.fsdp2.fully_shard import (
    FSDPModule,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)

# torch 2.13 and 2.15; `fully_shard` and its modules refuse them by name
DataParallelMeshDims = getattr(_torch_fsdp, "DataParallelMeshDims", None)
GradientReductionHandle = getattr(_torch_fsdp, "GradientReductionHandle", None)

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointImpl",
    "DataParallelMeshDims",
    "FSDP2Config",
    "FSDP2Wrapper",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "apply_activation_checkpointing",
    "checkpoint_wrapper",
    "fully_shard",
    "load_fsdp2_checkpoint",
    "register_fsdp_forward_method",
    "save_fsdp2_checkpoint",
    "share_comm_ctx",
    "wrap_model_fsdp2",
]
