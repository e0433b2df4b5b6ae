"""`backend: jax` trains like torch: equal data and losses, and files that torch reads."""

import json
import shutil
from importlib import metadata

import pytest

from support.runs import numbers

pytestmark = pytest.mark.timeout(300)  # three runs before the first test

# A large epsilon: rounding noise of gradients that should be zero must not decide a step.
CONFIG = """\
model:
  config: {{model_type: qwen2, vocab_size: 300, hidden_size: 32, intermediate_size: 64,
            num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2,
            max_position_embeddings: 64, tie_word_embeddings: true}}
data: {{path: {folder}/text.txt, validation_fraction: 0.1}}
training: {{output_dir: {folder}/run, max_steps: 20, per_device_train_batch_size: 3,
            per_device_eval_batch_size: 5, gradient_accumulation_steps: 2, max_seq_length: 32,
            learning_rate: 1e-3, adam_epsilon: 1e-4, weight_decay: 0.1, max_grad_norm: 0.5,
            warmup_steps: 3, eval_steps: 10, save_steps: 10}}
launch: {{num_processes: 2}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    (folder / "text.txt").write_text("".join(f"{i} and {i} is {i + i}.\n" for i in range(500)))
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return path


@pytest.fixture(scope="module")
def runs(config, fullshard):
    """Folders of the run on torch, on jax, and on torch resumed from the middle of jax's run."""
    folder = config.parent
    for name, *words in (
        ("torch",),
        ("jax", "backend=jax"),
        ("joined", "--resume", str(folder / "jax" / "checkpoints" / "step-00000010")),
    ):
        done = fullshard(
            "train", str(config), f"training.output_dir={folder / name}", *words, code=0
        )
        assert "Gloo" not in done.out, "the library's own line, which means nothing to a user"
    return folder


@pytest.mark.long
def test_twenty_steps_have_the_losses_of_torch(runs):
    wanted = numbers(runs / "torch")
    assert len(wanted) == 22
    assert numbers(runs / "jax") == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long
@pytest.mark.slow
def test_replicas_on_two_processes_have_the_losses_of_shards(runs, config, fullshard):
    folder = runs / "copies"
    words = (f"training.output_dir={folder}", "sharding.strategy=no_shard")
    fullshard("train", str(config), "backend=jax", *words, code=0)
    assert numbers(folder) == pytest.approx(numbers(runs / "jax"), rel=1e-5)


@pytest.mark.long
def test_torch_resumes_from_a_checkpoint_of_jax(runs):
    wanted, found = numbers(runs / "torch"), numbers(runs / "joined")
    assert len(found) == 11
    assert found == pytest.approx({name: wanted[name] for name in found}, rel=1e-5)


@pytest.mark.long
def test_jax_never_trains_over_checkpoints_that_it_cannot_read(runs, config, fullshard, tmp_path):
    folder = shutil.copytree(runs / "jax", tmp_path / "run")
    for weights in folder.glob("checkpoints/*/model-00000.safetensors"):
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    words = ("backend=jax", f"training.output_dir={folder}", "training.max_steps=22")
    done = fullshard("train", str(config), *words, code=7)
    assert "has other bytes than were written" in done.err + done.out
    assert len(list((folder / "checkpoints").iterdir())) == 2


@pytest.mark.long
@pytest.mark.slow
def test_a_longer_run_removes_an_average_that_it_does_not_keep(runs, config, fullshard, tmp_path):
    folder = shutil.copytree(runs / "jax", tmp_path / "run")
    (folder / "model_ema").mkdir()
    words = ("backend=jax", f"training.output_dir={folder}", "training.max_steps=22")
    fullshard("train", str(config), *words, code=0)
    assert (folder / "model").is_dir()
    assert not (folder / "model_ema").exists()


@pytest.mark.long
def test_a_run_leaves_the_files_that_every_run_leaves(runs):
    names = [{path.name for path in (runs / name).iterdir()} for name in ("torch", "jax")]
    assert names[0] - {"samples.jsonl"} == names[1]  # the XLA engine samples no text between steps
    record = json.loads((runs / "jax" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["environment"]["jax"] == metadata.version("jax")
    assert "model.layers.mlp.down_proj.weight" in (runs / "jax" / "report.html").read_text()
    for log in (runs / "jax" / "logs").glob("rank_*.log"):
        assert "peer ranks" not in log.read_text()  # gloo's messages about its connections


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sharding.transport=direct",), "sharding.transport: 'direct' is not yet supported"),
        (("sharding.grad_sync=last_micro_batch",), "sharding.grad_sync: 'last_micro_batch'"),
        (("model.config.attention_dropout=0.5",), "attention_dropout: expected one of 0.0"),
        (("freeze=[nonsense]",), "freeze: expected names (globs) of parameters; got 'nonsense'"),
        (('freeze=["*"]',), "freeze: expected globs that leave something to train"),
        (('freeze=["*.layers.0.*"]',), "freeze: expected globs that match all layers or none"),
    ],
)
def test_unsupported_settings_of_the_backend_are_refused_before_ranks_start(
    config, fullshard, words, said
):
    done = fullshard("train", str(config), "backend=jax", "--dry-run", *words, code=2)
    assert said in done.err
