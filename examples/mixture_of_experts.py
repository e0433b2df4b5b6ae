"""A mixture of experts: each pair of ranks shares the experts, all ranks share everything else.

    torchrun --nproc_per_node=2 examples/mixture_of_experts.py
    torchrun --nproc_per_node=4 examples/mixture_of_experts.py

transformers assigns half of the experts to each rank of a pair and exchanges the tokens. fullshard
shards dense parameters over all ranks, and experts over the ranks with the same experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.expert_parallel import apply_expert_parallelism

import fullshard as fs

EXPERT = 2  # ranks that share the experts
CONFIG = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def main() -> None:
    """Trains for forty steps on sequences that count upwards from a random number."""
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())

    torch.manual_seed(0)  # equal initial weights on every rank
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).to(device)
    names = ("shard", "expert", "tensor")
    mesh = init_device_mesh(device, (world // EXPERT, EXPERT, 1), mesh_dim_names=names)
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(model, mesh["expert"], mesh["tensor"], plan)
    fs.shard(model, mesh=mesh["shard", "expert"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    own = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {rank}: {own:,} of {fs.num_parameters(model):,} parameters")

    data = torch.Generator().manual_seed(rank)  # different data on every rank
    for step in range(40):
        first = torch.randint(0, 96, (16, 1), generator=data)
        tokens = (first + torch.arange(32)).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = fs.clip_grad_norm_(model, 1.0)  # counts every expert once
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1:2}  loss {mean.item() / world:.4f}  norm {norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
