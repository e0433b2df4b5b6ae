"""A row of a table of runs -> a Workload. Text becomes enums and numbers here, once.

Columns that hold what was measured, or where it was published, are dropped first: see DROPPED.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from fullshard.outlook.devices import GIGA, Device, find_device
from fullshard.outlook.memory import FULL, GIB, peak_memory
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

ANSWERS = (
    "tokens_per_sec_per_gpu",
    "samples_per_sec",
    "mfu_pct",
    "hfu_pct",
    "tflops_per_gpu",
    "step_time_s",
    "peak_mem_gib",
    "status",
    "notes",
    "source_locator",
    "reliability",
)
DROPPED = frozenset((*ANSWERS, "source", "group", "row_id"))

Row = Mapping[str, str]
TYPICAL_PARAMS = 7e9  # of a model that a row says nothing of

_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s*b(?![a-z0-9])", re.IGNORECASE)
_ACTIVE = re.compile(r"(?<![a-z0-9])a(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)
# Of models with experts whose name does not say it: all parameters and those of a token, 1e9.
# Their publishers' model cards.
_SPARSE = {
    "deepseek-v3-16b": (15.7, 2.4),
    "deepseek-v3": (671.0, 37.0),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.1),
    "gpt-oss-120b": (116.8, 5.1),
    "gpt-oss-20b": (20.9, 3.6),
    "nemotron v3 nano 30b": (31.6, 3.6),
    "gemma4-26b": (26.0, 4.0),
    "qwen3-30b": (30.5, 3.3),
    "qwen3-235b": (235.0, 22.0),
    "llama-4-scout": (109.0, 17.0),
    "llama-4-maverick": (400.0, 17.0),
    "glm-4.5-air": (106.0, 12.0),
    "moonlight": (16.0, 3.0),
}


def read_workload(row: Row) -> Workload:
    """A row's run.

    Raises:
        ValueError: A number cannot be read, or what nothing can be said without is missing.
    """
    row = {key: (value or "").strip() for key, value in row.items() if key and key not in DROPPED}
    doubt: list[str] = []
    device = _device(row, doubt)
    shapes, active_params = _shapes(row)
    if not shapes.num_params and not (shapes.layers and shapes.width and shapes.mlp_width):
        doubt.append("model")
        shapes = replace(shapes, num_params=TYPICAL_PARAMS)
    model = decoder(shapes, active_params)
    if model.is_guessed:
        doubt.append("shapes")
    if model.is_sparse:
        doubt.append("experts")
    strategy = row.get("strategy", "").lower()
    world = _count(row, "gpus") or _assume(doubt, "gpus", 8)
    domain = _domain(row, strategy, device, world)
    mesh, sharding = _mesh(strategy, world, domain)
    kernels = _kernels(row, device, doubt)
    tuning = _tuning(strategy)
    metric = _metric(row.get("mem_metric", ""))
    optimizer = row.get("optimizer", "").lower()
    run = Workload(
        model=model,
        device=device,
        mesh=mesh,
        sharding=sharding,
        batch=_batch(row, mesh, doubt),
        precision=_precision(row, device, tuning),
        state_bytes=next((size for word, size in _STATES.items() if word in optimizer), 8),
        updates_in_backward="in-bwd" in optimizer or "in-backward" in optimizer,
        kernels=kernels,
        tuning=tuning,
        metric=metric,
        fabric=_fabric(row.get("interconnect", ""), device, domain),
        domain=domain,
        offloads="offload" in strategy or "(cpu)" in optimizer,
        reshards="shard_grad_op" not in strategy and "zero-2" not in strategy,
        saves_whole=strategy.startswith("fsdp1") and metric is Metric.ALLOCATED and mesh.shard > 1,
        cuts_matmuls="asynctp" in strategy,
        doubt=tuple(doubt),
    )
    return run if "activation_checkpointing" not in doubt else _fitting(run)


def _fitting(run: Workload) -> Workload:
    """With the least recompute that fits: what people choose who do not say what they chose."""
    for name in ("none", "selective", "full"):
        recompute, kept = _RECOMPUTE[name]
        kernels = replace(
            run.kernels, recompute=recompute, kept=kept, by_operation=name == "selective"
        )
        run = replace(run, kernels=kernels)
        if peak_memory(run).active < FULL * run.device.memory_gib * GIB:
            break
    return run


def number(row: Row, key: str) -> float | None:
    """A cell as a positive number; None where it is blank.

    Raises:
        ValueError: It is something else.
    """
    text = row.get(key, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{key}: expected a positive number or nothing, got {text!r}")
    return value


def _count(row: Row, key: str) -> int | None:
    value = number(row, key)
    return None if value is None else max(1, round(value))


def _assume(doubt: list[str], what: str, value: int) -> int:
    doubt.append(what)
    return value


# ---- device and wires ----------------------------------------------------------------------------


def _device(row: Row, doubt: list[str]) -> Device:
    memory = number(row, "gpu_mem_gb")
    name = row.get("gpu_model", "")
    try:
        return find_device(name, memory)
    except KeyError:
        doubt.append("device")
        like = "RTX 3090" if memory is not None and memory < 40 else "A100"
        base = find_device(like)
        gib = 0.98 * memory if memory is not None else base.memory_gib
        return Device(
            name or "unknown", base.peak, base.matmul, base.bandwidth, gib, base.link, base.fabric
        )


def _domain(row: Row, strategy: str, device: Device, world: int) -> int:
    text = row.get("interconnect", "").lower()
    found = re.search(r"nvl(\d+)", text)
    if found:
        return int(found[1])
    nodes = _count(row, "nodes")
    slices = _axis(strategy, "dcn-dp")
    if slices > 1 and device.is_tpu:
        return max(1, world // slices)
    if nodes is not None and nodes <= world:
        return max(1, world // nodes) if nodes > 1 else max(world, device.domain)
    return device.domain


_RATES = re.compile(
    r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(tbps|tb/s|gbps|gb/s|gb)\b([^;,]*)", re.IGNORECASE
)


def _fabric(text: str, device: Device, domain: int) -> float:
    """Bytes a second and device between hosts, from prose such as "1600 Gbps/node RoCE"."""
    found = _RATES.search(text)
    if found is None:
        named = {"superpod": device.link / 12, "ndr": 50 * GIGA, "hdr": 25 * GIGA}
        return next((rate for word, rate in named.items() if word in text.lower()), device.fabric)
    count, rate, unit, rest = int(found[1] or 1), float(found[2]), found[3].lower(), found[4]
    bits = count * rate * (1000 if unit.startswith("t") else 1)
    per_device = "gpu" in rest.lower() or "chip" in rest.lower()
    return bits / 8 * GIGA / (1 if per_device else min(domain, 8))


# ---- model and mesh ------------------------------------------------------------------------------


def _shapes(row: Row) -> tuple[Shapes, float | None]:
    name = row.get("model_name", "")
    billions = number(row, "params_b")
    active: float | None = None
    sparse = next((size for known, size in _SPARSE.items() if known in name.lower()), None)
    said = _ACTIVE.search(name)
    if sparse is not None:
        billions, active = billions or sparse[0], sparse[1]
    elif said:
        active = float(said[1])
    if billions is None and number(row, "n_layers") is None:
        size = _SIZE.search(name)
        billions = float(size[1]) if size else None
    shapes = Shapes(
        num_params=1e9 * billions if billions else None,
        layers=_count(row, "n_layers"),
        width=_count(row, "d_model"),
        heads=_count(row, "n_heads"),
        kv_heads=_count(row, "n_kv_heads"),
        mlp_width=_count(row, "d_ff"),
        vocab=_count(row, "vocab"),
        seq_len=_count(row, "seq_len"),
    )
    return shapes, 1e9 * active if active else None


def _axis(strategy: str, *names: str) -> int:
    for name in names:
        found = re.search(rf"(?<![a-z-]){name}\s*=\s*(\d+)", strategy)
        if found:
            return max(1, int(found[1]))
    return 1


def _mesh(strategy: str, world: int, domain: int) -> tuple[Parallelism, Stage]:
    """The mesh and what is cut over it, from prose such as "FSDP2=32 x TP=8 (1F1B)"."""
    grid = re.search(r"mesh (\d+)x(\d+)", strategy)
    tensor = int(grid[2]) if grid else _axis(strategy, "tp")
    context, pipeline = _axis(strategy, "cp"), _axis(strategy, "pp")
    tensor = tensor if world % tensor == 0 else 1
    if world % (tensor * context * pipeline):
        context = pipeline = 1
    ranks = max(1, world // (tensor * context * pipeline))
    sharding, shard = Stage.PARAMETERS, ranks
    if "no_shard" in strategy or strategy.startswith(("ddp", "dp=")) or "zero-0" in strategy:
        sharding, shard = Stage.NOTHING, 1
    elif "zero-1" in strategy or "distributed optimizer" in strategy:
        sharding = Stage.OPTIMIZER
    elif "zero-2" in strategy:
        sharding = Stage.GRADIENTS
    elif "single device" in strategy:
        sharding = Stage.NOTHING
    within = re.search(r"shard (\d+)", strategy)
    said = re.search(r"(?:fsdp\d?|zero-3)\s*=\s*(\d+)", strategy)
    if within:
        shard = int(within[1])
    elif "hybrid" in strategy and "fsdp/hsdp" not in strategy:
        shard = domain
    elif said and int(said[1]) > 1:
        shard = int(said[1])
    shard = shard if 0 < shard <= ranks and ranks % shard == 0 else ranks
    if sharding is Stage.NOTHING:
        shard = 1
    return Parallelism(shard, ranks // shard, tensor, context, pipeline), sharding


def _batch(row: Row, mesh: Parallelism, doubt: list[str]) -> Batch:
    seq_len = _count(row, "seq_len") or _assume(doubt, "seq_len", 4096)
    micro = number(row, "micro_batch_per_gpu")
    accumulation = number(row, "grad_accum")
    total = number(row, "global_batch_tokens")
    if total is not None:
        samples = total / seq_len / mesh.data_ranks
        if micro is None:
            micro = max(samples / (accumulation or 1), 1 / mesh.context)
        elif accumulation is None:
            accumulation = max(1.0, samples / micro)
    elif micro is None:
        doubt.append("micro_batch_per_gpu")
    return Batch(seq_len, micro or max(1.0, 8192 / seq_len), accumulation or 1)


# ---- how it is computed --------------------------------------------------------------------------


def _tuning(strategy: str) -> Tuning:
    if "qlora" in strategy or "nf4" in strategy:
        return Tuning.QLORA
    return Tuning.LORA if "lora" in strategy else Tuning.FULL


_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def _precision(row: Row, device: Device, tuning: Tuning) -> Precision:
    """From param / reduce / compute; XLA gathers in what it computes with."""
    parts = (row.get("precision", "").lower().split(" ")[0] or "bf16").split("/")
    gather, reduce, math_name = (parts + [parts[0]] * 2)[:3] if len(parts) < 3 else parts[:3]
    is_narrow = any(word in math_name for word in ("fp8", "fp4", "int8"))
    math_ = Math.FLOAT8 if is_narrow else Math.HALF
    if math_name.startswith("fp32"):
        math_ = Math.FLOAT32
    stored = 4.0 if math_ is Math.FLOAT32 else 2.0
    default = 4.0 if tuning is Tuning.FULL and gather != "fp16" else 2.0
    by_xla = device.is_tpu or row.get("torch_compile") == "XLA"
    return Precision(
        gather=2.0 if by_xla else _BYTES.get(gather, stored),
        reduce=_BYTES.get(reduce, 4.0),
        master=_BYTES.get(row.get("master_dtype", "").lower(), default),
        math=math_,
        casts_late="amp" in row.get("precision", "").lower(),
    )


# Bytes of state of optimizers other than AdamW, by a word of their names; paged: on the host.
_STATES = {"paged": 0, "8bit": 2, "sgd": 0, "adafactor": 0.1}

# Share of a block's forward that runs again, share of its activations that is kept; the first name
# that is found counts.
_RECOMPUTE = {
    "full/selective": (0.6, 0.4),
    "minimal": (0.1, 0.6),
    "qkv_proj": (0.75, 0.1),
    "custom": (0.85, 0.0),
    "budget": (0.2, 0.5),
    "selective": (0.3, 0.55),
    "full": (1.0, 0.0),
    "none": (0.0, 1.0),
}


def _kernels(row: Row, device: Device, doubt: list[str]) -> Kernels:
    text = row.get("activation_checkpointing", "").lower()
    layers = number(row, "n_layers") or 32
    some = re.search(r"(\d+) layers", text)
    every = re.search(r"every (\d)", text)
    if some or every:
        recompute = 1 / int(every[1]) if every else 0.0
        recompute = min(1.0, int(some[1]) / layers) if some else recompute
        kept = 1 - recompute
    else:
        name = next((name for name in _RECOMPUTE if name in text), "")
        if not name:
            doubt.append("activation_checkpointing")
        recompute, kept = _RECOMPUTE[name or "none"]
    impl = row.get("attention_impl", "").lower()
    compiled = row.get("torch_compile", "").lower()
    compiler = Compiler.TORCH if compiled not in ("", "no", "false") else Compiler.NONE
    compiler = Compiler.XLA if device.is_tpu else compiler
    tuned = "cudnn" in impl or impl.startswith(("transformerengine", "te "))
    return Kernels(
        recompute=recompute,
        kept=kept,
        compiler=compiler,
        is_tuned=tuned,
        offloads_activations="offload" in text,
        by_operation="selective" in text and not every,
    )


def _metric(text: str) -> Metric:
    text = text.lower()
    for metric in (Metric.RESERVED, Metric.ACTIVE, Metric.ALLOCATED):
        if metric.value in text.partition("(")[0] or text.startswith(f"peak {metric.value}"):
            return metric
    return Metric.ALLOCATED if "max alloc" in text else Metric.UNKNOWN
