"""Comparisons of shardings measure real runs."""

import pytest

from fullshard.errors import ConfigError
from fullshard.train import create_fsdp_config, print_comparison_table, train


def test_a_strategy_in_any_spelling_makes_a_configuration():
    config = create_fsdp_config("ZeRO2", forward_prefetch=0)
    assert config == {"sharding": {"strategy": "shard_grad_op", "forward_prefetch": 0}}
    with pytest.raises(ConfigError, match="strategy: expected one of"):
        create_fsdp_config("ful")


def test_the_table_has_measurements_under_our_and_the_documented_keys(capsys):
    found = {"memory_gb": 1.25, "samples_per_sec": 7.0, "tokens_per_sec": 3200.0}
    found |= {"step_time_s": 0.0125, "loss": 2.5, "strategy": "no_shard", "run_dir": "runs/a"}
    picked = {"memory": found["memory_gb"], "throughput": found["samples_per_sec"]}
    print_comparison_table({"NO_SHARD": found, "picked": picked, "mine": {"time": 61.25}})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("configuration", "memory", "(GB)", "samples/s", "tokens/s", "step", "(ms)"),
        *("loss", "time"),
    ]
    assert [line.split() for line in lines[1:]] == [
        ["NO_SHARD", "1.250", "7.0", "3,200", "12.5", "2.5000", "-"],
        ["picked", "1.250", "7.0", "-", "-", "-", "-"],
        ["mine", "-", "-", "-", "-", "-", "61.25"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_too_few_steps_to_measure_are_refused():
    with pytest.raises(ConfigError, match="expected more than 2"):
        train(create_fsdp_config(), max_steps=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_measured(tmp_path):
    config = create_fsdp_config("SHARD_GRAD_OP")
    config["training"] = {"output_dir": str(tmp_path / "run")}
    config["data"] = {"validation_fraction": 0}
    found = train(config, max_steps=4)
    assert found["strategy"] == "shard_grad_op"
    assert found["memory_gb"] > 0.1
    assert found["samples_per_sec"] == pytest.approx(8 / found["step_time_s"], rel=0.5)
