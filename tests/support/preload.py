"""What the fork server imports before it forks. Nothing here may start a thread.

Not jax, which reads its environment when it is imported.
"""

import gc
import os
import sys

import torch
import torch._dynamo
import torch.distributed
import torch.distributed.fsdp
import torch.distributed.run
import torch.utils.checkpoint
import transformers.models.llama.modeling_llama
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import fullshard
import fullshard.run.on_torch
import support.rank_worker

__all__ = ["fullshard", "support", "torch", "transformers"]
SERVER = os.getpid()  # the process that imported this
fullshard.shard  # noqa: B018  the engine is imported at the first access
get_checkpoint_conversion_mapping("llama")  # compiles 900 patterns, once a process
if sys.platform == "linux":
    # A thread that wakes interrupts no other: gloo's would spin while its rank, which it
    # interrupted, holds a lock. Forked processes inherit it.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Ranks collect garbage after every body: not through the 400,000 objects of all these modules.
gc.freeze()
