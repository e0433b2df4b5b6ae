"""examples/switch: scripts of other libraries, changed by the `.sed` files, give equal results."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from support.peers import LIGHTNING, with_site
from support.trainers import launched, llama_config, word_tokenizer

pytestmark = [pytest.mark.timeout(600)]

SWITCH = Path(__file__).parents[2] / "examples" / "switch"


def changed(script, sed, folder):
    """Returns the script as changed by the sed file."""
    text = subprocess.run(
        ["sed", "-f", SWITCH / sed, script], capture_output=True, text=True, check=True
    ).stdout
    assert text != script.read_text()
    found = folder / f"changed_{script.name}"
    found.write_text(text)
    return found


def run(script, folder, *words, env=None):
    return launched(folder, script, *words, run=subprocess.run, env=env or os.environ)


def losses(output):
    (line,) = (line for line in output.splitlines() if "losses" in line)
    return [float(word) for word in line.partition("losses")[2].split()]


def both(script, sed, tmp_path, env=None):
    before = losses(run(script, tmp_path, tmp_path / "before", env=env))
    after = losses(run(changed(script, sed, tmp_path), tmp_path, tmp_path / "after", env=env))
    assert len(before) >= 4
    assert len(set(before)) > 1
    assert after == pytest.approx(before, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "sed"),
    [("clm.py", "trainer.sed"), ("loop.py", "accelerate.sed"), ("ddp.py", "ddp.sed")],
)
def test_a_changed_script_has_the_losses_of_the_original(script, sed, tmp_path):
    both(SWITCH / script, sed, tmp_path)


@pytest.mark.peers
def test_a_changed_lightning_script_has_the_losses_of_the_original(tmp_path):
    both(SWITCH / "lit.py", "lightning.sed", tmp_path, with_site(*LIGHTNING))


@pytest.mark.long
def test_the_checkpoint_of_the_changed_loop_is_that_of_ddp(tmp_path):
    run(SWITCH / "ddp.py", tmp_path, tmp_path / "before")
    run(changed(SWITCH / "ddp.py", "ddp.sed", tmp_path), tmp_path, tmp_path / "after")
    theirs, ours = (torch.load(tmp_path / name / "ckpt.pt") for name in ("before", "after"))
    assert ours["model"].keys() == theirs["model"].keys()
    for name, value in theirs["model"].items():
        torch.testing.assert_close(ours["model"][name], value, rtol=1e-5, atol=1e-6)
    moments = [state["optimizer"]["state"][0]["exp_avg"] for state in (theirs, ours)]
    torch.testing.assert_close(moments[1], moments[0], rtol=1e-4, atol=1e-6)


# ---- TRL's scripts from the installed package


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Creates a model with a tokenizer, and rows for each script."""
    folder = tmp_path_factory.mktemp("inputs")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(128)).save_pretrained(folder / "model")
    word_tokenizer(128).save_pretrained(folder / "model")

    def said(at, most):
        return " ".join(f"w{at * i % 120}" for i in range(1, 4 + at % most))

    kinds = {
        "sft": lambda at: {"prompt": f"w{at}", "completion": said(at, 9)},
        "dpo": lambda at: {"prompt": f"w{at}", "chosen": said(at, 9), "rejected": said(at, 5)},
        "kto": lambda at: {"prompt": f"w{at}", "completion": said(at, 9), "label": at % 2 == 0},
        "reward": lambda at: {"chosen": said(at, 9), "rejected": said(at + 1, 5)},
    }
    for kind, row in kinds.items():
        (folder / kind).mkdir()
        lines = "".join(json.dumps(row(at)) + "\n" for at in range(32))
        (folder / kind / "train.jsonl").write_text(lines)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_a_changed_script_of_trl_logs_what_the_original_logs(kind, inputs, tmp_path):
    trl = importlib.util.find_spec("trl")
    script = Path(trl.origin).parent / "scripts" / f"{kind}.py"
    words = ["--model_name_or_path", inputs / "model", "--dataset_name", inputs / kind]
    words += ["--use_cpu", "--bf16", "False", "--max_steps", "3", "--logging_steps", "1"]
    words += ["--per_device_train_batch_size", "4", "--learning_rate", "1e-2"]
    words += ["--report_to", "none", "--seed", "3", "--dataloader_pin_memory", "False"]
    # torch's DDP joins gloo's thread with the GIL held when it is deleted (pytorch/pytorch#56297).
    # That thread may need the GIL for the last gather, so the original script waits before it ends.
    original = tmp_path / script.name
    text, end = script.read_text(), "trainer.end()\n"
    assert text.count(end) == 1
    original.write_text("import time\n" + text.replace(end, "trainer.end(), time.sleep(1)\n"))
    found = []
    for name, one in (("before", original), ("after", changed(script, "trainer.sed", tmp_path))):
        run(one, tmp_path, *words, "--output_dir", tmp_path / name)
        state = max((tmp_path / name).glob("checkpoint-*/trainer_state.json"))
        history = json.loads(state.read_text())["log_history"]
        found.append([(row["loss"], row["grad_norm"]) for row in history if "loss" in row])
        assert (tmp_path / name / "model.safetensors").exists()
    before, after = found
    assert len(before) == 3
    for mine, theirs in zip(after, before, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-7)
