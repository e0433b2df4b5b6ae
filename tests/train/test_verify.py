"""`fullshard verify` as a command: what it shrinks, compares and prints, and its exit codes."""

import json
import signal

import pytest

from fullshard.config.load import load_config
from fullshard.launch.supervise import LaunchResult
from fullshard.models.config import config_from_settings
from fullshard.observe.metrics import wait_until
from fullshard.verify import check as verify
from fullshard.verify.compare import number_error
from fullshard.verify.faults import Fault
from support.processes import is_running, python

MODEL = (
    "model={config: {model_type: qwen2, vocab_size: 500, hidden_size: 96, intermediate_size: 200, "
    "num_hidden_layers: 9, num_attention_heads: 6, num_key_value_heads: 2, "
    "tie_word_embeddings: true}}"
)
ROWS = ("loss", "gradient norm", "gradients", "updated parameters", "saved state")


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "verify.yaml"
    file.write_text(
        "model:\n  config: {model_type: qwen2, vocab_size: 500, hidden_size: 96, "
        "intermediate_size: 200,\n    num_hidden_layers: 9, num_attention_heads: 6, "
        "num_key_value_heads: 2, tie_word_embeddings: true}\n"
        "sharding: {strategy: shard_grad_op, param_dtype: bf16}\n"
        "training: {gradient_accumulation_steps: 4}\n"
        "freeze: ['model.layers.8.mlp.*']\n"
    )
    return file


def test_sound_sharding_is_equal_in_float64_and_in_its_own_dtype(fullshard, config):
    done = fullshard("verify", config, "sharding.grad_sync=last_micro_batch", "--json", code=0)
    result = json.loads(done.out)
    assert (result["equal"], result["verdict"], result["injected"]) == (True, "equal", None)
    assert (result["model"], result["strategy"]) == ("Qwen2ForCausalLM", "shard_grad_op")
    assert (result["world_size"], result["mesh"]) == (2, {"replicate": 1, "shard": 2})
    rows = result["rows"]
    assert [row["name"] for row in rows] == [*ROWS, "step after loading"] * 2
    assert [row["dtype"] for row in rows] == ["float64"] * 6 + ["bfloat16"] * 6
    assert all(row["equal"] and row["where"] for row in rows)
    assert max(row["worst_error"] for row in rows[:6]) < 1e-11
    assert 0 < max(row["worst_error"] for row in rows[6:]) < 0.2
    shrunk = {change["key"]: (change["was"], change["now"]) for change in result["shrunk"]}
    assert shrunk["num_hidden_layers"] == (9, 4)
    assert shrunk["vocab_size"] == (500, 96)
    told = "EQUAL  Qwen2ForCausalLM under shard_grad_op on 2 ranks, with random weights, matches"
    assert told in done.err


def test_a_fault_ends_with_code_8_and_is_named(fullshard):
    done = fullshard("verify", MODEL, "--inject", "lost_tie", code=8)
    assert "NOT EQUAL  Qwen2ForCausalLM under full_shard on 2 ranks. A tie is lost" in done.out
    assert "DIFFERS" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, *Fault])
def test_mesh_of_two_axes_is_checked_on_four_ranks(fullshard, config, fault):
    words = ("strategy=hybrid_shard", "param_dtype=null", "--json")
    done = fullshard(
        "verify", config, *words, *(("--inject", fault) if fault else ()), code=8 if fault else 0
    )
    result = json.loads(done.out)
    assert result["mesh"] == {"replicate": 2, "shard": 2}
    assert result["verdict"] == (fault or "equal")


def test_dry_run_shows_what_would_be_compared_and_runs_nothing(fullshard, config):
    done = fullshard("verify", config, "--dry-run", "--inject", "repeated_data", "--json", code=0)
    result = json.loads(done.out)
    assert result["injected"] == "repeated_data"
    assert result["dtypes"] == ["float64", "bfloat16"]
    assert "rows" not in result


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--inject", "skiped_reduction"], "Did you mean 'skipped_reduction'?"),
        (
            ["--inject", "stale_slot", "strategy=no_shard"],
            "--inject: expected a sharded strategy for stale_slot, got 'no_shard'",
        ),
        (["--dryrun"], "Did you mean '--dry-run'?"),
        (["sharding.ignore=['*']"], "verify: expected a parameter that is trained here; got none"),
        (["backend=jax", "freeze=['*']"], "freeze: expected globs that leave something to train"),
        (["sharding.ignore=['decoder.*']"], "ignore: expected names (globs) of modules"),
        (["sharding.ignore=['model.layers.99.*']"], "got 'model.layers.99.*', which matches none"),
        (["param_dtype=bfloat16", "fp32_modules=['*.nrom']"], "got '*.nrom', which matches none"),
        (["freeze=[decoder.*]"], "freeze: expected globs of parameter names, got 'decoder.*'"),
        (["sharding.wrap=[LlamaDecoderLayer]"], "LlamaDecoderLayer"),
        (["sharding.transport=fake"], "sharding.transport: expected a real transport, got 'fake'"),
        (["backend=jax", "--inject", "lost_tie"], "--inject: expected repeated_data with backend"),
    ],
)
def test_settings_that_cannot_be_checked_are_configuration_errors(
    fullshard, config, words, expected
):
    done = fullshard("verify", config, *words, code=2)
    assert expected in done.err


@pytest.mark.long
def test_reference_imports_nothing_of_fullshard(tmp_path):
    resolved = load_config(None, [MODEL])
    verify.write(verify.prepare(resolved.config, None), tmp_path)
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], "
        "run_name='__main__'); print([m for m in sys.modules if m.split('.')[0] == 'fullshard'])"
    )
    done = python("-P", "-c", code, verify.REFERENCE, tmp_path)
    assert done.stdout.strip() == "[]"
    numbers = json.loads((tmp_path / "float64" / "reference.json").read_text())
    assert numbers["ties"] == [["model.embed_tokens.weight", "lm_head.weight"]]
    assert len(numbers["norm"]) == 4


KILLED = """
import os, signal
from pathlib import Path
from types import SimpleNamespace
from fullshard.observe.metrics import wait_until
from fullshard.verify import check

def killed(*_, **__):
    wait_until(Path("pid").is_file, 10.0)
    os.kill(os.getpid(), signal.SIGKILL)

check.REFERENCE, check.call_on_ranks = Path("reference.py").absolute(), killed
prepared = SimpleNamespace(program=("", 1), job=SimpleNamespace(device="cpu"))
check.run_sides(prepared, Path().absolute())
"""


def test_the_reference_ends_when_its_check_is_killed(tmp_path):
    (tmp_path / "reference.py").write_text(
        "import os, time; from pathlib import Path\n"
        "Path(__file__).with_name('pid').write_text(str(os.getpid())); time.sleep(60)\n"
    )
    python("-c", KILLED, cwd=tmp_path, code=-signal.SIGKILL)
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_running(pid), 5.0)


def test_an_undetected_fault_ends_with_code_1(fullshard, monkeypatch):
    ended = LaunchResult(0)
    monkeypatch.setattr(verify, "run_sides", lambda *_: (None, ended))
    monkeypatch.setattr(verify, "judge", lambda *_: verify.Verdict((), None, 1.0))
    assert "NOT FOUND" in fullshard("verify", MODEL, "--inject", "wrong_divisor", code=1).out


def test_model_folder_is_shrunk_like_a_configuration(tmp_path):
    config = config_from_settings({"model_type": "qwen3", "num_hidden_layers": 30})
    config.save_pretrained(tmp_path)
    prepared = verify.prepare(load_config(None, [f"model={tmp_path}"]).config, None)
    assert prepared.plan.model_kind == "Qwen3ForCausalLM"
    assert prepared.config.num_hidden_layers == 4


def test_sharding_is_fitted_to_local_ranks():
    def mesh_of(*words):
        plan = verify.prepare(load_config(None, [MODEL, *words]).config, None).plan
        return plan.mesh.replicate, plan.mesh.shard

    assert mesh_of("launch.num_processes=64", "launch.num_machines=8") == (1, 2)
    assert mesh_of("launch.num_processes=3") == (1, 3)
    assert mesh_of("strategy=no_shard") == (2, 1)
    assert mesh_of("strategy=hybrid_shard") == (2, 2)
    assert mesh_of("strategy=hybrid_shard", "sharding.replicate=1") == (1, 4)
    assert mesh_of("launch.num_processes=16", "sharding.shard=8") == (2, 2)


def test_frozen_and_ignored_parameters_are_not_trained(config):
    words = ["freeze=[model.layers.8.mlp.*]", "sharding.ignore=[model.norm]"]
    prepared = verify.prepare(load_config(config, words).config, None)
    assert [name.removeprefix("model.layers.3.mlp.") for name in prepared.job.frozen] == [
        "gate_proj.weight",
        "up_proj.weight",
        "down_proj.weight",
        "model.norm.weight",
    ]
    assert prepared.notes == (
        "Ignored parameters are frozen, because nothing reduces their gradients.",
    )


def test_globs_may_name_the_adapters_of_a_run():
    words = ("lora={r: 4}", "freeze=['*.layers.0.*lora_A*']")
    prepared = verify.prepare(load_config(None, [MODEL, *words]).config, None)
    lost = "freeze: *.layers.0.*lora_A* matches nothing in the small model."
    assert (prepared.job.frozen, lost in prepared.notes) == ((), True)


def test_settings_of_a_run_that_the_check_leaves_out_are_named():
    words = ("training.optim=sgd", "training.ema_decay=0.9", "training.loss_chunk_size=0")
    prepared = verify.prepare(load_config(None, [MODEL, *words]).config, None)
    assert prepared.notes[0].startswith("Not checked: training.optim, training.ema_decay.")
    assert prepared.job.loss_chunk_size is None


def test_units_are_chosen_as_at_full_width():
    large = "{model_type: llama, hidden_size: 256, intermediate_size: 640, num_attention_heads: 4, "
    ends = load_config(None, [f"model={{config: {large} vocab_size: 32000}}}}"])
    small = load_config(None, [f"model={{config: {large} vocab_size: 600}}}}"])
    units = [verify.prepare(resolved.config, None).plan.units for resolved in (ends, small)]
    assert "model.embed_tokens" in {unit.name for unit in units[0]}
    assert "model.embed_tokens" not in {unit.name for unit in units[1]}


def test_nan_counts_as_infinitely_wrong():
    assert number_error(float("nan"), 1.0) == float("inf")
    assert number_error(1.5, 2.0) == 0.25
    assert number_error(1.0, 1.0) == 0.0
