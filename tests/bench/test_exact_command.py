"""`python -m benchmarks.exact`: its rows, and one real case."""

from functools import partial
from types import SimpleNamespace

import pytest
from benchmarks import exact

from fullshard.errors import FullshardError
from support import forked


def found(error, *, same=True):
    errors = {"state_bytes": 1028, "peak": error, "collectives": same}
    return {
        "peak_bytes": {"device": 110, "host": 0, "disk": 0},
        "plan": {"num_parameters": 1000},
        "exact": {"error": errors, "peak_bytes": 100},
    }


def page(*errors):
    rows = [exact.row_of(case, found(e)) for case, e in zip(exact.CASES, errors, strict=False)]
    return exact.page_of(rows, None, 0.0, "python -m benchmarks.exact")


def test_the_median_is_of_absolute_errors_and_judged_by_the_goal():
    assert page(-0.30, 0.02, 0.04).notes[0].startswith("Median error 4.0%, largest 30.0%")
    assert page(-0.30, 0.02, 0.04).notes[0].endswith("(goal 5% in the median: met).")
    assert page(-0.06, 0.06).notes[0].endswith("not met).")


def test_the_page_reports_collectives_that_differ():
    rows = [exact.row_of(exact.CASES[0], found(0.0, same=False))]
    notes = exact.page_of(rows, "v5p:2x2x2", 0.0, "").notes
    assert notes[1] == "8M full_shard none 512: XLA's collectives are not the plan's."
    assert len(page(0.0).notes) == 1


@pytest.mark.slow
def test_a_case_is_planned_and_compiled(monkeypatch, capfd, tmp_path):
    small = exact.Case("tiny", 64, 2, 256, "full_shard", "block", 64)
    monkeypatch.setattr(exact, "CASES", (small,))
    exact.main(out=tmp_path)
    assert "tiny, full_shard, block, 64 tokens" in capfd.readouterr().err
    assert "| tiny (" in (tmp_path / "exact.md").read_text()


def test_a_case_that_does_not_compile_reports_the_reason(monkeypatch):
    run = partial(forked.run, timeout=100)
    monkeypatch.setattr(exact, "subprocess", SimpleNamespace(run=run))
    impossible = exact.Case("odd", 65, 2, 256, "full_shard", "block", 64)
    with pytest.raises(FullshardError, match="odd did not compile"):
        exact.run([impossible], None, command="", say=lambda _: None)
