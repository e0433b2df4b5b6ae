"""`fullshard doctor`: describes this machine, tests communication, reports known-bad settings.

facts (machine, versions, memory, disk, variables) -------.
a launch of two ranks (rendezvous, collectives, bandwidth) +--> findings, each with advice
                                                           '--> a block to paste into a bug report
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fullshard.config import host_memory
from fullshard.config.environment import notable_variables, read_launch_environment
from fullshard.errors import ConfigError, EngineError, PreemptedError
from fullshard.launch.exit_codes import ExitCode
from fullshard.launch.local_call import call_on_ranks
from fullshard.launch.machine import describe_machine, describe_versions, existing_folder

GIB = 1 << 30
MEASURE = f"{__name__}:measure"
RANKS_S = 120.0  # for two ranks to import torch, connect and measure
BUFFER_BYTES = 64 << 20
ROUNDS = 5
PACKAGES = (
    *("fullshard", "torch", "numpy", "transformers", "tokenizers", "safetensors"),
    *("pydantic", "omegaconf", "typer", "accelerate", "deepspeed", "jax", "triton"),
)
OLDEST = {"torch": (2, 11), "transformers": (4, 56)}  # oldest supported releases


class Health(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"  # works, but is slow or hides errors
    BROKEN = "broken"  # a run will fail


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        what: Subject of the check, in one or two words.
        health: How bad it is.
        says: The finding.
        do: Advice; empty if nothing is wrong.
    """

    what: str
    health: Health
    says: str
    do: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All facts and findings."""

    machine: dict[str, Any]
    versions: dict[str, str]
    memory: dict[str, int]
    variables: dict[str, str]
    ranks: dict[str, Any]
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> bool:
        """Whether a run would fail."""
        return any(finding.health is Health.BROKEN for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {**asdict(self), "broken": self.broken, "report": self.report()}

    def report(self) -> str:
        """A block for a bug report, without names of hosts, users or their folders."""
        lines = ["```text"]
        for title in ("machine", "versions", "memory", "variables", "ranks"):
            facts = getattr(self, title)
            shown = ", ".join(f"{key} {value}" for key, value in facts.items()) or "none"
            lines.append(f"{title}: {shown}")
        found = [one for one in self.findings if one.health is not Health.OK]
        lines += [f"{one.health}: {one.what}: {one.says}" for one in found]
        return anonymous("\n".join([*lines, "```"]))


def anonymous(text: str) -> str:
    """Replaces the names of the host, the home folder and local folders in a text."""
    for word, instead in (
        (str(Path(__file__).parents[2]), "SRC"),
        (sys.prefix, "PREFIX"),
        (str(Path.cwd()), "CWD"),
        (os.path.expanduser("~"), "~"),  # noqa: PTH111  (Path raises where there is none)
        (tempfile.gettempdir(), "TMP"),
        (socket.getfqdn(), "HOST"),
        (socket.gethostname(), "HOST"),
    ):
        if len(word) > 1 and word != "localhost":
            text = text.replace(word, instead)
    return text


def examine(output_dir: Path, num_ranks: int | None = None) -> DoctorReport:
    """Runs all checks; starts local ranks, which needs some seconds.

    Args:
        output_dir: Folder of future runs; its disk is checked.
        num_ranks: Number of local ranks; None: one per GPU, or two without GPUs.
    """
    machine: dict[str, Any] = {**describe_machine(), "accelerators": _accelerators()}
    versions, variables = describe_versions(PACKAGES), notable_variables()
    versions["kernel"] = platform.release().split("-")[0]
    memory = _memory(output_dir)
    gpus = len(machine["accelerators"])
    ranks, talk = _ranks(num_ranks or gpus or 2)
    findings = (
        *_of_versions(versions),
        *_of_accelerators(gpus),
        *_of_variables(variables, int(machine["cores"])),
        *_of_memory(memory, output_dir),
        *_of_system(),
        talk,
    )
    return DoctorReport(machine, versions, memory, variables, ranks, findings)


# ---- facts


def _accelerators() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{device.name} {device.total_memory / GIB:.0f} GiB" for device in devices]


def _memory(output_dir: Path) -> dict[str, int]:
    """Free bytes by place."""
    found = {
        "host_bytes": host_memory.available_bytes(),
        "disk_bytes": shutil.disk_usage(existing_folder(output_dir)).free,
    }
    limit = host_memory.limit()
    if limit.file is not None:
        found["cgroup_limit_bytes"] = limit.num_bytes
    if Path("/dev/shm").is_dir():
        found["shared_memory_bytes"] = shutil.disk_usage("/dev/shm").free
    return found


def _ranks(num_ranks: int) -> tuple[dict[str, Any], Finding]:
    """Starts ranks that measure the collectives; returns the result, or why it failed."""
    _, result, found = call_on_ranks(MEASURE, num_ranks, num_ranks, RANKS_S, RANKS_S / 2)
    if result.failure is not None:
        says = f"{num_ranks} ranks failed: {result.failure.text}"
        do = "The first error is the cause; check the `variables` below"
        return {"num_ranks": num_ranks}, Finding("ranks", Health.BROKEN, says, do)
    if result.exit_code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if result.exit_code:
        raise PreemptedError("doctor: expected to reach its end, got a signal. Run it again.")
    told = found[0]
    says = (
        f"{num_ranks} ranks over {told['backend']} ({told['transport']}): all-gather "
        f"{told['fetch_gb_per_s']:.2f} GB/s, reduce-scatter {told['reduce_gb_per_s']:.2f} GB/s "
        f"per rank, small all-reduce {told['latency_ms']:.2f} ms"
    )
    return {"num_ranks": num_ranks, **told}, Finding("ranks", Health.OK, says)


# ---- on a rank


def measure(ranks: int) -> dict[str, Any]:
    """Check and time the collectives that an engine would choose here.

    Times are medians of some rounds; bytes are those that one rank receives or sends.

    Args:
        ranks: Number of ranks in the process group.

    Raises:
        EngineError: A collective gave a wrong number.
    """
    import torch
    import torch.distributed as dist

    from fullshard.config.schema import ShardConfig
    from fullshard.config.values import DType
    from fullshard.engine.homes import default_device
    from fullshard.planner.mesh import Mesh
    from fullshard.planner.slots import Ring
    from fullshard.transport.groups import make_transport, resolve_transport

    device = default_device()
    config, mesh = ShardConfig(), Mesh(1, ranks)
    kind = resolve_transport(config, [mesh], device)
    transport = make_transport(ShardConfig.of(config, transport=kind), mesh)
    numel = BUFFER_BYTES // 4 // (64 * ranks) * 64 * ranks
    ring = Ring("doctor.grad", DType.FLOAT32, numel, count=1)
    given = transport.home.open_slots((), [ring])
    full = given[ring.name][0] if given else torch.empty(numel, device=device)
    full.fill_(float(dist.get_rank() + 1))
    part = torch.empty(numel // ranks, device=device)

    def meet() -> None:
        transport.all_reduce(torch.zeros(1, device=device))

    def seconds(action: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(ROUNDS):
            meet()
            start = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[ROUNDS // 2]

    reduce_s = seconds(lambda: transport.reduce([full]).sum_into([part]))
    if not bool((part == ranks * (ranks + 1) / 2).all()):
        raise EngineError(f"collectives: expected the sum over {ranks} ranks, got another number.")
    fetch_s = seconds(lambda: transport.fetch([full]).wait())
    if [float(piece[0]) for piece in full.chunk(ranks)] != [i + 1.0 for i in range(ranks)]:
        raise EngineError("collectives: expected every rank's part, got other numbers.")
    moved_gb = full.nbytes * max(ranks - 1, 1) / ranks / 1e9
    return {
        "backend": dist.get_backend(),
        "transport": transport.name,
        "fetch_gb_per_s": round(moved_gb / fetch_s, 3),
        "reduce_gb_per_s": round(moved_gb / reduce_s, 3),
        "latency_ms": round(seconds(meet) * 1e3, 3),
    }


# ---- known-bad settings


def _of_versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    for name, oldest in OLDEST.items():
        if name not in versions:
            continue
        numbers = tuple(int(part) for part in versions[name].split("+")[0].split(".")[:2])
        needed = ".".join(map(str, oldest))
        if numbers < oldest:
            says = f"{name} {versions[name]}, expected {needed} or newer"
            yield Finding("versions", Health.BROKEN, says, f"pip install -U '{name}>={needed}'")
    if "transformers" not in versions:
        says = "transformers is not installed; train, plan and verify need it"
        yield Finding("versions", Health.WARN, says, "pip install 'fullshard[hf]'")
    shown = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch"))
    yield Finding("versions", Health.OK, shown)


def _of_accelerators(count: int) -> Iterator[Finding]:
    import torch

    has_driver = Path("/proc/driver/nvidia/version").exists()
    if count:
        yield Finding("accelerators", Health.OK, f"{count} GPUs")
    elif has_driver and torch.version.cuda is None:
        do = "Install a torch with CUDA (https://pytorch.org/get-started)"
        says = "an NVIDIA driver is installed, but this torch is built for CPUs"
        yield Finding("accelerators", Health.WARN, says, do)
    elif has_driver:
        do = "Check CUDA_VISIBLE_DEVICES, `nvidia-smi`, and the version of the driver"
        says = f"torch is built for CUDA {torch.version.cuda}, but sees no GPU"
        yield Finding("accelerators", Health.WARN, says, do)
    else:
        yield Finding("accelerators", Health.OK, "none: ranks compute on CPUs")


# Variable, bad values (None: any), severity, effect, remedy.
_HARMFUL = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "every kernel waits for the last: no overlap", "Unset it"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "every collective is checked first", "Unset it"),
    ("NCCL_P2P_DISABLE", ("1",), "GPUs exchange data through host memory", "Unset it"),
    ("NCCL_IB_DISABLE", ("1",), "InfiniBand is not used", "Unset it if there is InfiniBand"),
    ("NCCL_SHM_DISABLE", ("1",), "ranks of one host use sockets", "Unset it"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", ("0",), "a failed rank leaves others waiting", "Unset it"),
    ("TORCH_NCCL_BLOCKING_WAIT", ("1",), "collectives block the host: no overlap", "Unset it"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", None, "every allocation calls the driver", "Unset it"),
    ("PYTHONHASHSEED", ("random",), "sets are ordered differently per rank", "Set a number"),
)


def _of_variables(variables: Mapping[str, str], cores: int) -> Iterator[Finding]:
    try:
        launch = read_launch_environment()
    except ConfigError as error:
        yield Finding("variables", Health.BROKEN, str(error), "Unset them outside of a launcher")
        launch = None
    if launch is not None:
        says = f"this process is rank {launch.rank} of {launch.world_size} of {launch.launcher}"
        do = "`fullshard train` runs as this rank; unset RANK and WORLD_SIZE to start local ranks"
        yield Finding("variables", Health.WARN, says, do)
    for name, values, does, do in _HARMFUL:
        value = variables.get(name)
        if value is not None and (values is None or value in values):
            yield Finding("variables", Health.WARN, f"{name}={value}: {does}", do)
    interfaces = {name for _, name in socket.if_nameindex()}
    wanted = variables.get("GLOO_SOCKET_IFNAME", "")
    if not set(filter(None, wanted.split(","))) <= interfaces:
        says = f"GLOO_SOCKET_IFNAME={wanted}, which is no interface here"
        do = f"One of {', '.join(sorted(interfaces))}, or unset it"
        yield Finding("variables", Health.BROKEN, says, do)
    threads = variables.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > cores:
        says = f"OMP_NUM_THREADS={threads} on {cores} cores: threads compete for cores"
        yield Finding("variables", Health.WARN, says, "Set it to at most cores / ranks")


def _of_memory(memory: Mapping[str, int], output_dir: Path) -> Iterator[Finding]:
    room = "Set another training.output_dir, or free space"
    checked = (
        ("memory", "host_bytes", f"of {host_memory.limit()}", "Stop other processes"),
        ("disk", "disk_bytes", f"for {output_dir}", room),
    )
    for what, key, whose, do in checked:
        free, low = f"{memory[key] / GIB:.1f} GiB free {whose}", memory[key] < GIB
        yield Finding(what, Health.WARN if low else Health.OK, free, do if low else "")
    shared = memory.get("shared_memory_bytes", GIB)
    if shared < 64 << 20:
        says = f"{shared >> 20} MiB free in /dev/shm, which data loader workers and NCCL use"
        do = "Run docker with --shm-size=8g, or use fewer workers"
        yield Finding("memory", Health.WARN, says, do)
    try:
        is_new = not output_dir.exists()
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=output_dir):
            pass
        if is_new:
            output_dir.rmdir()
    except OSError as error:
        says = f"cannot write into {output_dir}: {error.strerror}"
        yield Finding("disk", Health.BROKEN, says, "Set another training.output_dir")


# Limit of a process, ulimit's flag, a value that is too low, what needs more.
_LIMITS = (
    (resource.RLIMIT_NOFILE, "n", 1024, "open files per process; sockets of many ranks need more"),
    (resource.RLIMIT_NPROC, "u", 512, "processes and threads of this user; ranks start more"),
    (resource.RLIMIT_AS, "v", 8 << 30, "bytes of address space per process; libraries map more"),
    (resource.RLIMIT_FSIZE, "f", 1 << 30, "bytes per file; checkpoints have more"),
)


def _of_system() -> Iterator[Finding]:
    for number, flag, least, what in _LIMITS:
        soft = resource.getrlimit(number)[0]
        if 0 <= soft < least:  # unlimited is -1
            do = f"ulimit -{flag} {65536 if flag == 'n' else 'unlimited'}"
            yield Finding("limits", Health.WARN, f"at most {soft:,} {what}", do)
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        says = "the host's own name does not resolve: gloo under torchrun cannot bind to it"
        do = "Set GLOO_SOCKET_IFNAME (lo for one machine), or add the name to /etc/hosts"
        yield Finding("network", Health.WARN, says, do)
