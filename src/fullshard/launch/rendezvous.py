"""How the ranks meet: torch's default process group, from whoever launched this process.

our launcher   env://                                      the launcher's store
torchrun       env://                                      the agent's store
srun, mpirun   TCPStore at MASTER_ADDR:MASTER_PORT         rank 0 serves it
               on one machine without MASTER_PORT          rank 0 takes a free port, tells by file
nobody         no group at all                             one rank; fullshard needs none

The watchdog meets the other ranks at the same store, by a connection of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from fullshard import errors
from fullshard.config.environment import LaunchEnvironment, Launcher, read_launch_environment
from fullshard.errors import ConfigError, HangError
from fullshard.launch.exit_codes import as_ours
from fullshard.launch.store import LOOPBACK, LaunchStore, check_reaches
from fullshard.observe import watchdog
from fullshard.observe.watchdog import Seat

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

Made = TypeVar("Made")
WAITING_S = 10.0  # between lines of a rank that waits for rank 0
GOODBYE_S = 10.0  # for all ranks to hear why rank 0 failed
_SERVED: list[LaunchStore] = []  # by this process, as rank 0 of others' launch; until its end
TIMEOUT_MARGIN_S = 60.0  # torch's error would end a rank before all have told where they are


def init_process_group(timeout_s: float = 600.0, run_dir: Path | None = None) -> None:
    """Make the default process group: gloo on CPUs, and NCCL beside it where CUDA is visible.

    Does nothing where this process is no rank of anything, or has met the others before.

    Args:
        timeout_s: after which a rank whose peers do not come is stuck; the watchdog then names the
            one that is missed, and torch's own error comes later.
        run_dir: the run's folder, for the watchdog's report.

    Raises:
        ConfigError: the launch cannot be used, such as more local ranks than GPUs.
    """
    import torch
    import torch.distributed as dist

    launch = read_launch_environment()
    if launch is None or dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_s + TIMEOUT_MARGIN_S)
    backend, device = "gloo", None
    if torch.cuda.is_available():
        backend, device = "cpu:gloo,cuda:nccl", _cuda_device(launch)
    place: dict[str, Any] = {}
    is_ours = launch.launcher in (Launcher.FULLSHARD, Launcher.TORCHRUN)
    _check_address(launch)
    if not is_ours:
        launch = _with_port(launch, timeout)
    _reach_store(launch, timeout_s)
    try:
        if not is_ours:
            store = _store(launch, timeout)
            place = {"store": store, "rank": launch.rank, "world_size": launch.world_size}
        dist.init_process_group(backend, timeout=timeout, device_id=device, **place)
    except dist.DistNetworkError as error:
        raise HangError(_unreachable(launch, str(error).partition("\n")[0])) from error
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise ConfigError(
            f"launch: expected a GPU for each rank; rank {launch.rank} shares {device} of this "
            "machine with another. Ask for one a task (srun --gpus-per-task=1), or start fewer."
        ) from error
    if launch.rank == 0 and _SERVED:
        _port_file(launch).unlink(missing_ok=True)  # all have met
    seat = Seat.of(launch, timeout_s, run_dir)
    if seat is not None:
        watchdog.start(seat)


def published(name: str, make: Callable[[], str]) -> str:
    """What rank 0 makes, told to all ranks by the store at which they met. After they met."""
    from torch.distributed.distributed_c10d import _get_default_store, get_rank

    store = _get_default_store()
    if get_rank() == 0:
        store.set(name, make())
    return store.get(name).decode()


def first_prepares(prepare: Callable[[], Made], timeout_s: float) -> Made | None:
    """What `prepare` returns on rank 0; the others wait until it is done, however long that takes.

    They say what rank 0 says, and raise what it raises. After they met.

    Args:
        prepare: called on rank 0 alone.
        timeout_s: after which rank 0 is stuck if it gives no sign of life; a thread gives one a
            second.

    Raises:
        HangError: rank 0 is gone or stuck.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.distributed_c10d import _get_default_store, get_rank, get_world_size

    store = PrefixStore("fullshard/preparing", _get_default_store())
    if get_rank() != 0:
        _await_first(store, timeout_s)
        return None
    told = _LastWords()
    logging.getLogger("fullshard").addHandler(told)
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            store.set("now", json.dumps([time.time(), told.line]))
            ended.wait(1.0)

    thread = threading.Thread(target=beat, name="fullshard preparing", daemon=True)
    thread.start()
    end: list[str] = []
    try:
        return prepare()
    except BaseException as error:
        ours = as_ours(error)
        end = [type(ours).__name__, str(ours)]
        raise
    finally:
        ended.set()
        thread.join()
        logging.getLogger("fullshard").removeHandler(told)
        store.set("end", json.dumps(end))
        deadline = time.monotonic() + (GOODBYE_S if end else 0.0)
        while store.add("heard", 0) < get_world_size() - 1 and time.monotonic() < deadline:
            time.sleep(0.1)  # this process may serve the store


def _await_first(store: Store, timeout_s: float) -> None:
    shown = logging.getLogger("fullshard.preparing")
    shown.setLevel(logging.INFO)  # where ranks other than 0 are silent, too
    began = said = beaten = time.monotonic()
    beat = ""
    try:
        while not store.check(["end"]):
            now = time.monotonic()
            word = store.get("now").decode() if store.check(["now"]) else beat
            beat, beaten = word, now if word != beat else beaten
            if now - beaten > timeout_s:
                raise HangError(
                    f"launch.timeout: expected a sign of life of rank 0, which prepares the run, "
                    f"got none for {timeout_s:g} s. Look at its machine and its log."
                )
            if now - said > WAITING_S and beat:
                said = now
                line = json.loads(beat)[1]
                shown.info("waiting %.0f s for rank 0, which prepares: %s", now - began, line)
            time.sleep(0.2)
        end = json.loads(store.get("end"))
        store.add("heard", 1)
    except RuntimeError as error:  # torch's, of its stores
        raise HangError(
            f"rendezvous: expected rank 0 to prepare the run, got a store that is gone "
            f"({str(error).splitlines()[0]}). Rank 0 has ended, perhaps for memory: see its log."
        ) from error
    if end:
        kind = getattr(errors, end[0], errors.FullshardError)
        raise kind(f"rank 0 failed while it prepared the run: {end[1]}")


class _LastWords(logging.Handler):
    """Keeps the last line that was logged."""

    line = "reads the configuration"

    def emit(self, record: logging.LogRecord) -> None:
        self.line = record.getMessage()


def free_address(host: str | None) -> str:
    """An address on which this process may serve: the system chooses the port."""
    with socket.create_server(("", 0)) as server:
        return f"{host or LOOPBACK}:{server.getsockname()[1]}"


def shutdown() -> None:
    """Destroy the process group if there is one; call it where all ranks are at their end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _reach_store(launch: LaunchEnvironment, timeout_s: float) -> None:
    """Wait until rank 0's store can be connected to; torch's own waiting takes minutes longer.

    Raises:
        HangError: It cannot: the address is wrong, or rank 0 has not come.
        ConfigError: This is rank 0, and the address is not its own.
    """
    is_here = launch.launcher is Launcher.FULLSHARD and launch.master_addr == LOOPBACK
    if is_here or launch.master_addr is None or launch.master_port is None:
        return
    if launch.rank == 0:
        with contextlib.suppress(OSError), _server(launch.master_port):  # else it is served
            check_reaches(launch.master_addr, launch.master_port)
        return
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            place = (launch.master_addr, launch.master_port)
            with socket.create_connection(place, timeout=max(0.1, min(left, 10.0))):
                return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                why = getattr(error, "strerror", None) or error
                got = f"{why} for {timeout_s:g} s (launch.timeout)"
                raise HangError(_unreachable(launch, got)) from error
        time.sleep(0.2)


def _server(port: int) -> socket.socket:
    """Listens on a port for as long as the block lasts, as the store will."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _unreachable(launch: LaunchEnvironment, got: str) -> str:
    return (
        f"MASTER_ADDR, MASTER_PORT: expected rank 0's store at {launch.master_addr}:"
        f"{launch.master_port}, got {got}. Check that rank 0 runs, that every rank has the address "
        "of its machine, and that no firewall closes the port."
    )


def _with_port(launch: LaunchEnvironment, timeout: timedelta) -> LaunchEnvironment:
    """With the port of rank 0's store, where all ranks are here and nobody chose one.

    Raises:
        ConfigError: Ranks of several machines must be told where to meet.
    """
    if launch.master_addr is not None and launch.master_port is not None:
        return launch
    known = launch.run_id is not None or launch.launcher is Launcher.MPI
    if launch.world_size > launch.local_world_size or not known:
        raise ConfigError(
            f"MASTER_PORT: expected a free port on {launch.master_addr or 'the first host'} under "
            f"{launch.launcher}, got nothing. Set MASTER_ADDR and MASTER_PORT to the same values "
            "for all ranks."
        )
    file = _port_file(launch)
    if launch.rank == 0:
        meeting = LaunchStore()
        meeting.serve()
        _SERVED.append(meeting)
        partial = file.with_suffix(".partial")
        partial.write_text(str(meeting.port))
        partial.replace(file)
        return replace(launch, master_addr=LOOPBACK, master_port=meeting.port)
    deadline = time.monotonic() + timeout.total_seconds()
    while not (file.is_file() and file.stat().st_uid == os.getuid()):
        if time.monotonic() > deadline:
            raise HangError(f"rendezvous: expected rank 0 to write {file}; it did not.")
        time.sleep(0.05)
    return replace(launch, master_addr=LOOPBACK, master_port=int(file.read_text()))


def _port_file(launch: LaunchEnvironment) -> Path:
    """Named by the job; where mpirun gives it no name, by the process that started all ranks."""
    parent = psutil.Process(os.getppid())
    job = launch.run_id or f"{parent.pid} {parent.create_time()}"
    name = hashlib.sha256(job.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"fullshard-{os.getuid()}-{name}.port"


def _store(launch: LaunchEnvironment, timeout: timedelta) -> Store:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    assert launch.master_addr is not None
    assert launch.master_port is not None
    serves = launch.rank == 0 and not _SERVED
    return TCPStore(launch.master_addr, launch.master_port, launch.world_size, serves, timeout)


def _check_address(launch: LaunchEnvironment) -> None:
    """Refuses ranks of torchrun's kind that know no place to meet."""
    is_torchruns = launch.launcher in (Launcher.FULLSHARD, Launcher.TORCHRUN)
    if is_torchruns and not (launch.master_addr and launch.master_port):
        raise ConfigError(
            "environment: MASTER_ADDR and MASTER_PORT: expected the address where ranks meet, "
            "because RANK is set; got none. Start with torchrun, or unset RANK and WORLD_SIZE."
        )


def _cuda_device(launch: LaunchEnvironment) -> torch.device:
    import torch

    count = torch.cuda.device_count()
    index = launch.local_rank
    if count == 1 and launch.launcher in (Launcher.SLURM, Launcher.MPI):
        index = 0  # they may show every rank a GPU of its own alone
    if index >= count:
        raise ConfigError(
            f"launch.num_processes: expected at most {count} ranks on this machine, one a visible "
            f"GPU, got {launch.local_world_size}. Lower it or make more GPUs visible."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
