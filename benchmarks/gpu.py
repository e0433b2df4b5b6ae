"""`python -m benchmarks.gpu`: one GPU runs rank 0 of 8 or 64, with blocks of Llama 3 8B.

Nothing is sent: a collective takes the time of a simulated wire, on its own stream. One GPU thus
measures the engine's overhead over plain compute: copy kernels, waits, memory and host time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

import fullshard as fs
from benchmarks.command import JsonFlag, command_line, run_script
from benchmarks.delay import delayed, wire_of
from benchmarks.host import OURS, PLAIN, REFERENCE, fake_group
from benchmarks.llama import LLAMA, TINY, Llama, LlamaBlock, Shape, build
from fullshard.bench.calibrate import IdleTransport, make_idle
from fullshard.bench.measurement import Estimate, Neighbours, Page, Say, paired_ratio
from fullshard.cli.bench import OutFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.engine.engine import engine_of
from fullshard.launch.machine import describe_machine
from fullshard.transport.base import Reduction, Works

NAME = "benchmarks.gpu"
ENGINES = (PLAIN, OURS, REFERENCE)
WIRES = {8: (20e-6, 400e9), 64: (40e-6, 50e9)}  # ranks: latency, bytes/s of one rank (NVLink, IB)
NUM_WARM, MIB = 3, 1 << 20
COLUMNS = (
    "ranks",
    "engine",
    "step, ms",
    "of plain",
    "of FSDP2",
    "host, ms",
    "allocated, MiB",
    "reserved, MiB",
    "copies",
    "copying, ms",
)
METHOD = (
    "One process is rank 0 of a fake world. Blocks have the shape of Llama 3 8B's (RMSNorm, "
    "grouped queries, SwiGLU; no rotary embedding), masters are float32, compute is bf16, "
    "gradients are reduced in float32. Plain is the same blocks in bf16, unsharded. A step is "
    "forward and backward; the optimizer, whose work is 1/ranks of plain's, is left out.",
    "Every collective takes latency + bytes / bandwidth on a stream of its own, gathers and "
    f"reductions apart: {WIRES}. FSDP2 gets the same wires through its own interface for custom "
    "collectives, and explicit prefetch of the next block in both directions.",
    "A collective also writes what it would receive, the same data from every rank, on the wire's "
    "stream. Both engines keep the last block gathered for its backward. Engines take their steps "
    "in turn; ratios are medians over the rounds with a 95 % bootstrap interval. Step is a median, "
    "each step waited for; host is how long the process took to queue one. Memory is the peak of "
    "steps of an engine alone; copies are kernels whose names speak of copy or cat, of one step "
    "under the profiler, those of the wires included.",
)
NO_GPU = "torch sees no CUDA device here, so nothing was measured."


class _AlikeTransport(IdleTransport):
    """Gathers from ranks with equal shards; with zeros, the GPU would use less power."""

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Works:  # noqa: ARG002
        for full in fulls:
            _repeat(full.view(self.axes.mesh.shard, -1))
        return Works(())

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        for full in fulls:  # the part that a reduce-scatter receives
            parts = full.view(self.axes.mesh.shard, -1)
            parts[0].copy_(parts[1])
        return super().reduce(fulls)


def _repeat(parts: torch.Tensor) -> None:
    """Copies the first row, (numel,), into all other ones."""
    parts[1:].copy_(parts[:1].expand_as(parts[1:]))


def shard_ours(model: Llama, world: int) -> nn.Module:
    """Shards over a simulated world with delayed messages."""
    fs.shard(
        model, transport="fake", shard=world, wrap=[LlamaBlock.__name__], param_dtype="bfloat16"
    )
    engine = engine_of(model)
    make_idle(engine, _AlikeTransport)
    delayed(engine, *WIRES[world])
    return model


class _Wired:
    """Replaces a collective of FSDP2: takes the time of a wire and writes the same bytes."""

    def __init__(self, wire: Any, world: int) -> None:
        self._wire, self._world = wire, world

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, *_: Any, **__: Any) -> None:
        def move() -> None:
            if output_tensor.numel() < input_tensor.numel():  # a reduce-scatter
                parts = input_tensor.view(self._world, -1)
                output_tensor.copy_(parts[0].view_as(output_tensor))
                return
            parts = output_tensor.view(self._world, -1)
            if parts.data_ptr() != input_tensor.data_ptr():
                parts[0].copy_(input_tensor.view(-1))
            _repeat(parts)

        most = max(output_tensor.nbytes, input_tensor.nbytes)
        self._wire.carry(most * (self._world - 1) // self._world, move)[1].wait()


def shard_fsdp2(model: Llama, world: int) -> nn.Module:
    """Applies torch's fully_shard to every block and the root, with the same wires."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (world,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks: list[Any] = list(model)
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": mixed}
    modules = [fully_shard(block, **given) for block in blocks[:-1]]
    # Backward begins with this block, so it stays gathered, as with our engine.
    modules.append(fully_shard(blocks[-1], reshard_after_forward=False, **given))
    modules.append(fully_shard(model, **given))
    gathers, reductions = (_Wired(wire_of(device, *WIRES[world]), world) for _ in range(2))
    for module in modules:
        module.set_custom_all_gather(gathers)  # pyright: ignore[reportArgumentType]
        module.set_custom_reduce_scatter(reductions)  # pyright: ignore[reportArgumentType]
    for block, after in pairwise(blocks):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])
    return model


def make(name: str, shape: Shape, world: int, device: torch.device) -> nn.Module:
    """Builds one engine's model."""
    model = build(shape, device)
    if name == PLAIN:
        return model.to(torch.bfloat16)
    return shard_ours(model, world) if name == OURS else shard_fsdp2(model, world)


class Clock:
    """Measures time and memory of a device; a CPU has no queue and no peak memory."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"

    def wait(self) -> None:
        """Waits for all queued work of the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    @contextmanager
    def peaks(self) -> Iterator[list[int]]:
        """Fills the list with the block's peaks of allocated and reserved bytes."""
        found: list[int] = []
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield found
        if self.is_cuda:
            found += torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def copies(self, step: Callable[[], object]) -> tuple[int, float]:
        """Returns the number of copy kernels in a step and their total seconds."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.is_cuda
        with profile(activities=activities) as profiler:
            step()
            self.wait()
        kind = DeviceType.CUDA if self.is_cuda else DeviceType.CPU
        found = [
            event.time_range.elapsed_us()
            for event in profiler.events() or ()
            if event.device_type == kind and _copies(event.name.lower(), is_cuda=self.is_cuda)
        ]
        return len(found), sum(found) / 1e6


def _copies(name: str, *, is_cuda: bool) -> bool:
    if is_cuda:
        return "copy" in name or "cat" in name.replace("scatter", "")
    return name in ("aten::copy_", "aten::cat", "fsdp::chunk_cat", "fsdp::split_with_sizes_copy")


class Training:
    """Steps of one engine's model: forward and backward."""

    def __init__(self, name: str, shape: Shape, world: int, device: torch.device) -> None:
        self.model = make(name, shape, world, device)
        x = torch.randn(shape.batch, shape.seq, shape.width, device=device)
        self._x = x.to(torch.bfloat16).requires_grad_()

    def step(self) -> float:
        """Runs one step; returns how long the process took to queue it, s."""
        start = time.perf_counter()
        self.model(self._x).backward()
        host_s = time.perf_counter() - start
        self.model.zero_grad()
        return host_s


def measure_alone(training: Training, clock: Clock) -> dict[str, Any]:
    """Returns the memory and the copies of an engine's steps."""
    for _ in range(NUM_WARM):
        training.step()
    clock.wait()
    with clock.peaks() as peaks:
        for _ in range(NUM_WARM):
            training.step()
        clock.wait()
    num_copies, copy_s = clock.copies(training.step)
    return {
        "peak_allocated_bytes": peaks[0] if peaks else None,
        "peak_reserved_bytes": peaks[1] if peaks else None,
        "num_copies": num_copies,
        "copy_s": copy_s,
    }


def time_in_turns(
    trainings: Sequence[Training], clock: Clock, num_rounds: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Returns the seconds of steps and the seconds to queue them, by engine and round.

    Engines run their steps in turn, because a GPU becomes slower as it warms up.
    """
    times, hosts = ([[] for _ in trainings] for _ in range(2))
    for at in range(-NUM_WARM, num_rounds):
        for training, took, queued in zip(trainings, times, hosts, strict=True):
            start = time.perf_counter()
            host_s = training.step()
            clock.wait()
            if at >= 0:
                took.append(time.perf_counter() - start)
                queued.append(host_s)
    return times, hosts


def measure(
    shape: Shape, world: int, num_rounds: int, device: torch.device, say: Say
) -> list[dict]:
    """Measures every engine alone, then all in turn; returns their rows."""
    clock = Clock(device)
    rows: list[dict[str, Any]] = []
    for name in ENGINES:
        say(f"{name} as rank 0 of {world}")
        rows.append({"name": name, "world_size": world})
        rows[-1] |= measure_alone(Training(name, shape, world, device), clock)
        gc.collect()
    say(f"all in turn as rank 0 of {world}")
    trainings = [Training(name, shape, world, device) for name in ENGINES]
    times, hosts = time_in_turns(trainings, clock, num_rounds)
    for row, took, queued in zip(rows, times, hosts, strict=True):
        row |= {
            "device": torch.cuda.get_device_name() if clock.is_cuda else "cpu",
            "step_s": median(took),
            "host_s": median(queued),
            "ratio_to_plain": paired_ratio(took, times[0]).to_dict(),
            "ratio_to_fsdp2": paired_ratio(took, times[-1]).to_dict(),
        }
    return rows


def run(num_rounds: int, *, tiny: bool, command: str, say: Say) -> Page:
    """Measures all engines in both worlds; without a GPU only tiny shapes run, on the CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    absent = {} if tiny or device.type == "cuda" else {"gpu": NO_GPU}
    with Neighbours() as neighbours:
        for world in () if absent else WIRES:
            with fake_group(world):
                rows += measure(TINY if tiny else LLAMA, world, num_rounds, device, say)
                gc.collect()
    notes = ["Tiny shapes: they show that the command runs, and nothing else."] if tiny else []
    title = "Blocks of Llama 3 8B as one rank of many"
    machine = describe_machine()
    if device.type == "cuda":
        machine["accelerators"] = torch.cuda.get_device_name()
    return Page(
        "gpu",
        title,
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        neighbours,
        absent=absent,
        notes=notes,
        machine=machine,
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    peaks = (row["peak_allocated_bytes"], row["peak_reserved_bytes"])
    return (
        str(row["world_size"]),
        row["name"],
        f"{row['step_s'] * 1e3:.1f}",
        *(str(Estimate(**row[key])) for key in ("ratio_to_plain", "ratio_to_fsdp2")),
        f"{row['host_s'] * 1e3:.1f}",
        *("" if peak is None else f"{peak / MIB:.0f}" for peak in peaks),
        str(row["num_copies"]),
        f"{row['copy_s'] * 1e3:.2f}",
    )


def main(
    tiny: Annotated[bool, typer.Option("--tiny", help="Small blocks; runs on CPUs.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps per engine.")] = 15,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Measure blocks of Llama 3 8B on one GPU as rank 0 of 8 and 64, ours and FSDP2."""
    return show(run(rounds, tiny=tiny, command=command_line(NAME), say=say), out)


if __name__ == "__main__":
    run_script(NAME)
