"""Signals to a launcher end all of its ranks; a dead launcher leaves no rank behind."""

import os
import pty
import signal
import subprocess
import sys
import termios
import time

import pytest

from fullshard.launch.exit_codes import SAVE_SIGNALS, handled
from support.processes import assert_all_end, read_pids, wait_until


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """`launch(what, *args)` starts a launcher process, which ends with the test."""
    (tmp_path / "private").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "private"))  # a killed launcher leaves its folder
    started = []

    def launch(*words, **options):
        command = [sys.executable, "-m", "support.launcher", str(tmp_path / "logs"), *words]
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("number", "code", "how"),
    [
        (signal.SIGQUIT, 75, "forked"),  # a terminal's interrupt, below, has another process group
        (signal.SIGINT, 130, "started"),
        (signal.SIGINT, 130, "forked"),
        (signal.SIGTERM, 75, "started"),
        (signal.SIGQUIT, 75, "started"),
    ],
)
def test_a_signal_ends_all_ranks_cleanly(launch, tmp_path, monkeypatch, number, code, how):
    if how == "forked":
        monkeypatch.setenv("FORKS", "")
    launcher = launch("fork_and_sleep", str(tmp_path))
    pids = read_pids(tmp_path, 2)
    launcher.send_signal(number)
    assert launcher.wait(timeout=60) == code
    assert_all_end(pids)
    assert (tmp_path / "finally_0").exists()
    assert (tmp_path / "finally_1").exists()


def test_ctrl_c_does_not_wait_for_the_imports_of_the_server(launch, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("BLOCKED", str(tmp_path / "fifo"))
    monkeypatch.setenv("FORKS", "support.blocked")
    launcher = launch("fork_and_sleep", str(tmp_path))
    with (tmp_path / "fifo").open("wb"):
        # The launcher opens the log after it has begun to catch signals.
        wait_until((tmp_path / "logs" / "rank_0.log").exists, 60, "the launcher waits")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=30) == 130


def test_a_hangup_that_nohup_ignores_does_not_stop_the_ranks(launch, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher inherits it
    try:
        launcher = launch("fork_and_sleep", str(tmp_path))
    finally:
        signal.signal(signal.SIGHUP, before)
    pids = read_pids(tmp_path, 2)
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130  # 75 if the hangup was caught first
    assert_all_end(pids)


def test_a_second_ctrl_c_does_not_wait_for_ranks_that_ignored_the_first(
    launch, tmp_path, monkeypatch
):
    monkeypatch.setenv("INTERRUPT_S", "1000")
    launcher = launch("deaf", str(tmp_path))
    pids = read_pids(tmp_path, 2)
    launcher.send_signal(signal.SIGINT)
    # Two signals that are pending at once would count as one.
    for rank in range(2):
        wait_until((tmp_path / f"interrupted_{rank}").exists, 30, f"rank {rank} is interrupted")
    time.sleep(0.3)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    assert_all_end(pids)


def test_a_typed_failure_during_an_interrupt_is_reported(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("READY", str(tmp_path))
    launcher = launch("fail_to_save", stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("[01]"))) == 2, 30, "both ranks are ready")
    time.sleep(0.5)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 7
    assert "CheckpointError: checkpoint: expected a writable folder" in err


@pytest.mark.parametrize("how", ["started", "forked"])
def test_ranks_die_with_a_launcher_that_was_killed(launch, tmp_path, monkeypatch, how):
    if how == "forked":
        monkeypatch.setenv("FORKS", "")
    launcher = launch("fork_and_sleep", str(tmp_path))
    ranks = read_pids(tmp_path, 2)[::2]
    launcher.kill()
    assert_all_end(ranks)
    # Their child processes are not ranks and outlive this, because no process is left to end them.
    for pid in read_pids(tmp_path, 2)[1::2]:
        os.kill(pid, signal.SIGKILL)


def test_the_interrupt_of_a_terminal_reaches_each_rank_once(launch, tmp_path):
    """Ctrl-C signals the terminal's foreground group, so ranks must not be in it."""
    launcher = launch("fork_and_sleep", str(tmp_path), start_new_session=True)
    pids = read_pids(tmp_path, 2)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=60) == 130
    assert_all_end(pids)
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert log.count("KeyboardInterrupt") == 1


def test_rank_zero_sees_a_terminal_of_our_size_and_its_log_stays_plain(launch, tmp_path):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 123))
    launcher = launch("draw", stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": ""})
    assert launcher.wait(timeout=60) == 0
    os.close(theirs)
    shown = os.read(ours, 65536)
    os.close(ours)
    assert shown.startswith(b"terminal True 123\r\n\x1b[32mstep 1\x1b[0m\rstep 2\r\x1b[2Kstep 3")
    assert (tmp_path / "logs" / "rank_0.log").read_text() == "terminal True 123\nstep 3\n"


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_ends_at_a_signal_that_its_parent_catches():
    told, end = os.pipe()
    with handled(SAVE_SIGNALS, lambda *_: None):
        if (child := os.fork()) == 0:
            try:
                os.write(end, b"1")
                time.sleep(20)
            finally:
                os._exit(0)
        os.read(told, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
    os.close(told)
    os.close(end)
