"""Use of a machine over time: `machine-N.jsonl`, with processors, memory, disk, network and GPUs.

A thread of each node's first rank takes a sample every second at first, and then at every
thousandth of the time that has passed, so that the file of a run of days stays small. The last
sample is taken at the run's end, so that the shortest run has one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

logger = logging.getLogger(__name__)

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
        thread.join(10)  # a file system that hangs must not hold the run's end


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
    """The samples of each node, by the node's number; torn lines are left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob(MACHINE)):
        rows = found.setdefault(path.stem.partition("-")[2], [])
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("time"), int | float):
                    rows.append(row)
        rows.sort(key=lambda row: row["time"])
    return found
