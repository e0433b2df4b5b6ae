"""Defaults of `fullshard distill` without a file, and settings of a launcher without effect."""

import pytest

from fullshard.cli.arguments import load
from fullshard.cli.recipe import say_values
from fullshard.recipes.distill import job


@pytest.mark.parametrize(
    ("words", "cut"),
    [
        ([], (2, 4)),
        (["loss=jsd"], (2, 4)),
        (["teacher=a"], (None, None)),
        (["student=b"], (None, None)),
        (["teacher=a", "student=b", "loss=jsd"], (None, None)),
        (["teacher=a", "experts=16", "layers=12"], (12, 16)),
        (["--teacher", "a", "--layers", "3"], (3, None)),
    ],
)
def test_the_built_in_student_sizes_apply_only_to_the_built_in_teacher(words, cut):
    resolved = load(words, default=job(None))
    config = load(words, default=job(resolved)).config
    assert (config.distill.layers, config.distill.experts) == cut
    assert config.distill.temperature == 2.0, "the rest of the job stays"
    assert config.teacher is not None


def test_a_student_with_a_cache_needs_no_built_in_teacher():
    for words, has_teacher in (("student=b cache=c", False), ("cache=c", True)):
        resolved = load(words.split(), default=job(None))
        config = load(words.split(), default=job(resolved)).config
        assert (config.teacher is not None) == has_teacher


def test_a_built_in_job_names_its_values_but_not_the_defaults(capsys):
    say_values(load(["student=b"], default=job(None)))
    said = capsys.readouterr().out
    assert "alpha 0.7" in said
    assert "beta" not in said


def test_settings_of_accelerate_launch_without_effect_are_reported(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    load(["model=x"])
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\n")
    load(["model=x"], config_file=tmp_path / "fsdp.yaml")
    assert "ACCELERATE" not in capsys.readouterr().out
    load(["model=x"])
    said = "environment: ACCELERATE_USE_FSDP=true: settings of `accelerate launch` have no effect"
    assert capsys.readouterr().out.startswith(said)
