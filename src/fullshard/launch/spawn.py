"""Start ranks on this machine, supervised: the way every command runs a job without torchrun.

    launcher --- rank 0   terminal and logs/rank_0.log (see relay)
        |------- rank 1   logs/rank_1.log
        `------- ...      each `python -m MODULE ARGUMENTS` inside rank_entry's frame

Every rank leads a process group of its own, in the launcher's session: Ctrl-C reaches the launcher
alone, which passes it on once; ending a rank ends what it forked; and the kernel kills the ranks
when the launcher dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fullshard.config import host_memory
from fullshard.config.environment import LaunchEnvironment, Launcher, current_variables
from fullshard.errors import ConfigError
from fullshard.launch.folder import LaunchFolder
from fullshard.launch.relay import Relay
from fullshard.launch.signals import caught_stop_signals
from fullshard.launch.store import LOOPBACK, LaunchStore
from fullshard.launch.supervise import LaunchResult, RankProcess, Supervisor
from fullshard.observe import watchdog

ENTRY = "fullshard.launch.rank_entry"
PREFIX = "fullshard-launch-"  # of the private folder, in TMPDIR
LOCK = "lock"  # in that folder, held by its launcher
LEAST_RANK_BYTES = 64 << 20  # a process that has imported torch takes more


@dataclass(frozen=True)
class Machines:
    """Which of several machines this is; a launcher runs on each of them.

    Args:
        count: how many, each with the same number of ranks.
        index: this one, from 0.
        address: of machine 0, whose launcher serves the store.
        port: of the store; the same number on every machine, 0 only where there is one.
    """

    count: int = 1
    index: int = 0
    address: str = LOOPBACK
    port: int = 0


@dataclass(frozen=True)
class LocalLaunch:
    """What to run on the ranks of this machine.

    Args:
        module: run as `python -m module` on every rank; what ends in `.py` is run as a script.
        args: its arguments, the same for every rank.
        num_processes: how many ranks on this machine.
        log_dir: `<run's folder>/logs`; made if missing, logs of an earlier launch are continued.
        timeout_s: for the whole run; None: it may take for ever.
        stuck_s: after which a rank that others wait for counts as stuck (`launch.timeout`).
        machines: which of several this is.
        attempt: how often the same was launched before.
        config_file: for the script to read (`fullshard.integrations`); None: none.
    """

    module: str
    args: tuple[str, ...]
    num_processes: int
    log_dir: Path
    timeout_s: float | None = None
    stuck_s: float = 600.0
    machines: Machines = Machines()
    attempt: int = 0
    config_file: Path | None = None

    @property
    def world_size(self) -> int:
        """Ranks of all machines."""
        return self.num_processes * self.machines.count

    @property
    def ranks(self) -> range:
        """Those of this machine."""
        first = self.num_processes * self.machines.index
        return range(first, first + self.num_processes)

    def log(self, rank: int) -> Path:
        """Where a rank's output is kept."""
        return self.log_dir / f"rank_{rank}.log"


def run_local_ranks(
    module: str,
    args: Sequence[str],
    *,
    num_processes: int,
    log_dir: Path,
    timeout_s: float | None = None,
) -> int:
    """Run a module on local ranks, show the first failure if there is one, return the exit code.

    See LocalLaunch for the arguments.
    """
    launch = LocalLaunch(module, tuple(args), num_processes, log_dir, timeout_s)
    result = launch_local_ranks(launch)
    print_failure(launch, result)
    return result.exit_code


def launch_local_ranks(launch: LocalLaunch) -> LaunchResult:
    """Run a module on local ranks until all have ended; no process of theirs is left after it.

    Raises:
        ConfigError: the number of processes is not positive, or more than this machine holds.
    """
    most = max(1, host_memory.total_bytes() // LEAST_RANK_BYTES)
    if not 1 <= launch.num_processes <= most:
        raise ConfigError(
            f"launch.num_processes: expected an integer >= 1 and <= {most:,}, which is what this "
            f"machine has memory for, got {launch.num_processes:,}."
        )
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    if launch.attempt == 0:
        (launch.log_dir / "hang.txt").unlink(missing_ok=True)
    machines = launch.machines
    store = LaunchStore(machines.address, machines.port, served_here=machines.index == 0)
    with _private_folder() as folder, caught_stop_signals() as caught:
        relay = Relay(launch.log(launch.ranks[0]))
        ranks: list[RankProcess] = []
        run_id = uuid.uuid4().hex if machines.count == 1 else f"{store.host}:{store.port}"
        supervisor = Supervisor(
            ranks,
            folder,
            timeout_s=launch.timeout_s,
            on_failure=relay.mute,
            positions=partial(_positions, launch, store, run_id),
        )
        with contextlib.ExitStack() as closing:  # each of them, whatever becomes of the others
            for close in (store.close, relay.close, supervisor.end_all):
                closing.callback(close)
            for rank in launch.ranks:
                environment = _environment(launch, rank, folder, store, run_id)
                ranks.append(_start(launch, environment, folder, relay))
            relay.start()
            store.serve_soon()
            return supervisor.watch(caught)


def print_failure(launch: LocalLaunch, result: LaunchResult) -> None:
    """Show on standard error what a launch failed of: whole, once, before anything else."""
    cause = result.failure
    if cause is None:
        return
    lines = [
        f"rank {cause.rank} of {launch.world_size} failed (exit code {cause.exit_code}):",
        cause.text,
        f"Its log: {launch.log(cause.rank)}",
    ]
    for other in result.others:
        if (other.type, other.message) != (cause.type, cause.message):
            summary = textwrap.shorten(other.message, 160)
            lines.append(f"After it, rank {other.rank}: {other.type}: {summary}")
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _private_folder() -> Iterator[LaunchFolder]:
    _remove_abandoned()
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    held = os.open(path / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield LaunchFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def _remove_abandoned() -> None:
    """Remove the folders of launchers that were killed: no live one holds their locks."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < 60.0:
                continue
            descriptor = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)  # older versions have none
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _environment(
    launch: LocalLaunch, rank: int, folder: LaunchFolder, store: LaunchStore, run_id: str
) -> LaunchEnvironment:
    """What a rank is told of itself."""
    return LaunchEnvironment(
        launcher=Launcher.FULLSHARD,
        rank=rank,
        world_size=launch.world_size,
        local_rank=rank - launch.ranks[0],
        local_world_size=launch.num_processes,
        master_addr=store.host,
        master_port=store.port,
        launch_dir=folder.path,
        run_dir=launch.log_dir.absolute().parent,
        run_id=run_id,
        attempt=launch.attempt,
        timeout_s=launch.stuck_s,
        config_file=launch.config_file,
    )


def _start(
    launch: LocalLaunch, environment: LaunchEnvironment, folder: LaunchFolder, relay: Relay
) -> RankProcess:
    rank = environment.rank
    log = launch.log(rank).absolute()
    folder.log(rank).symlink_to(log)
    command = [sys.executable, "-u", "-m", ENTRY, str(os.getpid()), launch.module, *launch.args]
    # One thread a rank: more of them fight for the cores that the other ranks use.
    # gloo would bind to the address of the host's name, which may not resolve or be firewalled.
    defaults = {"OMP_NUM_THREADS": "1"}
    if launch.machines.count == 1:
        defaults["GLOO_SOCKET_IFNAME"] = _loopback()
    first = environment.local_rank == 0
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=relay.stdout_fd if first else file,
            stderr=relay.stderr_fd if first else file,
            env=defaults | current_variables() | environment.to_variables(),
            process_group=0,
        )
    return RankProcess(rank, process, log)


def _positions(launch: LocalLaunch, store: LaunchStore, run_id: str) -> list[str]:
    """Where the ranks were when they last spoke; also left in the file that a hang leaves."""
    if store.store is None:
        return []
    attempt = f"{run_id}.{launch.attempt}"
    seen = watchdog.read_positions(store.store, attempt, launch.world_size)
    return watchdog.describe(seen)


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
