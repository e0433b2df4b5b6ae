"""Machines that join and leave under torchrun: two agents on one machine."""

import contextlib
import json
import subprocess
import sys

import psutil
import pytest

from support.processes import free_port, wait_until
from support.runs import losses
from support.text import seeded_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3000
CONFIG = """\
model:
  config: {{model_type: llama, vocab_size: 300, hidden_size: 32, intermediate_size: 64,
            num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2,
            max_position_embeddings: 64}}
data: {{path: {text}, validation_fraction: 0}}
training: {{output_dir: {output}, max_steps: {steps}, per_device_train_batch_size: 6,
            max_seq_length: 32, learning_rate: 1e-3, save_steps: 100, save_total_limit: 2}}
"""


def written(folder, name):
    """Writes a configuration; its run uses the folder of its name."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(seeded_text(2_000))
    config = folder / f"{name}.yaml"
    config.write_text(CONFIG.format(text=text, output=folder / name, steps=STEPS))
    return config


def agent(job, port, log, *, machines="1:2"):
    """Starts torchrun for one "machine"."""
    elastic = [f"--nnodes={machines}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=a"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, *meeting, *job]
    with log.open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)


def kill_machine(process):
    """Kills an agent and its ranks, which are in separate sessions, at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
    process.wait()


def test_a_run_continues_when_a_machine_joins_and_when_it_is_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    port = free_port()
    calm, changing = written(tmp_path, "calm"), written(tmp_path, "changing")
    job = ["-m", "fullshard", "train", str(changing)]
    alone = [sys.executable, "-m", "fullshard", "train", str(calm), "num_processes=1"]
    subprocess.run(alone, check=True, capture_output=True, timeout=300)
    run, logs = tmp_path / "changing", [tmp_path / "first.log", tmp_path / "second.log"]

    def ranks():
        record = run / "run.json"
        planned = json.loads(record.read_text()).get("planned") if record.is_file() else None
        return planned["world_size"] if planned else 0

    agents = [agent(job, port, logs[0])]
    try:
        wait_until(lambda: max(losses(run), default=0) > 10, 100, "steps on one machine")
        agents.append(agent(job, port, logs[1]))
        wait_until(lambda: ranks() == 2, 100, "two machines")
        joined = max(losses(run))
        wait_until(lambda: max(losses(run)) > joined + 110, 100, "steps on two machines")
        kill_machine(agents[1])
        assert agents[0].wait(timeout=200) == 0, logs[0].read_text()
    finally:
        for process in agents:
            kill_machine(process)
    assert ranks() == 1
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert losses(run) == pytest.approx(losses(tmp_path / "calm"), rel=1e-4)


def test_both_machines_restart_after_a_rank_of_either_is_killed(tmp_path):
    """Their agents share one store, and count restarts separately."""
    job, port = ["-m", "support.launch_job", "meet_again", str(tmp_path)], free_port()
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    agents = [agent(job, port, log, machines="2") for log in logs]
    try:
        found = [process.wait(timeout=200) for process in agents]
        assert found == [0, 0], [log.read_text() for log in logs]
    finally:
        for process in agents:
            kill_machine(process)
    assert [len((tmp_path / f"starts_{rank}").read_text().split()) for rank in (0, 1)] == [3, 3]
