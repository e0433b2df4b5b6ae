"""Finds the rank to blame for a hang from the reports of all ranks."""

from dataclasses import replace
from pathlib import Path

from fullshard.config.environment import read_launch_environment
from fullshard.observe import watchdog
from fullshard.observe.hang import EventRing, Position, awaited, blamed, judge, streams
from fullshard.planner.schedule import Event, EventKind

RANK_0 = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TITLES = ("(root)", "a", "b", "c")
GATHER, REDUCE = EventKind.GATHER, EventKind.REDUCE


def entries(*kinds_and_units, step=0):
    return [(Event(kind, unit, 8), step) for kind, unit in kinds_and_units]


def seen(*positions):
    return {place.rank: place for place in positions}


def waiting(rank, doing, issued, number, *, kind="gather", step=1):
    stream = f"0/{step - 1}/{kind}"
    return Position(
        rank,
        doing=doing,
        kind=kind,
        stream=stream,
        number=number,
        step=step,
        since_s=5.0,
        limited=True,
        streams={stream: [0, *issued]},
    )


def test_ranks_that_make_progress_are_not_blamed():
    here = seen(Position(0, since_s=0.1, limited=True), Position(1, since_s=9000.0))
    assert judge(here, 600.0) is None  # user code between steps may take long


def test_the_rank_that_others_wait_for_is_named():
    busy = Position(3, step=412, doing="data loading", since_s=61.0, limited=True)
    others = [waiting(rank, "reduce of b", ["c", "b"], 1, kind="reduce") for rank in range(3)]
    others = [replace(place, since_s=61.0, step=412) for place in others]
    verdict = judge(seen(*others, busy), 60.0)
    assert verdict.rank == 3
    assert str(verdict) == (
        "run: expected every rank to make progress within 60 s, but rank 3 is in data loading, "
        "step 412, 61 s; the others wait in reduce of b, step 412."
    )
    assert judge(seen(*others, busy), 62.0) is None


def test_a_rank_that_stopped_before_its_first_message_is_named():
    waits = replace(waiting(0, "gather of a", ["a"], 0), since_s=61.0)
    verdict = judge(seen(waits), 60.0, 2)
    assert verdict.rank == 1
    told = "rank 1 is silent for 60 s, stopped or in C code (last seen in start); rank 0 waits in"
    assert f"but {told} gather of a" in str(verdict)
    assert judge(seen(replace(waits, limited=False)), 60.0, 2) is None  # no rank waits for it


def test_a_dead_rank_is_named_after_a_short_delay():
    waits, dead = waiting(0, "gather of a", ["a"], 0), Position(1, gone=True)
    assert judge(seen(waits, dead), 600.0) is None  # its error may still arrive
    assert judge(seen(waits, dead), 600.0, lost_s=0.0).rank == 1
    assert judge(seen(waits, replace(dead, silent_s=2.0)), 600.0).rank == 1
    assert judge(seen(replace(waits, failed=True), dead), 600.0).rank == 1


def test_after_a_failed_collective_a_machine_that_does_not_answer_is_named():
    failed, other = Position(0, failed=True), Position(3, host="b", step=7, doing="optimizer")
    verdict = judge(seen(failed, replace(other, silent_s=1.9)), 600.0)
    assert verdict.rank == 3
    assert "rank 3 no longer responds (last seen in optimizer, step 7)" in str(verdict)
    for calm in (
        seen(failed, replace(other, silent_s=1.4)),
        seen(failed, replace(other, silent_s=9.0, ended=True)),
        seen(failed, replace(other, silent_s=9.0, host="")),  # the launcher sees it die
        seen(replace(failed, failed=False), replace(other, silent_s=9.0)),
    ):
        found = judge(calm, 600.0)
        assert found is None or "no longer responds" not in str(found)


def test_a_rank_that_exited_cleanly_is_not_dead():
    left = Position(1, ended=True, gone=True)
    assert judge(seen(Position(0), left), 600.0) is None
    verdict = judge(seen(Position(0, failed=True), left), 600.0)
    assert "rank 1 has ended (step 0) while rank 0 waits in start" in str(verdict)


def test_a_rank_that_exited_while_others_wait_is_named():
    left = Position(1, step=3, ended=True)
    verdict = judge(seen(waiting(0, "gather of a", ["a"], 0, step=4), left), 600.0)
    assert verdict.rank == 1
    assert "rank 1 has ended (step 3) while rank 0 waits in gather of a, step 4" in str(verdict)


def test_the_first_collective_that_differs_is_named_and_the_majority_is_right():
    places = [waiting(rank, "gather of c", ["a", "b", "c"], 2) for rank in (0, 2)]
    odd = waiting(1, "gather of b", ["a", "c", "b"], 2)
    verdict = judge(seen(*places, odd), 600.0)
    assert verdict.rank == 1
    assert "rank 1 issues gather of c as its gather number 2, the others gather of b" in (
        str(verdict)
    )


def test_a_slow_wait_is_no_disagreement():
    """Rank 1 has sent the message that rank 0 waits for; it may still be in flight."""
    slow = waiting(0, "gather of a", ["a", "b"], 0)
    ahead = waiting(1, "gather of b", ["a", "b"], 1)
    assert judge(seen(slow, ahead), 600.0) is None


def test_ranks_that_wait_for_each_other_are_named_before_the_timeout():
    gathers = waiting(1, "gather of a", ["a"], 0, step=4)
    exchange = Position(0, doing="end of backward", kind="exchange", step=3, since_s=5.0)
    verdict = judge(seen(exchange, gathers), 600.0)
    assert verdict.rank == 1
    assert "that rank waits in end of backward, step 3" in str(verdict)
    young = replace(exchange, since_s=0.5)
    assert judge(seen(young, gathers), 600.0) is None


def test_streams_keep_messages_in_flight_and_count_dropped_ones():
    local = [(Event(GATHER, 3, 0), 0)]
    ring = [*entries((GATHER, 1), (REDUCE, 2)), *local, *entries((GATHER, 2))]
    assert streams(ring, TITLES, 0, 0) == {"0/0/gather": [0, "a", "b"], "0/0/reduce": [0, "b"]}
    many = entries(*[(GATHER, 1)] * 300)
    assert streams(many, TITLES, 0, 0)["0/0/gather"][0] == 44


def test_the_awaited_message_is_the_last_gather_of_the_unit():
    ring = entries((GATHER, 1), (GATHER, 2), (GATHER, 1), (GATHER, 3))
    found = awaited((Event(EventKind.BACKWARD, 1), 0), ring, TITLES, 0)
    assert (found["doing"], found["number"]) == ("gather of a", 2)


def test_a_hang_is_reported_even_if_its_file_cannot_be_written():
    dog, told = watchdog.Watchdog(read_launch_environment(RANK_0), 1.0, Path("/dev/full")), []
    watchdog.on_hang(told.append)
    dog.write(blamed(0, "rank 0 is stuck"), {0: "its stacks"}, {})
    assert [(str(one), one.rank) for one in told] == [("rank 0 is stuck", 0)]


def test_a_model_may_be_sharded_while_a_sample_is_taken():
    sampler = watchdog.PositionSampler(0, 1)

    class Ring(EventRing):
        count = property(lambda _: sampler.watch(EventRing(), ()), lambda *_: None)

    ring = Ring()
    sampler.watch(ring, TITLES)
    assert sampler.sample().rank == 0
