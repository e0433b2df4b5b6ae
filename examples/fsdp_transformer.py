"""Choosing the units that are gathered together: a policy makes every block a unit.

    torchrun --nproc_per_node=2 examples/fsdp_transformer.py

The modules of a unit are gathered and freed together. With one unit per block, a rank stores one or
two whole blocks at a time and its part of all others. The strategy decides whether a block stays
gathered between forward and backward.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1 import MixedPrecision, ShardingStrategy
from fullshard.compat.fsdp1.wrap import transformer_auto_wrap_policy

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def main() -> None:
    """Trains a small Llama on a pattern that it can learn."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")

    torch.manual_seed(0)
    model = FSDP(
        LlamaForCausalLM(CONFIG).to(device),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer}
        ),
        # Masters stay float32; blocks compute in bfloat16, gradients are summed in float32.
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    if rank == 0:
        print(f"{len(FSDP.fsdp_modules(model))} units: the model and its blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(20):
        start = torch.randint(
            0, 400, (4, 1), generator=torch.Generator().manual_seed(step * 8 + rank)
        )
        ids = (start + torch.arange(64)).to(device)  # counts up from a random number
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:2}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
