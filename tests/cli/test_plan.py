"""`fullshard plan` predicts the memory of a run without ranks, weights or a GPU."""

import json
from importlib.util import find_spec

import pytest

from fullshard.cli.app import run

BATCH = "per_device_train_batch_size"

SHAPE = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
BLOCK = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
NUMEL = 2 * 1000 * 64 + 64 + 3 * BLOCK


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model:\n  config: {json.dumps(SHAPE)}\n"
        "sharding:\n  strategy: full_shard\nlaunch:\n  num_processes: 4\n"
        f"training:\n  {BATCH}: 1\n"
    )
    return file


def rows(found):
    return {row["name"]: row["bytes"] for row in found["rows"]}


def test_the_405b_shape_is_planned_for_1024_gpus(plan):
    gpus = ("--gpus", "8xH100-80GB", "--nodes", "128")
    found, code = plan("examples/plan_llama_405b.yaml", *gpus)
    assert code == 0
    assert found["plan"]["num_parameters"] == 405_853_388_800
    assert found["plan"]["mesh"] == {"replicate": 1, "shard": 1024}
    assert len(found["plan"]["units"]) == 127
    exact = 4 * 405_853_388_800 / 1024
    assert exact <= rows(found)["parameter shards"] <= 1.001 * exact
    counts = 4 * (9 * 126 + 3)
    states = rows(found)["optimizer (AdamW)"] - counts
    assert 2 * exact <= states <= 2 * rows(found)["parameter shards"]


def test_the_json_object_has_the_keys_of_the_contract(plan, config):
    found, code = plan(config)
    assert code == 0
    assert list(found) == [
        "fits",
        "peak_bytes",
        "reserved_bytes",
        "step_time_s",
        "rows",
        "advice",
        "reserve",
        "phases",
        "checkpoint_bytes",
        "scaling",
        "memory_bytes",
        "plan",
    ]
    assert set(found["peak_bytes"]) == {"device", "host", "disk"}
    assert found["peak_bytes"]["device"] == sum(rows(found).values())
    assert (found["fits"], found["step_time_s"], found["advice"]) == ("fits", None, [])
    assert {"activations", "logits and loss"} <= set(rows(found))
    assert found["scaling"] == []
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert list(phases) == ["load", "shard", "forward", "backward", "optimizer", "save", "resume"]
    most = max(phase["device"] for phase in found["phases"])
    assert most == phases["backward"]["device"] == found["peak_bytes"]["device"]
    assert found["checkpoint_bytes"] == 3 * 4 * NUMEL
    assert set(found["plan"]["units"][0]) == {
        "name",
        "kind",
        "role",
        "numel",
        "padding",
        "trainable",
    }


def test_units_add_up_to_the_model(plan, config):
    found, _ = plan(config)
    units = found["plan"]["units"]
    assert sum(unit["numel"] - unit["padding"] for unit in units) == NUMEL
    assert found["plan"]["num_parameters"] == NUMEL
    assert [u["kind"] for u in units].count("LlamaDecoderLayer") == 3


def test_the_planner_chooses_and_reports_open_settings(plan, config, capfd):
    words = ("strategy=auto", "per_device_train_batch_size=auto", "train_batch_size=64")
    found, code = plan(config, *words, "--gpus", "4x1GB", "max_seq_length=512")
    made = found["plan"]
    sizes = made["per_device_train_batch_size"], made["gradient_accumulation_steps"]
    assert (code, sizes[0] * sizes[1]) == (0, 16)
    assert (
        f"auto selects strategy={made['strategy']} per_device_train_batch_size={sizes[0]} "
        f"gradient_accumulation_steps={sizes[1]}."
    ) in capfd.readouterr().out


@pytest.mark.long
def test_a_mixture_of_experts_is_divided_where_that_is_faster(plan, tmp_path, capfd):
    sizes = {"hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 4}
    experts = {"num_experts": 32, "num_experts_per_tok": 2, "vocab_size": 1000}
    (tmp_path / "moe.yaml").write_text(
        f"model: {{config: {json.dumps({'model_type': 'qwen3_moe', **sizes, **experts})}}}"
    )
    words = (tmp_path / "moe.yaml", "max_seq_length=128", "--gpus", "2xH100", "--nodes", "2")
    advised, _ = plan(*words)
    assert any("sharding.expert" in one["changes"] for one in advised["advice"])
    found, _ = plan(*words, "strategy=auto")
    assert found["step_time_s"] < advised["step_time_s"]
    assert found["advice"] == []  # no division is faster
    assert "sharding.expert=" in capfd.readouterr().out
    plan(*words, "strategy=auto", "sharding.expert=1")
    assert "sharding.expert=" not in capfd.readouterr().out  # given sizes stay


def test_the_file_sets_the_world_unless_gpus_and_nodes_are_given(plan, config):
    meshes = [
        plan(config, *words)[0]["plan"]["mesh"]
        for words in ([], ["--gpus", "8"], ["--nodes", "3"], ["--gpus", "2", "--nodes", "5"])
    ]
    assert [mesh["shard"] for mesh in meshes] == [4, 8, 12, 10]


def test_a_hybrid_mesh_shards_within_a_machine(plan, config):
    found, _ = plan(config, "strategy=hybrid_shard", "--gpus", "4xH200", "--nodes", "3")
    assert found["plan"]["mesh"] == {"replicate": 3, "shard": 4}


def test_frozen_parameters_have_no_gradient_and_no_optimizer_bytes(plan, config):
    before, _ = plan(config)
    after, _ = plan(config, "freeze=[model.layers.*]")
    block_bytes = 3 * BLOCK * 4 / 4
    saved = rows(before)["gradient shards"] - rows(after)["gradient shards"]
    assert block_bytes <= saved <= 1.1 * block_bytes
    assert rows(before)["parameter shards"] == pytest.approx(
        rows(after)["parameter shards"], rel=0.05
    )


def test_the_verdict_is_for_the_named_gpu(plan, config):
    found, code = plan(config, "--gpus", "4xA100-40GB")
    assert (found["fits"], code) == ("fits", 0)
    assert found["memory_bytes"] == 40 << 30


def test_a_model_that_does_not_fit_ends_with_code_3_and_the_reason(plan):
    words = ("examples/plan_llama_405b.yaml", "--gpus", "8xH100-80GB", "sharding.tensor=1")
    found, code = plan(*words)
    assert (found["fits"], code) == ("no", 3)
    assert found["peak_bytes"]["device"] > found["memory_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "size", "key"), [(128, 4, BATCH), (32, 1, "--nodes")])
def test_a_run_that_does_not_fit_is_answered_with_changes_that_fit(plan, nodes, size, key):
    words = ("examples/plan_llama_405b.yaml", f"{BATCH}={size}", "--gpus=8xH100", "--nodes", nodes)
    found, code = plan(*words)
    assert (found["fits"], code) == ("no", 3)
    assert any(key in one["changes"] for one in found["advice"])
    for one in found["advice"]:
        assert one["fits"] in ("fits", "tight")
        followed, code = plan(*words, *one["text"].split(":")[0].split())
        assert (followed["fits"], code) == (one["fits"], 0)
        assert followed["peak_bytes"]["device"] == one["peak_bytes"]
        assert followed["step_time_s"] == pytest.approx(one["step_time_s"])


def test_a_scaling_curve_to_1024_ranks_reports_the_loss(plan, config):
    found, _ = plan(config, "--gpus", "8xH100-80GB")
    curve = found["scaling"]
    assert [point["world_size"] for point in curve] == [2**power for power in range(11)]
    assert max(point["efficiency"] for point in curve) == 1
    assert all(one["efficiency"] > 0 and one["reason"] for one in curve)


def test_the_plan_has_the_logits_of_only_one_chunk(plan, config):
    words = ["max_seq_length=2048", "model.config.max_position_embeddings=2048"]
    words += ["model.config.vocab_size=50000"]
    chunked, whole = (
        plan(config, *words, *more)[0]["peak_bytes"]["device"]
        for more in ((), ("loss_chunk_size=0",))
    )
    assert whole - chunked > 4 * (2048 - 512) * 50_000


def test_the_strategy_is_chosen_where_it_is_left_to_the_planner(plan, config):
    found, code = plan(config, "strategy=auto", "--gpus", "8xH100-80GB")
    assert code == 0
    assert found["plan"]["strategy"] in ("no_shard", "shard_grad_op", "full_shard")
    longer = ("max_seq_length=100000", "model.config.max_position_embeddings=100000")
    found, code = plan(config, "strategy=auto", "--gpus", "2x1GB", *longer)
    assert code == 3
    assert "auto: expected a choice of strategy that fits" in found["error"]["message"]


def test_a_model_folder_or_its_config_json_stand_in_for_a_configuration(plan, tmp_path, config):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    words = ("--gpus", "2", f"{BATCH}=1")
    expected = plan(config, *words)[0]["plan"]
    assert plan(folder, *words)[0]["plan"] == expected
    assert plan(folder / "config.json", *words)[0]["plan"] == expected


def test_without_json_a_plan_prints_units_and_a_table(capfd, config):
    assert run(["plan", str(config), "--gpus", "8xH100"]) == 0
    out, err = capfd.readouterr()
    assert "model.layers.0 .. model.layers.2 (3): LlamaDecoderLayer" in out
    assert "parameter shards" in out
    assert "together" in out
    assert "Activations, logits and gradients in flight are traced on the model" in out
    assert "H100 (79.6 GiB): fits: needs" in out
    assert "tokens per second" in out
    assert err == ""


def test_an_impossible_mesh_names_the_line_and_the_nearest(capfd, config):
    config.write_text(config.read_text().replace("full_shard", "full_shard\n  shard: 3"))
    assert run(["plan", str(config)]) == 2
    assert capfd.readouterr().err == (
        f"ConfigError: {config}:5: sharding.shard: expected a divisor of 4 (the number of ranks); "
        "got 3. The nearest is 2.\n"
    )


DEVICES = """\
mi400:
  memory_gib: 402
  bf16_tflops: 2300
  memory_tb_s: 19.6
  link_gb_s: 300
  fabric_gb_s: 50
H100: {memory_gib: 79.1, bf16_tflops: 98.9, memory_tb_s: 3.35, link_gb_s: 450, fabric_gb_s: 50}
"""


@pytest.mark.slow
def test_devices_of_a_file_are_planned_for_and_replace_ours(plan, tmp_path):
    file = tmp_path / "devices.yaml"
    file.write_text(DEVICES)
    shape = ("examples/plan_llama_405b.yaml", "--nodes", "128", "--gpus")
    new, _ = plan(*shape, "8xMI400", "--devices", file)
    assert new["fits"] == "fits"
    ours, _ = plan(*shape, "8xH100")
    slow, _ = plan(*shape, "8xH100", "--devices", file)
    assert new["step_time_s"] < ours["step_time_s"] < slow["step_time_s"] / 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X1: {memory_gb: 80}", "X1.memory_gb: unknown key. Did you mean 'memory_gib'?"),
        ("X1: {memory_gib: 80, bf16_tflops: 9}", "X1.memory_tb_s: missing. Memory bandwidth"),
        ("X1: 80", "X1: expected a mapping with its numbers, got 80"),
        ("X-1: {}", "X-1: expected a name of letters and digits, got 'X-1'"),
        ("X1: {memory_gib: -1}", "X1.memory_gib: expected a number > 0, got -1"),
    ],
)
def test_a_device_that_cannot_be_used_is_named(capfd, config, tmp_path, text, message):
    file = tmp_path / "devices.yaml"
    file.write_text(text)
    assert run(["plan", str(config), "--gpus", "8xX1", "--devices", str(file)]) == 2
    assert f"devices.yaml: {message}" in capfd.readouterr().err


def test_a_plan_for_xla_has_the_same_keys_and_its_collectives(plan, config):
    wanted, _ = plan(config)
    found, code = plan(config, "backend=jax", "--gpus", "4xA100-40GB")
    assert code == 0
    assert found["fits"] == "fits"
    own = {"memory_bytes", "scaling", "reserve", "phases", "checkpoint_bytes"}
    assert set(wanted) - set(found) == own
    assert rows(found)["parameter shards"] == NUMEL  # 4 bytes per parameter on 4 devices
    assert found["peak_bytes"]["device"] == sum(rows(found).values())
    # Twelve arrays: nine in each of three layers, gathered twice, and three outside of blocks.
    assert found["plan"]["collectives"]["all-gather"]["count"] == 9 * 3 * 2 + 3


@pytest.mark.slow
def test_an_exact_plan_is_the_figure_of_xla_for_the_compiled_step(fullshard, config):
    words = ("backend=jax", "max_seq_length=32", "gradient_accumulation_steps=2", "--exact")
    done = fullshard("plan", str(config), *words, "--json", code=0)
    found = json.loads(done.stdout)
    exact = found["exact"]
    assert exact["collectives"] == found["plan"]["collectives"]
    assert exact["error"]["collectives"] is True
    assert 0 <= exact["error"]["state_bytes"] < 64 << 10
    assert exact["peak_bytes"] >= exact["arguments_bytes"] + exact["temporary_bytes"]
    wanted = found["peak_bytes"]["device"] / exact["peak_bytes"] - 1
    assert exact["error"]["peak"] == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="needs jax-cuda12-plugin")
def test_steps_compiled_for_absent_gpus_have_the_planned_collectives(fullshard, config):
    gathered = []
    for dtype in ("float32", "bfloat16"):
        words = ("backend=jax", f"sharding.param_dtype={dtype}", "max_seq_length=32")
        target = ("--exact", "--topology", "2x2xH100-80GB", "--json")
        done = fullshard("plan", str(config), *words, *target, code=0)
        exact = json.loads(done.stdout)["exact"]
        assert exact["error"]["collectives"] is True
        assert 0 <= exact["error"]["state_bytes"] < 64 << 10
        gathered.append(exact["collectives"]["all-gather"]["bytes"])
    assert gathered[0] == 2 * gathered[1] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--exact",), "--exact: expected backend: jax"),
        (
            ("backend=jax", "--topology", "v5p:2x2x2"),
            "--topology: expected --exact, got none. Add --exact",
        ),
        (("backend=jax", "--out", "page.html"), "--out: expected backend: torch"),
        (("backend=jax", "--calibration", "c.json"), "--calibration: expected backend: torch"),
        (
            ("backend=jax", "--exact", "--topology", "v5p:2x2x2"),
            "--topology: expected libtpu to compile for 'v5p:2x2x2'; it is not installed",
        ),
        (
            ("backend=jax", "--exact", "--topology", "8xH100-80GB"),
            "--topology: expected XLA's plugin for CUDA to compile for '8xH100-80GB'; it is not",
        ),
        (
            ("backend=jax", "--exact", "--topology", "8xT4"),
            "--topology: expected one of A100, B200, H100, H200, L4, L40S, for which XLA can",
        ),
        (
            ("backend=jax", "--exact", "--topology", "v5p"),
            "--topology: expected a TPU slice by libtpu's name, such as v5p:2x2x2, or a machine's "
            "GPUs, such as 8xH100-80GB (4x8xH100-80GB: four machines); got 'v5p'.",
        ),
    ],
)
def test_an_exact_plan_without_a_compiler_is_an_error(capsys, monkeypatch, config, words, said):
    monkeypatch.setattr("fullshard.xla.aot.find_spec", lambda _: None)
    assert run(["plan", str(config), *words]) == 2
    assert said in capsys.readouterr().err


def test_state_off_the_device_is_summed_by_its_location(capfd, config):
    assert run(["plan", str(config), "--gpus", "8xH100", "sharding.offload=cpu"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    rows = {line[-1]: int(line[1].replace(",", "")) for line in lines if line[:1] == ["together"]}
    held = [line for line in lines if line[-1:] == ["host"]]
    held = [line for line in held if line[0] not in ("together", "phase")]
    assert set(rows) == {"device", "host"}
    assert {line[0] for line in held} == {"parameter", "gradient", "optimizer"}
    assert rows["host"] == sum(int(line[2].replace(",", "")) for line in held)


def test_the_table_has_the_states_of_the_runs_optimizer(plan, config):
    of = {key: rows(plan(config, *words)[0]) for key, words in {
        "adamw": (), "sgd": ("optim=sgd",), "average": ("ema_decay=0.9",)
    }.items()}  # fmt: skip
    shards = of["adamw"]["parameter shards"]
    counts, average = 4 * (3 + 9 * 3), of["average"]["average of the weights"]
    assert of["adamw"]["optimizer (AdamW)"] == 2 * average + counts
    assert of["sgd"]["optimizer (SGD)"] == 0
    assert NUMEL <= average <= shards  # 4 bytes per parameter on 4 ranks; shards are padded
    assert sum(of["average"].values()) - sum(of["adamw"].values()) == average


def test_a_custom_optimizer_is_planned_by_its_bytes_per_element(plan, config):
    found, _ = plan(config, "--optimizer-bytes", "2.5")
    held = rows(found)["optimizer (2.5 bytes)"]
    assert 2.5 * NUMEL / 4 <= held <= 2.5 * rows(found)["parameter shards"] / 4
    assert found["checkpoint_bytes"] == pytest.approx((4 + 2.5) * NUMEL, abs=1)


def test_a_gpu_needs_more_than_is_allocated_and_each_row_explains_why(plan, config):
    found, _ = plan(config, "--gpus", "4xH100")
    reserve = {row["name"]: row["bytes"] for row in found["reserve"]}
    assert list(reserve) == ["allocator: holes", "context", "communicators"]
    assert all(row["bytes"] > 0 and row["why"] for row in found["reserve"])
    holes = reserve["allocator: holes"]
    assert found["reserved_bytes"] == found["peak_bytes"]["device"] + holes


def test_the_plan_reports_kept_checkpoints_and_the_one_being_written(capfd, config):
    assert run(["plan", str(config), "save_total_limit=2"]) == 0
    out, size = capfd.readouterr().out, 12 * NUMEL / 2**20
    assert f"A checkpoint needs {size:.1f} MiB of disk" in out
    assert f"2 of them need {2 * size:.1f} MiB, and {3 * size:.1f} MiB while" in out
    assert run(["plan", str(config), "save_strategy=no"]) == 0
    assert "\n save " not in capfd.readouterr().out


GIANT = 10**12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", str(GIANT)), "world size: expected at most 1,048,576 ranks, got 4,000,000,"),
        (("--gpus", f"{GIANT}xH100"), "world size: expected at most 1,048,576 ranks"),
        ((f"launch.num_processes={GIANT}",), "world size: expected at most 1,048,576 ranks"),
        (("model.config.num_hidden_layers=1001",), "expected between 1 and 1,000, got 1,001"),
        (
            (f"data.vocab_size={GIANT}",),
            "data.vocab_size: expected an integer >= 1 and < 10,000,000",
        ),
    ],
)
def test_an_enormous_number_is_refused_at_once(capfd, config, words, said):
    assert run(["plan", str(config), *words]) == 2
    assert said in capfd.readouterr().err
