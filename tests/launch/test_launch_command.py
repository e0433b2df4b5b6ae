"""`fullshard launch`: unmodified scripts connect, end together and restart."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fullshard.cli.app import run
from fullshard.launch.exit_codes import RankFailure, caught_stop_signals
from fullshard.launch.spawn import Relay
from fullshard.launch.supervise import LaunchResult
from support import forked
from support.processes import free_port, wait_until

ROOT = Path(__file__).parents[2]

MEETS = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), *sys.argv[1:], "of local rank", os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""

FAILS_ONCE = """
import os, sys
from pathlib import Path
done = Path(sys.argv[1])
if os.environ["RANK"] == "1" and not done.exists():
    done.touch()
    raise ValueError("rank one says no")
"""

STUCK = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(600)
dist.barrier()
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """`launch(text, *words)` writes a script, runs `fullshard launch`, and returns the process."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def launch(text, *words, arguments=()):
        script = tmp_path / "script.py"
        script.write_text(text)
        own = () if "--config_file" in words else ("--nproc-per-node", "2")
        return forked.Popen(
            [sys.executable, "-m", "fullshard", "launch", *own, *words, str(script), *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return launch


SHARDS = """
import torch, torch.distributed as dist
import fullshard as fs
dist.init_process_group("gloo")
torch.manual_seed(0)
fs.shard(torch.nn.Linear(4, 4))
dist.destroy_process_group()
"""


@pytest.mark.short(2)
@pytest.mark.parametrize(
    ("text", "file", "says"),
    [
        ("print(1)", "{distributed_type: FSDP, num_processes: 2}", True),
        (SHARDS, "{distributed_type: FSDP, num_processes: 2}", False),
        ("print(1)", "{distributed_type: MULTI_CPU, num_processes: 2}", False),
    ],
    ids=["plain", "sharded", "ddp"],
)
def test_a_script_that_shards_nothing_gets_a_warning(launch, tmp_path, text, file, says):
    (tmp_path / "fsdp.yaml").write_text(file)
    process = launch(text, "--config_file", "fsdp.yaml")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    wanted = "--config_file fsdp.yaml: asks for full_shard, but the script did not shard a model"
    assert (wanted in out + err) == says, out + err


def test_a_plain_script_connects_and_gets_its_arguments(launch, tmp_path):
    process = launch(MEETS, "--json", arguments=["--json", "x"])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["num_processes"] == 2
    assert err == "sum 3.0 --json x of local rank 0\n"  # with --json, and only of rank 0
    log = tmp_path / "runs" / "launch" / "logs" / "rank_1.log"
    assert log.read_text() == "sum 3.0 --json x of local rank 1\n"


WAITS = """
import os, sys, time
from pathlib import Path
print("first", flush=True)
Path(os.environ["LOCAL_RANK"]).touch()
while not Path("go").exists():
    time.sleep(0.01)
"""


def test_simultaneous_launches_write_separate_logs(launch, tmp_path):
    first = launch(WAITS)
    wait_until(lambda: all((tmp_path / n).exists() for n in "01"), 60, "both ranks have started")
    out, err = launch("print('second')", "--json").communicate(timeout=60)
    (tmp_path / "go").touch()
    first.communicate(timeout=60)
    logs = tmp_path / "runs" / "launch" / "logs"
    told = json.loads(out)["log_dir"]
    assert Path(told).name == "logs.1", err
    for folder, said in ((logs, "first\n"), (logs.with_name("logs.1"), "second\n")):
        assert [(folder / f"rank_{rank}.log").read_text() for rank in (0, 1)] == [said, said]
    launch("print('third')").communicate(timeout=60)
    assert (logs / "rank_1.log").read_text() == "third\n"


SAYS_ITS_REPORT = """
from fullshard.observe import watchdog
print(watchdog.current().hang_file)
"""


def test_the_log_of_a_live_run_is_not_changed(launch, tmp_path):
    log = tmp_path / "run" / "logs" / "rank_0.log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    with contextlib.closing(Relay(log)):  # of `fullshard train`
        out, err = launch(SAYS_ITS_REPORT, "--log-dir", log.parent, "--json").communicate(
            timeout=60
        )
    own = Path(json.loads(out)["log_dir"])
    assert own.name == "logs.1", err
    assert log.read_text() == "step 1\n"
    assert (own / "rank_1.log").read_text() == f"{own / 'hang.txt'}\n"


def on_two_machines(launch, program, address, *words):
    """Returns exit codes and errors of the launchers of both machines."""
    place = ["--nnodes", "2", "--master-addr", address, "--master-port", str(free_port()), *words]
    nodes = [
        launch(program, *place, "--node-rank", str(node), "--log-dir", f"logs_{node}")
        for node in (1, 0)
    ]
    return [(node.communicate(timeout=90)[1], node.returncode) for node in nodes]


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.long)])
def test_launchers_of_two_machines_connect(launch, tmp_path, address):
    if ":" in address and not Path("/proc/net/if_inet6").read_text():
        pytest.skip("needs a machine with IPv6")
    for err, code in on_two_machines(launch, MEETS, address):
        assert code == 0, err
    assert (tmp_path / "logs_1" / "rank_3.log").read_text() == "sum 10.0 of local rank 1\n"


FAILS_ON_ONE = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sys.exit(6)
dist.barrier()
"""


@pytest.mark.long
def test_the_launchers_of_both_machines_name_the_rank_that_failed(launch):
    for err, code in on_two_machines(launch, FAILS_ON_ONE, "127.0.0.1", "--nproc-per-node", "1"):
        assert code == 6, err
        assert "rank 1 of 2 failed (exit code 6)" in err


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 2
num_processes: 2
main_process_ip: 127.0.0.1
main_process_port: {port}
machine_rank: {node}
"""


def test_a_file_of_accelerate_sets_the_rank_of_the_machine(launch, tmp_path):
    port = free_port()
    nodes = []
    for node in (1, 0):
        file = tmp_path / f"machine_{node}.yaml"
        file.write_text(ACCELERATE.format(port=port, node=node))
        nodes.append(launch(MEETS, "--config_file", file, "--log-dir", f"logs_{node}"))
    for node in nodes:
        _, err = node.communicate(timeout=90)
        assert node.returncode == 0, err
    for node in (0, 1):
        log = tmp_path / f"logs_{node}" / f"rank_{node}.log"
        assert log.read_text() == "sum 3.0 of local rank 0\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "ranks 8 to 15 of 16"),
        (["--machine_rank", "0"], "ranks 0 to 7 of 16"),
        (["--num_machines", "4", "--num_processes", "8"], "ranks 2 to 3 of 8"),
        (["--nproc-per-node", "3"], "ranks 3 to 5 of 6"),
        (["--nnodes", "1", "--node-rank", "0"], "ranks 0 to 15 of 16"),
    ],
)
def test_flags_override_the_machines_of_the_file(words, said, tmp_path, capfd):
    file = tmp_path / "machines.yaml"
    text = ACCELERATE.replace("num_processes: 2", "num_processes: 16")
    file.write_text(text.format(port=29500, node=1))
    assert run(["launch", "--config_file", str(file), *words, "--dry-run", "-m", "x"]) == 0
    out = capfd.readouterr().out
    assert f"as {said}" in out
    assert ("--master-port: no effect on one machine" in out) == ("--nnodes" in words)


def test_a_file_of_two_machines_without_an_address_is_refused(tmp_path, capfd):
    file = tmp_path / "machines.yaml"
    file.write_text(ACCELERATE.replace("main_process_ip: 127.0.0.1\n", "").format(port=1, node=1))
    assert run(["launch", "--config_file", str(file), "-m", "x"]) == 2
    assert "main_process_ip, main_process_port" in capfd.readouterr().err


def test_all_ranks_restart_after_a_failure_up_to_the_limit(launch, tmp_path):
    process = launch(FAILS_ONCE, "--max-restarts", "1", arguments=[str(tmp_path / "done")])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "ValueError: rank one says no" in err
    assert "restarting: 1 of 1" in out
    (tmp_path / "done").unlink()
    process = launch(FAILS_ONCE, arguments=[str(tmp_path / "done")])
    process.communicate(timeout=60)
    assert process.returncode == 1


@pytest.mark.short(2)
@pytest.mark.parametrize("module", ["no.such.module", "json", "nosuch"])
def test_a_module_that_cannot_run_is_one_error(module, capfd, tmp_path):
    logs = ["--log-dir", str(tmp_path)]
    assert run(["launch", "--nproc-per-node", "2", *logs, "-m", module]) == 2
    err = capfd.readouterr().err
    assert f"-m: expected a module to run, got '{module}'" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_hang_of_a_script_without_fullshard_is_named(launch, tmp_path):
    process = launch(STUCK, "--timeout", "3", "--log-dir", "said")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "rank 1 is in the user's code (script.py:6 in <module>)" in err
    assert "rank 0 waits in a collective of script.py:7 in <module>" in err
    assert "rank 1 is in the user's code" in (tmp_path / "said" / "hang.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "SCRIPT: expected a file, got 'nothing.py', which does not exist."),
        (["job"], "SCRIPT: expected a Python file, got 'job'. For a module, use -m job."),
        (["/dev/null"], "SCRIPT: expected a Python file, got '/dev/null'.\n"),
        (
            ["--nnodes", "1:2", "-m", "x"],
            "--nnodes (--num-machines): expected an integer >= 1, got '1:2'\n",
        ),
        (
            ["--node-rank", "1", "-m", "x"],
            "--node-rank (--machine-rank): expected an integer < 1, because",
        ),
        (["--nnodes", "2", "-m", "x"], "--master-addr, --master-port: expected both"),
        (["--nproc-per-node", "two", "-m", "x"], "--nproc-per-node: expected a number"),
        (["--max-restarts", "-1", "-m", "x"], "--max-restarts: expected a number greater than"),
        (["--nproc-per-node", "gpu", "-m", "x"], "--nproc-per-node: expected a GPU on this"),
        (["--timeout", "-1", "-m", "x"], "--timeout: expected a number >= 1 and < 1,000,000,000;"),
        (["--log-dir", "/proc/no", "-m", "x"], "--log-dir: '/proc/no': expected a folder to write"),
        (["--num_processes", "0", "-m", "x"], "--num-processes: expected an integer >= 1, got 0"),
        (
            ["--num_processes", "2", "--nproc-per-node", "3", "-m", "x"],
            "--nproc-per-node: expected a number that gives num_processes (2)",
        ),
    ],
)
def test_a_mistaken_launch_is_one_error(words, message, capfd):
    assert run(["launch", *words]) == 2
    assert message in capfd.readouterr().err


def test_a_stopped_launch_does_not_restart(monkeypatch, tmp_path):
    """Scripts often end with 143 on SIGTERM, which looks like any other failure."""
    attempts = []

    def launched(order):
        attempts.append(order.attempt)
        with caught_stop_signals() if order.caught is None else contextlib.nullcontext():
            os.kill(os.getpid(), signal.SIGTERM)
        return LaunchResult(143, RankFailure(0, "SystemExit", "143", 143, "", 0.0))

    monkeypatch.setattr("fullshard.launch.spawn.launch_local_ranks", launched)
    words = ["--max-restarts", "2", "--log-dir", str(tmp_path), "-m", "x"]
    assert run(["launch", *words]) == 143
    assert attempts == [0]


@pytest.mark.parametrize("code", [75, 130])
def test_a_launch_stopped_on_another_machine_does_not_restart(code, monkeypatch, tmp_path):
    ends = [LaunchResult(code, LaunchResult(code).for_others(1, 1))]  # a second: IndexError
    monkeypatch.setattr("fullshard.launch.spawn.launch_local_ranks", lambda order: ends.pop())
    words = ["--max-restarts", "2", "--log-dir", str(tmp_path), "-m", "x"]
    assert run(["launch", *words]) == code


@pytest.mark.slow
def test_the_main_job_runs_under_two_agents_of_torchrun(tmp_path, monkeypatch):
    """Two "nodes" on one machine; a warning is printed once, not by every rank."""
    port = free_port()
    output = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    place = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    job = ["-m", "fullshard", "train", f"output_dir={output}", "max_steps=4", "eval_strategy=no"]
    agents = [
        subprocess.Popen(
            [*torchrun, *place, f"--node-rank={node}", *job],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    said = [agent.communicate(timeout=200) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    record = json.loads((output / "run.json").read_text())
    assert (record["status"], record["planned"]["world_size"]) == ("finished", 4)
    # Other ranks report the wait after ten seconds, which only a slow machine exceeds.
    waits = re.compile(r"(waiting \d+0 s for rank 0, which prepares: .+\n)*")
    assert said[1][0] == "", "the second node's ranks print nothing"
    assert waits.fullmatch(said[1][1]), said[1][1]
    warnings = [line for line in said[0][1].splitlines() if "warn" in line.lower()]
    assert len(warnings) == len(set(warnings))


ENDS = {  # how the main job ends: exit code, status, message
    ("SIGINT", None): (130, "interrupted", "Interrupted"),
    ("SIGTERM", None): (
        75,
        "interrupted",
        r"Stopped\. The last saved step is \d+, in .*step-\d+\. The same command",
    ),
    # The other rank first reports a lost peer; the launcher knows the cause.
    ("SIGKILL", 1): (
        5,
        "failed",
        "rank 1: expected to reach its end, but it was killed by SIGKILL",
    ),
    ("SIGSTOP", 1): (5, "failed", "rank 1 is silent for"),
}


def ended_by(act, output, *more):
    """Runs the main job until `act` ends it; returns its exit code, errors and record."""
    words = [f"output_dir={output}", "max_steps=100000", "num_processes=2", *more]
    command = [sys.executable, "-m", "fullshard", "train", *words]
    metrics = output / "metrics.jsonl"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 100, "a first step")
            act(process)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    record = json.loads((output / "run.json").read_text())
    assert process.returncode == record["exit_code"], err
    return process.returncode, err, record


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), ENDS)
def test_a_run_records_how_it_was_ended(name, rank, tmp_path):
    def end(process):
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
        whom = process if rank is None else ranks[rank]
        whom.send_signal(getattr(signal, name))

    output = tmp_path / "run"
    more = ["launch.timeout=5"] * (name == "SIGSTOP")  # an ended rank is noticed at once
    exit_code, err, record = ended_by(end, output, *more)
    code, status, said = ENDS[name, rank]
    assert (exit_code, record["status"]) == (code, status)
    assert re.search(said, err)
    if rank is not None:
        assert (record["error"]["type"], record["error"]["rank"]) == ("HangError", rank)
    left = {"SIGSTOP": "logs/hang.txt", "SIGINT": "report.html"}.get(name, "run.json")
    assert (output / left).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGQUIT", 75)])
def test_repeated_signals_end_a_run_like_one_signal(name, code, tmp_path):
    def repeat(process):
        while process.poll() is None:
            process.send_signal(getattr(signal, name))
            time.sleep(0.005)

    exit_code, err, record = ended_by(repeat, tmp_path / "run")
    assert (exit_code, record["status"]) == (code, "interrupted")
    assert "Traceback" not in err
    assert re.search(r"(Interrupted|Stopped)\. (No|The last) (saved )?step", err), err


def test_settings_of_the_file_reach_the_script_or_are_named(launch, tmp_path):
    file = tmp_path / "ds.yaml"
    file.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  gradient_accumulation_steps: 3\n  gradient_clipping: 0.1\n  zero_stage: 0\n"
        "dynamo_backend: INDUCTOR\n"
    )
    text = """
import os
print(*(os.environ[f"ACCELERATE_{name}"] for name in
        ("USE_CPU", "MIXED_PRECISION", "GRADIENT_ACCUMULATION_STEPS")))
"""
    out, _ = launch(text, "--config_file", str(file), "--nproc-per-node", "1").communicate()
    assert "true bf16 3\n" in out
    assert "gradient_clipping: no effect on a script" in out
    assert "dynamo_backend: lost: the model runs without torch.compile" in out
    file.write_text("training: {bf16: true, gradient_checkpointing: true}\n")
    out, _ = launch("", "--config_file", str(file), "--dry-run").communicate()
    assert "no effect" not in out  # these set keys of sharding, which scripts receive
