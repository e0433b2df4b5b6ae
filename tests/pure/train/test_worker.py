"""A process makes a rank's batches in order, passes errors on, and ends with the rank."""

import operator
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard.data.worker import Worker
from fullshard.errors import HangError
from support.processes import assert_all_end, newest_child

RANK = """
import time
import psutil
from fullshard.data.worker import Worker
worker = Worker(time.sleep)
worker.take(0, 3600)  # it is at work when the rank is killed
print(psutil.Process().children()[0].pid, flush=True)
input()
"""


def state(pid):
    """Returns a process's state letter; None if it no longer exists."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def test_answers_belong_to_their_request_even_if_another_was_started():
    worker = Worker(operator.itemgetter(1))
    assert worker.take((False, 0), (False, 1)) == 0
    assert worker.take((False, 1), (False, 2)) == 1
    assert worker.take((True, 7), None) == 7  # an evaluation between steps
    assert worker.take((False, 2), (False, 3)) == 2
    assert worker.take((False, 9), (False, 10)) == 9  # a run that resumes


def test_an_error_is_raised_by_the_rank_that_asked_for_it_and_the_next_request_is_answered():
    worker = Worker(operator.itemgetter(slice(0, None, 0)))
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        worker.take((False, 0), (False, 1))
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        worker.take((False, 1), None)


def test_the_worker_ignores_signals_that_stop_a_run():
    worker = Worker(operator.itemgetter(1))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        newest_child().send_signal(number)
    assert worker.take((False, 5), None) == 5


def test_a_killed_worker_is_a_typed_error():
    worker = Worker(operator.itemgetter(1))
    assert worker.take((False, 0), None) == 0
    process = newest_child()
    process.kill()
    assert_all_end([process.pid])
    with pytest.raises(
        HangError, match=r"from the process that prepares it, but .* by SIGKILL. Memory may"
    ):
        worker.take((False, 1), None)


@pytest.mark.timeout(60)
def test_no_worker_outlives_a_rank_that_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        worker = int(rank.stdout.readline())
        assert state(worker) not in (None, "Z")
        rank.kill()
    while state(worker) not in (None, "Z"):  # the test's time-out is the limit
        pass


def test_the_worker_imports_neither_torch_nor_transformers():
    code = (
        "import sys, fullshard.data.worker, fullshard.data.text, fullshard.data.chat_rows; "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
