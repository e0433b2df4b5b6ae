"""A calibration's interpolation between measured sizes, and the contents of its file."""

import json
import re

import pytest

from fullshard.errors import ConfigError
from fullshard.outlook.devices import (
    Calibration,
    Ceilings,
    HostOverhead,
    Table,
    read_calibration,
    to_json,
)
from fullshard.planner.tracing import Operation

LINE = Table((((10,), 1.0), ((1000,), 100.0)))  # 0.1 s per element at both ends
KNEE = Table((((100,), 1.0), ((400,), 1.0), ((1600,), 8.0)))


def ceilings(operations=None, transfers=None, host=None):
    return Ceilings(2, operations or {}, transfers or {}, host or HostOverhead())


@pytest.mark.parametrize(("size", "seconds"), [(10, 1.0), (100, 10.0), (1000, 100.0)])
def test_equal_costs_at_two_sizes_apply_between_them(size, seconds):
    assert LINE.seconds((size,)) == pytest.approx(seconds)


def test_costs_between_sizes_lie_on_a_line_of_logarithms():
    # An element costs 1/100 at 100 and 1/400 at 400: at 200, in the middle, 1/200.
    assert KNEE.seconds((200,)) == pytest.approx(1.0)
    # 1/400 at 400 and 1/200 at 1600: at 800 the geometric mean.
    assert KNEE.seconds((800,)) == pytest.approx(800 * (1 / 400 * 1 / 200) ** 0.5)


def test_times_are_constant_below_the_grid_and_proportional_above_it():
    assert KNEE.seconds((3,)) == pytest.approx(1.0)
    assert KNEE.seconds((3200,)) == pytest.approx(16.0)


def test_a_grid_of_two_axes_is_interpolated_on_both():
    grid = Table((((1, 1), 1.0), ((1, 4), 4.0), ((4, 1), 16.0), ((4, 4), 64.0)))
    assert grid.seconds((2, 1)) == pytest.approx(2 * 2.0)  # cost per element: 1 at 1, 4 at 4
    assert grid.seconds((2, 2)) == pytest.approx(4 * 2.0)
    assert grid.seconds((8, 8)) == pytest.approx(64 * 4.0)


def test_a_grid_with_a_gap_is_incomplete():
    assert not Table((((1, 1), 1.0), ((1, 4), 4.0), ((4, 1), 16.0))).is_whole
    assert not Table((((1,), 1.0), ((1,), 2.0))).is_whole
    assert KNEE.is_whole


def test_an_operation_uses_its_own_table_or_that_of_its_kind():
    own, plain, add = (Table((((1,), seconds),)) for seconds in (1.0, 2.0, 3.0))
    found = ceilings({"copy rows float32": own, "copy float32": plain, "add float32": add})
    assert found.seconds(Operation("copy rows", "float32", (1,))) == 1.0
    assert found.seconds(Operation("copy rows", "bfloat16", (1,))) == 1.0
    assert found.seconds(Operation("copy", "float32", (1,))) == 2.0
    assert found.seconds(Operation("unheard of", "float32", (2,))) == pytest.approx(6.0)
    assert found.seconds(Operation("matmul nn", "float32", (2, 2, 2))) == 0.0  # no such table
    assert found.seconds(Operation("view", "", ())) == 0.0


def test_operations_of_a_batch_are_timed_one_by_one():
    found = ceilings({"add float32": Table((((1,), 2.0),))})
    assert found.seconds(Operation("add", "float32", (1,), times=5)) == 10.0


@pytest.fixture
def written(tmp_path):
    host = HostOverhead(1e-6, 2e-6, 3e-5, 4e-4)
    measured = ceilings({"add float32": KNEE}, {"shared reduce": LINE}, host)
    path = tmp_path / "calibration.json"
    path.write_text(to_json(Calibration({"cores": 2}, {2: measured}), {"command": "x"}))
    return path


def test_a_calibration_survives_a_round_trip(written):
    found = read_calibration(written)
    assert found.cores == 2
    assert found.of(3) is None
    host = found.of(2)
    assert host is not None
    assert host.host == HostOverhead(1e-6, 2e-6, 3e-5, 4e-4)
    assert host.operations == {"add float32": KNEE}
    assert host.transfer_s("shared reduce", 100) == pytest.approx(10.0)
    assert host.transfer_s("c10d reduce", 100) == 0.0


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (("schema_version",), 7, "schema_version: expected 1, got 7"),
        (("machine",), None, "machine: expected an object, got null"),
        (("ranks",), {"two": {}}, "ranks.two.[key]: expected a valid integer"),
        (("ranks", "2", "host", "unit_s"), -1, "host.unit_s: expected greater than or equal to 0"),
        (
            ("ranks", "2", "tables", "operations add float32"),
            [[[4], 0]],
            "tables.operations add float32.0.1: expected greater than 0, got 0",
        ),
        (
            ("ranks", "2", "tables", "operations add float32"),
            [[[4, 4], 1], [[8, 8], 1]],
            "expected a complete grid of sizes, got 2 points",
        ),
        (
            ("ranks", "2", "tables", "operations add float32"),
            [4, 1],
            "tables.operations add float32.0: expected a valid array, got 4",
        ),
        (("ranks", "2", "tables"), {"rates x": []}, "pattern '^(operations|transfers) '"),
    ],
)
def test_a_file_with_a_wrong_value_is_refused_with_its_key(written, keys, value, says):
    values = json.loads(written.read_text())
    at = values
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    written.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        read_calibration(written)
    assert str(written) in str(caught.value)
    assert "bench calibrate" in str(caught.value)


def test_a_file_that_is_no_calibration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected a file of fullshard bench calibrate, got"):
        read_calibration(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("schema_version: 1")
    with pytest.raises(ConfigError, match="invalid JSON"):
        read_calibration(tmp_path / "text.json")
