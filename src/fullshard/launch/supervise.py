"""Watch running ranks until all have ended, and end them all once one fails.

    watch --- all ended with 0 ------------------------------------> ok
      |------ one failed ---> grace for the others' own reports -.
      |------ time is up ---> every rank writes its stacks ------+-> SIGTERM -> SIGKILL -> cause
      `------ SIGINT, SIGTERM ---> forwarded; a grace to save ---'

Dead ranks stay unreaped until the end, so that their process ids (which are also the ids of their
process groups) cannot be given to anybody else before the groups are killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fullshard.launch.exit_codes import ExitCode, describe_status, exit_code_of_signal
from fullshard.launch.failure import RankFailure, first_cause
from fullshard.launch.folder import LaunchFolder
from fullshard.launch.memory_kill import CURE, MemoryWatch
from fullshard.launch.rank_entry import STACKS_SIGNAL
from fullshard.launch.signals import Caught
from fullshard.observe.trace import read_kept

POLL_S = 0.05
REPORT_S = 1.0  # after the first failure: the others may be about to report the true cause
TERMINATE_S = 4.0  # between SIGTERM and SIGKILL
STACKS_S = 1.0
INTERRUPT_S = 10.0  # after Ctrl-C
PREEMPT_S = 30.0  # after SIGTERM: what schedulers usually leave, enough to save
LOG_LINES = 20
LOG_BYTES = 65_536
EVENTS = 8


@dataclass
class RankProcess:
    """One rank that runs or has run."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    status: int | None = field(default=None, init=False)  # as Popen.returncode
    ended_s: float = field(default=0.0, init=False)

    def poll(self) -> int | None:
        """Its status, without reaping it."""
        return self._look(os.WNOHANG)

    def send(self, number: int) -> None:
        """Signal the rank alone."""
        if self.poll() is None:
            os.kill(self.process.pid, number)

    def reap(self) -> None:
        """Kill what is left of its process group, then forget the process."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._look(0)
        self.process.wait()

    def _look(self, flags: int) -> int | None:
        if self.status is None:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | flags)
            if info is not None:
                killed = info.si_code != os.CLD_EXITED
                self.status = -info.si_status if killed else info.si_status
                self.ended_s = time.time()
        return self.status


@dataclass(frozen=True)
class LaunchResult:
    """How a launch ended.

    Args:
        exit_code: typed; 0 where every rank ended well.
        failure: what brought it about; None where nothing failed or a signal ended it.
        others: failures that followed.
    """

    exit_code: int
    failure: RankFailure | None = None
    others: tuple[RankFailure, ...] = ()


class Supervisor:
    """Watches the ranks of one launch.

    Args:
        ranks: started processes, each the leader of a process group of its own.
        folder: through which they report.
        timeout_s: after which they count as stuck; None: never.
        on_failure: called once, as soon as a rank has failed.
        positions: tells where each rank last was, a line a rank.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        folder: LaunchFolder,
        *,
        timeout_s: float | None,
        on_failure: Callable[[], None],
        positions: Callable[[], list[str]],
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._positions = positions
        self._memory = MemoryWatch()

    def watch(self, caught: Caught) -> LaunchResult:
        """Return when every rank has ended, for whatever reason."""
        started = time.monotonic()
        while True:
            self._memory.look()
            statuses = [rank.poll() for rank in self._ranks]
            if caught.numbers:
                return self._stop(caught)
            if any(statuses):
                return self._fail()
            if None not in statuses:
                return LaunchResult(ExitCode.OK)
            if self._timeout_s is not None and time.monotonic() - started > self._timeout_s:
                return self._hang(self._timeout_s)
            time.sleep(POLL_S)

    def end_all(self, patience_s: float = TERMINATE_S) -> None:
        """SIGTERM, then SIGKILL; returns when no process of any rank is left."""
        with contextlib.suppress(OSError):  # somebody emptied TMPDIR, or its disk is full
            self._folder.ending.touch()
        for rank in self._ranks:
            rank.send(signal.SIGTERM)
            rank.send(signal.SIGCONT)  # a stopped rank would not hear it
        self._wait(patience_s)
        for rank in self._ranks:
            rank.reap()

    def _fail(self) -> LaunchResult:
        self._on_failure()
        self._wait(REPORT_S)
        return self._explain()

    def _explain(self) -> LaunchResult:
        """End the ranks and find the failure that was first."""
        ended = {rank.rank for rank in self._ranks if rank.poll()}
        self.end_all()
        hang = RankFailure.read(self._folder.hang)
        if hang is not None:  # the watchdogs have judged and ended all ranks
            return LaunchResult(hang.exit_code, hang)
        # One that was still asking the others for the cause has reported, but had not ended.
        failed = (
            r for r in self._ranks if r.rank in ended or self._folder.failure(r.rank).exists()
        )
        failures = [self._failure_of(rank) for rank in failed]
        cause = first_cause(failures)
        others = tuple(failure for failure in failures if failure is not cause)
        return LaunchResult(cause.exit_code, self._placed(cause), others)

    def _placed(self, failure: RankFailure) -> RankFailure:
        """A rank that died without a word: with where all were; also written beside the logs."""
        lines = self._positions() if failure.type == "HangError" else []
        if not lines:
            return failure
        file = self._ranks[0].log.with_name("hang.txt")
        with contextlib.suppress(OSError):  # a full disk; the message has the places too
            file.write_text("\n".join([failure.message, "", *lines]) + "\n", encoding="utf-8")
        places = [line for line in lines if line.startswith("rank ")]
        message = "\n".join([failure.message, "Where the ranks were last seen:", *places])
        return replace(failure, message=message)

    def _failure_of(self, rank: RankProcess) -> RankFailure:
        """What the rank reported, or what its death and its log tell."""
        report = RankFailure.read(self._folder.failure(rank.rank))
        if report is not None:
            return report
        status = rank.status or 0
        no_memory = status == -signal.SIGKILL and self._memory.ran_out()
        words = describe_status(status) + " because memory ran out" * no_memory
        message = f"rank {rank.rank}: expected to reach its end, but it {words}."
        message += f" {CURE}." * no_memory
        tail = _last_lines(rank.log)
        if tail:
            message += "\nThe last lines of its log:\n  " + "\n  ".join(tail)
        events = read_kept(self._folder.events(rank.rank))[-EVENTS:]
        if events:
            message += f"\nIts last events: {'; '.join(events)}"
        if no_memory:
            kind, code = "OutOfMemoryError", int(ExitCode.OUT_OF_MEMORY)
        else:
            code = status if status > 0 else int(ExitCode.HANG)
            kind = "RankExit" if status > 0 else "HangError"
        return RankFailure(rank.rank, kind, message, code, "", rank.ended_s)

    def _stop(self, caught: Caught) -> LaunchResult:
        """Pass the signal on and wait for an orderly end; a second signal ends the patience."""
        interrupted = caught.numbers[0] == signal.SIGINT
        for rank in self._ranks:
            rank.send(signal.SIGINT if interrupted else signal.SIGTERM)
        self._wait(
            INTERRUPT_S if interrupted else PREEMPT_S, unless=lambda: len(caught.numbers) > 1
        )
        statuses = [rank.poll() for rank in self._ranks]
        self.end_all(0.0 if len(caught.numbers) > 1 else TERMINATE_S)
        if not any(status != 0 for status in statuses):
            return LaunchResult(ExitCode.OK)
        reports = [RankFailure.read(self._folder.failure(rank.rank)) for rank in self._ranks]
        stopping = (ExitCode.UNEXPECTED, ExitCode.HANG, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
        failures = [report for report in reports if report and report.exit_code not in stopping]
        if failures:  # such as a checkpoint that could not be written on the way out
            cause = first_cause(failures)
            return LaunchResult(cause.exit_code, cause)
        return LaunchResult(exit_code_of_signal(caught.numbers[0]))

    def _hang(self, timeout_s: float) -> LaunchResult:
        """Have every rank write its stacks, and make them the failure."""
        self._on_failure()
        running = [rank for rank in self._ranks if rank.poll() is None]
        for rank in running:
            rank.send(STACKS_SIGNAL)
        time.sleep(STACKS_S)
        self.end_all()
        message = f"run: expected all ranks to end within {timeout_s:g} s, but " + ", ".join(
            f"rank {rank.rank}" for rank in running
        )
        message += " did not. Their stacks:"
        for rank in running:
            file = self._folder.stacks(rank.rank)
            stacks = file.read_text() if file.exists() else "(none: it had not come that far)\n"
            message += f"\n---- rank {rank.rank} ----\n{stacks.rstrip()}"
        code = int(ExitCode.HANG)
        failure = RankFailure(running[0].rank, "HangError", message, code, "", time.time())
        return LaunchResult(code, failure)

    def _wait(self, timeout_s: float, unless: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not unless():
            if all(rank.poll() is not None for rank in self._ranks):
                return
            time.sleep(POLL_S)


def _last_lines(log: Path) -> list[str]:
    """What a rank wrote last; nothing where its log cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []
