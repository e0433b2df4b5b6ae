"""What the fork server imports before it forks ranks. Nothing here may start a thread."""

import torch
import torch.distributed
import torch.distributed.fsdp
import torch.utils.checkpoint

import fullshard

__all__ = ["fullshard", "torch"]
fullshard.shard  # noqa: B018  the engine is imported at the first access
torch.distributed.fsdp  # noqa: B018
