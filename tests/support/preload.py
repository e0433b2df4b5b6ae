"""Imports of the fork server before it forks. They must not start a thread.

jax is not among them, because it reads its environment when it is imported.
"""

import gc
import os

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
SERVER = os.getpid()  # the process that imported this module
fullshard.shard  # noqa: B018  the engine is imported at the first access
get_checkpoint_conversion_mapping("llama")  # compiles 900 patterns, once per process
# Ranks collect garbage after every body; freezing skips the 400,000 objects of these modules.
gc.freeze()
