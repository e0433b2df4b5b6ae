"""`metrics.jsonl`: an object per step and evaluation; `metrics.csv`: the same as a table.

`saves.jsonl` has an object per checkpoint, and `samples.jsonl` one per text of the model.

[Note: use of the machine]
`machine-N.jsonl` has the use of processors, memory, disk, network and GPUs over time. A thread of
each node's first rank samples every second at first, and then at every thousandth of the
time that has passed, so that the file of a run of days stays small. The last sample is taken at the
run's end, so that the shortest run has one.
"""

from __future__ import annotations

import csv
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import import_module
from math import isfinite
from os import fstat
from os.path import samestat
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TextIO

import psutil

from fullshard.errors import ConfigError

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

SAMPLE_S = 0.05


@dataclass(frozen=True)
class StepRow:
    """Measurements of one update; the fields are the file's.

    Attributes:
        step: From 1, after the update.
        epoch: Passes over the training data so far, as a fraction.
        loss: Mean over all label tokens of the global batch, in nats, before the update; None where
            it was not finite and the step was skipped.
        grad_norm: Norm of the global gradient, before clipping; None where it was not finite (fp16
            overflowed, or max_skipped_steps allows it) and the step was skipped.
        learning_rate: Learning rate of this update.
        tokens_per_s: Input tokens of all ranks per second.
        samples_per_s: Sequences of all ranks per second.
        step_time_s: Step time of the slowest rank.
        data_s: Getting batches (those of the next step), mean over ranks. On a GPU or XLA, the
            device may compute meanwhile.
        compute_s: The rest of the step.
        comm_s: Time to issue and wait for collectives, mean over ranks.
        memory_bytes: Memory in use at the end of the step, on the rank that uses the most.
        memory_peak_bytes: Peak memory so far, on the rank that used the most.
        mfu: Model FLOPs utilization, as a share of the devices' bf16 peaks; None where the device
            is not known.
    """

    step: int
    epoch: float
    loss: float | None
    grad_norm: float | None
    learning_rate: float
    tokens_per_s: float
    samples_per_s: float
    step_time_s: float
    data_s: float
    compute_s: float
    comm_s: float
    memory_bytes: int
    memory_peak_bytes: int
    mfu: float | None = None


@dataclass(frozen=True)
class EvalRow:
    """Held-out loss after `step` updates: mean over held-out label tokens, in nats."""

    step: int
    eval_loss: float


@dataclass(frozen=True)
class SaveRow:
    """A checkpoint after `step` updates: seconds for which training stood still on rank 0."""

    step: int
    save_s: float


@dataclass(frozen=True)
class SampleRow:
    """A sample after `step` updates: the prompt, and the text that follows it."""

    step: int
    prompt: str
    text: str


AnyRow = StepRow | EvalRow | SaveRow | SampleRow
# By a column that no other kind of row has.
KINDS = {"loss": StepRow, "eval_loss": EvalRow, "save_s": SaveRow, "text": SampleRow}
COLUMNS = [*(field.name for field in fields(StepRow)), "eval_loss"]
SAVES, SAMPLES = "saves.jsonl", "samples.jsonl"
ASIDE = {SaveRow: SAVES, SampleRow: SAMPLES}  # files of their own


class MetricsWriter:
    """Append rows to a file and to its CSV table; `write` returns when they are in the file.

    Raises:
        ConfigError: The file is no longer at its path, so rows would be lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._table_file = path.with_suffix(".csv").open("w", encoding="utf-8", newline="")
        self._table = csv.DictWriter(self._table_file, COLUMNS)
        self._table.writeheader()
        self._table.writerows(read_rows(path))
        self._table_file.flush()

    def write(self, row: AnyRow) -> None:
        values = asdict(row)
        if (name := ASIDE.get(type(row))) is not None:
            self._check_place()
            with self._path.with_name(name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(values, allow_nan=False) + "\n")
            return
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._table.writerow(values)
        self._file.flush()
        self._table_file.flush()
        self._check_place()

    def _check_place(self) -> None:
        with suppress(OSError):
            if samestat(self._path.stat(), fstat(self._file.fileno())):
                return
        raise ConfigError(
            f"training.output_dir: expected the run's folder to stay where it is; '{self._path}' "
            "was moved, removed or replaced while the run was writing it. Complete checkpoints "
            "are in the moved folder; move it back to resume from them."
        )

    def close(self) -> None:
        self._file.close()
        self._table_file.close()


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one per line; empty for lines that a crash or a full disk tore.

    Infinity and NaN are no JSON: a browser would refuse the whole page with them.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        found: Any = None
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
        is_whole = isinstance(found, dict)  # it has its last brace
        yield found if is_whole and all(map(_is_json, found.values())) else {}


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or isfinite(value)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file; a warning counts lines that are torn or have other fields."""
    left = 0
    for row in _objects(path):
        left += 1
        kind: Any = next((kind for word, kind in KINDS.items() if word in row), None)
        with suppress(TypeError):
            kind(**row)
            values = (row[name] for name in row if kind is not SampleRow)
            are_numbers = all(isinstance(value, int | float | None) for value in values)
            if type(row["step"]) is int and are_numbers:
                left -= 1
                yield row
    if left:
        warning = "%s: left out %d line(s) that are torn or of another version of fullshard"
        logger.warning(warning, path, left)


def keep_rows(path: Path, done: int) -> tuple[StepRow | None, EvalRow | None]:
    """Keep only rows of the first `done` steps in a metrics file; return the last of each kind.

    Steps after the checkpoint from which a run resumes are repeated, and written again.
    """
    rows = _keep(path, done)
    for name in ASIDE.values():
        _keep(path.with_name(name), done)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    return (
        StepRow(**steps[-1]) if steps else None,
        EvalRow(**evaluations[-1]) if evaluations else None,
    )


def _keep(path: Path, done: int) -> list[dict[str, Any]]:
    rows = [row for row in read_rows(path) if row["step"] <= done]
    if path.is_file():
        aside = path.with_name(f".{path.name}")
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        aside.replace(path)
    return rows


@cache
def process_peak() -> list[int]:
    """A list with the peak of this process's memory since the first call, kept by a thread.

    Linux keeps no peak of memory without pages of files.
    """
    peak = [_OWN.num_bytes()]

    def sample() -> None:
        peak[0] = max(peak[0], _OWN.num_bytes())

    repeated(sample, SAMPLE_S)
    return peak


def repeated(do: Callable[[], object], pause_s: float) -> Callable[[], None]:
    """Calls a function in a thread, after each pause; returns a function that ends this.

    Errors of the system, as of a file that is gone, are ignored.
    """
    ended = Event()

    def run() -> None:
        while not ended.wait(pause_s):
            with suppress(OSError):
                do()

    thread = Thread(target=run, name=f"fullshard {getattr(do, '__name__', 'beat')}", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def wait_until(is_met: Callable[[], bool], timeout_s: float, pause_s: float = 0.1) -> bool:
    """Waits until a condition is met; returns whether it was within the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (met := is_met()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return met


def process_bytes(pid: int | str = "self") -> int:
    """Anonymous memory of a process and its share of shared memory; the kernel cannot drop either.

    A page of shared memory that n processes map counts as 1/n in each, an anonymous page as one in
    each. Pages of files (libraries, data, state on disk) do not count.
    """
    return _size("status", "RssAnon", pid) + _share(pid)


def _size(file: str, name: str, pid: int | str = "self") -> int:
    """Bytes that a file of a process in /proc reports; 0 if this kernel has none."""
    found = re.search(rf"^{name}:\s*(\d+)", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _share(pid: int | str = "self") -> int:
    """A process's share of the shared memory that it maps; all of it before Linux 5.3."""
    mapped = _size("status", "RssShmem", pid)
    with suppress(OSError):  # a sandbox
        return (mapped and _size("smaps_rollup", "Pss_Shmem", pid)) or mapped
    return mapped


class _Own:
    """Memory of this process; its share of shared memory is read in a hundredth of the time."""

    _shared, _next = 0, 0.0

    def num_bytes(self) -> int:
        began = time.monotonic()
        if began >= self._next:
            self._shared = _share()
            now = time.monotonic()
            self._next = now + 100 * (now - began)
        return _size("status", "RssAnon") + self._shared


_OWN = _Own()


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes in use now, and their peak: of torch's allocator on CUDA, of the process on a CPU."""
    if device.type != "cuda":
        now = _OWN.num_bytes()
        return now, max(now, *process_peak())
    import torch

    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


# ---- use of the machine --------------------------------------------------------------------------


MACHINE = "machine-*.jsonl"
SHORTEST_S, SHARE = 1.0, 1e-3  # between samples: seconds, and a share of the time that has passed


@contextmanager
def sampled(folder: Path, node: int) -> Iterator[None]:
    """Writes samples of this machine into a run's folder until the block ends."""
    ended = Event()
    file = folder / MACHINE.replace("*", str(node))
    thread = Thread(target=_sample, args=(file, ended), name="use of the machine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)  # a file system that hangs must not delay the run's end


def _sample(path: Path, ended: Event) -> None:
    began = last = time.monotonic()
    before, gpus = _counters(), _gpus()
    psutil.cpu_percent()  # the first call only begins an interval
    at_end = False
    while not at_end:
        at_end = ended.wait(max(SHORTEST_S, SHARE * (last - began)))
        now, counters = time.monotonic(), _counters()
        memory = psutil.virtual_memory()
        row = {
            "time": round(time.time(), 3),
            "cpu_percent": psutil.cpu_percent(),
            "memory_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            **{name: (counters[name] - before[name]) / (now - last) for name in counters},
            **gpus(),
        }
        last, before = now, counters
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # the folder was moved, or its disk is full
            logger.warning("%s is no longer written: %s", path, error)
            return


def _counters() -> dict[str, int]:
    """Bytes since the machine started; the loopback device is no network."""
    disk = psutil.disk_io_counters()
    devices = psutil.net_io_counters(pernic=True).items()
    net = [counts for name, counts in devices if name != "lo"]
    return {
        "disk_read_bytes_per_s": disk.read_bytes if disk else 0,
        "disk_write_bytes_per_s": disk.write_bytes if disk else 0,
        "net_recv_bytes_per_s": sum(one.bytes_recv for one in net),
        "net_sent_bytes_per_s": sum(one.bytes_sent for one in net),
    }


def _gpus() -> Any:
    """A function that reads all GPUs through NVML (the package nvidia-ml-py), where it is."""
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # noqa: BLE001  no package, no driver, or a driver that does not answer
        return dict

    def read() -> dict[str, float]:
        row: dict[str, float] = {}
        for number, handle in enumerate(handles):
            with suppress(nvml.NVMLError):  # some devices do not measure everything
                row[f"gpu{number}_percent"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                row[f"gpu{number}_memory_bytes"] = nvml.nvmlDeviceGetMemoryInfo(handle).used
                row[f"gpu{number}_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return row

    return read


def read_machine(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The samples of each node, by the node's number, without torn ones."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(MACHINE)):
        rows = (row for row in _objects(path) if isinstance(row.get("time"), int | float))
        found[path.stem.partition("-")[2]] = sorted(rows, key=lambda row: row["time"])
    return found
