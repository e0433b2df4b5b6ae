"""Mixtures of experts: transformers' with its expert parallelism, and layers in plain torch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from support.models import hugging_face, perturbed
from support.other_axes import LLAMA, WIDTH

# ---- transformers --------------------------------------------------------------------------------


def of(kind: str, **more: Any) -> nn.Module:
    """Builds a tiny model of transformers, whose grouped products do not support float64."""
    model = hugging_face(kind, **LLAMA, **more)
    model.set_experts_implementation("eager")
    return model


def qwen() -> nn.Module:
    more = {"moe_intermediate_size": 10, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return of("qwen3_moe", **more)


def mixtral() -> nn.Module:
    return of("mixtral", num_local_experts=4, num_experts_per_tok=2)


def cut_as_transformers(model: nn.Module, ep: int, tp: int = 1) -> DeviceMesh:
    """Does what `DistributedConfig(ep_size, tp_size)` does; returns the dense mesh."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    world = dist.get_world_size()
    dense = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("fsdp", "tp"))
    experts = init_device_mesh("cpu", (world // ep, ep), mesh_dim_names=("efsdp", "ep"))
    tp_plan, ep_plan = map(model._expand_parallel_plan, (model.tp_plan, model.ep_plan))
    if tp > 1:
        kept = {name: style for name, style in tp_plan.items() if ".experts" not in name}
        apply_tensor_parallelism(model, dense["tp"], kept)
    apply_expert_parallelism(model, experts["ep"], dense["tp"], ep_plan)
    return dense


# ---- plain torch ---------------------------------------------------------------------------------


class Experts(nn.Module):
    """Weights of all experts, and their products with rows sorted by expert."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 7))
        self.down = nn.Parameter(torch.randn(count, 7, WIDTH))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = rows.split(counts.tolist())
        outs = [torch.tanh(part @ up[i]) @ down[i] for i, part in enumerate(parts)]
        return torch.cat([rows[:0], *outs])


class Mixture(nn.Module):
    """Routes each token to one expert; the last expert of a starved mixture gets no token.

    Attributes:
        skips: Whether forward skips experts without tokens.
    """

    def __init__(self, count: int, *, starved: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = Experts(count)
        self.starved, self.skips, self.mesh = starved, False, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        scores = self.router(rows).softmax(-1)
        allowed = scores[:, : (scores.shape[1] + 1) // 2] if self.starved else scores
        weight, chosen = allowed.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=scores.shape[1])
        run = self._run if self.mesh is None else self._exchange
        found = run(rows[order], counts)
        back = torch.empty_like(found)
        back[order] = found
        return x + (weight.unsqueeze(-1) * back).view_as(x)

    def _run(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return rows if self.skips and not len(rows) else self.experts(rows, counts)

    def _exchange(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Sends each row to the rank of its expert and receives the results."""
        group = self.mesh.get_group()
        owned = [len(part) for part in torch.arange(len(counts)).chunk(self.mesh.size())]
        owned += [0] * (self.mesh.size() - len(owned))
        here = [owned[self.mesh.get_local_rank()]] * len(owned)
        heard = counts.new_zeros(sum(here))
        dist.all_to_all_single(heard, counts, here, owned, group=group)
        told = heard.split(here)
        sent = [int(part.sum()) for part in counts.split(owned)]
        received = [int(part.sum()) for part in told]
        rows = all_to_all_single_autograd(rows, received, sent, group).clone()
        by_expert = torch.arange(len(told[0])).repeat(len(told))
        order = by_expert.repeat_interleave(torch.cat(told)).argsort(stable=True)
        found = self._run(rows[order], torch.stack(told).sum(0))
        back = torch.empty_like(found)
        back[order] = found
        return all_to_all_single_autograd(back, sent, received, group).clone()


class ExpertParallel(ParallelStyle):
    """Shards the parameters of experts along their first dimension, as torchtitan does."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: str, inner: nn.Module, mesh: DeviceMesh) -> None:
            for name, param in inner.named_parameters(recurse=False):
                cut = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(inner, name, nn.Parameter(cut, param.requires_grad))

        return distribute_module(module, device_mesh, cut)


class MixtureNet(nn.Module):
    """Dense layers and mixtures; two ranks cannot divide its five experts evenly."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        starved = (False, True, False)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(count, starved=is_)) for is_ in starved]
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixture_net(count: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return perturbed(MixtureNet(count).double())


def spread(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the experts of a net over a mesh of one axis."""
    for block in model.blocks:
        parallelize_module(block[1], mesh, {"experts": ExpertParallel()})
        block[1].mesh = mesh
