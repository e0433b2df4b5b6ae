"""`fullshard distill` on real ranks: a student cut out of its teacher, resuming, cached logits."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from fullshard.config.files import read_job
from fullshard.config.load import load_config
from fullshard.config.values import IntervalStrategy
from fullshard.launch.run_lock import RunLock
from fullshard.observe.metrics import read_rows
from fullshard.recipes.distill.loss import NEW
from support.model_folder import small_config, write_model
from support.runs import other_cache_at_the_start
from support.text import seeded_text

pytestmark = pytest.mark.timeout(400)

CONFIG = """\
teacher: {folder}/teacher
data: {{path: {folder}/text.txt, validation_fraction: 0.1}}
distill: {{temperature: 2.0, kd_ratio: 0.5}}
training:
  max_steps: 3
  per_device_train_batch_size: 2
  max_seq_length: 32
  learning_rate: 5e-3
  eval_steps: 2
  save_steps: 2
launch: {{num_processes: 2}}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    (folder / "text.txt").write_text(seeded_text(300))
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = small_config("qwen3_moe", num_hidden_layers=3, num_key_value_heads=1, **routed)
    write_model(folder / "teacher", config, seeded_text(50))
    (folder / "distill.yaml").write_text(CONFIG.format(folder=folder))
    return folder


@pytest.mark.long
def test_a_student_cut_out_of_its_teacher_learns_resumes_and_opens_anywhere(fullshard, files):
    words = ("distill", files / "distill.yaml", "experts=2", "layers=2")
    run = files / "run"
    first = fullshard(*words, f"output_dir={run}", code=0)
    assert "layers 0, 2 of the teacher are kept" in first.out + first.err
    fullshard(*words, f"output_dir={run}", "max_steps=5", code=0)
    steps = [row["step"] for row in read_rows(run / "metrics.jsonl") if "loss" in row]
    assert steps == [1, 2, 3, 4, 5]
    student = AutoModelForCausalLM.from_pretrained(run / "model")
    assert (student.config.num_hidden_layers, student.config.num_experts) == (2, 2)
    assert student.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)
    record = json.loads((run / "run.json").read_text())
    del record["last_saved_step"]
    (run / "run.json").write_text(json.dumps({**record, "status": "failed"}))
    shutil.rmtree(run / "checkpoints")  # as if it had stopped before its first save
    again = fullshard(*words, f"output_dir={run}", "layers=1", "max_steps=1", code=0)
    assert "layers 0 of the teacher are kept" in again.out + again.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("config.defaults", "main_job.yaml"),
        ("recipes.sft", "sft_job.yaml"),
        *(
            ("recipes.distill", f"{name}_job.yaml")
            for name in ("teacher", "distill", "distill_jax")
        ),
    ],
)
def test_every_built_in_job_can_be_resumed_after_a_stop(package, name):
    """Otherwise an interrupt of the teacher's training in `distill` would lose all of its steps."""
    training = load_config([read_job(name, f"fullshard.{package}")]).config.training
    assert training.saves is not IntervalStrategy.NO


@pytest.mark.long
def test_cached_logits_train_without_the_teacher(fullshard, files, monkeypatch):
    config = files / "distill.yaml"
    cache = files / "logits"
    write = ("distill", "cache", config, f"distill.cache={cache}", "top_k=300")
    (cache / NEW).mkdir(parents=True)
    with RunLock(cache / NEW):  # another run writes the same cache into its own folder
        done = fullshard(*write, f"output_dir={files / 'second'}", code=2)
    assert "distill.cache: expected a folder that no run uses" in done.err
    fullshard(*write, f"output_dir={files / 'caching'}", code=0)
    losses = []
    for name, words in (("beside", []), ("kept", [f"distill.cache={cache}"])):
        run = files / name
        fullshard("distill", config, *words, f"output_dir={run}", "layers=null", code=0)
        losses.append([row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)  # logits are stored in float16
    facts = json.loads((cache / "cache.json").read_text())
    with monkeypatch.context() as patched:
        other_cache_at_the_start(patched, cache)
        kept = (f"distill.cache={cache}", f"output_dir={files / 'swapped'}", "layers=null")
        done = fullshard("distill", config, *kept)
    said = "the weights and the config.json (or the distill.cache)"
    assert (done.exit_code, said in done.err) == (2, True), done.err
    (cache / "cache.json").write_text(json.dumps(facts | {"teacher": "of another"}))
    done = fullshard("distill", config, f"distill.cache={cache}", f"output_dir={files / 'no'}")
    assert (done.exit_code, "expected logits of the run's teacher" in done.err) == (6, True)
    (cache / "cache.json").write_text(json.dumps(facts | {"num_train_tokens": 1}))
    done = fullshard("distill", config, f"distill.cache={cache}", f"output_dir={files / 'no'}")
    assert (done.exit_code, "expected logits of this run's data" in done.err) == (6, True), done.err
