"""Events played in time: which event waits for which, by hand."""

import pytest

from fullshard.outlook.player import Bar, Cost, Lane, play
from fullshard.planner.schedule import Event, EventKind

GATHER, FORWARD, BACKWARD, REDUCE, ACCUMULATE, SETTLE = (
    EventKind.GATHER,
    EventKind.FORWARD,
    EventKind.BACKWARD,
    EventKind.REDUCE,
    EventKind.ACCUMULATE,
    EventKind.SETTLE,
)


def events(*pairs):
    return [Event(kind, unit) for kind, unit in pairs]


def costs(**by_kind):
    return lambda event, _: by_kind.get(event.kind.value, Cost())


def test_a_unit_waits_for_its_gather_and_hides_the_next_one():
    found = play(
        events((GATHER, 0), (GATHER, 1), (FORWARD, 0), (FORWARD, 1)),
        costs(gather=Cost(wire_s=2.0), forward=Cost(own_s=3.0)),
    )
    assert found.bars == [
        Bar(Lane.GATHER, 0, 0.0, 2.0),
        Bar(Lane.GATHER, 1, 2.0, 4.0),  # one wire
        Bar(Lane.FORWARD, 0, 2.0, 5.0),
        Bar(Lane.FORWARD, 1, 5.0, 8.0),
    ]
    assert (found.end_s, found.exposed_s) == (8.0, 2.0)


def test_reductions_are_awaited_at_accumulation_and_replica_sums_at_the_end():
    found = play(
        events((BACKWARD, 1), (REDUCE, 1), (BACKWARD, 0), (ACCUMULATE, 1), (SETTLE, -1)),
        costs(
            backward=Cost(own_s=2.0),
            reduce=Cost(wire_s=5.0),
            accumulate=Cost(own_s=1.0, wire_s=4.0),
            settle=Cost(own_s=0.5),
        ),
    )
    assert (found.end_s, found.exposed_s) == (2.0 + 5.0 + 1.0 + 4.0 + 0.5, 3.0 + 4.0)


def test_a_reduction_without_a_wait_ends_the_step():
    found = play(
        events((BACKWARD, 0), (REDUCE, 0)), costs(backward=Cost(own_s=1.0), reduce=Cost(wire_s=2.0))
    )
    assert (found.end_s, found.exposed_s) == (3.0, 2.0)


@pytest.mark.parametrize(("issues_ahead", "begins"), [(False, 3.0), (True, 0.0)])
def test_a_host_that_runs_ahead_issues_gathers_when_the_unit_before_begins(issues_ahead, begins):
    found = play(
        events((FORWARD, 0), (GATHER, 1), (FORWARD, 1)),
        costs(gather=Cost(wire_s=2.0), forward=Cost(own_s=3.0)),
        issues_ahead=issues_ahead,
    )
    gather = next(bar for bar in found.bars if bar.lane is Lane.GATHER)
    assert gather.start_s == begins
    assert found.end_s == (6.0 if issues_ahead else 8.0)


def test_costs_know_whether_a_gather_is_for_backward():
    asked = []

    def cost_of(event, is_backward):
        asked.append((event.kind, is_backward))
        return Cost()

    play(events((GATHER, 0), (FORWARD, 0), (BACKWARD, 0), (GATHER, 0)), cost_of)
    assert [was for _, was in asked] == [False, False, True, True]
