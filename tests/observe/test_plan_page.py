"""The page of a plan is one self-contained file that shows all of the plan."""

import re
from pathlib import Path

import pytest

from fullshard.cli.app import invoke
from support.sizes import sizes_of

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/plan_llama_405b.yaml"
GPUS = ("--gpus", "8xH100-80GB", "--nodes", "128")
FEW = ("model.config.num_hidden_layers=4", "sharding.tensor=1")  # few additional forecasts


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    target = tmp_path_factory.mktemp("page") / "plan.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        outcome = invoke(["plan", EXAMPLE, *GPUS, *FEW, "--out", str(target)])
    assert outcome.exit_code == 0
    return outcome.result, target.read_text(encoding="utf-8")


def test_it_needs_no_network(page):
    _, text = page
    assert "default-src 'none'" in text
    html = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"(src|href)\s*=(?!\"data:,\")|@import|url\(", html)


def test_it_shows_the_verdict_every_row_of_memory_and_every_scale(page):
    found, text = page
    assert f">{found['fits']}</b>" in text
    for row in found["rows"]:
        assert row["name"].replace("'", "&#39;") in text
    for point in found["scaling"]:
        assert f'<td class="num">{point["world_size"]:,}</td>' in text


def test_its_schedule_has_a_bar_for_every_unit_in_every_lane_that_the_unit_uses(page):
    found, text = page
    blocks = sum(unit["role"] == "block" for unit in found["plan"]["units"])
    for color in (1, 2, 3, 4):
        assert text.count(f'<rect class="bar c{color}"') >= blocks


def test_colours_of_text_stand_out_from_their_background_in_both_schemes(page):
    _, text = page
    schemes = re.findall(r"--page: (#\w+); --card: (#\w+); --text: (#\w+); --soft: (#\w+)", text)
    assert len(schemes) == 2
    for ground, card, ink, soft in schemes:
        for back in (ground, card):
            assert contrast(ink, back) >= 7
            assert contrast(soft, back) >= 4.5


def test_it_shows_all_axes_of_the_mesh(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    target = tmp_path / "plan.html"
    small = [f"model.config.{key}={value}" for key, value in SMALL.items()]
    small.append("model.config.num_hidden_layers=2")
    axes = ["sharding.tensor=2", "--gpus", "8xH100-80GB", "--out", str(target)]
    assert invoke(["plan", EXAMPLE, *small, *axes]).exit_code == 0
    assert "8 rank(s) (replicate 1 x shard 4 x tensor 2)" in target.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_a_typed_error(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    target = tmp_path / "nowhere" / "plan.html"
    small = [f"model.config.{key}={value}" for key, value in SMALL.items()]
    outcome = invoke(["plan", EXAMPLE, *small, "--gpus", "8xH100", "--out", str(target)])
    assert outcome.exit_code == 2


SMALL = sizes_of(256, 512, 4, 4, layers=1)


def contrast(one, other):
    """Returns the contrast of two colours as defined by WCAG 2: 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
