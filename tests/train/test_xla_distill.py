"""`fullshard distill` with `backend: jax` learns the same from a teacher as torch."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fullshard.observe.metrics import read_rows
from support.model_folder import small_config, write_chats, write_model
from support.runs import numbers, other_cache_at_the_start, same_losses
from support.text import seeded_text

pytestmark = pytest.mark.timeout(600)

# A large epsilon: rounding noise of gradients that should be zero must not decide a step.
CONFIG = """\
teacher: {folder}/teacher
data: {{path: {folder}/text.txt, validation_fraction: 0.1}}
distill: {{temperature: 2.0, kd_ratio: 0.6, chunk_size: 24}}
training:
  max_steps: 4
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  max_seq_length: 32
  learning_rate: 1e-2
  adam_epsilon: 1e-4
  max_grad_norm: 0.5
  warmup_steps: 0
  eval_steps: 2
  save_steps: 2
launch: {{num_processes: 2}}
"""
READ = "student: {folder}/student\n"
DRAWN = """\
student:
  config: {{model_type: llama, vocab_size: 300, hidden_size: 16, intermediate_size: 32,
            num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 64}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Teachers, dense and sparse, a student with weights, and text."""
    folder = tmp_path_factory.mktemp("distill")
    (folder / "text.txt").write_text(seeded_text(300))
    large = {"num_hidden_layers": 3, "num_key_value_heads": 1}
    small = {"hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1}
    other = small_config("mistral", **large)
    models = {
        "teacher": small_config("qwen3", **large),
        "student": small_config("llama", **small),
        "other": other,
    }
    for seed, (name, config) in enumerate(models.items()):
        write_model(folder / name, config, seeded_text(50), seed=seed, sure=10)
    for name, student in (("read", READ), ("drawn", DRAWN), ("none", "")):
        (folder / f"{name}.yaml").write_text((CONFIG + student).format(folder=folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("drawn.yaml", "loss=jsd"),
        ("drawn.yaml", "loss=hidden", "alpha=1"),
        ("read.yaml", "loss=hidden"),
        ("read.yaml", "loss=reverse_kl", "distill.teacher_strategy=no_shard"),
    ],
    ids=str,
)
def test_losses_are_those_of_torch(folder, fullshard, tmp_path, words):
    config, *more = words
    found = same_losses(fullshard, tmp_path, "distill", folder / config, *more)
    assert len(found) == 6
    assert found["loss 3"] < found["loss 1"]
    for backend in ("torch", "jax"):
        student = AutoModelForCausalLM.from_pretrained(tmp_path / backend / "model")
        assert student.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("torch", "jax")]
    assert names[0] - {"samples.jsonl"} == names[1]  # the XLA engine samples no text between steps


@pytest.mark.slow
def test_cached_logits_of_torch_train_here_and_runs_resume(
    folder, fullshard, tmp_path, monkeypatch
):
    """Uses torch's cache, resumes torch's checkpoint, and continues for one step more."""
    kept = f"distill.cache={tmp_path / 'logits'}"
    words = ("distill", "cache", folder / "drawn.yaml", kept, "top_k=20")
    fullshard(*words, f"output_dir={tmp_path / 'caching'}", code=0)
    words = ("distill", folder / "drawn.yaml", kept)
    wanted = [*same_losses(fullshard, tmp_path, *words).values()]
    middle = tmp_path / "jax" / "checkpoints" / "step-00000002"
    fullshard(*words, "--resume", middle, f"output_dir={tmp_path / 'joined'}", code=0)
    joined = [*numbers(tmp_path / "joined").values()]
    assert joined == pytest.approx(wanted[3:], rel=1e-5)
    given = (folder / "drawn.yaml", kept, "backend=jax", f"output_dir={tmp_path / 'jax'}")
    fullshard("distill", *given, "max_steps=5", code=0)
    rows = read_rows(tmp_path / "jax" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]
    other_cache_at_the_start(monkeypatch, tmp_path / "logits")
    done = fullshard("distill", *given[:-1], f"output_dir={tmp_path / 'swapped'}")
    said = "the weights and the config.json (or the distill.cache)"
    assert (done.exit_code, said in done.err) == (2, True), done.err


@pytest.mark.slow
def test_packed_chats_with_cached_logits_have_the_losses_of_torch(
    folder, fullshard, tmp_path, monkeypatch
):
    """Rows are padded here, and so are their cached logits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_chats(tmp_path / "chat.jsonl", 200)
    kept = (f"distill.cache={tmp_path / 'logits'}", "top_k=300", "max_length=64")
    words = (folder / "read.yaml", f"data.path={tmp_path / 'chat.jsonl'}", "packing=true", *kept)
    fullshard("distill", "cache", *words, f"output_dir={tmp_path / 'caching'}", code=0)
    wanted = same_losses(fullshard, tmp_path, "distill", *words)
    more = ("backend=jax", "distill.cache=null", f"output_dir={tmp_path / 'teacher'}")
    fullshard("distill", *words, *more, code=0)
    assert numbers(tmp_path / "teacher") == pytest.approx(wanted, rel=2e-3)  # stored in float16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("read.yaml", "distill.teacher_offload=cpu"),
            "distill.teacher_offload: 'cpu' with backend: jax is not yet supported",
        ),
        (("none.yaml", "distill.layers=2"), "distill.layers: 2 with backend: jax is not yet"),
        (("none.yaml", "experts=2"), "Give the student its own configuration or folder"),
        (("read.yaml", "teacher={folder}/other"), "teacher.model_type: expected one of llama, "),
        (("read.yaml", "teacher={folder}/other"), "`fullshard distill cache` and backend: torch"),
        (
            ("read.yaml", "strategy=no_shard", "distill.teacher_strategy=full_shard"),
            "distill.teacher_strategy: expected no_shard or the student's strategy (no_shard)",
        ),
        (
            ("read.yaml", "distill.teacher_dtype=float64"),
            "distill.teacher_dtype: expected float32 or less",
        ),
        (("cache", "read.yaml"), "Use torch; runs with backend: jax read the cache"),
    ],
)
def test_features_that_the_backend_lacks_are_refused_before_ranks_start(
    folder, fullshard, words, said
):
    given = [word.replace("{folder}", str(folder)) for word in words]
    given = [folder / word if word.endswith(".yaml") else word for word in given]
    done = fullshard("distill", *given, "backend=jax", "--dry-run", code=2)
    assert said in done.err


def test_without_arguments_a_small_student_learns_from_the_main_job(
    fullshard, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    done = fullshard("distill", "backend=jax", "--dry-run", code=0)
    assert "runs/train/model does not exist yet; it is trained first." in done.out
