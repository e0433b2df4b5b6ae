"""`fullshard plan`, a dry run and the run use one plan, which refuses runs that cannot fit."""

import json
import random
import shutil
from collections import namedtuple
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import fullshard as fs
from fullshard.cli.app import invoke
from fullshard.config import host_memory
from fullshard.config.files import read_job
from fullshard.config.load import load_config
from fullshard.config.values import Backend
from fullshard.data.tokenize import train_tokenizer
from fullshard.engine.engine import engine_of
from fullshard.models.build import model_config_of, model_on_meta
from fullshard.outlook.memory import LAUNCHER_PROCESS, RANK_PROCESS, WORKER_PROCESS
from fullshard.planner.optimizers import states_of
from fullshard.planner.text import human_bytes
from support.text import seeded_text

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
TEACHERS = "fullshard.recipes.distill"  # its job trains the teacher
DEFAULTS = ROOT / "src" / "fullshard" / "config" / "defaults"
MACHINE = "accelerate_configs"
CASES = sorted(
    path
    for folder in (DEFAULTS, ROOT / "examples")
    for path in folder.rglob("*.yaml")
    if path.parent.name != MACHINE  # files that only describe machines
    and "apiVersion:" not in path.read_text()  # Kubernetes jobs
)
HOST = 24 << 30


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder with the initial models of the examples, and small data."""
    found = tmp_path_factory.mktemp("place")
    text = seeded_text(6000)
    (found / "text.txt").write_text(text)
    lines = [line for line in text.split(".") if line.strip()][:400]
    pairs = [{"prompt": f"What is {at}?", "completion": line} for at, line in enumerate(lines)]
    (found / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    tokenizer = train_tokenizer([text], 512)
    jobs = ((read_job(), "train"), (read_job("teacher_job.yaml", TEACHERS), "teacher"))
    for job, folder in jobs:
        config = load_config([job]).config
        model = AutoModelForCausalLM.from_config(model_config_of(config, tokenizer))
        model.save_pretrained(found / "runs" / folder / "model")
        tokenizer.save_pretrained(found / "runs" / folder / "model")
    return found


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setattr(host_memory, "limit", lambda: host_memory.Limit(HOST))


def said(*words):
    outcome = invoke([str(word) for word in words])
    return json.loads(json.dumps(outcome.result, default=str)), outcome.exit_code


def words_of(path):
    """Returns the command of an example and its arguments."""
    machines = [f"--config_file={file}" for file in (path.parent / MACHINE).glob("*.yaml")]
    is_sft = "sft" in path.parts[-3:][0] or path.stem.startswith("sft")
    is_distill = "distill" in str(path.relative_to(ROOT)) and not is_sft
    command = "sft" if is_sft else "distill" if is_distill else "train"
    data = "pairs.jsonl" if is_sft else "text.txt"
    return command, [str(path), *machines, f"data.path={data}", "output_dir=out"]


def digest_of_the_engine(path, words):
    machines = [word.partition("=")[2] for word in words if word.startswith("--config_file")]
    others = [word for word in words if not word.startswith("--")]
    config = load_config([*map(Path, machines), path], others).config
    model = fs.shard(
        model_on_meta(config, model_config_of(config)), config.sharding.without("context")
    )
    return engine_of(model).plan.trained_by(states_of(config.training)).digest()


@pytest.mark.short(1)
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_plan_a_dry_run_and_the_run_are_equal(ranks, path, place):
    command, words = words_of(path)
    plan, code = said("plan", *words)
    dry, dry_code = said(command, *words, "--dry-run")
    assert code == dry_code == (0 if plan["fits"] == "fits" else 3), dry
    assert dry["planned"]["digest"] == plan["plan"]["digest"]
    assert dry["planned"]["num_parameters"] == plan["plan"]["num_parameters"]
    if dry["planned"]["expected_peak_bytes"] is not None:
        assert dry["planned"]["expected_peak_bytes"] == plan["peak_bytes"]["device"]
    is_torch = load_config(path, needs_model=False).config.backend is Backend.TORCH
    if code == 0 and is_torch:
        found = ranks(2)(run_in, place, path, words[1:])
        assert set(found) == {plan["plan"]["digest"]}


def run_in(place, path, words):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return digest_of_the_engine(path, words)


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.long)])
def test_a_vocabulary_that_is_trained_later_is_planned_as_it_will_be(place, caplog, backend):
    caplog.set_level("INFO", "fullshard")
    file = place / "short.yaml"
    shape = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1}
    shape |= {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    file.write_text(json.dumps({"model": {"config": shape}, "data": {"path": "text.txt"}}))
    words = (file, "max_seq_length=32", "max_steps=2", "output_dir=out", f"backend={backend}")
    plan, dry = said("plan", *words)[0], said("train", *words, "--dry-run")[0]
    assert plan["plan"]["num_parameters"] == dry["planned"]["num_parameters"]
    assert plan["plan"]["num_parameters"] > 2 * 8192 * 32  # not the class's default vocabulary
    assert "since a trace met" not in caplog.text  # a model of one layer is traced too


@pytest.mark.short(1)
@pytest.mark.parametrize("limit", [1 << 20, 24 << 20])
def test_a_run_that_cannot_fit_is_refused_with_its_plan_before_reading_data(
    monkeypatch, place, limit
):
    monkeypatch.setattr(host_memory, "limit", lambda: host_memory.Limit(limit))
    output = place / f"refused-{limit}"
    words = ("data.path=text.txt", f"output_dir={output}")
    monkeypatch.setattr("fullshard.run.start.make_data", lambda *_: pytest.fail("data was read"))
    dry, code = said("train", *words, "--dry-run")
    assert (code, output.exists()) == (3, False)
    found, code = said("train", *words)
    assert code == 3
    message = found["error"]["message"]
    assert "what would help:\n  " in message
    assert "optimizer (AdamW)" in message
    record = json.loads((output / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("failed", 3)
    assert record["planned"] == found["planned"] == dry["planned"]
    assert record["planned"]["num_parameters"] == 3279104


@pytest.mark.parametrize(
    ("num_ranks", "words"), [(1, ("offload=cpu",)), (2, ()), (2, ("offload=nvme",))]
)
def test_a_limit_must_leave_room_for_the_processes_beside_the_tensors(
    monkeypatch, place, num_ranks, words
):
    words = (*words, "data.path=text.txt", "output_dir=nowhere", "save_strategy=no")
    words = (*words, f"launch.num_processes={num_ranks}")
    phases = said("plan", *words)[0]["phases"]
    tensors = max(one["device"] + one["host"] * (one["name"] != "load") for one in phases)
    least = num_ranks * (tensors + RANK_PROCESS + WORKER_PROCESS) + LAUNCHER_PROCESS
    file = Path("/sys/fs/cgroup/memory.max")
    for missing, expected in ((0, 0), (num_ranks, 3)):
        limit = host_memory.Limit(least - missing, file)
        monkeypatch.setattr(host_memory, "limit", lambda limit=limit: limit)
        found, code = said("train", *words, "--dry-run")
        assert code == expected, found
        assert said("plan", *words)[1] == expected
    message = found["error"]["message"]
    assert f"per rank of the container's memory limit of {human_bytes(least)} ({file})" in message
    process = human_bytes(RANK_PROCESS + WORKER_PROCESS + LAUNCHER_PROCESS // num_ranks)
    assert f"Tensors take {human_bytes(tensors)} per rank; its process" in message
    assert f"share of the launcher take {process}." in message


def test_a_disk_without_room_for_the_checkpoints_is_found_first(monkeypatch, place):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 0, 100 << 20))
    words = ("data.path=text.txt", f"output_dir={place / 'full'}", "max_steps=500")
    found, code = said("train", *words, "--dry-run")
    assert code == 3
    # Two kept checkpoints and one being written, each weights and two moments; and the model.
    needed = (3 * 3 + 1) * 4 * 3279104 / 2**20
    assert f"expected {needed:.1f} MiB of disk" in found["error"]["message"]
    assert said("train", *words, "save_strategy=no", "--dry-run")[1] == 0
    cache = ("distill", "cache", f"teacher={place / 'runs' / 'train' / 'model'}", *words[:2])
    assert said(*cache, "--dry-run")[1] == 0  # JAX saves no checkpoint here


def test_a_run_that_is_moved_aside_frees_no_disk(monkeypatch, place, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(place / "runs" / "train", folder)
    (folder / "run.json").write_text('{"command": "train", "status": "failed"}')
    with (folder / "model" / "large").open("wb") as file:
        file.truncate(1 << 30)  # a sparse file with the size of all checkpoints
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 0, 1 << 20))
    words = ("data.path=text.txt", f"output_dir={folder}", "max_steps=5", "--dry-run")
    found, code = said("train", *words, "--resume", "never")
    assert code == 3
    assert "of disk for" in found["error"]["message"]
    resumed = said("train", *words, "--resume", "auto")
    assert resumed[1] != 3, resumed


def test_a_truncated_file_of_weights_is_found_before_the_model_is_traced(
    place, tmp_path, monkeypatch
):
    traces = []
    monkeypatch.setattr("fullshard.run.outlook.trace_step", lambda *_, **__: traces.append(1))
    folder = tmp_path / "model"
    shutil.copytree(place / "runs" / "train" / "model", folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Exception, match="incomplete"), safe_open(file, "pt"):
        pass
    for words in (
        ["sft", "data.path=pairs.jsonl", f"model={folder}"],
        ["distill", "data.path=text.txt", f"teacher={folder}", "distill.layers=null"],
    ):
        found, code = said(*words, "--dry-run")
        assert code == 2, found
        assert "model.safetensors' to be a whole safetensors file" in found["error"]["message"]
        assert not traces


def test_weights_without_their_tokenizer_need_the_key_that_trains_one(place, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(place / "runs" / "train" / "model", folder)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    main = (DEFAULTS / "main_job.yaml", "data.path=text.txt", "output_dir=out", "--dry-run")
    found, code = said("train", f"model={folder}", *main[1:])
    assert code == 2
    assert "data.vocab_size" in found["error"]["message"]
    assert said("train", f"model={folder}", "data.vocab_size=300", *main[1:])[1] == 0
    student = json.dumps(load_config(main[0]).config.model.config | {"vocab_size": 9000})
    distill = ("distill", f"teacher={folder}", f"student.config={student}", *main[1:])
    found, code = said(*distill)
    assert code == 2
    assert (
        "teacher.name_or_path: expected weights with their tokenizer" in found["error"]["message"]
    )
    assert said(*distill, "data.vocab_size=2000")[1] == 0  # so short a text yields 437 entries
    chance = random.Random(0)
    words = ("".join(chance.choices(ascii_lowercase, k=6)) for _ in range(4_000))
    (tmp_path / "words.txt").write_text(" ".join(words))
    many = [f"data.path={tmp_path / 'words.txt'}" if "text.txt" in str(w) else w for w in distill]
    found, code = said(*many, "data.vocab_size=2000")
    assert code == 2
    assert "teacher.config.vocab_size: expected at least" in found["error"]["message"]


def test_a_page_that_cannot_be_written_is_an_error_before_planning(monkeypatch):
    monkeypatch.setattr(torch, "device", lambda *_: pytest.fail("planned"))
    found, code = said("plan", DEFAULTS / "main_job.yaml", "--out", "nowhere/page.html")
    assert code == 2
    assert "--out: expected a file in a writable folder" in found["error"]["message"]
