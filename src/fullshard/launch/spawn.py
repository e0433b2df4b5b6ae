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
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fullshard.config.environment import LaunchEnvironment, Launcher, current_variables
from fullshard.errors import ConfigError
from fullshard.launch.folder import LaunchFolder
from fullshard.launch.relay import Relay
from fullshard.launch.signals import caught_stop_signals
from fullshard.launch.store import LaunchStore
from fullshard.launch.supervise import LaunchResult, RankProcess, Supervisor
from fullshard.observe import watchdog

ENTRY = "fullshard.launch.rank_entry"


@dataclass(frozen=True)
class LocalLaunch:
    """What to run on the ranks of this machine.

    Args:
        module: run as `python -m module` on every rank.
        args: its arguments, the same for every rank.
        num_processes: how many ranks.
        log_dir: `<run's folder>/logs`; made if missing, logs of an earlier launch are continued.
        timeout_s: for the whole run; None: it may take for ever.
        stuck_s: after which a rank that others wait for counts as stuck (`launch.timeout`).
    """

    module: str
    args: tuple[str, ...]
    num_processes: int
    log_dir: Path
    timeout_s: float | None = None
    stuck_s: float = 600.0

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
        ConfigError: the number of processes is not positive.
    """
    if launch.num_processes < 1:
        raise ConfigError(
            f"launch.num_processes: expected an integer >= 1, got {launch.num_processes}."
        )
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    with _private_folder() as folder, caught_stop_signals() as caught:
        relay = Relay(launch.log(0))
        ranks: list[RankProcess] = []
        store, run_id = LaunchStore(), uuid.uuid4().hex
        supervisor = Supervisor(
            ranks,
            folder,
            timeout_s=launch.timeout_s,
            on_failure=relay.mute,
            positions=partial(_positions, launch, store, run_id),
        )
        try:
            for rank in range(launch.num_processes):
                environment = _environment(launch, rank, folder, store, run_id)
                ranks.append(_start(launch, environment, folder, relay))
            relay.start()
            store.serve()
            return supervisor.watch(caught)
        finally:
            supervisor.end_all()
            relay.close()
            store.close()


def print_failure(launch: LocalLaunch, result: LaunchResult) -> None:
    """Show on standard error what a launch failed of: whole, once, before anything else."""
    cause = result.failure
    if cause is None:
        return
    lines = [
        f"rank {cause.rank} of {launch.num_processes} failed (exit code {cause.exit_code}):",
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
    path = Path(tempfile.mkdtemp(prefix="fullshard-launch-"))
    try:
        yield LaunchFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _environment(
    launch: LocalLaunch, rank: int, folder: LaunchFolder, store: LaunchStore, run_id: str
) -> LaunchEnvironment:
    """What a rank is told of itself."""
    return LaunchEnvironment(
        launcher=Launcher.FULLSHARD,
        rank=rank,
        world_size=launch.num_processes,
        local_rank=rank,
        local_world_size=launch.num_processes,
        master_addr=store.host,
        master_port=store.port,
        launch_dir=folder.path,
        run_dir=launch.log_dir.absolute().parent,
        run_id=run_id,
        timeout_s=launch.stuck_s,
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
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": _loopback()}
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=relay.stdout_fd if rank == 0 else file,
            stderr=relay.stderr_fd if rank == 0 else file,
            env=defaults | current_variables() | environment.to_variables(),
            process_group=0,
        )
    return RankProcess(rank, process, log)


def _positions(launch: LocalLaunch, store: LaunchStore, run_id: str) -> list[str]:
    """Where the ranks were when they last spoke; also left in the file that a hang leaves."""
    if store.store is None:
        return []
    seen = watchdog.read_positions(store.store, f"{run_id}.0", launch.num_processes)
    return watchdog.describe(seen)


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])
