"""Bad input ends a command before a rank starts, with its exit code, and leaves no files."""

import json
import os
import signal
import sys

import pytest

from fullshard.run.folder import begin
from support import forked
from support.processes import free_port, python

pytestmark = pytest.mark.timeout(240)  # the first test imports transformers

# One mistake for each check of a start; tests of the checks have the others.
CASES = {
    "empty data": (["data.path=empty.txt"], 6, "tokens in 'empty.txt'"),
    "too few held out": (
        ["data.path=short.txt", "max_seq_length=4", "data.validation_fraction=0.01"],
        6,
        "at least 4 held-out tokens",
    ),
    "nothing to wait for": (
        ["data.validation_fraction=0", "eval_steps=1", "early_stopping_patience=1"],
        2,
        "early_stopping_patience: expected held-out data",
    ),
    "too few sequences": (
        ["per_device_train_batch_size=1", "gradient_accumulation_steps=100000"],
        6,
        "at least 200,000 sequences",
    ),
    "unknown model key": (["model.config.hiden_size=8"], 2, "Did you mean 'hidden_size'?"),
    "sequence too long": (["max_seq_length=65"], 2, "expected at most 64"),
    "freeze without a match": (["freeze=[lm_haed.*]"], 2, "which matches none"),
    "ignored and trained": (["sharding.ignore=[model.norm]"], 2, "expected frozen parameters"),
    "impossible mesh": (["sharding.shard=3"], 2, "shard"),
    "vocabulary without bytes": (["data.vocab_size=200"], 2, "at least 257"),
    "not yet": (["sharding.activation_checkpointing=offload"], 2, "not yet supported"),
    "of another recipe": (["teacher=t"], 2, "applies to `fullshard distill` only"),
    "nothing to resume from": (["--resume", "checkpoints/1"], 7, "which does not exist"),
    "place is taken": (["training.output_dir=."], 2, "other files"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_an_error_before_any_rank_starts(
    name, tmp_path, monkeypatch, fullshard, write_config
):
    config = write_config(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("A few words only.")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    words, code, expected = CASES[name]
    done = fullshard("train", config, *words, code=code)
    assert expected in done.err
    assert done.out == ""
    assert sorted(tmp_path.iterdir()) == before


def test_an_unusable_folder_is_one_error_under_another_launcher(tmp_path, write_config):
    (tmp_path / "run" / "run.json").mkdir(parents=True)
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [
        sys.executable,
        "-m",
        "fullshard",
        "train",
        str(write_config(tmp_path)),
        "num_processes=1",
    ]
    done = forked.run(command, timeout=100, env=os.environ | ranks | place, capture_output=True)
    assert (done.returncode, b"Traceback" in done.stderr) == (2, False), done.stderr
    assert b"expected a usable path, got 'Is a directory'" in done.stderr


def test_a_signal_before_the_checks_ends_the_command_with_its_code(
    tmp_path, monkeypatch, fullshard, write_config
):
    def stopped(*_):
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr("fullshard.run.start.world_size_of", stopped)  # after torch's import
    done = fullshard("train", write_config(tmp_path), code=75)
    assert "expected to reach its end, got SIGUSR1" in done.err


WITHOUT_TORCH = [
    (["train", "nowhere.yaml"], 2),
    (["train", "CONFIG", "data.path=nowhere.txt"], 6),
    (["train", "CONFIG", "model=nowhere"], 2),
    (["train", "CONFIG", "data.tokenizer=nowhere"], 2),
    (["sft", "data.path=nowhere.jsonl"], 6),  # before its initial model is trained
    (["distill", "data.path=nowhere.txt"], 6),
    (["distill", "data.path=nowhere.txt", "backend=jax"], 6),
    (["ckpt", "export", "nowhere", "out"], 7),
    (["ckpt", "import", "nowhere", "out"], 7),
    (["ckpt", "diff", "nowhere", "."], 7),
    (["plan", "CONFIG", "model=nowhere"], 2),
    (["verify", "CONFIG", "model=nowhere"], 2),
]


def test_missing_paths_are_found_before_torch_is_imported(tmp_path, write_config):
    config = str(write_config(tmp_path))
    commands = [[config if w == "CONFIG" else w for w in words] for words, _ in WITHOUT_TORCH]
    program = (
        "import sys\nfrom fullshard.cli.app import run\n"
        f"for words in {commands!r}:\n"
        "    print(run(words), 'torch' in sys.modules)\n"
        "    print('----', file=sys.stderr)\n"
    )
    done = python("-c", program, cwd=tmp_path)
    shown = [line for line in done.stdout.splitlines() if " lost: " not in line]
    values = [line for line in shown if "the built-in job's values hold without a CONFIG" in line]
    assert ["max_seq_length 128" in line for line in values] == [True] * 3  # sft, distill, on JAX
    assert [x for x in shown if x not in values] == [f"{code} False" for _, code in WITHOUT_TORCH]
    *said, _ = done.stderr.split("----\n")
    assert ["nowhere" in text for text in said] == [True] * len(WITHOUT_TORCH)


def test_a_second_start_does_not_change_a_live_run(tmp_path, fullshard, write_config):
    config = write_config(tmp_path)
    with begin(tmp_path / "run", "train") as (folder, _):
        before = {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()}
        for words in ((), ("--dry-run",), ("--resume", "never")):
            done = fullshard("train", config, *words, code=2)
            assert f"whose run is still active (process {os.getpid()} on host" in done.err
        after = {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()}
        assert after == before


def test_dry_run_shows_the_plan_and_writes_nothing(tmp_path, fullshard, write_config):
    config = write_config(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = fullshard("train", config, "--dry-run", "--json", code=0)
    planned = json.loads(done.out)["planned"]
    assert (planned["world_size"], planned["num_steps"]) == (2, 6)
    assert "2 ranks (replicate 1 x shard 2)" in done.err
    assert sorted(tmp_path.iterdir()) == before


def test_hugging_face_flags_are_training_keys(tmp_path, fullshard, write_config):
    config = write_config(tmp_path)
    words = ("--max_steps", "3", "--per-device-train-batch-size=2", "--dry-run", "--json")
    planned = json.loads(fullshard("train", config, *words).out)["planned"]
    assert (planned["num_steps"], planned["samples_per_step"]) == (3, 4)


def test_main_job_needs_no_file(fullshard):
    planned = json.loads(fullshard("train", "--dry-run", "--json").out)["planned"]
    assert planned["world_size"] == 2
    assert 2e6 < planned["num_parameters"] < 4e6


def test_epochs_are_resolved_to_steps(tmp_path, fullshard, write_config):
    config = write_config(tmp_path)
    words = ("max_steps=-1", "num_train_epochs=0.5", "--dry-run", "--json")
    half = json.loads(fullshard("train", config, *words).out)["planned"]["num_steps"]
    words = ("max_steps=-1", "num_train_epochs=1", "--dry-run", "--json")
    whole = json.loads(fullshard("train", config, *words).out)["planned"]["num_steps"]
    assert whole > 10
    assert half == -(-whole // 2)


INDEX = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}


@pytest.mark.parametrize(
    ("command", "index"),
    [
        ("train", "pytorch_model.bin.index.json"),
        *((command, "model.safetensors.index.json") for command in ("sft", "plan")),
        pytest.param("distill", "model.safetensors.index.json", marks=pytest.mark.long),
    ],
)
def test_an_index_without_its_files_is_refused_rather_than_trained_from_random_weights(
    command, index, tmp_path, fullshard, write_config
):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    (folder / index).write_text(json.dumps(INDEX))
    key = "teacher" if command == "distill" else "model"
    done = fullshard(command, write_config(tmp_path), f"{key}={folder}", code=2)
    assert "weights: expected" in done.err
    assert str(folder) in done.err
    assert not (tmp_path / "run").exists()


def test_more_ranks_than_gpus_are_refused_before_one_starts(
    tmp_path, monkeypatch, fullshard, write_config
):
    monkeypatch.setattr("fullshard.run.start.num_visible_accelerators", lambda: 1)
    done = fullshard("train", write_config(tmp_path), "num_processes=2", code=2)
    assert "num_processes: expected at most 1 ranks on this machine, one per visible" in done.err
    assert not (tmp_path / "run" / "logs").exists()
