"""What the fork server imports before it forks. Nothing here may start a thread.

Not jax, which reads its environment when it is imported.
"""

import torch
import torch._dynamo
import torch.distributed
import torch.distributed.fsdp
import torch.utils.checkpoint
import transformers.models.llama.modeling_llama

import fullshard
import fullshard.train.job

__all__ = ["fullshard", "torch", "transformers"]
fullshard.shard  # noqa: B018  the engine is imported at the first access
