"""The exit code of each error, and the first of several failures."""

import errno
import fcntl
import inspect
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fullshard import errors
from fullshard.checkpoint.commit import failure as failure_of_save
from fullshard.compat import MisuseValueError
from fullshard.config.values import ConfigProblems, Problem
from fullshard.launch.exit_codes import (
    STREAM,
    ExitCode,
    RankFailure,
    as_ours,
    describe_status,
    exit_code_of,
    exit_code_of_signal,
    first_cause,
    of_place,
    public_name,
)
from fullshard.launch.spawn import LineCleaner


class OutOfMemoryError(RuntimeError):
    """Looks like torch's, without torch."""


class DistStoreError(RuntimeError):
    """Looks like torch's, without torch."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.WillNotFitError("x"), 3),
        (errors.PreemptedError("x"), 75),
        (errors.SlotError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(9), 9),
        (SystemExit(-1), 255),  # a process's exit code has eight bits
        (SystemExit(256), 0),
        (SystemExit(2**64 + 3), 3),
        (SystemExit("words"), 1),
        (MemoryError(), 4),
        (OutOfMemoryError("CUDA out of memory"), 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), 4),
        (OSError(12, "Cannot allocate memory"), 4),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), 5),
        (ValueError("Timed out waiting"), 1),
        (ZeroDivisionError(), 1),
    ],
)
def test_errors_mean_exit_codes(error, code):
    assert exit_code_of(error) == code


def test_a_limit_of_processes_is_named(tmp_path, monkeypatch):
    with (tmp_path / "lock").open("w") as mine, (tmp_path / "lock").open() as other:
        fcntl.flock(mine, fcntl.LOCK_EX)
        taken = partial(fcntl.flock, other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # reports EAGAIN
        monkeypatch.setattr(os, "fork", taken)
        with pytest.raises(BlockingIOError) as lock:
            taken()
        with pytest.raises(BlockingIOError) as fork:
            os.fork()
    assert as_ours(lock.value) is lock.value
    for error in (fork.value, *map(RuntimeError, ("can't start new thread", str(fork.value)))):
        assert str(as_ours(error)).startswith("ulimit -u: expected to start another process or t")
    assert "os.fork()" in RankFailure.of(fork.value, 0).text  # the line of the user's code


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_every_limit_on_bytes_is_a_full_disk(number):
    assert exit_code_of(as_ours(OSError(number, os.strerror(number), "a.json"))) == 3


def test_a_full_shared_memory_is_not_called_a_full_disk():
    at = f"{Path(multiprocessing.__file__).parent}/synchronize.py"
    with pytest.raises(OSError, match="No space") as lock:
        exec(compile("raise OSError(28, 'No space left on device')", at, "exec"))
    in_worker = RuntimeError(
        "Caught in a worker:\nfile </torch_1_2_0>: No space left on device (28)"
    )
    for error in (lock.value, in_worker):
        said = str(as_ours(error))
        assert said.startswith("/dev/shm: expected room for what data loader workers share")
        assert "\n" not in said
        assert exit_code_of(as_ours(error)) == 3


@pytest.mark.parametrize(("number", "flag"), [(errno.EMFILE, "n"), (errno.EFBIG, "f")])
def test_a_limit_that_stops_all_ranks_is_named(number, flag):
    def fail():
        raise OSError(number, os.strerror(number), "checkpoints")

    with pytest.raises(errors.CheckpointError, match=f"Raise the limit that `ulimit -{flag}` sho"):
        errors.raise_together(lambda value: [value], 0, fail)


def test_problems_of_one_rank_are_equal_on_the_others():
    error, sent = ConfigProblems([Problem("a", "", "no"), Problem("b", "", "no")]), []

    def fail():
        raise error

    for rank, do in enumerate((fail, bool)):
        with pytest.raises(ConfigProblems) as found:
            errors.raise_together(lambda value: sent.append(value) or sent, rank, do)
        assert str(found.value) == str(error)


def test_a_limit_on_open_files_is_named():
    error = as_ours(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/meminfo"))
    assert str(error).startswith("ulimit -n: expected to open more files than the ")
    assert exit_code_of(error) == 2


def test_a_store_without_a_descriptor_names_the_limit_on_open_files():
    error = as_ours(DistStoreError("Failed to init uv loop"))
    assert str(error).startswith("ulimit -n: expected to open more files than the ")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "ulimit -v: expected to map more memory than the 1,048,576 MiB"),
        (
            ImportError("Please read\n\nfoo.so: failed to map segment from shared object\n"),
            "ulimit -v: expected to map more memory than the 1,048,576 MiB that a process may, "
            "got none (foo.so: failed to map segment from shared object). Raise",
        ),
        (RuntimeError("can't start new thread"), "ulimit -u or -v: expected to start another"),
    ],
)
def test_a_limit_on_address_space_is_named(error, said):
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert not str(as_ours(error)).startswith("ulimit -v")
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))
    try:
        assert str(as_ours(error)).startswith(said)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_limit_on_data_is_named():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert not str(as_ours(MemoryError())).startswith("ulimit -d")
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, before[1]))
    try:
        assert str(as_ours(MemoryError())).startswith("ulimit -d: expected to map more memory")
        said = str(as_ours(RuntimeError("can't start new thread")))  # the stack counts as data
        assert said.startswith("ulimit -u or -d: expected to start another")
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_both_limits_on_memory_are_named():
    limits = {resource.RLIMIT_AS: 1 << 40, resource.RLIMIT_DATA: 1 << 39}
    before = {number: resource.getrlimit(number) for number in limits}
    try:
        for number, most in limits.items():
            resource.setrlimit(number, (most, before[number][1]))
        assert str(as_ours(MemoryError())).startswith(
            "ulimit -v or -d: expected to map more memory than the 1,048,576 or 524,288 MiB"
        )
    finally:
        for number, most in before.items():
            resource.setrlimit(number, most)


def test_a_save_without_a_thread_names_the_limits():
    error = RuntimeError("can't start new thread")
    said = str(failure_of_save(Path("step-1"), 0, error))
    assert "Raise the limits that `ulimit -u`, `ulimit -v` and `ulimit -d` show" in said


def test_a_limit_on_files_is_not_called_a_full_disk():
    said = str(as_ours(OSError(errno.EFBIG, os.strerror(errno.EFBIG), "a.json")))
    assert said.startswith("ulimit -f: expected room to write a.json")
    assert "Free space" not in said


@pytest.mark.parametrize("place", ["file", "link", "x" * 300])
def test_an_impossible_folder_is_an_error_of_the_user(tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match=place) as caught:
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for may_pass in (False, True):
        error = of_place(caught.value, may_pass=may_pass)
        assert isinstance(error, errors.ConfigError)
        assert f"{place}': expected a usable path" in str(error)


def test_every_code_of_our_errors_has_a_name():
    codes = {
        cls.exit_code
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.FullshardError)
    }
    assert codes <= set(ExitCode)


def test_an_error_is_shown_by_its_class_in_the_tree_of_errors():
    assert public_name(ConfigProblems([Problem("key", "", "unknown key")])) == "ConfigError"
    assert public_name(MisuseValueError("a call that is refused")) == "EngineError"


def test_ctrl_c_is_an_interrupt_and_sigterm_a_preemption():
    assert exit_code_of_signal(signal.SIGINT) == 130
    assert exit_code_of_signal(signal.SIGTERM) == 75
    assert exit_code_of_signal(signal.SIGHUP) == 75


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_file_system_that_fails_is_named_and_the_run_may_be_restarted(number):
    error = as_ours(OSError(number, os.strerror(number), "runs/a/data/tokens.json"))
    assert str(error).startswith("'runs/a/data/tokens.json': expected a file system that works")
    assert exit_code_of(error) == ExitCode.UNEXPECTED
    terminal = OSError(number, os.strerror(number), STREAM)  # the file was closed
    assert as_ours(terminal) is terminal


def test_statuses_are_described_in_words():
    assert describe_status(3) == "ended with exit code 3"
    assert describe_status(-9) == "was killed by SIGKILL"
    assert describe_status(-63) == "was killed by signal 63"


def test_a_file_that_was_cut_short_while_it_was_mapped_is_named_as_a_cause(tmp_path):
    code = (
        "import mmap, os, sys; file = open(sys.argv[1], 'w+b'); file.truncate(8192);"
        "view = mmap.mmap(file.fileno(), 0); file.truncate(0); view[5000]"
    )
    ended = subprocess.run([sys.executable, "-c", code, tmp_path / "tokens"], check=False)
    assert "cut short, or a disk or /dev/shm is full" in describe_status(ended.returncode)


def failure(rank, message, time_s, code=1):
    return RankFailure(rank, "RuntimeError", message, code, "", time_s)


def test_the_earliest_failure_is_the_cause():
    late, early = failure(0, "no", 2.0), failure(1, "no", 1.0)
    assert first_cause([late, early]) is early


@pytest.mark.parametrize(
    "message",
    [
        "[pair.cc:553] Connection closed by peer [127.0.0.1]:18861.",
        "Read error [127.0.0.1]:12703: Connection reset by peer.",
        "NCCL communicator was aborted on rank 1.",
        "Broken pipe",
        "a forward: expected rank 1 (process 12) to take part; it has ended.",
    ],
)
def test_a_lost_peer_is_a_consequence_even_if_it_was_noticed_first(message):
    lost, cause = failure(0, message, 1.0), failure(1, "rank one says no", 2.0)
    assert first_cause([lost, cause]) is cause


def test_a_failure_survives_a_round_trip_through_its_file(tmp_path):
    try:
        raise ValueError("no")
    except ValueError as error:
        error.add_note("a note")
        written = RankFailure.of(error, 3)
    written.write(tmp_path / "failure.json")
    read = RankFailure.read(tmp_path / "failure.json")
    assert read == written
    assert read.message == "no\na note"
    assert "ValueError: no" in read.text
    assert RankFailure.read(tmp_path / "nothing.json") is None


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([b"a\nb", b"c\n"], b"a\nbc\n"),
        ([b"a\r\n"], b"a\n"),
        ([b"10%\r20%\r30%\n"], b"30%\n"),
        ([b"\x1b[1;32mgreen\x1b[0m\n"], b"green\n"),
        ([b"\x1b[2K\r\x1b]0;title\x07done\n"], b"done\n"),
        ([b"no end"], b"no end\n"),
        ([b"split \x1b[3", b"2mcode\n"], b"split code\n"),
    ],
)
def test_logs_keep_the_last_version_of_a_line(chunks, text):
    cleaner = LineCleaner()
    assert b"".join([cleaner.feed(chunk) for chunk in chunks]) + cleaner.finish() == text


def test_a_line_without_an_end_is_overwritten_and_cut_in_bounded_memory():
    text = b"old\rnew\x1b[K\r\r\nkept\r\x1b[K\nab\rc\rde\n\x1b[2Kx\r"
    for size in (1, 2, 3, 100):
        cleaner = LineCleaner()
        told = b"".join(cleaner.feed(text[at : at + size]) for at in range(0, len(text), size))
        assert told + cleaner.finish() == b"new\nkept\nde\nx\n"
    bar = b"".join(cleaner.feed(b"\r%3d%%" % (step % 100)) for step in range(100_000))
    assert (bar, cleaner.finish()) == (b"", b" 99%\n")
    lines = b"".join(cleaner.feed(b"x" * 65536) for _ in range(64)).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= (1 << 20) + 65536
