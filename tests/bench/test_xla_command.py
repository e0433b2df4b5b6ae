"""`python -m benchmarks.xla`: its rows, without checking times."""

import pytest
from benchmarks import xla

from fullshard.bench.measurement import Neighbours
from support import forked


def results(slow_down=1.0, other_loss=2.0):
    """Returns results of two ranks; one round was disturbed for all engines."""
    times = {
        xla.OURS: [1.1 * slow_down, 3.3 * slow_down, 1.1 * slow_down],
        xla.OURS_ONCE: [1.5, 4.5, 1.5],
        xla.AUTO: [2.0, 6.0, 2.0],
        xla.AUTO_ONCE: [1.2, 3.6, 1.2],
        xla.ONE: [1.0, 3.0, 1.0],
    }
    first = {
        "times_s": times,
        "cpu_times_s": {name: [0.5, 0.5, 0.5] for name in times},
        "losses": {**{name: [2.0] for name in times}, xla.AUTO: [other_loss], xla.ONE: [7.0]},
    }
    return [first, {**first, "cpu_times_s": {name: [0.7, 0.7, 0.7] for name in times}}]


def page(found):
    job = xla.Job(xla.find_shape("tiny"), 3)
    return xla.page_of(job, found, {}, Neighbours(), "python -m benchmarks.xla")


def test_rows_have_paired_ratios_to_one_process_and_to_auto():
    rows = page(results()).to_dict()["rows"]
    assert tuple(row["name"] for row in rows) == tuple(xla.ENGINES)
    ours, once, auto, _, one = rows
    assert once["ratio_to_auto"]["value"] == pytest.approx(1.25), "of auto that gathers once"
    assert auto["ratio_to_one_process"]["value"] == pytest.approx(2.0)
    assert "ratio_to_auto" not in auto
    assert ours["ratio_to_one_process"]["value"] == pytest.approx(1.1)
    assert ours["ratio_to_auto"]["value"] == pytest.approx(0.55)
    assert ours["tokens_per_s"] == pytest.approx(2 * 2 * 16 / 1.1)
    assert one["tokens_per_s"] == pytest.approx(2 * 16)  # the first rank's batch alone
    assert (ours["cpu_step_s"], one["cpu_step_s"]) == (pytest.approx(0.6), 0.5)
    assert not ours["loaded"]


def test_goals_and_unequal_losses_are_reported():
    assert [note.rpartition("(")[2] for note in page(results()).notes[1:]] == [
        "goal 1.2: met).",
        "goal 1.0: met).",
        "goal 1.0: not met).",
    ]
    notes = page(results(slow_down=2.0, other_loss=2.1)).notes
    assert "(goal 1.2: not met)" in notes[1]
    assert "Losses of auto differ from fullshard's by 5.0e-02" in notes[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_engines_train_the_same_on_two_processes(tmp_path):
    words = ("--case", "tiny", "--rounds", "2", "--out", tmp_path)
    found = forked.result("benchmarks.xla", *words, timeout=500)
    assert [row["name"] for row in found["rows"]] == list(xla.ENGINES)
    assert found["absent"] == []
    assert "Do not compare" not in (tmp_path / "jax.md").read_text()
