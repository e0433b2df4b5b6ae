"""The files of examples/cluster run here with the variables that the schedulers set."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support.processes import free_port, wait_until

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
SMALL = ["model.config.num_hidden_layers=1", "model.config.vocab_size=512", "save_steps=1000000"]
# `srun`: two tasks with the variables of SLURM 22.05; returns the highest exit code.
SRUN = """
import os, subprocess, sys
step = {"SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost,localhost"}
tasks = [
    subprocess.Popen(
        [sys.executable, "-m", *sys.argv[2:]],
        env={**os.environ, **step, "SLURM_PROCID": str(r), "SLURM_NODEID": str(r),
             "SLURM_LOCALID": "0"},
    )
    for r in range(2)
]
open("tasks", "w").write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""


def record(run):
    return json.loads((run / "run.json").read_text())


@pytest.mark.long
def test_the_slurm_script_saves_on_a_signal_requeues_and_resumes(tmp_path, monkeypatch):
    commands = {
        "srun": f'exec {sys.executable} {tmp_path}/srun.py "$@"',
        "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi',
    }
    (tmp_path / "srun.py").write_text(SRUN)
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    script = (CLUSTER / "slurm.sbatch").read_text().replace("29500", str(free_port()))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = {**os.environ, "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": "3"}
    start = ["bash", "-c", script, "slurm.sbatch", str(CLUSTER / "train.yaml"), *SMALL]
    run = tmp_path / "runs" / "cluster"

    first = subprocess.Popen([*start, "max_steps=100000"], cwd=tmp_path, env=job)
    try:
        rows = run / "metrics.jsonl"
        wait_until(lambda: rows.exists() and rows.stat().st_size > 0, 100, "a first step")
        for pid in (tmp_path / "tasks").read_text().split():
            os.kill(int(pid), signal.SIGUSR1)
        assert first.wait(60) == 75
    finally:
        first.kill()
    assert record(run)["status"] == "interrupted"
    assert (tmp_path / "requeued").read_text() == "requeue 3\n"

    saved = json.loads(rows.read_text().splitlines()[-1])["step"]
    again = subprocess.run([*start, f"max_steps={saved + 2}"], cwd=tmp_path, env=job, timeout=100)
    assert (again.returncode, record(run)["status"]) == (0, "finished")
    steps = [json.loads(row).get("step") for row in rows.read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, saved + 3))


def pod_of(name):
    """Returns the container of a manifest's pods, and its command for this machine."""
    manifest = yaml.safe_load((CLUSTER / name).read_text())
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        template = spec["replicatedJobs"][0]["template"]["spec"]["template"]
    else:
        template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    container = template["spec"]["containers"][0]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    return manifest, container["command"] + container.get("args", [])


def run_pods(command, variables, folder):
    """Runs a command as two pods; returns the exit codes."""
    programs = {"fullshard": ["-m", "fullshard"], "torchrun": ["-m", "torch.distributed.run"]}
    processes = []
    for index in range(2):
        words = [word.replace("/config", str(CLUSTER)) for word in command[1:]]
        words = [word.replace("/runs", str(folder)) for word in words]
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in words]
        words += [*SMALL, "max_steps=3"]
        job = {name: value.format(index=index) for name, value in variables.items()}
        start = [sys.executable, *programs[command[0]], *words]
        processes.append(subprocess.Popen(start, cwd=folder, env={**os.environ, **job}))
    try:
        return [process.wait(150) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.long
def test_the_pods_of_the_job_set_connect_and_train(tmp_path):
    manifest, command = pod_of("jobset.yaml")
    (job,) = manifest["spec"]["replicatedJobs"]
    first = f"{manifest['metadata']['name']}-{job['name']}-0-0.{manifest['metadata']['name']}"
    here = {
        f"--master-addr={first}": "--master-addr=localhost",
        "--master-port=29500": f"--master-port={free_port()}",
        "--nproc-per-node=8": "--nproc-per-node=1",
    }
    assert here.keys() <= set(command)
    assert run_pods([here.get(word, word) for word in command], {}, tmp_path) == [0, 0]
    assert record(tmp_path / "cluster")["planned"]["world_size"] == 2


@pytest.mark.long
def test_the_pods_of_the_training_operator_connect_and_train(tmp_path):
    manifest, command = pod_of("pytorchjob.yaml")
    port, replicas = str(free_port()), manifest["spec"]["pytorchReplicaSpecs"].values()
    nodes = sum(replica["replicas"] for replica in replicas)
    variables = {  # variables that the training operator sets
        **{"RANK": "{index}", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port},
        **{"PET_NODE_RANK": "{index}", "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1"},
        **{"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port},
    }
    assert run_pods(command, variables, tmp_path) == [0, 0]
    assert record(tmp_path / "cluster")["planned"]["world_size"] == 2


@pytest.mark.peers
@pytest.mark.timeout(700)
def test_the_workers_of_ray_train_and_resume(tmp_path):
    pytest.importorskip("ray.train", reason="needs `pip install 'ray[train]'`")
    start = [sys.executable, str(CLUSTER / "ray_train.py"), str(tmp_path)]
    for _ in range(2):
        done = subprocess.run(start, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert f"checkpoints: {tmp_path / 'checkpoints'}" in done.stdout
    assert (tmp_path / "checkpoints" / "step-00000020").is_dir()
