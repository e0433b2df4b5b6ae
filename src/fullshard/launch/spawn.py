"""Starts supervised ranks on this machine; commands use it when torchrun does not start them.

    launcher --- rank 0   terminal and logs/rank_0.log (see Relay)
        |------- rank 1   logs/rank_1.log
        `------- ...      each `python -m MODULE ARGUMENTS` inside rank_entry's frame

Every rank leads its own process group in the launcher's session. Ctrl-C reaches only the launcher,
which forwards it once. Ending a rank ends the processes that it forked. The kernel kills the ranks
when the launcher dies for any reason.

[Note: the output of rank 0]
It goes to the user's terminal and, cleaned, into its log:

    rank 0  --stdout, stderr-->  pty, or a pipe where ours is none  -->  our stdout, stderr
                                                                    `->  logs/rank_0.log

With a pty the rank sees a terminal of the right size, so progress bars work. The log gets the final
text: no colours, no overwritten lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import re
import resource
import select
import selectors
import socket
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import tty
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from fullshard.config import host_memory
from fullshard.config.environment import LaunchEnvironment, Launcher, current_variables, rank_log
from fullshard.config.schema import LaunchConfig
from fullshard.errors import ConfigError
from fullshard.launch.exit_codes import LaunchFolder, caught_stop_signals
from fullshard.launch.fork_server import ForkServer
from fullshard.launch.rendezvous import LOOPBACK, LaunchStore, OtherMachines
from fullshard.launch.supervise import LaunchResult, RankProcess, Supervisor
from fullshard.observe import watchdog

logger = logging.getLogger(__name__)

_ESCAPES = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_CHUNK_BYTES = 65536
_RESIZE_S = 0.5
_LONGEST_LINE = 1 << 20  # a longer one is cut


class LineCleaner:
    """Turns a stream for terminals into lines for a file."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes, as they looked when they were complete."""
        *ended, rest = data.split(b"\n")
        done = bytearray()
        for end in ended:
            self._rest += end
            done += self._line()
        self._rest += rest
        return bytes(done + self._line() if len(self._rest) > _LONGEST_LINE else done)

    def finish(self) -> bytes:
        """The rest of an unfinished line."""
        line = self._line()
        return b"" if line == b"\n" else line

    def _line(self) -> bytes:
        plain = _ESCAPES.sub(b"", self._rest).rstrip(b"\r")
        self._rest.clear()
        return bytes(plain.rpartition(b"\r")[2]) + b"\n"


class Relay:
    """One rank's output on its way. Lives as long as the launch; `close` after the rank's end."""

    def __init__(self, log: Path) -> None:
        self._log: BinaryIO = log.open("ab", buffering=0)
        with contextlib.suppress(OSError):  # `fullshard launch` may have locked it before
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._targets: dict[int, int] = {}  # our reading end -> where it goes
        self._terminal: tuple[int, int] | None = None  # the pty's controlling end, our terminal
        self.muted = threading.Event()  # set: something more important is shown from now on
        self.stdout_fd = self._open(1)
        self.stderr_fd = self._open(2)
        self._thread = threading.Thread(target=self._copy, name="relay of rank 0", daemon=True)

    def start(self) -> None:
        """Start to copy; call it after the rank has its ends of the pipes."""
        for fd in {self.stdout_fd, self.stderr_fd}:
            os.close(fd)  # otherwise there would be no end of file
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Wait until everything has been copied."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            return
        self._log.close()  # no rank was started
        for fd in {self.stdout_fd, self.stderr_fd, *self._targets}:
            os.close(fd)

    def _open(self, target: int) -> int:
        """The rank's end of a new way to one of our streams; both share one pty, and its order."""
        if not os.isatty(target):
            reading, writing = os.pipe()
            self._targets[reading] = target
            return writing
        if self._terminal is not None:
            return self.stdout_fd
        reading, writing = os.openpty()
        tty.setraw(writing)  # our own terminal turns \n into \r\n already
        self._terminal = reading, target
        self._resize()
        self._targets[reading] = target
        return writing

    def _resize(self) -> None:
        if self._terminal is not None:
            pty, terminal = self._terminal
            with contextlib.suppress(termios.error):
                termios.tcsetwinsize(pty, termios.tcgetwinsize(terminal))

    def _copy(self) -> None:
        cleaners = {fd: LineCleaner() for fd in self._targets}
        with selectors.DefaultSelector() as selector, self._log:
            for fd in self._targets:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                self._resize()
                for key, _ in selector.select(_RESIZE_S):
                    data, cleaner = _read(key.fd), cleaners[key.fd]
                    self._write(cleaner.feed(data) if data else cleaner.finish())
                    if data:
                        self._show(key.fd, data)
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)

    def _write(self, text: bytes) -> None:
        try:
            self._log.write(text)
        except OSError as error:  # a rank whose output is not read would wait forever
            logger.warning("%s ends here: %s", self._log.name, error.strerror)
            self._log = Path(os.devnull).open("wb", 0)  # noqa: SIM115

    def _show(self, fd: int, data: bytes) -> None:
        while data and not self.muted.is_set():
            try:
                data = data[os.write(self._targets[fd], data) :]
            except BlockingIOError:  # another program made our stream non-blocking
                select.select([], [self._targets[fd]], [], _RESIZE_S)
            except OSError:  # the reader is gone; the run and its log continue
                self.muted.set()


def _read(fd: int) -> bytes:
    """Like os.read; the end of a pty, which Linux calls an error, is an end of file."""
    try:
        return os.read(fd, _CHUNK_BYTES)
    except OSError:
        return b""


ENTRY = "fullshard.launch.rank_entry"
PREFIX = "fullshard-launch-"  # of the private folder in TMPDIR
LEAST_RANK_BYTES = 64 << 20  # a process that has imported torch needs more


@dataclass(frozen=True)
class LocalLaunch:
    """The program to run on the ranks of this machine.

    Attributes:
        module: Module that every rank runs as `python -m module`, or a script that ends in `.py`.
        args: Its arguments, equal for every rank.
        num_processes: Number of ranks on this machine.
        log_dir: `<run's folder>/logs`; created if missing; existing logs are appended to.
        timeout_s: Maximum duration of the launch; None: unlimited.
        stuck_s: Seconds after which a rank that others wait for is stuck (`launch.timeout`).
        machines: Number of machines, this one's number, and the address of machine 0.
        attempt: Number of earlier attempts of the same launch.
        config_file: Configuration for the script (`fullshard.integrations`), or None.
        variables: Environment variables of every rank.
        server: Forks the ranks, then ends; None: each rank is started separately.
        caught: Signals of the caller's `caught_stop_signals`; None: they are caught in the launch.
    """

    module: str
    args: tuple[str, ...]
    num_processes: int
    log_dir: Path
    timeout_s: float | None = None
    stuck_s: float = 600.0
    machines: LaunchConfig = field(default_factory=LaunchConfig)
    attempt: int = 0
    config_file: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    server: ForkServer | None = None
    caught: list[int] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks of all machines."""
        return self.num_processes * self.machines.num_machines

    @property
    def ranks(self) -> range:
        """Ranks of this machine."""
        first = self.num_processes * self.machines.machine_rank
        return range(first, first + self.num_processes)

    def log(self, rank: int) -> Path:
        """Log file of a rank."""
        return rank_log(self.log_dir, rank)


def launch_local_ranks(launch: LocalLaunch) -> LaunchResult:
    """Runs a module on local ranks until all of their processes have ended.

    Raises:
        ConfigError: The number of processes is not positive, or more than this machine can run.
    """
    caught = launch.caught
    if caught is None:
        with caught_stop_signals() as caught:
            return launch_local_ranks(replace(launch, caught=caught))
    _check_limits(launch.num_processes)
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's: what preparing the run took goes back
        ctypes.CDLL(None).malloc_trim(0)
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    if launch.attempt == 0:
        (launch.log_dir / "hang.txt").unlink(missing_ok=True)
    machines = launch.machines
    host = (machines.num_machines > 1 and machines.main_process_ip) or LOOPBACK
    port = machines.main_process_port or 0  # 0: any free port
    store = LaunchStore(host, port, served_here=machines.machine_rank == 0)
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as private:
        folder = LaunchFolder(Path(private), launch.log_dir)
        relay = Relay(launch.log(launch.ranks[0]))
        ranks: list[RankProcess] = []
        supervisor = Supervisor(
            ranks=ranks,
            folder=folder,
            timeout_s=launch.timeout_s,
            on_failure=relay.muted.set,
            positions=partial(_positions, launch, store),
        )
        with contextlib.ExitStack() as closing:  # all of them are called, even if one fails
            for close in (store.close, relay.close, supervisor.end_all):
                closing.callback(close)
            if launch.server is not None:
                launch.server.wait(caught)
            for rank in () if caught else launch.ranks:
                environment = _environment(launch, rank, folder, store)
                ranks.append(_start(launch, environment, relay))
            if launch.server is not None:
                launch.server.close()
            relay.start()
            if ranks:
                store.serve()  # now, because importing torch takes seconds
            if not ranks or machines.num_machines == 1:
                return supervisor.watch(caught)
            others = OtherMachines(store, machines, launch.ranks)
            supervisor.elsewhere = lambda: others.failure
            result = supervisor.watch(caught)
            others.leave(result.for_others(machines.machine_rank, launch.ranks[0]))
            return result


def _check_limits(num_processes: int) -> None:
    most = max(1, host_memory.limit().num_bytes // LEAST_RANK_BYTES)
    if not 1 <= num_processes <= most:
        raise ConfigError(
            f"launch.num_processes: expected an integer >= 1 and <= {most:,}, the number for which "
            f"this machine has memory, got {num_processes:,}."
        )
    files, least = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 32 + 4 * num_processes
    if 0 <= files < least:  # without a descriptor, the ranks' store waits for ever
        raise ConfigError(
            f"ulimit -n: expected at least {least} open files for {num_processes} ranks, got "
            f"{files}. Raise that limit."
        )


def print_failure(launch: LocalLaunch, result: LaunchResult) -> None:
    """Prints the cause of a failed launch to standard error."""
    cause = result.failure
    if cause is None:
        return
    lines = [
        f"rank {cause.rank} of {launch.world_size} failed (exit code {cause.exit_code}):",
        cause.text,
        *(f"Its log: {log}" for log in [launch.log(cause.rank)] if log.is_file()),
    ]
    if result.ended:  # the cause may have waited for them
        ranks = ", ".join(map(str, result.ended))
        lines.append(f"Before it, ended with exit code 0: rank {ranks}.")
    for other in result.others:
        if (other.type, other.message) != (cause.type, cause.message):
            summary = textwrap.shorten(other.message, 160)
            when = "After" if other.exit_code else "Before"
            lines.append(f"{when} it, rank {other.rank}: {other.type}: {summary}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


def _environment(
    launch: LocalLaunch, rank: int, folder: LaunchFolder, store: LaunchStore
) -> LaunchEnvironment:
    """Launch environment of a rank."""
    return LaunchEnvironment(
        launcher=Launcher.FULLSHARD,
        rank=rank,
        world_size=launch.world_size,
        local_rank=rank - launch.ranks[0],
        local_world_size=launch.num_processes,
        master_addr=store.host,
        master_port=store.port,
        launch_dir=folder.path,
        log_dir=launch.log_dir.absolute(),
        attempt=launch.attempt,
        timeout_s=launch.stuck_s,
        config_file=launch.config_file,
    )


def _start(launch: LocalLaunch, environment: LaunchEnvironment, relay: Relay) -> RankProcess:
    rank = environment.rank
    log = launch.log(rank).absolute()
    words = (launch.module, *launch.args)
    variables = {**launch.variables, **environment.to_variables()}
    with log.open("ab") as file:
        out, err = (file.fileno(),) * 2
        if environment.local_rank == 0:
            out, err = relay.stdout_fd, relay.stderr_fd
        forked = launch.server and launch.server.fork(words, variables, out, err)
        process = forked or subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", ENTRY, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=_defaults(launch.machines.num_machines) | current_variables() | variables,
            process_group=0,
        )
    return RankProcess(rank, process, log)


def _defaults(num_machines: int) -> dict[str, str]:
    """Variables of ranks, where the environment has none."""
    # One thread per rank: more would compete for the cores of the other ranks.
    # By default gloo binds to the address of the host's name, which may not resolve.
    loopback = {"GLOO_SOCKET_IFNAME": _loopback()} if num_machines == 1 else {}
    return {"OMP_NUM_THREADS": "1", **loopback}


@contextlib.contextmanager
def fork_server(modules: Sequence[str]) -> Iterator[ForkServer]:
    """A server of ranks of this machine, which imports modules while the block runs."""
    # OpenBLAS would start threads when it is imported; a process with threads cannot fork.
    server = ForkServer(ENTRY, modules, _defaults(1) | {"OPENBLAS_NUM_THREADS": "1"})
    try:
        yield server
    finally:
        server.close()


def _positions(launch: LocalLaunch, store: LaunchStore) -> list[str]:
    """Last published positions of the ranks, one line per rank."""
    if store.store is None:
        return []
    return watchdog.describe(watchdog.read_positions(store.store, launch.world_size))


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
