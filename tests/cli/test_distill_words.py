"""What `fullshard distill` is without a configuration file, and what a launcher asks in vain."""

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
def test_the_own_jobs_student_is_cut_for_its_own_teacher_alone(words, cut):
    resolved = load(words, default=job(None))
    config = load(words, default=job(resolved)).config
    assert (config.distill.layers, config.distill.experts) == cut
    assert config.distill.temperature == 2.0, "the rest of the job stays"
    assert config.teacher is not None


def test_a_student_beside_a_cache_needs_no_teacher_of_the_own_job():
    for words, has_teacher in (("student=b cache=c", False), ("cache=c", True)):
        resolved = load(words.split(), default=job(None))
        config = load(words.split(), default=job(resolved)).config
        assert (config.teacher is not None) == has_teacher


def test_a_built_in_job_names_the_values_that_it_sets_and_no_defaults(capsys):
    say_values(load(["student=b"], default=job(None)))
    said = capsys.readouterr().out
    assert "alpha 0.7" in said
    assert "beta" not in said


def test_settings_of_accelerate_launch_that_reach_nothing_are_told(monkeypatch, tmp_path, capsys):
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
