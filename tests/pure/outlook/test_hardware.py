"""Reads descriptions of a machine's GPUs."""

import pytest

from fullshard.errors import ConfigError
from fullshard.outlook.devices import GPU_MEMORY, Gpus, parse_gpus
from fullshard.outlook.memory import Fit, judge_fit

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "count", "name", "gib"),
    [
        ("8xH100-80GB", 8, "H100", (79, 80)),
        ("8 x h100-80gb", 8, "H100", (79, 80)),
        ("8*H100", 8, "H100", (79, 80)),
        ("4xA100-40GB", 4, "A100", (39, 40)),
        ("4xA100_40GB", 4, "A100", (39, 40)),
        ("A100 80GB", 1, "A100", (79, 80)),
        ("H200", 1, "H200", (139, 141)),
        ("2xRTX4090", 2, "RTX4090", (23, 24)),
        ("2xRTX 4090", 2, "RTX4090", (23, 24)),
        ("L4", 1, "L4", (22, 24)),
        ("8x96GiB", 8, "", (96, 96)),
        ("4xNEWGPU-288GB", 4, "NEWGPU", (268, 269)),
    ],
)
def test_counts_names_and_memory_are_read(text, count, name, gib):
    found = parse_gpus(text)
    assert (found.count, found.name) == (count, name)
    assert found.memory_bytes is not None
    assert gib[0] * GIB <= found.memory_bytes <= gib[1] * GIB


def test_a_number_alone_does_not_define_memory():
    assert parse_gpus("8") == Gpus(8, "", None)


@pytest.mark.parametrize("text", ["", "0xH100", "0", "8x", "x", "eight H100!", "-1", "8xH100-80TB"])
def test_an_unreadable_description_is_refused_with_examples(text):
    with pytest.raises(ConfigError, match=r"--gpus: .*such as 8xH100-80GB"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("text", "nearest", "way_out"),
    [
        ("8xH1000", "'H100'", "8x80GB"),
        ("8xH10-80GB", "'A10' or 'H100'", "8x80GB"),
        ("4xMI400-432GB", "'MI300X'", "4x432GB"),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_nearest_and_the_remedy(text, nearest, way_out):
    with pytest.raises(ConfigError, match="got unknown GPU") as caught:
        parse_gpus(text)
    suggested = str(caught.value).partition("Did you mean ")[2].partition("?")[0]
    assert set(nearest.split(" or ")) <= set(suggested.split(" or "))
    assert f"give only its memory ({way_out})" in str(caught.value)


def test_an_unknown_variant_is_refused_with_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"--gpus: expected A100-80GB or A100-40GB, got A100-60GB"
    ):
        parse_gpus("A100-60GB")


def test_no_gpu_has_more_memory_than_its_name_says():
    for variants in GPU_MEMORY.values():
        for nominal_gb, memory_bytes in variants.items():
            assert 0.9 * nominal_gb * 1e9 < memory_bytes <= 1.03 * nominal_gb * GIB


@pytest.mark.parametrize(
    ("needed", "fit"),
    [(0, Fit.FITS), (90, Fit.FITS), (91, Fit.TIGHT), (100, Fit.TIGHT), (101, Fit.NO)],
)
def test_a_plan_must_leave_a_tenth_for_fragmentation_and_errors(needed, fit):
    assert judge_fit(needed, 100) is fit
    assert f"{needed / 100:.1%}" in fit.sentence(needed, 100)


def test_a_model_many_times_too_large_is_described_as_such():
    assert Fit.NO.sentence(8000, 100) == "does not fit: needs 80.0 times the memory."
