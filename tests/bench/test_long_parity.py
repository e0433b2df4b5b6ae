"""DDP, FSDP2 and fullshard train equally on the same text."""

import math
import xml.etree.ElementTree as ET

import pytest
from benchmarks import long_parity


@pytest.mark.slow
def test_a_short_run_has_three_equal_curves_in_one_plot():
    result = long_parity.run(5, timeout_s=100)
    curves = result["losses"]
    assert list(curves) == ["ddp", "fsdp2", "fullshard"]
    assert all(len(curve) == 5 and curve[0] > curve[-1] for curve in curves.values())
    assert max(result["largest_difference"].values()) < 1e-5
    lines = ET.fromstring(long_parity.plot(curves)).iter("{http://www.w3.org/2000/svg}polyline")
    assert len(list(lines)) == 3


def test_differences_are_the_largest_of_each_pair_and_show_nan():
    found = long_parity.differences({"a": [1.0, 2.0], "b": [1.5, 2.0], "c": [1.0, math.nan]})
    assert found["a - b"] == 0.5
    assert math.isnan(found["a - c"])
