"""The list of PyTorch's public test functions names existing tests and known statuses."""

from pathlib import Path

import conformance


def test_the_list_names_tests_that_exist(capsys):
    rows = conformance.read_list()
    assert len({(row["file"], row["function"]) for row in rows}) == len(rows)
    here = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    for row in rows:
        assert row["status"] in conformance.STATUSES, row
        assert (row["status"] == "passes") is (row["passed"] == row["cases"]), row
        assert row["status"] != "passes" or row["where"] in here, row
        assert row["where"], row
    assert conformance.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith(f" of {sum(int(row['cases']) for row in rows)} cases")
