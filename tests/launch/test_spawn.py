"""Local ranks connect, their output is routed, and a failure ends them all."""

import errno
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from fullshard.config.host_memory import Limit
from fullshard.errors import ConfigError
from fullshard.launch import supervise
from fullshard.launch.exit_codes import LaunchFolder, RankFailure
from fullshard.launch.rendezvous import LaunchStore
from fullshard.launch.spawn import LocalLaunch, fork_server, launch_local_ranks
from fullshard.launch.supervise import RankProcess, Supervisor
from support import forked
from support.launcher import run_local_ranks
from support.processes import assert_all_end, newest_child, read_pids

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(what, *args, ranks=2)` launches a job of support/launch_job.py."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def run(what, *args, ranks=2, timeout_s=60.0, server=None):
        with forked.launching():
            return run_local_ranks(
                "support.launch_job",
                [what, *map(str, args)],
                num_processes=ranks,
                log_dir=tmp_path / "logs",
                timeout_s=timeout_s,
                server=server,
            )

    return run


@pytest.fixture
def alone(monkeypatch):
    """One rank fails, and no other reports a failure."""
    monkeypatch.setattr(supervise, "REPORT_S", 0.1)


def log(tmp_path, rank):
    return (tmp_path / "logs" / f"rank_{rank}.log").read_text()


def test_ranks_connect_over_gloo_with_one_thread_each(run, tmp_path):
    assert run("meet_twice", tmp_path) == 0
    for rank in range(2):
        assert (tmp_path / f"sum_{rank}").read_text() == "gloo 1 3.0"


@pytest.mark.gpu
def test_a_rank_with_a_gpu_connects_over_nccl_and_gloo(run, tmp_path):
    assert run("meet_on_gpus", tmp_path, ranks=1) == 0
    assert (tmp_path / "sum_0").read_text() == "cuda:0 1.0 1.0"


@pytest.mark.gpu
def test_more_ranks_than_gpus_are_refused_by_name(run, tmp_path, capfd):
    import torch

    assert run("meet_on_gpus", tmp_path, ranks=torch.cuda.device_count() + 1) == 2
    assert "launch.num_processes: expected at most" in capfd.readouterr().err


def test_rank_zero_writes_to_the_terminal_and_every_rank_to_its_log(run, tmp_path, capfd):
    assert run("speak") == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("stdout of rank 0\n", "stderr of rank 0\n")
    for rank in range(2):
        assert sorted(log(tmp_path, rank).splitlines()) == [
            f"stderr of rank {rank}",
            f"stdout of rank {rank}",
        ]


@pytest.mark.parametrize(
    ("how", "module"),
    [
        ("forked", "tabnanny"),
        ("the server has ended", "tabnanny"),
        ("the server has two threads", "support.thread"),
        ("the server cannot import", "support.missing"),
        ("the launcher cannot adopt", "tabnanny"),
    ],
)
def test_ranks_are_forked_or_started(run, tmp_path, monkeypatch, capfd, how, module):
    monkeypatch.chdir(tmp_path)  # files there are not imported instead of Python's
    (tmp_path / "tabnanny.py").write_text("raise SystemExit('of the working folder')")
    if "adopt" in how:
        monkeypatch.setattr("fullshard.launch.fork_server.PR_SET_CHILD_SUBREAPER", 9999)
    with fork_server([module]) as server:
        if "has ended" in how:
            newest_child().kill()
        assert run("imported", module, server=server) == 0
    for rank in range(2):
        assert log(tmp_path, rank) == f"rank {rank}: {how == 'forked'}\n"
    assert "Traceback" not in capfd.readouterr().err


def test_forked_ranks_draw_numbers_of_their_own(run, tmp_path):
    with fork_server(["numpy.random"]) as server:
        assert run("draw_a_number", server=server) == 0
    assert log(tmp_path, 0) != log(tmp_path, 1)


@pytest.mark.usefixtures("alone")
def test_one_failing_rank_ends_the_others_within_seconds(run, tmp_path, capfd):
    started = time.monotonic()
    assert run("raise_on_rank_one", "value") == 1
    assert time.monotonic() - started < 60  # the others would sleep for 600
    err = capfd.readouterr().err
    assert err.startswith("rank 1 of 2 failed (exit code 1):\nTraceback (most recent call last):\n")
    assert "launch_job.py" in err.splitlines()[2]  # the user's own code is shown first
    assert err.count("ValueError: rank one says no") == 1
    assert err.endswith(f"Its log: {tmp_path}/logs/rank_1.log\n")
    assert "ValueError: rank one says no" in log(tmp_path, 1)


@pytest.mark.usefixtures("alone")
def test_a_configuration_error_has_no_traceback_and_its_own_exit_code(run, tmp_path, capfd):
    assert run("raise_on_rank_one", "config") == 2
    assert capfd.readouterr().err == (
        "rank 1 of 2 failed (exit code 2):\n"
        "ConfigError: rank one says no\n"
        f"Its log: {tmp_path}/logs/rank_1.log\n"
    )
    assert log(tmp_path, 1) == "ConfigError: rank one says no\n"


@pytest.mark.usefixtures("alone")
@pytest.mark.short(1)
@pytest.mark.parametrize(("kind", "code"), [("data", 6), ("engine", 1)])
def test_any_other_error_shows_the_line_of_the_users_program(run, capfd, kind, code):
    assert run("raise_on_rank_one", kind) == code
    err = capfd.readouterr().err
    assert 'launch_job.py", line' in err
    assert "in raise_on_rank_one" in err
    assert "rank_entry.py" not in err
    assert "Error: rank one says no\n" in err


@pytest.mark.parametrize(
    ("how", "failed", "first", "last"),
    [
        ("raises", 1, "ValueError: rank one says no", "After it, rank 0: RuntimeError: "),
        ("at once", 0, "RuntimeError: ", "Before it, ended with exit code 0: rank 1.\n"),
    ],
)
def test_a_rank_that_lost_its_peer_is_shown_with_it(run, capfd, how, failed, first, last):
    assert run("end_in_a_collective", how) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"rank {failed} of 2 failed")
    assert err.index(first) < err.index(last)


def test_the_same_error_on_every_rank_is_shown_once(run, capfd):
    assert run("raise_everywhere") == 1
    assert capfd.readouterr().err.count("ValueError: all say no") == 1


@pytest.mark.usefixtures("alone")
def test_the_exit_code_of_a_rank_is_that_of_the_launch(run):
    assert run("exit_with", 9) == 9
    assert run("exit_with", 0) == 0


@pytest.mark.usefixtures("alone")
def test_a_rank_killed_by_the_kernel_is_named_with_its_last_words(run, capfd):
    assert run("die", "SIGKILL") == 5
    err = capfd.readouterr().err
    assert "HangError: rank 1: expected to reach its end, but it was killed by SIGKILL" in err
    assert "  the last words of rank 1\n" in err


@pytest.mark.usefixtures("alone")
def test_a_rank_killed_because_memory_ran_out_is_exit_code_4(run, tmp_path, monkeypatch, capfd):
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom_kill 3\n")
    limit = Limit(900 << 20, Path("/sys/fs/cgroup/job/memory.max"))
    monkeypatch.setattr(supervise, "SYSTEM_KILLS", counter)
    monkeypatch.setattr(supervise, "limit", lambda: limit)
    assert run("die_without_memory", counter) == 4
    err = capfd.readouterr().err
    assert "OutOfMemoryError: rank 1: expected to reach its end, but it was killed by" in err
    assert (
        "because memory ran out. The processes need more than the container's memory limit of "
        "900.0 MiB (/sys/fs/cgroup/job/memory.max). Reduce the memory per rank"
    ) in err


def test_a_store_that_cannot_be_served_ends_the_launch(run, tmp_path, monkeypatch):
    """Without a descriptor (`ulimit -n 16`), ranks waited until launch.timeout."""

    def serve(_store):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(LaunchStore, "serve", serve)
    monkeypatch.setattr(supervise.Supervisor.end_all, "__defaults__", (1.0,))  # of patience
    with pytest.raises(OSError, match="Too many open files"):
        run("meet", tmp_path, timeout_s=20.0)


def test_a_full_temporary_folder_does_not_hide_the_cause(run, monkeypatch, capfd):
    """Ranks' files for the launcher are cut short; their logs are elsewhere."""
    assert run("raise_on_a_full_disk") == 1
    assert "ValueError: what really happened" in capfd.readouterr().err


@pytest.mark.usefixtures("alone")
def test_a_vanished_private_folder_does_not_hide_the_cause(run, tmp_path, capfd):
    assert run("raise_without_the_folder") == 2
    err = capfd.readouterr().err
    assert "rank 1 of 2 failed (exit code 2)" in err
    assert "ConfigError: what really happened" in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("alone")
def test_a_rank_that_ignores_sigterm_is_killed(run, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise.Supervisor.end_all, "__defaults__", (0.5,))  # of patience
    started = time.monotonic()
    assert run("ignore_sigterm", tmp_path) == 1
    assert time.monotonic() - started < 60


def test_ranks_that_do_not_end_in_time_are_shown_by_their_stacks(run, capfd):
    assert run("sleep_by_a_name_of_its_own", timeout_s=1.0) == 5
    err = capfd.readouterr().err
    assert "HangError: run: expected all ranks to end within 1 s, but rank 0, rank 1 did" in err
    assert err.count("in sleep_by_a_name_of_its_own") == 2


def test_processes_that_a_rank_started_end_with_it(run, tmp_path):
    assert run("fork_and_sleep", tmp_path, timeout_s=1.5) == 5
    assert_all_end(read_pids(tmp_path, 2))


def test_a_launch_leaves_no_folder_and_no_handler_behind(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "private"))
    (tmp_path / "private").mkdir()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run("raise_everywhere")
    assert list((tmp_path / "private").iterdir()) == []
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [0, 1_000_000])
def test_a_launch_of_no_process_or_of_too_many_is_refused(number, tmp_path):
    launch = LocalLaunch("support.launch_job", (), number, tmp_path / "logs")
    words = rf"launch.num_processes: expected an integer >= 1 and <= \S+, .*, got {number:,}"
    with pytest.raises(ConfigError, match=words):
        launch_local_ranks(launch)


def test_a_launch_with_too_few_open_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (39, 39))
    launch = LocalLaunch("support.launch_job", (), 2, tmp_path / "logs")
    with pytest.raises(ConfigError, match="ulimit -n: expected at least 40 open files for 2 ranks"):
        launch_local_ranks(launch)


@pytest.fixture
def started(tmp_path):
    """`started(rank, *words)` starts a command as a rank."""
    return lambda rank, *words: RankProcess(
        rank, subprocess.Popen(words, process_group=0), tmp_path / f"{rank}.log"
    )


@pytest.mark.parametrize("how", ["stopped", "lost its peer"])
def test_a_failure_of_another_machine_ends_ranks_and_is_their_cause(
    how, started, tmp_path, monkeypatch
):
    monkeypatch.setattr(supervise, "PREEMPT_S", 0.2)
    monkeypatch.setattr(supervise, "REPORT_S", 0.1)
    rank = started(1, *(("sleep", "60") if how == "stopped" else ("false",)))
    folder = LaunchFolder(tmp_path, tmp_path)
    if how == "stopped":
        rank.send(signal.SIGSTOP)
    else:
        RankFailure(1, "RuntimeError", "connection reset", 1, "", 1.0).write(folder.failure(1))
    known = RankFailure(0, "DataError", "no such file", 6, "", 2.0)
    quiet = {"timeout_s": 30.0, "on_failure": lambda: None, "positions": list}
    supervisor = Supervisor(ranks=[rank], folder=folder, elsewhere=lambda: known, **quiet)
    result = supervisor.watch([])
    supervisor.end_all()
    assert (result.exit_code, result.failure) == (6, known)


def test_a_failed_rank_is_not_called_silent_while_the_others_end(started, tmp_path, monkeypatch):
    class Slow(Supervisor):
        def end_all(self, patience_s=0.0):
            RankFailure(1, "HangError", "rank 1 is silent", 5, "", 2.0).write(self.folder.hang)
            super().end_all(0.0)

    monkeypatch.setattr("fullshard.launch.supervise.REPORT_S", 0.1)
    ranks = [started(0, "sleep", "60"), started(1, "false")]
    folder = LaunchFolder(tmp_path, tmp_path)
    RankFailure(1, "RuntimeError", "a worker was killed", 1, "", 1.0).write(folder.failure(1))
    quiet = {"timeout_s": None, "on_failure": lambda: None, "positions": list}
    result = Slow(ranks=ranks, folder=folder, **quiet).watch([])
    assert (result.exit_code, result.failure.message) == (1, "a worker was killed")
