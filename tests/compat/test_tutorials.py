"""PyTorch's FSDP1 tutorials (getting started, advanced) as written, on small models."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fullshard.compat.fsdp1 import FullStateDictConfig, MixedPrecision, ShardingStrategy
from fullshard.compat.fsdp1 import FullyShardedDataParallel as FSDP
from fullshard.compat.fsdp1.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from fullshard.compat.fsdp1.fully_sharded_data_parallel import CPUOffload, StateDictType
from fullshard.compat.fsdp1.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from support.compat import Net, TransformerBlock, build, loss_of
from support.ranks import on_ranks


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(128, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = F.relu(self.fc1(torch.flatten(self.dropout(x), 1)))
        return F.log_softmax(self.fc2(x), dim=1)


@on_ranks(2)
def test_getting_started_with_fsdp(tmp_path):
    rank = dist.get_rank()
    torch.manual_seed(1)
    dataset = TensorDataset(torch.randn(32, 1, 12, 12), torch.randint(0, 10, (32,)))
    sampler = DistributedSampler(dataset, rank=rank, num_replicas=2, shuffle=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, shuffle=False)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=4000)
    found = []
    for settings in (
        {},
        {"auto_wrap_policy": policy},
        {"auto_wrap_policy": policy, "cpu_offload": CPUOffload(offload_params=True)},
    ):
        torch.manual_seed(1)
        model = FSDP(Digits(), **settings)
        assert len(FSDP.fsdp_modules(model)) == (2 if settings else 1)
        assert "(_fsdp_wrapped_module)" in f"{model}"
        optimizer = optim.Adadelta(model.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
        for epoch in (1, 2):
            model.train()
            sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for data, target in loader:
                optimizer.zero_grad()
                loss = F.nll_loss(model(data), target, reduction="sum")
                loss.backward()
                optimizer.step()
                total += torch.tensor([loss.item(), len(data)])
            dist.all_reduce(total)
            model.eval()
            with torch.no_grad():
                right = sum(model(x).argmax(1).eq(y).sum().item() for x, y in loader)
            scheduler.step()
        found.append((total[0].item(), right))
        states = model.state_dict()
        if rank == 0:
            torch.save(states, tmp_path / "mnist_cnn.pt")
            plain = Digits()
            plain.load_state_dict(torch.load(tmp_path / "mnist_cnn.pt", weights_only=True))
    assert found[0] == found[1] == found[2]
    assert found[0][0] / 32 < 2.5


def test_recomputing_does_not_offload():
    with pytest.raises(NotImplementedError, match="offload_wrapper"):
        checkpoint_wrapper(nn.Linear(2, 2), offload_to_cpu=True)


def blocks():
    policy = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={TransformerBlock}
    )
    bf16 = torch.bfloat16
    model = FSDP(
        build(),
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(bf16, bf16, bf16),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=torch.device("cpu"),
        limit_all_gathers=True,
    )
    wrapper = functools.partial(
        checkpoint_wrapper, offload_to_cpu=False, checkpoint_impl=CheckpointImpl.NO_REENTRANT
    )
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=wrapper,
        check_fn=lambda module: isinstance(module, TransformerBlock),
    )
    return model


@on_ranks(2)
def test_advanced_training_with_fsdp(tmp_path):
    rank, root = dist.get_rank(), tmp_path
    model = blocks()
    optimizer = optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(2):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
    ):
        whole = model.state_dict()
    moments = FSDP.full_optim_state_dict(model, optimizer)
    if rank == 0:
        Net().load_state_dict(whole)
        torch.save(moments, root / "optim.pt")
        moments = torch.load(root / "optim.pt")
    else:
        assert whole == moments == {}
        moments = None
    other = blocks()
    twin = optim.AdamW(other.parameters(), lr=2e-3)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tutorial uses deprecated calls
        dist_cp.save_state_dict(
            state_dict=state,
            storage_writer=dist_cp.FileSystemWriter(root / "dcp"),
            planner=DefaultSavePlanner(),
        )
        loaded = {"model": other.state_dict()}
        dist_cp.load_state_dict(
            state_dict=loaded, storage_reader=dist_cp.FileSystemReader(root / "dcp")
        )
        other.load_state_dict(loaded["model"])
    twin.load_state_dict(FSDP.scatter_full_optim_state_dict(moments, other, optim=twin))
    for one, by in ((model, optimizer), (other, twin)):
        loss_of(one, 2, rank).backward()
        by.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())
