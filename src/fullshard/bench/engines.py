"""The models of the benchmarks, and the training step that each engine builds around them.

The models are plain GPTs that need only torch. Every builder takes a `Setup` and returns a `Step`:
a call that runs forward, backward and optimizer on one batch and returns this rank's loss. Nothing
else differs between engines. A rank of `bench step` runs them in turn, step by step, in one process
group (mode "time"), or one alone (mode "memory").
"""

from __future__ import annotations

import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fullshard.bench.measurement import PeakSampler, proportional_bytes, return_free_memory, timed
from fullshard.bench.step import ADAPTER_RANK, CASES, NUM_CHOSEN, NUM_EXPERTS, Case, Kind, StepJob

HEAD_WIDTH = 64


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., width) to the same shape."""
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Feed-forwards of which a learned router selects a few per token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList([FeedForward(width) for _ in range(NUM_EXPERTS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., width) to the same shape; the number of tokens per expert depends on the data.

        An expert without tokens multiplies an empty matrix, so that its gradient is zero, not
        absent. Otherwise ranks would reduce different sets of parameters.
        """
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).topk(NUM_CHOSEN, dim=-1)
        shares = scores.softmax(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            share = shares[rows, places].unsqueeze(-1)
            mixed = mixed.index_add(0, rows, share * expert(tokens[rows]))
        return mixed.view_as(x)


class Adapted(nn.Module):
    """A frozen linear layer plus the product of two narrow trained ones."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base
        self.narrow = nn.Linear(base.in_features, ADAPTER_RANK, bias=False)
        self.widen = nn.Linear(ADAPTER_RANK, base.out_features, bias=False)
        nn.init.zeros_(self.widen.weight)  # training starts at the base model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in_features) to (..., out_features)."""
        return self.base(x) + self.widen(self.narrow(x))


class Block(nn.Module):
    """Attention and feed-forward with pre-normalization: the unit that every engine shards."""

    def __init__(self, width: int, kind: Kind = "gpt") -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.out: nn.Module = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = Experts(width) if kind == "moe" else FeedForward(width)
        self.num_heads = max(1, width // HEAD_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (batch, seq, width) to the same shape."""
        batch, seq, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, seq, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """Embedding, blocks, norm, head; forward returns the loss."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab, case.width)
        self.blocks = nn.ModuleList([Block(case.width, case.kind) for _ in range(case.layers)])
        self.norm = nn.LayerNorm(case.width)
        self.head = nn.Linear(case.width, case.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Returns the mean cross-entropy of `labels`, both (batch, seq)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        # A loss in bfloat16 has three digits: too few to tell two engines apart.
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def add_adapters(model: GPT) -> None:
    """Freezes the model and adds trained adapters to the attention of every block."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.qkv = Adapted(block.qkv)
        block.out = Adapted(block.out)


def build_model(case: Case, seed: int) -> GPT:
    """Builds the model with the same weights in every process."""
    torch.manual_seed(seed)
    model = GPT(case)
    if case.kind == "lora":
        add_adapters(model)
    return model


def make_batches(case: Case, rank: int, num_batches: int) -> list[tuple[torch.Tensor, ...]]:
    """Draws this rank's batches, which differ so that a missing reduction shows."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = (2, case.batch, case.seq)
    return [
        tuple(torch.randint(0, case.vocab, shape, generator=generator).unbind(0))
        for _ in range(num_batches)
    ]


# ---- engines -------------------------------------------------------------------------------------


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Setup:
    """The inputs of an engine's builder.

    Attributes:
        prefetch: FSDP2's explicit prefetch distance in blocks; 0: FSDP2 decides.
        max_norm: Norm to which torch clips gradients in every engine; None: no clipping.
    """

    case: Case
    seed: int = 0
    learning_rate: float = 1e-3
    prefetch: int = 0
    max_norm: float | None = None

    def model(self) -> GPT:
        """Builds the model, with the same weights in every engine and rank."""
        return build_model(self.case, self.seed)

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype of forward and backward; None: the float32 of the parameters."""
        return torch.bfloat16 if self.case.compute == "bfloat16" else None

    def adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer that every engine uses, for the trained parameters."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate, fused=True)


def train_step(model: nn.Module, setup: Setup) -> Step:
    """Returns forward, backward and update of a sharded model."""
    optimizer = setup.adamw(model.parameters())

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, labels)
        loss.backward()
        if setup.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setup.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def shard_ours(setup: Setup, transport: str = "auto") -> nn.Module:
    """Returns a model that fullshard shards, with one unit per block."""
    import fullshard as fs

    return fs.shard(
        setup.model(),
        strategy="full_shard",
        wrap=[Block.__name__],
        transport=transport,
        param_dtype=None if setup.compute is None else setup.case.compute,
    )


def build_ours(setup: Setup, transport: str = "auto") -> Step:
    """Returns fullshard's training step."""
    return train_step(shard_ours(setup, transport), setup)


def build_fsdp2(setup: Setup, *, reshard_after_forward: bool = True) -> Step:
    """Returns the step of torch's fully_shard on every block and the root.

    Without `reshard_after_forward` blocks stay gathered between forward and backward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = setup.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks: list[Any] = list(model.blocks)
    mixed = MixedPrecisionPolicy(param_dtype=setup.compute, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if setup.compute is None else mixed
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if setup.prefetch:
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + setup.prefetch])
            before = blocks[max(0, i - setup.prefetch) : i]
            block.set_modules_to_backward_prefetch(before[::-1])
    return train_step(model, setup)


def build_fsdp1(setup: Setup) -> Step:
    """Returns the step of torch's FullyShardedDataParallel; it needs a device_id for the CPU."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecation warning for every wrapped block
        model = FullyShardedDataParallel(
            setup.model(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(setup.compute, torch.float32) if setup.compute else None,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    return train_step(model, setup)


def build_ddp(setup: Setup) -> Step:
    """Returns the step of torch's DistributedDataParallel, which replicates everything."""
    model = nn.parallel.DistributedDataParallel(setup.model(), gradient_as_bucket_view=True)
    return train_step(model, setup)


def build_deepspeed(setup: Setup, stage: int) -> Step:
    """Returns the step of DeepSpeed ZeRO on its CPU accelerator, with torch's optimizer."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    model = setup.model()
    config = {
        "train_micro_batch_size_per_gpu": setup.case.batch,
        "steps_per_print": sys.maxsize,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # the default is 1
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=setup.adamw(model.parameters()),
        model_parameters=list(model.parameters()),
        config=config,
        dist_init_required=False,
    )

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def build_floor(setup: Setup) -> Step:
    """Returns a step without any engine: forward, backward, and 1/W of the optimizer.

    No sharded engine can be faster on these processes, since it does the same arithmetic and also
    moves gradients. If compute is bfloat16, so is the model, and the updated part is cast.
    """
    model = setup.model().to(setup.compute)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numel = math.ceil(sum(p.numel() for p in parameters) / dist.get_world_size())
    part = nn.Parameter(torch.zeros(numel))
    part.grad = torch.zeros(numel)
    cast = None if setup.compute is None else torch.empty(numel, dtype=setup.compute)
    optimizer = setup.adamw([part])

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        if cast is not None:
            cast.copy_(part.detach())
        for parameter in parameters:
            parameter.grad = None
        return loss.detach()

    return step


# Ours: a shared home; direct messages, as between hosts; gloo's collectives.
TRANSPORTS = {"fullshard": "auto", "fullshard-direct": "direct", "fullshard-c10d": "c10d"}

BUILDERS: dict[str, Callable[[Setup], Step]] = {
    **{name: partial(build_ours, transport=kind) for name, kind in TRANSPORTS.items()},
    "fsdp2": build_fsdp2,
    "fsdp2-zero2": partial(build_fsdp2, reshard_after_forward=False),
    "fsdp1": build_fsdp1,
    "ddp": build_ddp,
    "deepspeed": partial(build_deepspeed, stage=3),
    "deepspeed-zero2": partial(build_deepspeed, stage=2),
    "floor": build_floor,
}


# ---- one rank of `bench step` --------------------------------------------------------------------


NUM_BATCHES = 4
PREFETCHES = (0, 1, 2)
TUNABLE = ("fsdp2", "fsdp2-zero2")
PILOT_STEPS = 3
MEMORY_STEPS = 3


def setup_of(job: StepJob, engine: str) -> Setup:
    """Return the inputs of the engine's builder."""
    return Setup(job.case, prefetch=(job.prefetch or {}).get(engine, 0))


class Feeder:
    """Hands an engine its batches in order and counts its steps."""

    def __init__(self, case: Case, step: Step) -> None:
        self._batches = make_batches(case, dist.get_rank(), NUM_BATCHES)
        self._step = step
        self._num_steps = 0

    def step(self) -> torch.Tensor:
        """Runs one training step and returns this rank's loss."""
        tokens, labels = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        return self._step(tokens, labels)

    def mean_loss(self) -> float:
        """Runs one step and returns the mean of all ranks' losses."""
        loss = self.step().double().reshape(1)
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()


def timed_by_all(step: Callable[[], object]) -> tuple[float, float]:
    """Times one step.

    Returns:
        The seconds from when every rank is ready until every rank has finished, and the processor
        seconds of this rank alone (which a loaded machine lengthens far less).
    """
    took_s, cpu_s = timed(step)
    start = time.perf_counter()
    dist.barrier()
    return took_s + time.perf_counter() - start, cpu_s


def choose_prefetch(job: StepJob, engine: str) -> dict[int, float]:
    """Times FSDP2's prefetch distances and returns the best step of each, in the slowest rank."""
    times: dict[int, float] = {}
    for distance in PREFETCHES:
        setup = replace(setup_of(job, engine), prefetch=distance)
        feeder = Feeder(job.case, BUILDERS[engine](setup))
        feeder.step()
        best = torch.tensor([min(timed_by_all(feeder.step)[0] for _ in range(PILOT_STEPS))])
        dist.all_reduce(best, op=dist.ReduceOp.MAX)
        times[distance] = float(best)
        del feeder
        gc.collect()
    return times


def measure_time(job: StepJob) -> dict[str, object]:
    """Runs the engines in turn and returns their step times, losses and settings."""
    pilot: dict[int, float] = {}
    if job.prefetch is None:
        tunable = [engine for engine in job.engines if engine in TUNABLE]
        pilot = choose_prefetch(job, tunable[0]) if tunable else {}
        best = min(pilot, key=pilot.__getitem__, default=0)
        job = replace(job, prefetch=dict.fromkeys(TUNABLE, best))
    feeders, losses = {}, {}
    for engine in job.engines:
        feeder = Feeder(job.case, BUILDERS[engine](setup_of(job, engine)))
        losses[engine] = [feeder.mean_loss() for _ in range(job.num_checked)]
        feeders[engine] = feeder
    gc.collect()
    times: dict[str, list[float]] = {engine: [] for engine in job.engines}
    cpu_times: dict[str, list[float]] = {engine: [] for engine in job.engines}
    for i in range(job.num_rounds):
        # The order turns with every round, so that no engine always follows the same other one.
        turn = i % len(job.engines)
        for engine in job.engines[turn:] + job.engines[:turn]:
            step_s, step_cpu_s = timed_by_all(feeders[engine].step)
            times[engine].append(step_s)
            cpu_times[engine].append(step_cpu_s)
    return {
        "times_s": times,
        "cpu_times_s": cpu_times,
        "losses": losses,
        "prefetch": job.prefetch,
        "pilot_s": pilot,
    }


def warm_up_process(job: StepJob, engine: str) -> None:
    """Runs the engine on a tiny model first, so that the memory of imports does not count."""
    case = job.case
    like = replace(CASES["tiny"], num_ranks=case.num_ranks, kind=case.kind, compute=case.compute)
    tiny = replace(job, case=like)
    Feeder(tiny.case, BUILDERS[engine](setup_of(tiny, engine))).step()


def measure(job: StepJob) -> dict[str, object]:
    """Run the measurements of a job."""
    # Peers call renamed functions of torch at every step; those warnings are not part of a step.
    warnings.simplefilter("ignore", FutureWarning)
    return measure_time(job) if job.mode == "time" else measure_memory(job)


def measure_memory(job: StepJob) -> dict[str, object]:
    """Run one engine alone and return its peak above the process's memory before it was built."""
    (engine,) = job.engines
    warm_up_process(job, engine)
    return_free_memory()
    dist.barrier()
    baseline = proportional_bytes()
    feeder = Feeder(job.case, BUILDERS[engine](setup_of(job, engine)))
    return_free_memory()
    dist.barrier()
    with PeakSampler() as steps:
        for _ in range(MEMORY_STEPS):
            feeder.step()
        dist.barrier()
    return {"memory_peak_bytes": steps.peak_bytes - baseline}
