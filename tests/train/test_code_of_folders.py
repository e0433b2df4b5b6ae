"""Python code in a model's or tokenizer's folder runs only if one key allows it."""

import json
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fullshard.data.tokenize import train_tokenizer
from support.grid import marked
from support.text import seeded_text

pytestmark = pytest.mark.timeout(300)

CODE = """\
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

with Path({marker!r}).open("a") as file:
    file.write("ran\\n")

class StrangeConfig(LlamaConfig):
    model_type = {kind!r}

class Strange(LlamaForCausalLM):
    config_class = StrangeConfig

class StrangeTokenizer(PreTrainedTokenizerFast):
    pass
"""
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
MAPS = {"AutoConfig": "code.StrangeConfig", "AutoModelForCausalLM": "code.Strange"}


def edit(file, **fields):
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([seeded_text(100)], 300)


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """Code of a folder writes this file; every prompt for permission is answered with yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "marker"


@pytest.fixture
def folder(tmp_path, marker, tokenizer):
    """A Llama with code for its configuration, its model and its tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path / "MODEL"
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "code.py").write_text(CODE.format(marker=str(marker), kind="strange"))
    edit(folder / "config.json", auto_map=MAPS)
    auto = {"AutoTokenizer": [None, "code.StrangeTokenizer"]}
    edit(folder / "tokenizer_config.json", auto_map=auto)
    return folder


def make_strange(folder):
    """No class of transformers can replace its classes."""
    edit(folder / "config.json", model_type="strange")
    edit(folder / "tokenizer_config.json", tokenizer_class="StrangeTokenizer")


@pytest.fixture
def job(tmp_path, write_config):
    """A small run on one rank without a model."""
    config = write_config(tmp_path)
    text = config.read_text()
    config.write_text(text[text.index("data:") :].replace("  vocab_size: 300\n", ""))
    return (config, "num_processes=1", "max_steps=1", "save_strategy=no")


def chats(tmp_path):
    turn = {"messages": [{"role": r, "content": "a word"} for r in ("user", "assistant")]}
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{json.dumps(turn)}\n" * 40)
    return f"data.path={file}"


COMMANDS = {
    "train": lambda job, folder: ("train", *job, f"model={folder}"),
    "dry run": lambda job, folder: ("train", *job, f"model={folder}", "--dry-run"),
    "sft": lambda job, folder: ("sft", *job, f"model={folder}", chats(folder.parent)),
    "teacher": lambda job, folder: (
        *("distill", *job, "model.config.model_type=llama", "model.config.hidden_size=32"),
        f"teacher={folder}",
    ),
    "teacher alone": lambda job, folder: ("distill", *job, f"teacher={folder}"),
    "tokenizer": lambda job, folder: (
        *("train", *job, "model.config.model_type=llama", f"data.tokenizer={folder}"),
    ),
    "plan": lambda job, folder: ("plan", job[0], f"model={folder}", "num_processes=1"),
    "verify": lambda job, folder: ("verify", job[0], f"model={folder}", "num_processes=1"),
    "generate": lambda job, folder: ("generate", folder, "--prompt", "Ada has"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_folder(command, fullshard, folder, marker, job):
    make_strange(folder)
    done = fullshard(*COMMANDS[command](job, folder))
    assert not marker.exists()
    assert done.exit_code == 2, done.err
    assert f"'{folder}', which contains Python code" in done.err
    flag = {"generate": "--trust-remote-code"}
    if command.startswith("teacher"):
        flag[command] = "teacher.trust_remote_code=true"
        assert done.err.startswith("ConfigError: command line: teacher.name_or_path: ")
    assert f"allow it with {flag.get(command, 'model.trust_remote_code=true')}" in done.err


def test_a_known_model_is_trained_without_the_code_of_its_folder(
    fullshard, folder, marker, job, tmp_path
):
    fullshard("train", *job, f"model={folder}", code=0)
    assert not marker.exists()
    written = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert "auto_map" not in written  # the code is missing


def test_one_key_runs_the_code_of_a_folder(fullshard, folder, marker, job, tmp_path):
    make_strange(folder)
    fullshard("train", *job, f"model={folder}", "model.trust_remote_code=true", code=0)
    assert marker.read_text()
    marker.unlink()
    refused = fullshard("generate", tmp_path / "run", "--prompt", "Ada")
    assert (refused.exit_code, marker.exists()) == (2, False)
    allowed = fullshard("generate", tmp_path / "run", "--prompt", "Ada", "--trust-remote-code")
    assert (allowed.exit_code, marker.exists()) == (0, True), allowed.err


LEAVES = {  # statements of a model's forward, and the resulting messages
    "sys.exit(0)": r"code\.py:\d+ ended it by sys\.exit\(0\)",
    "'FULLSHARD_RANK' in os.environ and sys.exit(0)": r"code\.py:\d+ ended it by sys\.exit\(0\)",
    "'FULLSHARD_RANK' in os.environ and os._exit(0)": "all ranks ended with exit code 0 before",
}


@pytest.mark.parametrize(
    "statement", marked(zip(LEAVES), lambda one: "and sys.exit" not in one, pytest.mark.long)
)
def test_code_that_ends_the_process_early_fails_the_run(
    statement, fullshard, folder, job, tmp_path
):
    make_strange(folder)
    code = folder / "code.py"
    begins = "    config_class = StrangeConfig\n"
    leaves = f"    def forward(self, *args, **more):\n        {statement}\n"
    leaves += "        return super().forward(*args, **more)\n"
    code.write_text(f"import os, sys\n{code.read_text()}".replace(begins, begins + leaves))
    done = fullshard("train", *job, f"model={folder}", "model.trust_remote_code=true")
    assert done.exit_code == 1, done.err
    assert re.search(LEAVES[statement], done.err)
    record = tmp_path / "run" / "run.json"
    assert not record.exists() or json.loads(record.read_text())["status"] == "failed"


def test_attention_of_a_hub_is_refused(fullshard, folder, job):
    kernel = "model.config.attn_implementation=someone/kernel"
    typed = fullshard("train", *job, "model.config.model_type=llama", kernel)
    edit(folder / "config.json", _attn_implementation="someone/kernel")
    in_a_file = fullshard("train", *job, f"model={folder}", "--dry-run")
    for done in (typed, in_a_file):
        assert done.exit_code == 2, done.err
        assert "got 'someone/kernel', whose code would be downloaded" in done.err


def test_a_checkpoint_is_exported_without_the_code_of_its_configuration(
    fullshard, folder, marker, job, tmp_path
):
    words = ("save_strategy=steps", "save_steps=1")
    assert fullshard("train", *job[:-1], f"model={folder}", *words).exit_code == 0
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    for file in checkpoint.rglob("*.json"):
        assert "code.Strange" not in file.read_text() or file.name != "config.json"
    fullshard("ckpt", "export", checkpoint, tmp_path / "exported", code=0)
    assert not marker.exists()
