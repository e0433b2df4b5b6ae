"""Forecasts for the rows of a table of training runs, of any framework: `fullshard plan --table`.

A row becomes a `Workload`; its text becomes enums and numbers here. Columns with measured values,
or with the place where a run was published, are dropped first (`DROPPED`). Every predicted number
has an 80 % interval, measured on published runs (`benchmarks/results/planner.md`). The interval is
wider for unusual devices, meshes and formats, and for every assumption that a row needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fullshard.config.regular_files import packaged_table
from fullshard.outlook.constants import FITTED, SPREAD, Constants, Familiarity
from fullshard.outlook.devices import GIGA, Device, find_device
from fullshard.outlook.memory import FULL, GIB, peak_memory
from fullshard.outlook.speed import tokens_per_s
from fullshard.outlook.workload import (
    Batch,
    Compiler,
    Kernels,
    Math,
    Metric,
    Parallelism,
    Precision,
    Shapes,
    Stage,
    Tuning,
    Workload,
    decoder,
)

COLUMNS = (
    *(
        f"pred_{name}{end}"
        for name in ("tokens_per_sec_per_gpu", "step_time_s", "peak_mem_gib")
        for end in ("", "_lo", "_hi")
    ),
    "pred_fits",
    "pred_note",
)
GRAVE = ("device", "model")  # if one of these is assumed, only the order of magnitude is right
TYPICAL_PARAMS = 7e9  # of a model that the row does not describe

_WORDS: dict[str, Any] = packaged_table("fullshard.outlook", "published.yaml")
DROPPED = frozenset(_WORDS["dropped"])
_SPARSE: dict[str, tuple[float, float]] = _WORDS["sparse"]
_BYTES: dict[str, float] = _WORDS["bytes"]
_RECOMPUTE: dict[str, tuple[float, float]] = _WORDS["recompute"]
_RATES = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(tbps|tb/s|gbps|gb/s|gb)\b([^;,]*)")

Row = Mapping[str, str]


# ---- predict -------------------------------------------------------------------------------------


def predict(row: Row, k: Constants = FITTED) -> dict[str, str]:
    """Returns the predictions for one row as text, by COLUMNS.

    For a row that cannot be read the cells are blank and `pred_note` has the reason.
    """
    try:
        run = read_workload(row)
    except ValueError as error:
        return {**dict.fromkeys(COLUMNS, ""), "pred_note": f"not predicted: {error}"}
    speed = tokens_per_s(run, k)
    batch = run.batch.seq_len * run.batch.micro_batch * run.batch.accumulation
    step_s = batch / run.mesh.model_ranks / speed
    held = peak_memory(run, k)
    cells = {
        **_interval("tokens_per_sec_per_gpu", speed, spread(run, "speed")),
        **_interval("step_time_s", step_s, spread(run, "speed")),
        **_interval("peak_mem_gib", held.of(run.metric) / GIB, spread(run, "memory")),
        "pred_fits": str(held.active <= run.device.memory_gib * GIB).lower(),
        "pred_note": f"assumed: {', '.join(run.doubt)}" if run.doubt else "",
    }
    return {name: cells[name] for name in COLUMNS}


def _interval(name: str, value: float, width: float) -> dict[str, str]:
    ends = {"": 0.0, "_lo": -width, "_hi": width}
    return {f"pred_{name}{end}": f"{value * math.exp(by):.6g}" for end, by in ends.items()}


def spread(run: Workload, what: str) -> float:
    """Returns half the width of the interval, of the logarithm.

    Args:
        run: The run.
        what: `speed` or `memory`.
    """
    grave = sum(doubt in GRAVE for doubt in run.doubt)
    return SPREAD[what][familiarity(run, what)] * (1 + 2 * grave)


def familiarity(run: Workload, what: str) -> Familiarity:
    """Returns how similar a run is to those that the constants were fitted to."""
    doubts = set(run.doubt) - ({"activation_checkpointing"} if what == "speed" else set[str]())
    if doubts or (what == "memory" and run.metric is Metric.UNKNOWN):
        return Familiarity.ASSUMED
    usual = run.precision.math is Math.HALF and run.mesh.model_ranks == 1 and not run.offloads
    if what == "speed":
        known = run.device.name in ("A100", "A100-40", "H100")
        usual = usual and known and run.tuning is Tuning.FULL
    return Familiarity.USUAL if usual else Familiarity.UNUSUAL


# ---- read a row ----------------------------------------------------------------------------------


class _Cells:
    """The cells of a row that may be used, and what had to be assumed.

    Attributes:
        doubt: Names of the columns whose values were assumed.
    """

    def __init__(self, row: Row) -> None:
        self._row = {
            key: (value or "").strip() for key, value in row.items() if key and key not in DROPPED
        }
        self.doubt: list[str] = []
        self.strategy = self.text("strategy")

    def raw(self, key: str) -> str:
        """A cell as written; blank if the column is missing."""
        return self._row.get(key, "")

    def text(self, key: str) -> str:
        """A cell in lower case."""
        return self.raw(key).lower()

    def number(self, key: str) -> float | None:
        """A cell as a positive number; None if it is blank.

        Raises:
            ValueError: The cell has something else.
        """
        text = self.raw(key)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"{key}: expected a positive number or nothing, got {text!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int | None:
        """A cell as a whole number from 1; a default is noted as an assumption."""
        value = self.number(key)
        if value is None and default is not None:
            self.doubt.append(key)
        return default if value is None else max(1, round(value))

    def axis(self, name: str) -> int:
        """Size of a mesh axis in the strategy's text, as in `TP=8`; 1 if it is not there."""
        found = re.search(rf"(?<![a-z-]){name}\s*=\s*(\d+)", self.strategy)
        return max(1, int(found[1])) if found else 1


def read_workload(row: Row) -> Workload:
    """Returns the run of a row.

    Raises:
        ValueError: A number cannot be read.
    """
    cells = _Cells(row)
    device = _device(cells)
    shapes, active_params = _shapes(cells)
    if not shapes.num_params and not (shapes.layers and shapes.width and shapes.mlp_width):
        cells.doubt.append("model")
        shapes = replace(shapes, num_params=TYPICAL_PARAMS)
    model = decoder(shapes, active_params)
    cells.doubt += ["shapes"] * model.is_guessed + ["experts"] * model.is_sparse
    strategy, optimizer = cells.strategy, cells.text("optimizer")
    world = cells.count("gpus", 8) or 8
    domain = _domain(cells, device, world)
    mesh, sharding = _mesh(cells, world, domain)
    kernels = _kernels(cells, device)
    tuning = Tuning(_meaning("tunings", strategy))
    metric = Metric(_meaning("metrics", cells.text("mem_metric")))
    run = Workload(
        model=model,
        device=device,
        mesh=mesh,
        sharding=sharding,
        batch=_batch(cells, mesh),
        precision=_precision(cells, device, tuning),
        state_bytes=_meaning("states", optimizer),
        updates_in_backward="in-bwd" in optimizer or "in-backward" in optimizer,
        kernels=kernels,
        tuning=tuning,
        metric=metric,
        fabric=_fabric(cells.text("interconnect"), device, domain),
        domain=domain,
        offloads="offload" in strategy or "(cpu)" in optimizer,
        reshards="shard_grad_op" not in strategy and "zero-2" not in strategy,
        saves_whole=strategy.startswith("fsdp1") and metric is Metric.ALLOCATED and mesh.shard > 1,
        cuts_matmuls="asynctp" in strategy,
        doubt=tuple(cells.doubt),
    )
    return run if "activation_checkpointing" not in run.doubt else _fitting(run)


def _meaning(table: str, text: str) -> Any:
    """The meaning of a text in a table of published.yaml: that of the first pattern in it."""
    return next(value for pattern, value in _WORDS[table].items() if re.search(pattern, text))


def _fitting(run: Workload) -> Workload:
    """The run with the least recompute that fits, as people usually choose."""
    for name in ("none", "selective", "full"):
        recompute, kept = _RECOMPUTE[name]
        kernels = replace(
            run.kernels, recompute=recompute, kept=kept, by_operation=name == "selective"
        )
        run = replace(run, kernels=kernels)
        if peak_memory(run).active < FULL * run.device.memory_gib * GIB:
            break
    return run


def _device(cells: _Cells) -> Device:
    memory, name = cells.number("gpu_mem_gb"), cells.raw("gpu_model")
    try:
        return find_device(name, memory)
    except KeyError:
        cells.doubt.append("device")
        base = find_device("RTX 3090" if memory is not None and memory < 40 else "A100")
        gib = 0.98 * memory if memory is not None else base.memory_gib
        return Device(
            name or "unknown", base.peak, base.matmul, base.bandwidth, gib, base.link, base.fabric
        )


def _domain(cells: _Cells, device: Device, world: int) -> int:
    """Devices that the fast link joins."""
    found = re.search(r"nvl(\d+)", cells.text("interconnect"))
    if found:
        return int(found[1])
    nodes, slices = cells.count("nodes"), cells.axis("dcn-dp")
    if slices > 1 and device.is_tpu:
        return max(1, world // slices)
    if nodes is not None and nodes <= world:
        return max(1, world // nodes) if nodes > 1 else max(world, device.domain)
    return device.domain


def _fabric(text: str, device: Device, domain: int) -> float:
    """Bytes per second and device between hosts, from text such as "1600 gbps/node roce"."""
    found = _RATES.search(text)
    if found is None:
        named = {"superpod": device.link / 12, "ndr": 50 * GIGA, "hdr": 25 * GIGA}
        return next((rate for word, rate in named.items() if word in text), device.fabric)
    count, rate, unit, rest = int(found[1] or 1), float(found[2]), found[3], found[4]
    bits = count * rate * (1000 if unit.startswith("t") else 1)
    per_device = "gpu" in rest or "chip" in rest
    return bits / 8 * GIGA / (1 if per_device else min(domain, 8))


def _shapes(cells: _Cells) -> tuple[Shapes, float | None]:
    """The model's shapes, and the parameters that a token uses if only experts' are partly used."""
    name = cells.text("model_name")
    billions = cells.number("params_b")
    active: float | None = None
    sparse = next((size for known, size in _SPARSE.items() if known in name), None)
    named_active = re.search(r"(?<![a-z0-9])a(\d+(?:\.\d+)?)b(?![a-z0-9])", name)
    if sparse is not None:
        billions, active = billions or sparse[0], sparse[1]
    elif named_active:
        active = float(named_active[1])
    if billions is None and cells.number("n_layers") is None:
        size = re.search(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*b(?![a-z0-9])", name)
        billions = float(size[1]) if size else None
    shapes = Shapes(
        num_params=1e9 * billions if billions else None,
        layers=cells.count("n_layers"),
        width=cells.count("d_model"),
        heads=cells.count("n_heads"),
        kv_heads=cells.count("n_kv_heads"),
        mlp_width=cells.count("d_ff"),
        vocab=cells.count("vocab"),
        seq_len=cells.count("seq_len"),
    )
    return shapes, 1e9 * active if active else None


def _mesh(cells: _Cells, world: int, domain: int) -> tuple[Parallelism, Stage]:
    """The mesh and the parts cut over it, from text such as "fsdp2=32 x tp=8 (1f1b)"."""
    strategy = cells.strategy
    grid = re.search(r"mesh (\d+)x(\d+)", strategy)
    tensor = int(grid[2]) if grid else cells.axis("tp")
    context, pipeline = cells.axis("cp"), cells.axis("pp")
    tensor = tensor if world % tensor == 0 else 1
    if world % (tensor * context * pipeline):
        context = pipeline = 1
    ranks = max(1, world // (tensor * context * pipeline))
    sharding, shard = Stage(_meaning("stages", strategy)), ranks
    within = re.search(r"shard (\d+)", strategy)
    stated = re.search(r"(?:fsdp\d?|zero-3)\s*=\s*(\d+)", strategy)
    if within:
        shard = int(within[1])
    elif "hybrid" in strategy and "fsdp/hsdp" not in strategy:
        shard = domain
    elif stated and int(stated[1]) > 1:
        shard = int(stated[1])
    shard = shard if 0 < shard <= ranks and ranks % shard == 0 else ranks
    if sharding is Stage.NOTHING:
        shard = 1
    return Parallelism(shard, ranks // shard, tensor, context, pipeline), sharding


def _batch(cells: _Cells, mesh: Parallelism) -> Batch:
    seq_len = cells.count("seq_len", 4096) or 4096
    micro = cells.number("micro_batch_per_gpu")
    accumulation = cells.number("grad_accum")
    total = cells.number("global_batch_tokens")
    if total is not None:
        samples = total / seq_len / mesh.data_ranks
        if micro is None:
            micro = max(samples / (accumulation or 1), 1 / mesh.context)
        elif accumulation is None:
            accumulation = max(1.0, samples / micro)
    elif micro is None:
        cells.doubt.append("micro_batch_per_gpu")
    return Batch(seq_len, micro or max(1.0, 8192 / seq_len), accumulation or 1)


def _precision(cells: _Cells, device: Device, tuning: Tuning) -> Precision:
    """From `param/reduce/compute`; XLA gathers in the dtype that it computes in."""
    text = cells.text("precision")
    parts = (text.split(" ")[0] or "bf16").split("/")
    gather, reduce, math_name = (parts + [parts[0]] * 2)[:3]
    is_narrow = any(word in math_name for word in ("fp8", "fp4", "int8"))
    math_ = Math.FLOAT8 if is_narrow else Math.HALF
    if math_name.startswith("fp32"):
        math_ = Math.FLOAT32
    stored = 4.0 if math_ is Math.FLOAT32 else 2.0
    default = 4.0 if tuning is Tuning.FULL and gather != "fp16" else 2.0
    by_xla = device.is_tpu or cells.raw("torch_compile") == "XLA"
    return Precision(
        gather=2.0 if by_xla else _BYTES.get(gather, stored),
        reduce=_BYTES.get(reduce, 4.0),
        master=_BYTES.get(cells.text("master_dtype"), default),
        math=math_,
        casts_late="amp" in text,
    )


def _kernels(cells: _Cells, device: Device) -> Kernels:
    text = cells.text("activation_checkpointing")
    layers = cells.number("n_layers") or 32
    some = re.search(r"(\d+) layers", text)
    every = re.search(r"every (\d)", text)
    if some or every:
        recompute = 1 / int(every[1]) if every else 0.0
        recompute = min(1.0, int(some[1]) / layers) if some else recompute
        kept = 1 - recompute
    else:
        name = next((name for name in _RECOMPUTE if name in text), "")
        if not name:
            cells.doubt.append("activation_checkpointing")
        recompute, kept = _RECOMPUTE[name or "none"]
    compiler = Compiler.XLA
    if not device.is_tpu:
        is_eager = cells.text("torch_compile") in ("", "no", "false")
        compiler = Compiler.NONE if is_eager else Compiler.TORCH
    attention = cells.text("attention_impl")
    return Kernels(
        recompute=recompute,
        kept=kept,
        compiler=compiler,
        is_tuned="cudnn" in attention or attention.startswith(("transformerengine", "te ")),
        offloads_activations="offload" in text,
        by_operation="selective" in text and not every,
    )
