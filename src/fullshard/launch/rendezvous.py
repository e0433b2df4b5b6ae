"""The rendezvous: creates torch's default process group under any launcher, and the launch's store.

our launcher   the launcher's store
torchrun       the agent's store
srun, mpirun   rank 0 serves the store at MASTER_ADDR:MASTER_PORT
               on one machine without MASTER_PORT, it writes a free port to a file
no launcher    no group, one rank

Ranks reach the store by torch's `env://`; a rank 0 that serves it counts the others. The watchdog
uses it through its own connection.

The launcher serves the store, so it outlives every rank. The port is bound before the first rank
starts and stays bound; connections before the store is ready wait in the socket's backlog. The
launchers of several machines tell each other through the store how they ended (`OtherMachines`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from fullshard import errors
from fullshard.config.environment import (
    LaunchEnvironment,
    Launcher,
    add_variables,
    read_launch_environment,
)
from fullshard.errors import ConfigError, HangError, printable
from fullshard.launch.exit_codes import ExitCode, RankFailure, of_place, public_name
from fullshard.launch.machine import check_accelerators
from fullshard.observe import watchdog
from fullshard.observe.metrics import wait_until

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from fullshard.config.schema import LaunchConfig

Made = TypeVar("Made")
ASKED, STARTS = "fullshard/asked", "fullshard/starts"  # counts of a store
ANSWER = "fullshard/start_for/{}"  # by question: the start of the rank that asked it
JOINED = "fullshard/joined/{}"  # by start: number of ranks, besides rank 0, that know its number
WAITING_S = 10.0  # between log lines of a rank that waits for others
GOODBYE_S = 10.0  # for all ranks to read how rank 0 ended
_GROUPS = count()  # a process may destroy its group and make another one: without old addresses
END = "fullshard/end"  # how a launch on several machines ended: its first failure, or null
LISTENING, HEARD = "fullshard/listening", "fullshard/heard"  # counts of launchers
MACHINE, WORLD = "fullshard/machine/{}", "fullshard/world"  # its launcher; how many ranks, and who
LISTEN_S = 0.5
OLD_STORE_S = 60.0  # for another machine to end its ranks, which may not notice a failure
_SERVED: list[LaunchStore] = []  # stores served by this process as rank 0 of another launcher
TIMEOUT_MARGIN_S = 60.0  # the watchdog reports before torch's timeout ends a rank


def init_process_group(timeout_s: float | None = None, log_dir: Path | None = None) -> None:
    """Creates the default process group: gloo for CPUs, and NCCL if CUDA is visible.

    Do nothing if this process is not a rank, or if the group exists.

    Args:
        timeout_s: Seconds after which a rank that waits for its peers is stuck; the watchdog then
            names the missing rank, before torch's own error. None: the launch's value, or 600.
        log_dir: Folder of the watchdog's report.

    Raises:
        ConfigError: The launch is invalid: no address of rank 0, more local ranks than GPUs.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.rendezvous import rendezvous

    launch = read_launch_environment()
    if launch is None or dist.is_initialized():
        return
    timeout_s = timeout_s or launch.timeout_s or watchdog.DEFAULT_TIMEOUT_S
    backend, device = "gloo", None
    if torch.cuda.is_available():
        backend, device = "cpu:gloo,cuda:nccl", _cuda_device(launch)
    launch = _with_address(launch, timeout_s)
    try:
        size, timeout = launch.world_size, timedelta(seconds=timeout_s)
        store = _serve(launch) if launch.rank == 0 else None
        if store is None:
            store, *_ = next(rendezvous("env://", launch.rank, size, timeout=timeout))
        if launch.launcher is not Launcher.FULLSHARD:  # which sees the ranks, and serves each start
            launch = replace(launch, start=number_of_start(store, launch, timeout_s))
        store = PrefixStore(f"fullshard/start_{launch.start}/group_{next(_GROUPS)}", store)
        timeout += timedelta(seconds=TIMEOUT_MARGIN_S)
        store.set_timeout(timeout)
        place: Any = {"store": store, "rank": launch.rank, "world_size": size}
        dist.init_process_group(backend, timeout=timeout, device_id=device, **place)
    except RuntimeError as error:
        ours = _named(launch, device, error)
        if ours is None:
            raise
        raise ours from error
    if launch.rank == 0 and _SERVED:
        _port_file(launch).unlink(missing_ok=True)  # all ranks have connected
    watchdog.start(launch, timeout_s, log_dir)


def _named(
    launch: LaunchEnvironment, device: object, error: RuntimeError
) -> ConfigError | HangError | None:
    """Our error for one of torch's; None if there is none."""
    import torch.distributed as dist

    said = str(error)
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return _unreachable(launch, said.partition("\n")[0].rstrip("."))
    if "Duplicate GPU" in said:
        return ConfigError(
            f"launch: expected a GPU for each rank; rank {launch.rank} shares {device} of this "
            "machine with another. Request one per task (srun --gpus-per-task=1), or start fewer."
        )
    if lacks := re.search(r"Unable to find address for: (\S+)", said):
        return ConfigError(
            f"GLOO_SOCKET_IFNAME: expected a network interface of this machine, got '{lacks[1]}'. "
            "Unset it, or name one that `ip link` lists."
        )
    return None


def published(name: str, make: Callable[[], str]) -> str:
    """Returns rank 0's value of `make()` on all ranks. Call it after the rendezvous."""
    from torch.distributed.distributed_c10d import _get_default_store, get_rank

    store = _get_default_store()
    if get_rank() == 0:
        store.set(name, make())
    return store.get(name).decode()


def first_prepares(prepare: Callable[[], Made]) -> Made | None:
    """Returns the result of `prepare` on rank 0; the others wait for it and return None.

    They log what rank 0 logs, and raise its error. Call it after the rendezvous. The watchdog names
    a rank 0 whose process is stopped.

    Args:
        prepare: Called on rank 0 only.

    Raises:
        HangError: Rank 0 is gone.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.distributed_c10d import _get_default_store, get_rank, get_world_size

    store = PrefixStore("fullshard/preparing", _get_default_store())
    watchdog.phase("preparation" if get_rank() == 0 else "preparation of rank 0", limited=False)
    if get_rank() != 0:
        _await_first(store)
        watchdog.phase("")
        return None
    logger, lines, end = logging.getLogger("fullshard"), _LastLine(store), list[str]()
    logger.addHandler(lines)
    try:
        return prepare()
    except BaseException as error:
        ours = of_place(error)
        end = [public_name(ours), str(ours)]
        if ours is not error:
            raise ours from error
        raise
    finally:
        logger.removeHandler(lines)
        watchdog.phase("")
        store.set("end", json.dumps(end))
        # This process may serve the store. torchrun signals it once another rank has raised `end`.
        with contextlib.suppress(errors.PreemptedError) if end else contextlib.nullcontext():
            wait_until(lambda: store.add("heard", 0) >= get_world_size() - 1, GOODBYE_S)


def _await_first(store: Store) -> None:
    shown = logging.getLogger("fullshard.preparing")
    shown.setLevel(logging.INFO)  # also if ranks other than 0 log errors only
    began = said = time.monotonic()
    try:
        while not store.check(["end"]):
            now = time.monotonic()
            if now - said > WAITING_S:
                said = now
                line = store.get("now").decode() if store.check(["now"]) else "configuration"
                shown.info("waiting %.0f s for rank 0, which prepares: %s", now - began, line)
            time.sleep(0.2)
        end = json.loads(store.get("end"))
        store.add("heard", 1)
    except RuntimeError as error:  # torch's, of its stores
        raise HangError(
            "rendezvous: expected rank 0 to prepare the run, got a store that is gone "
            f"({str(error).splitlines()[0]}). Rank 0 has ended, maybe out of memory. See its log."
        ) from error
    if end:
        kind = getattr(errors, end[0], None)
        text = end[1] if kind else ": ".join(filter(None, end))  # KeyboardInterrupt has no text
        raise (kind or errors.FullshardError)(f"rank 0 failed while it prepared the run: {text}")


class _LastLine(logging.Handler):
    """Publishes the last line that was logged."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set("now", printable(record.getMessage()))


def free_address(host: str | None) -> str:
    """A free address on this machine; the system chooses the port."""
    with socket.create_server(("", 0)) as server:
        return f"{host or LOOPBACK}:{server.getsockname()[1]}"


def shutdown() -> None:
    """Destroys the process group, if there is one; all ranks must call it at their end."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _unreachable(launch: LaunchEnvironment, got: str) -> ConfigError | HangError:
    if "address already in use" in got:
        return ConfigError(
            f"MASTER_PORT: expected a free port, got {launch.master_port}, which another process "
            "uses. Choose another port, the same on every rank."
        )
    return HangError(
        f"MASTER_ADDR, MASTER_PORT: expected rank 0's store at {launch.master_addr}:"
        f"{launch.master_port}, got {got}. Check that rank 0 runs, that every rank has the address "
        "of its machine, and that no firewall closes the port."
    )


def _with_address(launch: LaunchEnvironment, timeout_s: float) -> LaunchEnvironment:
    """Adds the address of the store, if all ranks are on this machine and none is set.

    Raises:
        ConfigError: The address is needed, or rank 0 is not there.
    """
    host, port = launch.master_addr, launch.master_port
    if host is not None and port is not None:
        if launch.rank != 0:
            _await_store(launch, (host, port), timeout_s)
    elif launch.launcher in (Launcher.FULLSHARD, Launcher.TORCHRUN):
        raise ConfigError(
            "environment: MASTER_ADDR and MASTER_PORT: expected the address of rank 0, "
            "because RANK is set; got none. Start with torchrun, or unset RANK and WORLD_SIZE."
        )
    elif launch.world_size > launch.local_world_size or not (
        launch.run_id is not None or launch.launcher is Launcher.MPI
    ):
        raise ConfigError(
            f"MASTER_PORT: expected a free port on {host or 'the first host'} under "
            f"{launch.launcher}, got nothing. Set MASTER_ADDR and MASTER_PORT to the same values "
            "for all ranks."
        )
    else:
        host, port = LOOPBACK, _port_of_rank_0(launch, timeout_s)
    add_variables({"MASTER_ADDR": host, "MASTER_PORT": str(port)})
    return replace(launch, master_addr=host, master_port=port)


def _await_store(launch: LaunchEnvironment, place: tuple[str, int], timeout_s: float) -> None:
    """Waits until rank 0's store accepts connections; torch would not handle signals meanwhile.

    Raises:
        HangError: The address is wrong, or rank 0 has not started.
    """
    whys: list[Exception] = []

    def answers() -> bool:
        try:
            socket.create_connection(place, timeout=min(timeout_s, 10.0)).close()
        except (OSError, UnicodeError) as error:
            whys[:] = [error]
            return False
        return True

    if not _wait(launch.rank, f"rank 0 at {place[0]}:{place[1]}", answers, timeout_s):
        why = getattr(whys[0], "strerror", None) or whys[0]
        raise _unreachable(launch, f"{why} for {timeout_s:g} s (launch.timeout)") from whys[0]


def _serve(launch: LaunchEnvironment) -> Store | None:
    """Serves the store as rank 0; None: its port is taken.

    The launcher may serve it; torch names a port that another program has.

    Raises:
        ConfigError: The address is not that of this machine.
    """
    meeting = _SERVED[-1] if _SERVED else None
    if meeting is None:
        host, port = str(launch.master_addr), launch.master_port or 0
        try:
            with _bound("", port):
                check_reaches(host, port)
        except OSError:
            return None
        meeting = LaunchStore(host, port, everywhere=True)
        meeting.serve()
    return meeting.store


def number_of_start(store: Store, launch: LaunchEnvironment, timeout_s: float) -> int:
    """Number of this start of all ranks in their store. Returns when all ranks have reached it.

    torchrun's store may outlive a restart, with the addresses of ranks that are gone. Each agent
    counts the restarts of its own ranks, and tells them nothing that is equal for all ranks and new
    at every start. So rank 0 counts, and answers each question by the number of the question: the
    answers to ranks of earlier starts are under other numbers.

    While torch waits for ranks, it would not handle signals.

    Raises:
        HangError: A rank has not started, or has another address.
    """
    if launch.rank != 0:
        answer = ANSWER.format(store.add(ASKED, 1))
        if not _wait(launch.rank, "rank 0", lambda: store.check([answer]), timeout_s):
            raise _unreachable(launch, f"no word of rank 0 for {timeout_s:g} s (launch.timeout)")
        start = int(store.get(answer))
        store.add(JOINED.format(start), 1)
        return start
    start, size, answered = store.add(STARTS, 1), launch.world_size, 0

    def num_ranks() -> int:
        nonlocal answered
        while answered < store.add(ASKED, 0):
            answered += 1
            store.set(ANSWER.format(answered), str(start))
        return store.add(JOINED.format(start), 0) + 1

    if not _wait(0, f"all of {size} ranks (WORLD_SIZE)", lambda: num_ranks() >= size, timeout_s):
        raise HangError(
            f"WORLD_SIZE: expected {size} ranks, got {num_ranks()} in {timeout_s:g} s "
            "(launch.timeout). Start all of them, with one MASTER_ADDR and MASTER_PORT; or unset "
            "RANK, which an older launch may have left."
        )
    return start


def _wait(rank: int, whom: str, until: Callable[[], bool], timeout_s: float) -> bool:
    """As `wait_until`; says after some seconds for whom this rank waits."""
    if wait_until(until, soon := min(WAITING_S, timeout_s)):
        return True
    logger = logging.getLogger("fullshard.preparing")
    logger.setLevel(logging.INFO)  # also if ranks other than 0 log errors only
    logger.warning("rank %d waits for %s; if it is alone, unset RANK", rank, whom)
    return wait_until(until, timeout_s - soon)


def _port_of_rank_0(launch: LaunchEnvironment, timeout_s: float) -> int:
    """The port of rank 0's store, which rank 0 writes to a file."""
    file = _port_file(launch)
    if launch.rank == 0:
        meeting = LaunchStore()
        meeting.serve()
        _SERVED.append(meeting)
        partial = file.with_suffix(".partial")
        partial.write_text(str(meeting.port))
        partial.replace(file)

    def is_there() -> bool:
        return file.is_file() and file.stat().st_uid == os.getuid()

    if not _wait(launch.rank, "rank 0", is_there, timeout_s):
        raise HangError(f"rendezvous: expected rank 0 to write {file}; it did not.")
    return int(file.read_text())


def _port_file(launch: LaunchEnvironment) -> Path:
    """Named after the job, or after the parent process if mpirun gives no job name."""
    parent = psutil.Process(os.getppid())
    job = launch.run_id or f"{parent.pid} {parent.create_time()}"
    name = hashlib.sha256(job.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"fullshard-{os.getuid()}-{name}.port"


def _cuda_device(launch: LaunchEnvironment) -> torch.device:
    import torch

    count = torch.cuda.device_count()
    index = launch.local_rank
    if count == 1 and launch.launcher in (Launcher.SLURM, Launcher.MPI):
        index = 0  # each rank may see only its own GPU
    if index >= count:
        started = {} if launch.launcher is Launcher.FULLSHARD else {"asked": launch.launcher}
        check_accelerators(count, max(launch.local_world_size, index + 1), **started)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


LOOPBACK = "127.0.0.1"
_BACKLOG = 4096


def check_reaches(host: str, port: int) -> None:
    """Checks that a port of this process can be reached under its address.

    Otherwise torch would try for more than a minute.

    Raises:
        ConfigError: The address does not belong to this machine.
    """
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except (OSError, UnicodeError) as error:  # of a name that no host can have
        cure = "Correct MASTER_ADDR or launch.main_process_ip"
        cure = "Bring up the loopback interface (ip link set lo up)" if host == LOOPBACK else cure
        raise ConfigError(
            f"MASTER_ADDR: expected the address of rank 0's machine, which is this one "
            f"({socket.gethostname()}), got {host}: port {port} cannot be reached there "
            f"({getattr(error, 'strerror', None) or error}). {cure}."
        ) from error


class LaunchStore:
    """A bound port, and torch's store on it once `serve` is called.

    Args:
        host: Address of this machine; the loopback if all ranks are on it.
        port: Port; 0: any free port.
        served_here: False: the launcher of another machine serves the store.
        everywhere: Whether to serve it on all interfaces, also if the host is the loopback.

    Raises:
        ConfigError: The port is in use, or the host is not this machine.
    """

    def __init__(
        self,
        host: str = LOOPBACK,
        port: int = 0,
        *,
        served_here: bool = True,
        everywhere: bool = False,
    ) -> None:
        self.host, self.port = host, port
        self.store: Any = None
        self._socket: socket.socket | None = None
        if not served_here:
            return
        try:
            self._socket = _bound("" if everywhere else host, port)
        except OSError as error:
            why = os.strerror(error.errno or 0)  # without create_server's words
            raise ConfigError(
                f"MASTER_PORT: expected a free port, got {port} ({why}). Set MASTER_PORT or "
                "launch.main_process_port to a port that is free on this machine."
            ) from error
        self.port = self._socket.getsockname()[1]
        check_reaches(host, self.port)

    def serve(self) -> None:
        """Starts torch's store on the port, in threads of torch."""
        if self._socket is None:
            return
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self.store = TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,  # a second group of rank 0 finds this one by `env://`
            master_listen_fd=self._socket.detach(),
        )

    def close(self) -> None:
        """Frees the port."""
        if self._socket is not None:
            self._socket.close()
        self.store = None


def await_end_of_attempt(place: tuple[str, int], unless: Callable[[], bool]) -> None:
    """Waits until the store of an attempt that has failed is gone; new ranks would meet there.

    Args:
        place: Address of the machine that serves the store.
        unless: Returns whether to stop waiting.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    with contextlib.suppress(OSError, RuntimeError):  # it is gone
        socket.create_connection(place, timeout=10.0).close()
        old = TCPStore(*place, is_master=False, timeout=timedelta(seconds=30))
        wait_until(lambda: unless() or not old.check([END]), OLD_STORE_S)


class OtherMachines:
    """Tells the launchers of other machines how this one ended, and learns how they ended.

    Ranks may not notice that another machine has failed: they may be stopped, or in C code.

        each launcher   thread, twice per second:  store --> `failure` of another machine
                        its failure --> store
        launcher 0      its end --> store, which it serves until the others have read the end

    The first launcher counts. One of the same machine rank leaves, and one whose machine rank the
    launch does not have: it may belong to the next launch, while this one still saves. If another
    one has other numbers of machines or ranks, all end.

    Args:
        store: Store of the launch.
        machines: Number of machines, and this one's; the launcher of machine 0 serves the store.
        ranks: Ranks of this machine.
    """

    def __init__(self, store: LaunchStore, machines: LaunchConfig, ranks: range) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self.failure: RankFailure | None = None
        self._place, self._open = (store.host, store.port), TCPStore
        self._machine, self._serves = machines.machine_rank, machines.machine_rank == 0
        self._size = machines.num_machines
        self._world = f"--nnodes {self._size} and --nproc-per-node {len(ranks)}"
        self._first_rank = ranks[0]
        self._own: RankFailure | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def leave(self, failure: RankFailure | None) -> None:
        """Publishes how the launch ended on this machine, and waits until the others have read it.

        Args:
            failure: None if all ranks of this machine have succeeded.
        """
        self._own = failure
        self._left.set()
        self._thread.join(GOODBYE_S + LISTEN_S)

    def _run(self) -> None:
        store = self._connected()
        if store is None:
            return
        try:
            while not self._left.wait(LISTEN_S) and not store.check([END]):
                pass
            if self._own or (self._serves and self._left.is_set()):  # the first end counts
                store.compare_set(END, "", json.dumps(self._own and asdict(self._own)))
            if store.check([END]) and (first := json.loads(store.get(END))):
                self.failure = RankFailure(**first)
            store.add(HEARD, 1)
            if self._serves:
                self._left.wait()
                wait_until(lambda: store.add(HEARD, 0) >= store.add(LISTENING, 0), GOODBYE_S)
        except RuntimeError as error:  # torch's, of its stores
            said = (
                "launch: expected machine 0 to publish how it ended, got a store that is gone "
                f"({str(error).splitlines()[0]}). Its launcher was killed, or the network is down."
            )
            code, now = int(ExitCode.HANG), time.monotonic()
            self.failure = RankFailure(0, "HangError", said, code, "", now)

    def _connected(self) -> Store | None:
        """The store, once it is there; None: not even when this launch has ended."""
        is_over = False
        while not is_over:
            is_over = self._left.wait(LISTEN_S)
            with contextlib.suppress(OSError, RuntimeError):
                socket.create_connection(self._place, timeout=10.0).close()
                store = self._open(*self._place, is_master=False, timeout=timedelta(seconds=30))
                return self._joined(store)
        return None

    def _joined(self, store: Store) -> Store | None:
        """The store of this launch, if this launcher may take part; sets the failure if not."""
        name, machine = f"process {os.getpid()} on host {socket.gethostname()}", self._machine
        own = json.dumps([self._size, self._world, f"machine {machine} ({name})"])
        size, world, who = json.loads(store.compare_set(WORLD, "", own))
        other, is_one = name, machine < size
        if is_one:
            other = store.compare_set(MACHINE.format(machine), "", name).decode()
        error = None
        if other != name:
            error = ConfigError(
                f"--node-rank: expected a number of its own for each machine; got {machine} for "
                f"{name}, which {other} has. Number the machines from 0."
            )
        elif world != self._world:
            error = ConfigError(
                f"launch: expected the same number of ranks on all machines; got {self._world} on "
                f"machine {machine} ({name}), and {world} on {who}. Start all with the same."
            )
        failure = None if error is None else RankFailure.of(error, self._first_rank)
        if other != name or not is_one:
            self.failure = failure
            return None
        store.add(LISTENING, 1)  # first: the store stays until we have read the end
        if failure is not None:
            store.compare_set(END, "", json.dumps(asdict(failure)))
        return store


def _bound(host: str, port: int) -> socket.socket:
    """Listens on a port, on the interfaces of a store: all, unless it is for this machine."""
    if host == LOOPBACK:
        return socket.create_server((host, port), backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
