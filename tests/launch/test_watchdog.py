"""The watchdog names killed, stuck and desynchronised ranks of real processes.

"Within 20 s" is measured from the fault, whose time the job records, to the report.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullshard.launch.spawn import LocalLaunch, launch_local_ranks, print_failure
from support import forked
from support.processes import free_port

ROOT = Path(__file__).parents[2]
NAMED_S = 20.0


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """`run(fault)` trains on two ranks with a timeout of 5 s; returns code, output, report."""

    def run(fault, *transport):
        words, logs = (fault, *transport), tmp_path / "logs"
        launch = LocalLaunch("support.hang_job", words, 2, logs, timeout_s=100.0, stuck_s=5.0)
        result = launch_local_ranks(launch)
        ended = time.time()
        print_failure(launch, result)
        file = tmp_path / "logs" / "hang.txt"
        if file.exists():
            assert ended - (tmp_path / "fault").stat().st_mtime < NAMED_S
        return result, capfd.readouterr().err, file.read_text() if file.exists() else ""

    return run


@pytest.mark.slow
def test_a_run_without_a_fault_is_not_interrupted(run):
    result, _, report = run("none")
    assert (result.exit_code, report) == (0, "")


def test_a_rank_that_sleeps_in_its_data_is_named_with_the_line(run):
    with forked.launching():
        result, err, report = run("sleep")
    assert (result.exit_code, result.failure.rank, result.failure.type) == (5, 1, "HangError")
    assert (
        "expected every rank to make progress within 5 s, but rank 1 is in the user's code, step 3"
        in (err)
    )
    assert "hang_job.py" in err
    assert "in read_batch" in err
    assert "rank 0 waits in gather of layers.0, step 3" in err
    assert "---- stacks of rank 0 ----" in report
    assert report.count("in read_batch") >= 2  # the line, and the stack
    assert "last events: " in report


@pytest.mark.long
def test_garbage_in_the_side_store_does_not_end_the_watch(run):
    with forked.launching():
        result, err, _ = run("garbage")
    assert (result.exit_code, result.failure.rank, result.failure.type) == (5, 1, "HangError")
    assert "in read_batch" in err


def test_a_killed_rank_is_named_at_once_with_the_place_of_all_ranks(run):
    result, err, report = run("kill")
    assert (result.exit_code, result.failure.rank) == (5, 1)
    assert "HangError: rank 1: expected to reach its end, but it was killed by SIGKILL" in err
    assert "Last known position of the ranks:\nrank 0: " in err
    assert "was killed by SIGKILL" in report


HANGS = {  # (fault, transport): message and a line of rank 1's stack
    ("sleep", "shared"): (["rank 0 waits in beginning of a forward, step 3"], "in read_batch"),
    ("stop",): (["rank 1 is silent for"], "(none: the process is stopped"),
    ("lock",): (["rank 1 is silent for"], "in read_batch"),
    ("exit",): (["to be alive, but rank 1 is gone: its process died"], ""),
    ("fewer",): (
        [
            "rank 1 waits in a collective of hang_job.py",
            "which rank 0 has not issued; that rank waits in gather of layers.0, step 4",
            "ranks with different numbers of batches",
        ],
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", HANGS, ids=" ".join)
def test_every_hang_names_the_rank_and_where_it_is(run, fault):
    result, err, report = run(*fault)
    said, stack = HANGS[fault]
    assert (result.exit_code, result.failure.type) == (5, "HangError")
    assert not stack or result.failure.rank == 1
    assert all(words in err for words in said), err
    assert stack in report.partition("---- stacks of rank 1 ----")[2]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["forward", "micro_batch"])
def test_a_forward_or_a_micro_batch_too_many_is_an_error_of_the_ranks(run, fault):
    result, err, report = run(fault, "c10d")
    assert (result.exit_code, report) == (1, "")
    assert "One of them skipped or added a forward, a backward" in err


def _without_a_launcher(fault, folder, size=2):
    """Returns exit codes and errors of ranks without a launcher."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    names = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(size)) | {"OMP_NUM_THREADS": "1"}
    processes = [
        forked.Popen(
            [sys.executable, "-m", "support.hang_job", fault],
            env={**os.environ, **place, **names, "RANK": str(r), "LOCAL_RANK": str(r)},
            cwd=folder,
            stderr=forked.PIPE,
            text=True,
        )
        for r in range(size)
    ]
    said = [process.communicate(timeout=60)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.long
def test_no_rank_blames_another_for_a_stop_of_all_ranks(tmp_path):
    codes, said = _without_a_launcher("preempt", tmp_path)
    assert codes == [75, 75], said


@pytest.mark.long
def test_a_rank_that_ends_early_is_named_on_ranks_with_failed_collectives(tmp_path):
    """The report waits 3 s for that rank's stacks, as long as an error waits for a verdict."""
    codes, said = _without_a_launcher("leave", tmp_path, 3)
    assert codes == [5, 0, 5], said
    for text in (said[0], said[2], (tmp_path / "hang.txt").read_text()):
        assert "run: expected all ranks to end together, but rank 1 has ended" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "is gone"),
        pytest.param("sleep", "in read_batch", marks=pytest.mark.slow),
    ],
)
def test_under_torchrun_the_ranks_watch_each_other(fault, words, tmp_path, monkeypatch):
    monkeypatch.setenv("FULLSHARD_TIMEOUT", "5")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = ["-m", "support.hang_job", fault]
    done = subprocess.run(
        [*command, *job], cwd=tmp_path, timeout=60, capture_output=True, text=True
    )
    assert done.returncode != 0
    said = next(line for line in done.stderr.splitlines() if line.startswith("HangError: "))
    assert "rank 1 is " in said
    assert words in said
    assert said.removeprefix("HangError: ") in (tmp_path / "hang.txt").read_text()
    assert "exitcode  : 5" in done.stderr
