"""Checks of the engine on GPUs; every rank of a group runs them.

test_gpu.py calls them on one rank; `python -m gpu_checks`, started by our launcher, is a rank of
several. The reference is computed on the same GPU: a float32 master, a copy of it in the compute
dtype that runs forward and backward for every rank's batch in turn, gradients summed in float32.
"""

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs
from fullshard.bench.engines import GPT
from fullshard.bench.step import Case
from fullshard.engine.engine import engine_of
from fullshard.launch import rendezvous
from support.parity import assert_planned_events

DEVICE = torch.device("cuda")
CASE = Case("gpu", width=256, layers=4, vocab=512, batch=2, seq=64, num_ranks=1)
NUM_STEPS = 4
MAX_NORM = 0.5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Relative to the whole update: float32 rounding, and a different order of sums in bfloat16.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
SLACK_BYTES = 2**20  # counters and norms


def build() -> GPT:
    """Builds the model with noise on all weights; a norm's ones would hide a missed gather."""
    torch.manual_seed(0)
    model = GPT(CASE)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.02 * torch.randn(param.shape))
    return model.to(DEVICE)


def batch(step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Returns tokens and labels of one rank in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (2, CASE.batch, CASE.seq)
    return torch.randint(0, CASE.vocab, shape, generator=generator).to(DEVICE).unbind(0)


def make_optimizer(params: object) -> torch.optim.Optimizer:
    """Returns SGD: its update is linear in the gradients, so it does not amplify errors."""
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)  # pyright: ignore[reportArgumentType]


def train_alone(dtype: torch.dtype, world_size: int) -> dict[str, torch.Tensor]:
    """Trains as `world_size` ranks would, without fullshard, and returns the parameters."""
    master, compute = build(), build().to(dtype)
    pairs = list(zip(master.parameters(), compute.parameters(), strict=True))
    optimizer = make_optimizer(master.parameters())
    for step in range(NUM_STEPS):
        for whole, cast in pairs:
            cast.data.copy_(whole.data)
            whole.grad = torch.zeros_like(whole)
        for rank in range(world_size):
            compute(*batch(step, rank)).backward()
            for whole, cast in pairs:
                assert whole.grad is not None
                assert cast.grad is not None
                whole.grad += cast.grad.float() / world_size
                cast.grad = None
        nn.utils.clip_grad_norm_(master.parameters(), MAX_NORM)
        optimizer.step()
    return {name: param.detach() for name, param in master.named_parameters()}


def train_sharded(dtype: str, strategy: str, **more: object) -> dict[str, torch.Tensor]:
    """Trains on this group's ranks, under poison, and returns the whole parameters."""
    settings = {"strategy": strategy, "param_dtype": dtype, "poison": True, **more}
    model = fs.shard(build(), wrap=["Block"], **settings)
    optimizer = make_optimizer(model.parameters())
    for step in range(NUM_STEPS):
        model(*batch(step, dist.get_rank())).backward()
        fs.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.full_tensor() for name, param in model.named_parameters()}


def check_parity(dtype: str, strategy: str, **more: object) -> None:
    """Checks that parameters are updated as in one process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    start = dict(build().named_parameters())
    wanted = train_alone(DTYPES[dtype], dist.get_world_size())
    found = train_sharded(dtype, strategy, **more)
    assert found.keys() == wanted.keys()
    for name in wanted:
        moved = (wanted[name] - start[name]).norm()
        error = (found[name] - wanted[name]).norm()
        assert moved > 0, name
        assert error <= TOLERANCES[dtype] * moved, (name, float(error), float(moved))


def check_memory(dtype: str, strategy: str) -> str:
    """Checks that a model allocates what the plan lists, no more in later steps, and frees it."""
    _train_and_measure(dtype, strategy)  # libraries have allocated their memory by now
    before = _allocated()
    now, planned, peaks = _train_and_measure(dtype, strategy)
    assert planned <= now - before <= planned + SLACK_BYTES, (now - before, planned)
    assert len(set(peaks)) == 1, peaks
    assert _allocated() - before <= SLACK_BYTES, "a discarded model's memory was not freed"
    held = (planned, now - before, torch.cuda.max_memory_reserved())
    return "planned {:.1f} MiB, taken {:.1f}, reserved at most {:.1f}".format(
        *(size / 2**20 for size in held)
    )


def _allocated() -> int:
    """Returns the bytes that tensors requested; the allocator rounds large ones up by 1 MiB."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def _train_and_measure(dtype: str, strategy: str) -> tuple[int, int, list[int]]:
    model = fs.shard(build(), strategy=strategy, wrap=["Block"], param_dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    peaks = []
    for step in range(6):
        torch.cuda.reset_peak_memory_stats()
        model(*batch(0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        if step >= 3:  # the order of units is learned, and the optimizer has its states
            peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    return _allocated(), engine_of(model).plan.peak_bytes["device"], peaks


def check_events(dtype: str, strategy: str) -> None:
    """Checks that the events of a step are those of the plan."""
    model = fs.shard(build(), strategy=strategy, wrap=["Block"], param_dtype=dtype)
    for step in range(3):
        model(*batch(step, dist.get_rank())).backward()
    assert_planned_events(model, 2)


def check_symmetric(dtype: str, strategy: str) -> None:
    """Checks that results with symmetric memory are bit-identical (at most two ranks)."""
    wanted = train_sharded(dtype, strategy)
    found = train_sharded(dtype, strategy, symmetric_memory=True)
    for name, param in wanted.items():
        assert torch.equal(found[name], param), name


CHECKS: dict[str, Callable[[str, str], object]] = {
    "parity": check_parity,
    "memory": check_memory,
    "events": check_events,
    "symmetric": check_symmetric,
}
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")


def main() -> None:
    """Runs every check on one rank."""
    rendezvous.init_process_group()
    try:
        for name, check in CHECKS.items():
            for dtype in DTYPES:
                for strategy in STRATEGIES:
                    try:
                        check(dtype, strategy)
                    except AssertionError as error:
                        raise AssertionError(f"{name}, {dtype}, {strategy}: {error}") from error
    finally:
        rendezvous.shutdown()


if __name__ == "__main__":
    main()
