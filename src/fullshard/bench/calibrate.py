"""`fullshard bench calibrate`: measures the speed of this machine, for `fullshard plan` to use.

Ranks measure kernels, messages, and the host time of tiny models. Kernels run as they do in a step:
one after another, each reading the result of the one before it, with operands that left the caches,
and writing memory that is freed only at the end. Times are processor time of the thread, which
other processes lengthen far less than wall time.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fullshard as fs
from fullshard.bench.comm import TimedExchange, plan_buffer, resolve
from fullshard.bench.measurement import Neighbours, Say, run_ranks, timed
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig
from fullshard.engine.engine import Engine, engine_of
from fullshard.errors import ConfigError
from fullshard.launch.machine import describe_machine, describe_versions, num_visible_accelerators
from fullshard.models.build import build_sharded, given_model_config
from fullshard.models.config import build_model
from fullshard.outlook.devices import Calibration, Ceilings, HostOverhead, Point, Table, to_json
from fullshard.planner.mesh import Mesh
from fullshard.planner.plan import Plan
from fullshard.planner.tracing import Work
from fullshard.recipes.base import causal_lm_loss
from fullshard.run.optim import build_optimizer
from fullshard.transport.base import Axes, FakeTransport, Reduction, Works
from fullshard.transport.groups import make_transport

KIB, MIB = 1 << 10, 1 << 20
HELD_BYTES = 48 * MIB  # results of one repetition
OPERAND_BYTES = 24 * MIB  # operands that are read in turn
MOST_CALLS = 40
ROW, SHORT, HEADS, VOCABULARY = 256, 32, 8, 2048  # elements of rows and short rows; heads; words

Step = Callable[[Any, int], Any]  # (the previous result, number of the call) -> the result
Tables = dict[str, list[Point]]


@dataclass(frozen=True)
class Sizes:
    """Which sizes are measured, and how often.

    Attributes:
        num_rounds: Repetitions, of which the median counts.
        bytes: Bytes that an elementwise operation reads and writes.
        dims: Rows, inner dimension and columns of matmuls.
        lengths, widths: Sequence lengths and head widths of attention.
        updates: Parameters that are updated at once.
        transfers: Bytes of buffers that ranks exchange.
        most_flops: Limit per matmul; larger ones are measured on a part of their rows.
    """

    num_rounds: int = 5
    bytes: tuple[int, ...] = (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB)
    dims: tuple[int, ...] = (32, 128, 512, 2048)
    lengths: tuple[int, ...] = (64, 256, 1024)
    widths: tuple[int, ...] = (16, 64, 128)
    updates: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23)
    transfers: tuple[int, ...] = (64 * KIB, MIB, 8 * MIB, 32 * MIB)
    most_flops: float = 2e9


TINY = Sizes(
    num_rounds=1,
    bytes=(4 * KIB, 64 * KIB),
    dims=(32, 64),
    lengths=(32, 64),
    widths=(16,),
    updates=(1 << 10, 1 << 14),
    transfers=(64 * KIB, 256 * KIB),
)


@dataclass(frozen=True)
class KernelTimer:
    """Measures tables of kernels.

    Attributes:
        sizes: Which sizes.
        meet: Barrier before every repetition, so that all ranks begin together.
    """

    sizes: Sizes
    meet: Callable[[], Any]

    def tables(self, dtype: torch.dtype) -> Tables:
        """Every kind of operation in a dtype."""
        return {**self.products(dtype), **self.attentions(dtype), **self.passes(dtype)}

    def products(self, dtype: torch.dtype) -> Tables:
        """Every combination of three dimensions, with either factor transposed."""
        dims = self.sizes.dims
        sizes = [(rows, inner, columns) for rows in dims for inner in dims for columns in dims]
        return {
            f"matmul {layout}": [(size, self._product(layout, size, dtype)) for size in sizes]
            for layout in ("nn", "nt", "tn")
        }

    def _product(self, layout: str, size: tuple[int, int, int], dtype: torch.dtype) -> float:
        rows, inner, columns = size
        part = min(1.0, self.sizes.most_flops / (2 * prod(size)))
        rows = max(1, round(rows * part))

        def left() -> torch.Tensor:
            return torch.randn(inner, rows).t() if layout == "tn" else torch.randn(rows, inner)

        def right() -> torch.Tensor:
            flipped = layout == "nt"
            return torch.randn(columns, inner).t() if flipped else torch.randn(inner, columns)

        lefts, rights = _operands(lambda: left().to(dtype)), _operands(lambda: right().to(dtype))
        outs = _operands(lambda: torch.empty(rows, columns, dtype=dtype))
        writes = layout == "tn"  # gradients of weights are written into their slots

        def step(_: Any, at: int) -> Any:
            a, b = lefts[at % len(lefts)], rights[at % len(rights)]
            return torch.mm(a, b, out=outs[at % len(outs)]) if writes else a.mm(b)

        calls = max(2, min(MOST_CALLS, int(4e8 / (2 * prod((rows, inner, columns))))))
        held = _calls(rows * columns * dtype.itemsize)
        return self._seconds(step, None, min(calls, held)) / part

    def attentions(self, dtype: torch.dtype) -> Tables:
        """The fused kernel for one head, forward and backward."""
        found: Tables = {}
        for is_causal in (False, True):
            name = "attention causal" if is_causal else "attention"
            for length in self.sizes.lengths:
                for width in self.sizes.widths:
                    steps = _attention(length, width, dtype, is_causal=is_causal)
                    calls = max(2, min(10, int(2e8 / (4 * HEADS * length * length * width))))
                    for kind, step in zip((name, f"{name} backward"), steps, strict=True):
                        seconds = self._seconds(step, None, calls) / HEADS
                        found.setdefault(kind, []).append(((length * length, width), seconds))
        return found

    def passes(self, dtype: torch.dtype) -> Tables:
        """Everything that is bound by memory, by bytes read and written."""
        found: Tables = {}
        for num_bytes in self.sizes.bytes:
            numel = num_bytes // (2 * dtype.itemsize)
            for kind, width, first, step in _passes(numel, dtype):
                seconds = self._seconds(step, first, _calls(numel * dtype.itemsize))
                # All kinds have the same sizes, so that one can replace a missing one.
                found.setdefault(kind, []).append(((numel * width,), seconds))
        return found

    def updates(self) -> list[Point]:
        """Fused AdamW over four parameters."""
        found: list[Point] = []
        for numel in self.sizes.updates:
            params = [torch.randn(numel // 4).requires_grad_() for _ in range(4)]
            optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
            for param in params:
                param.grad = torch.randn(numel // 4)

            def step(_: Any, __: int, update: Any = optimizer.step) -> None:
                update()

            calls = max(1, min(10, (1 << 20) // numel))
            found.append(((numel,), self._seconds(step, None, calls)))
        return found

    def _seconds(self, step: Step, first: Any, num_calls: int) -> float:
        """Processor seconds per call: the median of the repetitions."""
        found = []
        for turn in range(-1, self.sizes.num_rounds):
            self.meet()
            start = time.thread_time()
            held = [first]
            for at in range(num_calls):
                held.append(step(held[-1], at))
            del held
            if turn >= 0:
                found.append((time.thread_time() - start) / num_calls)
        return median(found)


def _calls(num_bytes: int) -> int:
    return max(2, min(MOST_CALLS, HELD_BYTES // num_bytes))


def _operands(make: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    first = make()
    count = max(1, min(MOST_CALLS, OPERAND_BYTES // max(1, first.nbytes)))
    return [first, *(make() for _ in range(count - 1))]


def _attention(
    length: int, width: int, dtype: torch.dtype, *, is_causal: bool
) -> tuple[Step, Step]:
    """Forward and backward, laid out as in a model: a token's heads are neighbours in memory."""
    aten: Any = torch.ops.aten

    def heads() -> torch.Tensor:
        return torch.randn(1, length, HEADS, width).to(dtype).transpose(1, 2)

    queries, keys, values = (_operands(heads)[:4] for _ in range(3))
    options = (0.0, is_causal)

    def forward(_: Any, at: int) -> Any:
        at %= len(queries)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            queries[at], keys[at], values[at], *options
        )

    made = [forward(None, at) for at in range(len(queries))]
    gradient = heads()

    def backward(_: Any, at: int) -> Any:
        at %= len(queries)
        out, sums = made[at][:2]
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, queries[at], keys[at], values[at], out, sums, *options
        )

    return forward, backward


def _passes(numel: int, dtype: torch.dtype) -> Iterator[tuple[str, int, torch.Tensor, Step]]:
    """(kind, bytes read and written per element, the first input, the step)."""
    size = dtype.itemsize
    rows = max(1, numel // ROW)
    x = torch.randn(rows, ROW).to(dtype)
    others = _operands(lambda: torch.randn(rows, ROW).to(dtype))
    aten: Any = torch.ops.aten
    weight, bias = torch.ones(ROW, dtype=dtype), torch.zeros(ROW, dtype=dtype)

    def of(at: int) -> torch.Tensor:
        return others[at % len(others)]

    # Half of the data that is read was just written, as in a forward and a backward.
    yield "add", 3 * size, x, lambda y, at: (y if at % 2 else of(at + 1)) + of(at)
    yield "copy", 2 * size, x, lambda y, at: (y if at % 2 else of(at)).clone()
    yield "fill", size, x, lambda y, _: torch.zeros_like(y)
    yield "exp", 2 * size, x, lambda y, _: torch.tanh(y)
    yield "silu", 2 * size, x, lambda y, _: F.silu(y)
    yield "silu_backward", 3 * size, x, lambda y, at: aten.silu_backward(y, of(at))
    yield "gelu", 2 * size, x, lambda y, _: F.gelu(y)
    yield "gelu_backward", 3 * size, x, lambda y, at: aten.gelu_backward(y, of(at))
    yield "sum", size, x, lambda _, at: of(at).mean(-1, keepdim=True)
    yield "sum columns", size, x, lambda _, at: of(at).sum(0)
    yield "norm", size, x, lambda _, at: torch.linalg.vector_norm(of(at))

    def normed(y: torch.Tensor) -> Any:
        return aten.native_layer_norm(y, [ROW], weight, bias, 1e-5)

    _, mean, scale = normed(x)
    yield "native_layer_norm", 2 * size, x, lambda y, _: normed(y)[0]
    yield (
        *("native_layer_norm_backward", 3 * size, x),
        lambda y, at: aten.native_layer_norm_backward(
            y, of(at), [ROW], mean, scale, weight, bias, [True, True, True]
        )[0],
    )
    yield from _row_passes(numel, dtype)


def _row_passes(numel: int, dtype: torch.dtype) -> Iterator[tuple[str, int, torch.Tensor, Step]]:
    """The same for operations on rows of other lengths."""
    size, aten = dtype.itemsize, torch.ops.aten
    softmax: Any = aten._softmax
    softmax_back: Any = aten._softmax_backward_data
    log_softmax: Any = aten._log_softmax
    log_softmax_back: Any = aten._log_softmax_backward_data
    x = torch.randn(max(1, numel // ROW), ROW).to(dtype)
    p = softmax(x, -1, False)
    yield "softmax", 2 * size, x, lambda y, _: softmax(y, -1, False)
    yield "softmax_backward_data", 3 * size, x, lambda y, _: softmax_back(y, p, -1, dtype)
    x = torch.randn(max(1, numel // VOCABULARY), min(numel, VOCABULARY)).to(dtype)
    logs = log_softmax(x, -1, False)
    yield "log_softmax", 2 * size, x, lambda y, _: log_softmax(y, -1, False)
    yield (
        *("log_softmax_backward_data", 3 * size, x),
        lambda y, _: log_softmax_back(y, logs, -1, dtype),
    )
    count = max(1, numel // ROW)
    table = torch.randn(VOCABULARY, ROW).to(dtype)
    ids = torch.randint(VOCABULARY, (count,))
    few = ids % HEADS  # few rows to fill, because the additions are measured
    grad = torch.randn(count, ROW).to(dtype)
    back: Any = aten.embedding_dense_backward
    yield "embedding", size, x, lambda _, __: F.embedding(ids, table)
    yield "embedding_dense_backward", size, x, lambda _, __: back(grad, few, HEADS, -1, False)
    pairs = _operands(lambda: torch.randn(max(1, numel // SHORT), 2 * SHORT).to(dtype))

    def halves(at: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = pairs[at % len(pairs)]
        return both[:, :SHORT], both[:, SHORT:]

    yield "add rows", 2 * size, x, lambda _, at: -halves(at)[0]
    yield "copy rows", 4 * size, x, lambda _, at: torch.cat(halves(at)[::-1], -1)


DEFAULT_RANKS = (1, 2, 4)
DEPTHS = (2, 6)  # blocks of the tiny models that show the host's time
DTYPES = (torch.float32, torch.bfloat16)
SETTLED = 256  # numbers in the reduction that ends a backward: about two per parameter
WARM_UP, HOST_STEPS = 5, 40


@dataclass(frozen=True)
class CalibrationJob:
    """The job of the ranks.

    Attributes:
        is_tiny: Measure few small sizes, as a test of the command.
        has_kernels: Measure kernels and the host too, not only messages.
    """

    is_tiny: bool = False
    has_kernels: bool = True


# ---- on a rank -----------------------------------------------------------------------------------


def measure(job: CalibrationJob) -> dict[str, Any]:
    """Returns the tables of this rank, and the seconds of tiny models."""
    sizes = TINY if job.is_tiny else Sizes()
    found: dict[str, Any] = {"transfers": transfers(sizes)}
    if job.has_kernels:
        found |= {"operations": operations(sizes), "host": host_seconds()}
    return found


def operations(sizes: Sizes) -> Tables:
    """Returns tables of operations by kind and dtype."""
    timer = KernelTimer(sizes, dist.barrier)
    found: Tables = {}
    with torch.no_grad():
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            found |= {f"{kind} {name}": points for kind, points in timer.tables(dtype).items()}
            gc.collect()
    found["update float32"] = timer.updates()
    return found


def transfers(sizes: Sizes) -> Tables:
    """Returns tables of each transport's messages: wall seconds, and with "cpu" processor ones."""
    world = dist.get_world_size()
    found: Tables = {}
    if world == 1:
        return found

    def note(name: str, num_bytes: int, work: Callable[[], Any]) -> None:
        turns = [timed(work) for _ in range(-2, sizes.num_rounds)]  # two to warm up
        wall_s, cpu_s = map(median, zip(*turns[2:], strict=True))
        found.setdefault(name, []).append(((num_bytes,), wall_s))
        found.setdefault(f"{name} cpu", []).append(((num_bytes,), max(cpu_s, 1e-9)))

    for name in ("direct", "shared", "c10d"):
        try:
            config = resolve(name, world)
        except ConfigError:  # not on this system
            continue
        for num_bytes in sizes.transfers:
            plan = plan_buffer(num_bytes, config, world)
            exchange = TimedExchange(make_transport(config, Mesh(1, world)), plan)
            note(f"{name} fetch", num_bytes, exchange.fetch)
            note(f"{name} reduce", num_bytes, exchange.reduce)
        transport = make_transport(config, Mesh(1, world))
        few = torch.ones(SETTLED, dtype=torch.float64)
        note(f"{name} settle", few.nbytes, lambda t=transport, v=few: t.all_reduce(v))
    replicas = make_transport(resolve("direct", world), Mesh(world, 1))
    for num_bytes in sizes.transfers:
        values = torch.ones(num_bytes // 4)
        note("direct replicas", num_bytes, lambda v=values: list(replicas.sum_replicas(v)))
    return found


def host_seconds() -> dict[str, float]:
    """Returns processor seconds of a tiny model's passes without an engine, and of sharded steps.

    The keys are `forward`, `backward`, and `step N` for the model of N blocks.
    """
    config = host_config(DEPTHS[-1])
    ids = torch.randint(given_model_config(config).vocab_size, (1, config.training.max_seq_length))
    model = build_model(given_model_config(config), None, torch.float32, 0)
    forward_s, backward_s = _median_laps(lambda lap: _plain_step(model, ids, lap), 2)
    found = {"forward": forward_s, "backward": backward_s}
    for depth in DEPTHS:
        (found[f"step {depth}"],) = _median_laps(_sharded_step(host_config(depth), ids), 1)
    return found


def _median_laps(step: Callable[[Callable[[], None]], None], count: int) -> list[float]:
    """Median processor seconds of each part of a step, which calls its argument after each part."""
    laps: list[list[float]] = []
    for _ in range(WARM_UP + HOST_STEPS):
        clock = [time.thread_time()]
        step(lambda clock=clock: clock.append(time.thread_time()))
        laps.append([end - start for start, end in pairwise(clock)])
    return [median(lap[at] for lap in laps[WARM_UP:]) for at in range(count)]


def _plain_step(model: nn.Module, ids: torch.Tensor, lap: Callable[[], None]) -> None:
    loss, _ = causal_lm_loss(model(input_ids=ids, use_cache=False).logits, ids)
    lap()
    loss.backward()
    lap()
    model.zero_grad()


def _sharded_step(config: RunConfig, ids: torch.Tensor) -> Callable[[Callable[[], None]], None]:
    """Returns a whole step, as the training loop runs it; messages cost nothing."""
    model = build_sharded(config, given_model_config(config), torch.device("cpu"))
    make_idle(engine_of(model))
    optimizer = build_optimizer(model, config.training)
    limit = config.training.max_grad_norm or math.inf

    def step(lap: Callable[[], None]) -> None:
        loss, count = causal_lm_loss(model(input_ids=ids, use_cache=False).logits, ids)
        (loss * (1 / count)).backward()
        fs.clip_grad_norm_(model, limit)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        lap()

    return step


class IdleTransport(FakeTransport):
    """Messages that cost nothing; a fake transport's cost grows with the number of peers."""

    def fetch(self, fulls: Sequence[torch.Tensor], unit: str = "") -> Works:  # noqa: ARG002
        return Works(())

    def reduce(self, fulls: Sequence[torch.Tensor]) -> Reduction:
        num_parts = self.axes.mesh.shard
        return Reduction(lambda: [[full[: full.numel() // num_parts]] for full in fulls])


def make_idle(engine: Engine, kind: type[IdleTransport] = IdleTransport) -> None:
    """Makes the engine's messages cost nothing, so that a step shows the engine's own time."""
    mesh = engine.plan.mesh
    transport = kind(Axes(mesh, 0, tuple(range(mesh.shard)), (0,)))
    for owner in (engine, engine.gradients, *engine.units):
        owner.transport = transport
    engine.transports.update(dict.fromkeys(engine.transports, transport))


# ---- the command ---------------------------------------------------------------------------------


def run(
    ranks: Sequence[int], *, is_tiny: bool, wait: bool, timeout_s: float, say: Say
) -> tuple[Calibration, Neighbours]:
    """Measures with every number of ranks.

    Returns:
        The calibration, and how busy other processes kept the machine.

    Raises:
        ConfigError: There is a GPU.
        FullshardError: A rank failed; its own error has been shown.
    """
    if count := num_visible_accelerators():
        raise ConfigError(
            f"bench calibrate: expected no GPU, because it measures processors; got {count}, which "
            "`fullshard plan` knows from its table. CUDA_VISIBLE_DEVICES= hides them."
        )
    machine = describe_machine()
    cores = Calibration(machine, {}).cores
    at_work = sorted({min(num_ranks, cores) for num_ranks in ranks})
    found: dict[int, Ceilings] = {}
    with Neighbours(wait=wait, say=say) as neighbours:
        for num_ranks in [*at_work, *sorted(set(ranks) - set(at_work))]:
            has_kernels = num_ranks in at_work
            say(f"{num_ranks} rank(s): {'kernels, the host, ' * has_kernels}messages")
            job, what = CalibrationJob(is_tiny, has_kernels), f"bench calibrate: {num_ranks} ranks"
            measured = run_ranks(
                f"{__name__}:measure", job, num_ranks, what=what, timeout_s=timeout_s
            )
            if has_kernels:
                found[num_ranks] = _ceilings(num_ranks, measured, machine)
            else:
                messages = _tables([rank["transfers"] for rank in measured])
                found[num_ranks] = crowded(found[cores], num_ranks, messages)
    hosts = {num_ranks: found[num_ranks] for num_ranks in dict.fromkeys(ranks)}
    return Calibration(machine, hosts), neighbours


def file_text(calibration: Calibration, neighbours: Neighbours, command: str) -> str:
    """Returns the file that `fullshard plan` reads."""
    about = {
        "versions": describe_versions(("fullshard", "torch")),
        "others_share": round(neighbours.share, 3),
        "command": command,
    }
    return to_json(calibration, about)


def to_dict(calibration: Calibration, neighbours: Neighbours) -> dict[str, object]:
    """Returns what `--json` prints: the highest rate of matmuls, and the host's times."""
    rows = [
        {
            "num_ranks": num_ranks,
            **{f"matmul_{dtype}_flops": _best(found, dtype) for dtype in ("float32", "bfloat16")},
            **{f"host_{name}": getattr(found.host, name) for name in HostOverhead.__slots__},
        }
        for num_ranks, found in calibration.hosts.items()
    ]
    return {"rows": rows, "absent": [], "others_share": neighbours.share}


def _best(found: Ceilings, dtype: str) -> float:
    points = found.operations[f"matmul nn {dtype}"].points
    return max(2 * math.prod(size) / seconds for size, seconds in points)


def summary(calibration: Calibration, neighbours: Neighbours) -> str:
    """Returns the same in a few lines."""
    lines = [
        f"{num_ranks} rank(s), each: matmuls at {_best(found, 'float32') / 1e9:.1f} (float32) and "
        f"{_best(found, 'bfloat16') / 1e9:.1f} (bfloat16) GFLOP/s; overhead of the host "
        f"{1e6 * found.host.forward_s:.1f} us per forward operation, "
        f"{1e6 * found.host.backward_s:.1f} us per backward operation, "
        f"{1e6 * found.host.unit_s:.0f} us per unit"
        for num_ranks, found in calibration.hosts.items()
    ]
    return "\n".join([*lines, str(neighbours)])


def crowded(whole: Ceilings, num_ranks: int, messages: Mapping[str, Table]) -> Ceilings:
    """Returns the ceilings of more ranks than cores, which take turns on the cores.

    Args:
        whole: Measured with one rank per core.
        num_ranks: Number of ranks, above the number of cores.
        messages: Tables measured with this number of ranks.
    """
    crowd = num_ranks / whole.num_ranks
    tables = {
        name: Table(tuple((size, crowd * seconds) for size, seconds in table.points))
        for name, table in whole.operations.items()
    }
    host = HostOverhead(
        **{name: crowd * getattr(whole.host, name) for name in HostOverhead.__slots__}
    )
    return Ceilings(num_ranks, tables, messages, host)


def _ceilings(
    num_ranks: int, ranks: Sequence[dict[str, Any]], machine: Mapping[str, object]
) -> Ceilings:
    kernels, messages = (
        _tables([rank[kind] for rank in ranks]) for kind in ("operations", "transfers")
    )
    host = {name: fmean(rank["host"][name] for rank in ranks) for name in ranks[0]["host"]}
    bare = Ceilings(num_ranks, kernels, messages, HostOverhead())
    return replace(bare, host=host_of(bare, host, machine))


def _tables(ranks: Sequence[Mapping[str, list[Any]]]) -> dict[str, Table]:
    """The mean of the ranks, which are alike; a step waits for the slower one of a moment."""
    return {
        name: Table(
            tuple(
                (tuple(size), fmean(rank[name][at][1] for rank in ranks))
                for at, (size, _) in enumerate(points)
            )
        )
        for name, points in ranks[0].items()
    }


# ---- host time -----------------------------------------------------------------------------------


def host_config(depth: int) -> RunConfig:
    """Returns a Llama whose kernels take nearly no time."""
    model = {
        **{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": depth, "num_attention_heads": 2, "num_key_value_heads": 2},
        "max_position_embeddings": 16,
    }
    words = {
        "model.config": json.dumps(model),
        "sharding.strategy": "full_shard",
        "sharding.transport": "fake",
        "training.per_device_train_batch_size": 1,
        "training.max_seq_length": 16,
    }
    return load_config(None, [f"{key}={value}" for key, value in words.items()]).config


def host_of(
    bare: Ceilings, measured: Mapping[str, float], machine: Mapping[str, object]
) -> HostOverhead:
    """Returns what remains of the tiny models' times after the time of their kernels.

    Args:
        bare: Tables of the kernels, without host times.
        measured: See `host_seconds`.
        machine: Description of the machine.
    """
    from fullshard.outlook.player import step_time

    depths = sorted(int(name.split()[1]) for name in measured if name.startswith("step "))
    _, work = _traced(depths[-1], 1)
    passes = {"forward": 0.0, "backward": 0.0}
    for name in passes:
        found = [getattr(unit, name) for unit in work.values()]
        count = sum(sum(one.values()) for one in found)
        kernels = sum(times * bare.seconds(op) for one in found for op, times in one.items())
        passes[name] = max(0.0, measured[name] - kernels) / count
    host = HostOverhead(passes["forward"], passes["backward"])
    calibration = Calibration(machine, {bare.num_ranks: replace(bare, host=host)})
    left, turns = [], []
    for depth in (depths[0], depths[-1]):
        plan, work = _traced(depth, bare.num_ranks)
        counted = step_time(plan, work, calibration)
        assert counted is not None, "these ranks were measured"
        left.append(measured[f"step {depth}"] - counted[0].step)
        turns.append(2 * len(plan.units))
    unit_s = max(0.0, left[1] - left[0]) / (turns[1] - turns[0])
    return replace(host, unit_s=unit_s, step_s=max(0.0, left[0] - turns[0] * unit_s))


def _traced(depth: int, world_size: int) -> tuple[Plan, Work]:
    """The plan of a tiny model on the ranks of a host, and the operations of its step."""
    from fullshard.outlook.predict import Machine
    from fullshard.run.outlook import look_at

    config = host_config(depth)
    outlook = look_at(config, world_size, Machine(None, None))
    job = outlook.job
    assert job.work is not None, "the model is on meta"
    work = job.work(outlook.plan, config.sharding, job.batch.micro_batch)
    assert work is not None, "a Llama can be traced"
    return outlook.plan, work
