"""Watches running ranks until all have ended, and ends all of them once one fails.

    watch --- all ended with 0 --------------------------------------> ok
      |------ one failed ---> grace period for the others' reports -.
      |------ another machine failed ---> grace period to save -----|
      |------ time is up ---> every rank writes its stacks ---------+-> SIGTERM, SIGKILL -> cause
      `------ SIGINT, SIGTERM ---> forwarded; grace period to save -'

Dead ranks are not reaped until the end, so that the system cannot reuse their process ids (which
are also the ids of their process groups) before the groups are killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fullshard.config.host_memory import kill_counters, limit
from fullshard.launch.exit_codes import (
    ExitCode,
    LaunchFolder,
    RankFailure,
    describe_status,
    exit_code_of_signal,
    first_cause,
)
from fullshard.launch.fork_server import Adopted
from fullshard.observe.metrics import wait_until
from fullshard.observe.watchdog import stacks_of

POLL_S = 0.05
REPORT_S = 1.0  # after the first failure: another rank may still report the cause
TERMINATE_S = 4.0  # between SIGTERM and SIGKILL
INTERRUPT_S = 10.0  # after Ctrl-C
PREEMPT_S = 30.0  # after SIGTERM: schedulers usually wait this long, enough to save
LOG_LINES = 20
LOG_BYTES = 65_536


@dataclass
class RankProcess:
    """A rank that runs or has run."""

    rank: int
    process: subprocess.Popen[bytes] | Adopted
    log: Path
    status: int | None = field(default=None, init=False)  # as Popen.returncode
    ended_s: float = field(default=0.0, init=False)

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        """Its exit status, without reaping it; None while it runs. Without flags it waits."""
        if self.status is None:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | flags)
            if info is not None:
                killed = info.si_code != os.CLD_EXITED
                self.status = -info.si_status if killed else info.si_status
                self.ended_s = time.monotonic()
        return self.status

    def send(self, number: int) -> None:
        """Sends a signal to the rank, not to its process group."""
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def reap(self) -> None:
        """Kills the rest of its process group, then reaps the process."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.poll(0)
        self.process.wait()


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        exit_code: Typed exit code; 0 if every rank succeeded.
        failure: The first cause; None if nothing failed or a signal ended the launch.
        others: Further failures.
        ended: Ranks that had ended without a failure before.
    """

    exit_code: int
    failure: RankFailure | None = None
    others: tuple[RankFailure, ...] = ()
    ended: tuple[int, ...] = ()

    def for_others(self, machine: int, rank: int) -> RankFailure | None:
        """Returns the failure for other machines; a signal that ended this launch is one, too."""
        if self.failure is not None or self.exit_code == ExitCode.OK:
            return self.failure
        kind = "PreemptedError" if self.exit_code == ExitCode.PREEMPTED else "KeyboardInterrupt"
        said = f"launch: expected machine {machine} to reach its end, but a signal stopped it."
        return RankFailure(rank, kind, said, self.exit_code, "", time.monotonic())


@dataclass(kw_only=True)
class Supervisor:
    """Watches the ranks of one launch.

    Attributes:
        ranks: Started processes, each the leader of its own process group.
        folder: Folder in which the ranks report failures.
        timeout_s: Maximum duration of the launch; None: unlimited.
        on_failure: Called once, as soon as a rank has failed.
        positions: Returns the last known position of each rank, one line per rank.
        elsewhere: Returns the failure of another machine; None here: there is only this machine.
    """

    ranks: Sequence[RankProcess]
    folder: LaunchFolder
    timeout_s: float | None
    on_failure: Callable[[], None]
    positions: Callable[[], list[str]]
    elsewhere: Callable[[], RankFailure | None] | None = None

    def __post_init__(self) -> None:
        self._kills = num_kills()
        self._told_s: float | None = None  # since when another machine's failure is known

    def watch(self, caught: list[int]) -> LaunchResult:
        """Returns once every rank has ended."""
        started = time.monotonic()
        while True:
            statuses = [rank.poll() for rank in self.ranks]
            if caught:
                return self._stop(caught)
            if any(statuses):
                return self._fail()
            if None not in statuses:
                return LaunchResult(ExitCode.OK)
            if self.timeout_s is not None and time.monotonic() - started > self.timeout_s:
                return self._hang(self.timeout_s)
            if (failure := self._unnoticed()) is not None:
                self.on_failure()
                self.end_all()
                return LaunchResult(failure.exit_code, failure)
            time.sleep(POLL_S)

    def _unnoticed(self) -> RankFailure | None:
        """Failure of another machine which our ranks have had the time to notice and to save."""
        failure = self.elsewhere() if self.elsewhere else None
        if failure is None:
            return None
        self._told_s = self._told_s or time.monotonic()
        patience = PREEMPT_S * (failure.exit_code != ExitCode.CONFIG)  # then nothing is saved
        return failure if time.monotonic() - self._told_s > patience else None

    def end_all(self, patience_s: float = TERMINATE_S) -> None:
        """Sends SIGTERM, then SIGKILL; returns once no process of any rank is left."""
        with contextlib.suppress(OSError):  # TMPDIR was emptied, or its disk is full
            self.folder.ending.touch()
        for rank in self.ranks:
            rank.send(signal.SIGTERM)
            rank.send(signal.SIGCONT)  # a stopped rank would not handle SIGTERM
        self._wait(patience_s)
        for rank in self.ranks:
            rank.reap()

    def _fail(self) -> LaunchResult:
        """Ends the ranks and finds the first failure."""
        before = tuple(rank.rank for rank in self.ranks if rank.status == 0)
        self.on_failure()
        self._wait(REPORT_S)
        ended = {rank.rank for rank in self.ranks if rank.poll()}
        # A rank that ended with a report of its own was not judged: it is silent since it ended.
        told = any(self.folder.failure(rank).exists() for rank in ended)
        was_judged = self.folder.hang.exists() or not told
        self.end_all()
        hang = RankFailure.read(self.folder.hang) if was_judged else None
        if hang is not None:  # the watchdogs have ended all ranks
            return LaunchResult(hang.exit_code, hang)
        # A rank that was still looking for the cause has reported, but not ended.
        failed = (r for r in self.ranks if r.rank in ended or self.folder.failure(r.rank).exists())
        failures = [self._failure_of(rank) for rank in failed]
        cause = first_cause(failures)
        if cause.is_consequence and (elsewhere := self.elsewhere):
            wait_until(lambda: elsewhere() is not None, REPORT_S + TERMINATE_S + 1.0)
            cause = elsewhere() or cause
        others = tuple(failure for failure in failures if failure is not cause)
        return LaunchResult(cause.exit_code, self._with_positions(cause), others, before)

    def _with_positions(self, failure: RankFailure) -> RankFailure:
        """Adds the positions of all ranks to a death without a report; writes hang.txt too."""
        is_silent = failure.type in ("HangError", "OutOfMemoryError")
        lines = self.positions() if is_silent else []
        if not lines:
            return failure
        file = self.ranks[0].log.with_name("hang.txt")
        with contextlib.suppress(OSError):  # a full disk; the message has the places too
            file.write_text("\n".join([failure.message, "", *lines]) + "\n", encoding="utf-8")
        places = [line for line in lines if line.startswith("rank ")]
        message = "\n".join([failure.message, "Last known position of the ranks:", *places])
        return replace(failure, message=message)

    def _failure_of(self, rank: RankProcess) -> RankFailure:
        """The rank's report, or else its exit status and the end of its log."""
        report = RankFailure.read(self.folder.failure(rank.rank))
        if report is not None:
            return report
        status = rank.status or 0
        message = f"rank {rank.rank}: expected to reach its end, but it {describe_status(status)}"
        kind, code = ("RankExit", status) if status > 0 else ("HangError", int(ExitCode.HANG))
        if status == -signal.SIGKILL and num_kills() > self._kills:
            kind, code = "OutOfMemoryError", int(ExitCode.OUT_OF_MEMORY)
            message += f" because memory ran out. The processes need more than {limit()}. {CURE}"
        message += "."
        if tail := _last_lines(rank.log):
            message += "\nThe last lines of its log:\n  " + "\n  ".join(tail)
        return RankFailure(rank.rank, kind, message, code, "", rank.ended_s)

    def _stop(self, caught: list[int]) -> LaunchResult:
        """Forwards the signal and waits for the ranks to end; a second signal ends the wait."""
        interrupted = caught[0] == signal.SIGINT
        for rank in self.ranks:
            rank.send(signal.SIGINT if interrupted else signal.SIGTERM)
        self._wait(INTERRUPT_S if interrupted else PREEMPT_S, unless=lambda: len(caught) > 1)
        statuses = [rank.poll() for rank in self.ranks]
        self.end_all(0.0 if len(caught) > 1 else TERMINATE_S)
        if statuses and not any(status != 0 for status in statuses):
            return LaunchResult(ExitCode.OK)
        reports = [RankFailure.read(self.folder.failure(rank.rank)) for rank in self.ranks]
        stopping = (ExitCode.UNEXPECTED, ExitCode.HANG, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
        failures = [report for report in reports if report and report.exit_code not in stopping]
        if failures:  # such as a checkpoint that could not be written
            cause = first_cause(failures)
            return LaunchResult(cause.exit_code, cause)
        return LaunchResult(exit_code_of_signal(caught[0]))

    def _hang(self, timeout_s: float) -> LaunchResult:
        """Reports the stacks of every rank as the failure."""
        self.on_failure()
        running = [rank for rank in self.ranks if rank.poll() is None]
        names = ", ".join(f"rank {rank.rank}" for rank in running)
        message = f"run: expected all ranks to end within {timeout_s:g} s, but {names} did not. "
        message += "Their stacks:"
        for rank in running:
            stacks = stacks_of(rank.process.pid, rank.log)
            message += f"\n---- rank {rank.rank} ----\n{stacks.rstrip()}"
        self.end_all()
        code = int(ExitCode.HANG)
        failure = RankFailure(running[0].rank, "HangError", message, code, "", time.monotonic())
        return LaunchResult(code, failure)

    def _wait(self, timeout_s: float, unless: Callable[[], bool] = lambda: False) -> None:
        def is_over() -> bool:
            return unless() or all(rank.poll() is not None for rank in self.ranks)

        wait_until(is_over, timeout_s, POLL_S)


def _last_lines(log: Path) -> list[str]:
    """The last lines of a log; empty if it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    return []


SYSTEM_KILLS = Path("/proc/vmstat")
_COUNT = re.compile(r"^oom_kill (\d+)", re.MULTILINE)

CURE = (
    "Reduce the memory per rank (batch, sequence length, model), start fewer ranks, move state "
    "from memory to disk (offload: nvme), or give the run more memory"
)


def num_kills() -> int:
    """Counts the processes that the kernel killed for memory, on this machine or in our cgroups."""
    found: list[str] = []
    for file in (SYSTEM_KILLS, *kill_counters()):
        with contextlib.suppress(OSError):
            found += _COUNT.findall(file.read_text(encoding="utf-8"))
    return sum(map(int, found))
