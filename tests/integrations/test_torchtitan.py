"""torchtitan's trainer with our fully_shard gives the results of torch's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from support.peers import site_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("torchtitan_job.py")
SED = Path(__file__).parents[2] / "examples" / "switch" / "torchtitan.sed"
SHARED = ("torchdata==0.11.0", "tyro", "typeguard", "docstring_parser", "shtab", "tomli", "triton",
          "tiktoken")  # fmt: skip
DEBUG_MODEL = {
    "0.2.2": ["--job.dump_folder", "{run}", "--model.name", "llama3", "--model.flavor",
              "debugmodel", "--model.hf_assets_path", "{assets}", "--training.dataset", "c4_test",
              "--training.dataset_path", "{assets}/text", "--optimizer.implementation", "foreach",
              "--activation_checkpoint.mode", "selective"],
    "0.3.0": ["--module", "llama3", "--config", "llama3_debugmodel", "--dump_folder", "{run}",
              "--hf_assets_path", "{assets}", "--dataloader.dataset_path", "{assets}/text",
              "--training.disable_cuda_graphs", "--validator.no-enable"],
}  # fmt: skip
NEEDED = {
    "0.2.2": ("torchtitan==0.2.2",),
    "0.3.0": ("torchtitan==0.3.0", "torch_checkpointing", "spmd_types==0.2.3", "einops"),
}
CHANGED = {"0.2.2": "models/llama3/infra/parallelize.py", "0.3.0": "distributed/fsdp.py"}
# torch's `fully_shard` accepts the default parameters of 0.3 only from 2.14 on.
OLDER = Version(torch.__version__) < Version("2.14")
REFERENCE = {"0.2.2": [], "0.3.0": ["--parallelism.spmd_backend", "partial_dtensor"] * OLDER}


class Runs:
    """Runs of the trainer, each in its own folder."""

    def __init__(self, folder, version):
        self.folder, self.version = folder, version
        self.sites = {"torch": site_of(*NEEDED[version]), "sharded": folder / "site"}
        package = self.sites["torch"] / "torchtitan"
        shutil.copytree(package, folder / "site" / "torchtitan")
        changed = folder / "site" / "torchtitan" / CHANGED[version]
        text = subprocess.run(
            ["sed", "-f", SED, changed], capture_output=True, text=True, check=True
        ).stdout
        assert text.count("import fully_shard\n") == 1
        changed.write_text(text)
        self.write_inputs()

    def write_inputs(self):
        """Writes a tokenizer, text and a seed checkpoint, because weights drawn by ranks differ."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        assets = self.folder / "assets"
        (assets / "text").mkdir(parents=True)
        words = {f"w{at}": at for at in range(1000)} | {"<eos>": 1000, "<unk>": 1001}
        made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.save(str(assets / "tokenizer.json"))
        special = {"eos_token": "<eos>", "bos_token": "<eos>"}
        (assets / "tokenizer_config.json").write_text(json.dumps(special))
        lines = [" ".join(f"w{at * i * i % 997}" for i in range(1, 90)) for at in range(400)]
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (assets / "text" / "train.json").write_text(rows)
        self.run("torch", "seed", "--checkpoint.create_seed_checkpoint", ranks=1)

    def run(self, side, name, *options, start=None, ranks=2):
        """Trains 20 steps, or resumes from a checkpoint; returns rows by step."""
        run = self.folder / name
        if start is not None:
            shutil.copytree(start, run / "checkpoint" / start.name)
        command = [sys.executable, "-m", "fullshard", "launch", "--nproc-per-node", ranks]
        command += ["--log-dir", self.folder / "logs", SCRIPT, self.folder / f"{name}.json"]
        places = {"run": run, "assets": self.folder / "assets"}
        command += [word.format(**places) for word in DEBUG_MODEL[self.version]]
        command += REFERENCE[self.version] if side == "torch" else []
        command += ["--training.seq_len", 64, "--training.local_batch_size", 2]
        command += ["--training.steps", 20, "--training.mixed_precision_param", "float32"]
        command += ["--checkpoint.enable", "--checkpoint.interval", 10]
        command += ["--lr_scheduler.warmup_steps", 2, "--metrics.log_freq", 1]
        path = [self.sites[side], self.sites["torch"], site_of(*SHARED)]
        path.append(os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        done = subprocess.run(
            [*map(str, command), *options], capture_output=True, text=True, timeout=400,
            env={**environment, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return {row[0]: row[1:] for row in json.loads((self.folder / f"{name}.json").read_text())}


@pytest.fixture(scope="module", params=NEEDED)
def runs(request, tmp_path_factory):
    made = Runs(tmp_path_factory.mktemp("torchtitan"), request.param)
    seed = made.folder / "seed" / "checkpoint" / "step-0"
    made.found = {side: made.run(side, side, start=seed) for side in ("torch", "sharded")}
    return made


def assert_equal(found, wanted):
    for step, row in found.items():
        assert row == pytest.approx(wanted[step], rel=2e-6), step


def test_losses_and_norms_of_twenty_steps_are_those_of_torchs_fsdp2(runs):
    assert [*runs.found["torch"]] == [*runs.found["sharded"]] == [*range(1, 21)]
    assert_equal(runs.found["sharded"], runs.found["torch"])


def flattened(state, prefix=""):
    inner = [flattened(v, f"{prefix}{k}/") for k, v in state.items() if isinstance(v, dict)]
    found = {f"{prefix}{k}": v for k, v in state.items() if not isinstance(v, dict)}
    return {name: value for part in (found, *inner) for name, value in part.items()}


def test_checkpoints_contain_the_same_tensors(runs, tmp_path):
    states = []
    for side in ("torch", "sharded"):
        dcp_to_torch_save(runs.folder / side / "checkpoint" / "step-10", tmp_path / side)
        states.append(torch.load(tmp_path / side, weights_only=False))
    theirs, ours = map(flattened, states)
    tensors = {name for name, value in theirs.items() if isinstance(value, torch.Tensor)}
    assert theirs.keys() == ours.keys()
    assert len(tensors) > 150
    for name in tensors:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("side", "saver"), [("sharded", "sharded"), ("sharded", "torch"), ("torch", "sharded")]
)
def test_each_engine_resumes_checkpoints_of_the_other(runs, side, saver):
    start = runs.folder / saver / "checkpoint" / "step-10"
    found = runs.run(side, f"{side}-of-{saver}", start=start)
    assert [*found] == [*range(11, 21)]
    assert_equal(found, runs.found["torch"])
