"""The standing pool of ranks: values, failures, hangs, deaths, cleanliness."""

import os
import random
import time
import warnings
from dataclasses import dataclass

import psutil
import pytest
import torch
import torch.distributed as dist

from support.ranks import RankError, RankPool, on_ranks


@pytest.fixture
def pool(pytestconfig: pytest.Config):
    """A pool for one test, so that failures do not end the session's pool."""
    pool = RankPool(2, pytestconfig.getini("filterwarnings") or ["error"])
    yield pool
    pool.close()


@dataclass
class Sent:
    """A class of a test file, sent to a rank and back."""

    value: float


def sum_over_ranks(sent):
    total = torch.tensor(sent.value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), Sent(total.item())


def seeded_draw():
    return torch.rand(()).item(), random.random(), torch.get_num_threads()


def raise_on_rank_one():
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()  # never completes


def raise_everywhere():
    raise ValueError(f"voice of rank {dist.get_rank()}")


def failing_assert():
    left, right = [1, 2], [1, 3]
    assert left == right


def hang_on_rank_zero():
    if dist.get_rank() == 0:
        sleep_by_a_name_of_its_own()


def sleep_by_a_name_of_its_own():
    time.sleep(600)


def exit_at_once():
    os._exit(7)


def warn():
    warnings.warn("careless", UserWarning, stacklevel=1)


def leave_a_mess():
    dist.new_group([0, 1])
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    os.environ["LEFT_BY_A_TEST"] = "1"


def state():
    groups = len(dist.distributed_c10d._world.pg_map)
    return groups, str(torch.get_default_dtype()), "LEFT_BY_A_TEST" in os.environ


def process_id():
    return os.getpid()


def leave_the_group():
    dist.destroy_process_group()


KEPT = []


def leave_a_model():
    import fullshard as fs
    from support.models import chain

    KEPT.append(fs.shard(chain()))


def test_every_rank_returns_its_value_in_rank_order(ranks):
    assert ranks(2)(sum_over_ranks, Sent(10.0)) == [(0, Sent(21.0)), (1, Sent(21.0))]


def test_each_call_starts_from_the_same_seed_on_one_thread(ranks):
    first, second = ranks(2)(seeded_draw), ranks(2)(seeded_draw)
    assert first == second
    assert first[0] == first[1]
    assert first[0][2] == 1


def test_leftovers_of_a_body_are_gone_at_the_next_call(ranks):
    before = ranks(2)(state)
    ranks(2)(leave_a_mess)
    assert ranks(2)(state) == before == [(1, "torch.float32", False)] * 2
    ranks(2)(leave_the_group)
    assert ranks(2)(state) == before


def test_an_error_of_one_rank_is_shown_before_the_ranks_that_wait_for_it(pool, monkeypatch):
    monkeypatch.setattr("support.ranks.GRACE_S", 0.5)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool(raise_on_rank_one)
    assert time.monotonic() - started < 40
    text = str(caught.value)
    assert text.startswith("raise_on_rank_one failed on 1 rank(s)\n---- rank 1 of 2 raised ----")
    assert text.index("ValueError: rank one says no") < text.index("rank 0 of 2 was still running")
    assert "in raise_on_rank_one" in text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (failing_assert, r"assert \[1, 2\] == \[1, 3\]"),
        (exit_at_once, r"(?s)rank 0 of 1 .*ended with exit code 7"),
        (warn, "UserWarning: careless"),
        (leave_a_model, "leave_a_model left a sharded model alive"),
    ],
)
def test_a_misbehaving_rank_fails_the_call(ranks, body, said):
    with pytest.raises(RankError, match=said):
        ranks(1)(body)


def test_errors_of_all_ranks_are_joined_and_the_pool_starts_again_after_them(pool):
    old = pool(process_id)
    with pytest.raises(RankError, match=r"(?s)voice of rank 0.*voice of rank 1"):
        pool(raise_everywhere)
    assert pool.process_ids == []
    assert not any(map(psutil.pid_exists, old))
    assert len(pool(process_id)) == 2


def test_a_hang_fails_with_the_stacks_of_the_rank(pool):
    pool(process_id)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool(hang_on_rank_zero, timeout=1)
    assert time.monotonic() - started < 60
    text = str(caught.value)
    assert text.startswith("hang_on_rank_zero did not return within 1 s on 1 rank(s)")
    assert "in sleep_by_a_name_of_its_own" in text
    assert "rank 1" not in text
    assert pool.process_ids == []


def test_local_functions_are_refused_by_name(ranks):
    def local():
        return 1

    with pytest.raises(TypeError, match=r"module-level function, got .*<locals>\.local"):
        ranks(1)(local)


@on_ranks("size")
def leave_a_file(tmp_path):
    (tmp_path / f"{dist.get_rank()}").touch()


def test_a_test_function_can_be_its_own_body(ranks, tmp_path):
    leave_a_file(ranks=ranks, tmp_path=tmp_path, size=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
