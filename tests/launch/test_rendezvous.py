"""Ranks of other launchers connect too; a process without a launcher has no group."""

import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fullshard.config.environment import LaunchEnvironment, Launcher
from fullshard.config.schema import LaunchConfig
from fullshard.errors import ConfigError, HangError
from fullshard.launch import machine, rendezvous
from fullshard.launch.exit_codes import (
    SAVE_SIGNALS,
    ExitCode,
    RankFailure,
    Stopped,
    handled,
    raise_stopped,
)
from support import forked as subprocess
from support.processes import free_port, wait_until


@pytest.fixture(autouse=True)
def _launched_by_nobody(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("FULLSHARD_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchrun(monkeypatch):
    """`torchrun(rank=1)` sets torchrun's variables for a rank of several on other machines."""

    def set_variables(*, rank=0, size=1, port=29500, address="127.0.0.1", **more):
        place = {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}
        local = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in {"RANK": rank, "WORLD_SIZE": size, **local, **place, **more}.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


@pytest.fixture
def srun(monkeypatch):
    """`srun(tasks)` sets srun's variables for the first of these tasks, all on one machine."""

    def set_variables(tasks, **more):
        ids = {"STEP_ID": 0, "PROCID": 0, "LOCALID": 0}
        ids |= {"STEP_NUM_TASKS": tasks, "STEP_TASKS_PER_NODE": tasks}
        for name, value in ({f"SLURM_{name}": n for name, n in ids.items()} | more).items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def meeting(tmp_path, *variables):
    """Connects ranks with these variables."""
    command = [sys.executable, "-m", "support.launch_job", "meet", str(tmp_path)]
    processes = [subprocess.Popen(command, env={**os.environ, **own}) for own in variables]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert {(tmp_path / f"sum_{rank}").read_text() for rank in range(2)} == {"gloo 1 3.0"}


def test_ranks_of_torchrun_connect(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = ["-m", "support.launch_job", "meet", str(tmp_path)]
    subprocess.run([*command, *job], check=True, timeout=90, capture_output=True)
    for rank in range(2):
        assert (tmp_path / f"sum_{rank}").read_text() == "gloo 1 3.0"


def test_tasks_of_srun_connect_at_the_first_hosts_port(tmp_path):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    tasks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    meeting(tmp_path, *(step | task for task in tasks))


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_ranks_of_one_machine_connect_at_a_free_port(launcher, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if launcher == "srun":
        job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
        names = ["SLURM_PROCID", "SLURM_LOCALID"]
    else:
        job = {"PMIX_NAMESPACE": "prte-7@1"}
        names = ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"]
        job |= dict.fromkeys(["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"], "2")
    meeting(tmp_path, *(job | dict.fromkeys(names, str(rank)) for rank in range(2)))
    assert not list(tmp_path.glob("fullshard-*"))


@pytest.mark.long
@pytest.mark.parametrize("how", ["slow", "fail", "kill", "stop"])
def test_ranks_wait_for_rank_0_to_prepare_and_name_its_error(how, tmp_path, monkeypatch):
    """Rank 0 needs twice the time-out, and serves the store itself, as under srun."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    processes = []
    for rank in range(2):
        task = dict.fromkeys(["SLURM_PROCID", "SLURM_LOCALID"], str(rank))
        process = subprocess.Popen(
            [sys.executable, "-m", "support.launch_job", "prepare", how],
            env={**os.environ, **job, **task},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    try:
        if how == "stop":
            processes[1].wait(timeout=90)
    finally:
        if how == "stop":
            processes[0].kill()
    said = [process.communicate(timeout=90) for process in processes]
    codes = [process.returncode for process in processes]
    assert "rank 0, which prepares: data: 41 % of it" in said[1][1]
    if how == "slow":
        assert codes == [0, 0], said
        assert [out for out, _ in said] == ["made\n", "None\n"]
    elif how == "fail":
        assert codes == [6, 6], said
        assert "data.path: expected text, got none." in said[0][1]
        assert "rank 0 failed while it prepared the run: data.path: expected text" in said[1][1]
    elif how == "kill":
        assert codes == [-9, 5], said
        assert "Rank 0 has ended" in said[1][1]
    else:
        assert codes == [-9, 5], said
        assert "rank 0 is silent for" in said[1][1]
        assert "(last seen in preparation (" in said[1][1]
        assert "rank 0 is silent for" in (tmp_path / "hang.txt").read_text()


def test_tasks_of_srun_without_a_port_name_the_missing_variable(srun):
    srun(2, SLURM_STEP_NODELIST="gpu[07-08]")
    with pytest.raises(
        ConfigError, match=r"MASTER_PORT: expected a free port on gpu07 under slurm"
    ):
        rendezvous.init_process_group()


@pytest.mark.timeout(50)  # torch would try to reach its own store for a minute
def test_rank_0_with_another_machines_address_names_the_variable(srun):
    srun(2, MASTER_ADDR="no-such-host.invalid", MASTER_PORT=free_port())
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: .* got no-such-host.invalid: port"):
        rendezvous.init_process_group()


def test_a_loopback_that_is_down_is_named_at_once():
    """torch would retry the launcher's store for five minutes."""
    apart = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*apart, "true"], timeout=60, capture_output=True).returncode:
        pytest.skip("this machine gives no network of its own")
    program = "from fullshard.launch.rendezvous import LaunchStore; LaunchStore().serve()"
    words = [*apart, sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "Network is unreachable). Bring up the loopback interface" in done.stderr


def test_a_port_that_another_process_uses_is_named(torchrun):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        torchrun(port=port)
        with pytest.raises(ConfigError, match=f"MASTER_PORT: expected a free port, got {port}"):
            rendezvous.init_process_group(5.0)


def test_ranks_without_an_address_name_the_missing_variable(torchrun, monkeypatch):
    torchrun(size=2, LOCAL_WORLD_SIZE=2)
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT: expected the address"):
        rendezvous.init_process_group()


def test_an_address_that_nobody_answers_is_named_within_the_timeout(torchrun):
    with socket.socket() as closed:  # bound but not listening, so that connections are refused
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        torchrun(rank=1, size=2, port=port)
        began = time.monotonic()
        with pytest.raises(HangError, match=f"rank 0's store at 127.0.0.1:{port}, got Connection"):
            rendezvous.init_process_group(timeout_s=1.0)
        assert time.monotonic() - began < 30


@pytest.mark.short(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the socket
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_ends_at_a_signal_at_once(rank, torchrun, capfd):
    """torch would wait in C++, where no signal handler runs, and print a trace."""
    import torch.distributed as dist

    torchrun(rank=rank, size=2, port=free_port())
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    stop = handled(SAVE_SIGNALS, lambda _, number, __: raise_stopped(number))
    with stop, pytest.raises(Stopped, match="got SIGTERM"):
        rendezvous.init_process_group(timeout_s=20.0)
    assert not dist.is_initialized()
    assert time.monotonic() - began < 15
    assert capfd.readouterr().err == ""


def test_an_interface_that_is_not_there_is_named(torchrun):
    torchrun(port=free_port(), GLOO_SOCKET_IFNAME="no-such")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME: .* got 'no-such'\. Unset"):
        rendezvous.init_process_group(5.0)


def test_a_rank_without_other_ranks_says_for_whom_it_waits(torchrun, monkeypatch, caplog):
    """As in a shell with RANK of an older launch; torch's error had a traceback."""
    monkeypatch.setattr(rendezvous, "WAITING_S", 0.2)
    torchrun(size=2, port=free_port())
    with pytest.raises(HangError, match=r"expected 2 ranks, got 1 in 1 s .*\. Start all"):
        rendezvous.init_process_group(1.0)
    assert "rank 0 waits for all of 2 ranks (WORLD_SIZE); if it is alone, unset" in caplog.text
    torchrun(rank=1, size=2, port=(port := free_port()))
    with pytest.raises(HangError, match="expected rank 0's store at"):
        rendezvous.init_process_group(1.0)
    assert f"rank 1 waits for rank 0 at 127.0.0.1:{port}; if it is alone, unset" in caplog.text


@pytest.mark.parametrize(("rank", "error"), [("0", ConfigError), ("1", HangError)])
def test_a_name_that_no_host_can_have_is_named(rank, error, torchrun):
    torchrun(rank=rank, size=2, address="a..b")
    with pytest.raises(error, match=r"MASTER_ADDR.*a\.\.b.*label empty"):
        rendezvous.init_process_group(timeout_s=0.5)


def test_a_restart_reads_no_values_of_earlier_ranks(torchrun, monkeypatch):
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    monkeypatch.setattr(rendezvous.watchdog, "start", lambda *_: None)
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True)  # for all attempts (--standalone)
    found = []
    for attempt in (0, 0):  # torchrun does not count a restart for another machine
        more = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": attempt}
        torchrun(port=agent.port, **more)
        rendezvous.init_process_group(10.0)
        found.append(_get_default_store().check(["ready"]))
        rendezvous.published("ready", lambda: "yes")
        found.append(_get_default_store().check(["ready"]))
        rendezvous.shutdown()
    assert found == [False, True, False, True]


def test_every_start_of_all_ranks_has_its_own_number():
    """torchrun counts a failure only on its machine, and restarts other machines uncounted."""
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True)

    def number(rank, size, timeout_s=20.0):
        store = TCPStore("127.0.0.1", agent.port, is_master=False)
        launch = LaunchEnvironment(Launcher.TORCHRUN, rank, size, 0, 1, attempt=rank)
        return rendezvous.number_of_start(store, launch, timeout_s)

    def start(size):
        with ThreadPoolExecutor(size) as ranks:
            return set(ranks.map(lambda rank: number(rank, size), reversed(range(size))))

    found = [start(2)]
    with pytest.raises(HangError, match=r"expected rank 0's store .*, got no word of rank 0"):
        number(1, 2, 0.2)  # rank 1 of the next start is killed while it waits, then rank 0
    found.append(start(3))
    with pytest.raises(HangError, match="expected 2 ranks, got 1"):
        number(0, 2, 0.2)
    assert [*found, start(2)] == [{1}, {2}, {4}]


def joining(store, machine, num_machines=4, ranks=2):
    """The launcher of a machine."""
    machines = SimpleNamespace(machine_rank=machine, num_machines=num_machines)
    return rendezvous.OtherMachines(store, machines, range(machine * ranks, (machine + 1) * ranks))


@pytest.fixture
def launchers():
    """Launchers of three machines; the first one serves the store."""
    served = rendezvous.LaunchStore()
    served.serve()
    there = rendezvous.LaunchStore(port=served.port, served_here=False)
    found = [joining(served, 0), *(joining(there, machine) for machine in (1, 2))]
    wait_until(lambda: served.store.add(rendezvous.LISTENING, 0) == 3, 20, "all to listen")
    return served, found


@pytest.mark.parametrize("first", [0, 2])
def test_the_first_failure_of_a_machine_is_known_on_all(launchers, first):
    served, machines = launchers
    failure = RankFailure(first, "DataError", "no such file", 6, "", 1.0)
    leaving = threading.Thread(target=machines[first].leave, args=(failure,))
    leaving.start()
    there = rendezvous.LaunchStore(port=served.port, served_here=False)
    late = joining(there, 3)
    wait_until(lambda: all(one.failure for one in (*machines, late)), 20, "all to know it")
    asked = []  # by the next attempt, which must not use this store
    again = (there.host, there.port), lambda: asked.append(1)
    waiting = threading.Thread(target=rendezvous.await_end_of_attempt, args=again)
    waiting.start()
    wait_until(lambda: len(asked) > 1, 20, "the next attempt to wait")
    for one in machines:
        one.leave(RankFailure(1, "RuntimeError", "connection reset", 1, "", 2.0))
    leaving.join()
    assert [one.failure for one in machines] == [failure] * 3
    served.close()
    waiting.join(20)
    assert not waiting.is_alive()


def test_launchers_with_other_numbers_of_ranks_or_one_machine_rank_end(launchers, monkeypatch):
    served, machines = launchers
    there = rendezvous.LaunchStore(port=served.port, served_here=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    twice = joining(there, 1)
    wait_until(lambda: twice.failure, 20, "the second launcher of machine 1 to be refused")
    said = r"node-rank: .* got 1 for process .* host another, which process"
    assert re.search(said, twice.failure.text)
    stray = joining(there, 4, num_machines=5)  # perhaps of the next launch
    wait_until(lambda: stray.failure, 20, "a machine that the launch does not have to be refused")
    assert "and --nnodes 4 and --nproc-per-node 2 on machine" in stray.failure.message
    time.sleep(2 * rendezvous.LISTEN_S)
    assert not any(one.failure for one in machines)
    other = joining(there, 3, ranks=3)
    wait_until(lambda: all(one.failure for one in (*machines, other)), 20, "all to know it")
    for one in (*machines, other):
        assert one.failure.exit_code == ExitCode.CONFIG
        assert "--nnodes 4 and --nproc-per-node 3 on machine 3" in one.failure.message
        assert "and --nnodes 4 and --nproc-per-node 2 on machine" in one.failure.message
        one.leave(one.failure)


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_machine_that_ended_differs_from_one_that_was_killed(launchers, how):
    served, machines = launchers
    if how == "ended":
        machines[0].leave(None)
    served.close()
    for one in machines[1:]:
        if how == "killed":
            wait_until(lambda one=one: one.failure, 20, "the killed launcher to be noticed")
        one.leave(None)
        said = one.failure and one.failure.message
        assert (said is None) == (how == "ended"), said
        assert how == "ended" or "Its launcher was killed, or the network is down" in said


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)` simulates n GPUs, one of them shared for NCCL; returns the devices set."""
    import torch.distributed as dist

    # The error of NCCL, which compares the GPUs of all ranks, however they are numbered.
    said = "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device c1000"
    chosen = []

    def init_process_group(*_, **given):
        assert [given["device_id"]] == chosen
        raise dist.DistBackendError(said)

    def set_gpus(count):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.set_device", chosen.append)
        monkeypatch.setattr(dist, "init_process_group", init_process_group)

    return set_gpus


@pytest.mark.parametrize(("visible", "device"), [(1, "cuda:0"), (4, "cuda:3")])
def test_a_task_computes_on_the_one_gpu_that_it_sees(visible, device, srun, gpus):
    from torch.distributed import TCPStore

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    srun(4, SLURM_PROCID=3, SLURM_LOCALID=3, **place)
    gpus(visible)
    store = TCPStore(*place.values(), is_master=True, wait_for_workers=False)  # as of rank 0
    store.set(rendezvous.ANSWER.format(1), "1")
    with pytest.raises(ConfigError, match=f"for each rank; rank 3 shares {device} of this mach"):
        rendezvous.init_process_group(timeout_s=5.0)
    assert store


def test_ranks_of_one_launcher_see_the_same_gpus(torchrun, gpus):
    torchrun(rank=1, size=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    gpus(1)
    with pytest.raises(ConfigError, match=r"torchrun: expected at most 1 ranks on.*got 2"):
        rendezvous.init_process_group(timeout_s=5.0)


@pytest.mark.parametrize(
    ("shown", "count"),
    [
        *((None, 4), ("", 0), ("-1", 0), ("none", 0), ("2", 1), ("3,1", 2), (" 0 , 2x", 2)),
        *(("0,-1,2", 1), ("1,7,2", 1), ("0,0", 0)),
        *(("GPU-b3", 1), ("GPU-b3,GPU-b0-1", 2), ("GPU-b3,GPU-b3", 0), ("GPU-b0,GPU-c", 1)),
        *(("GPU-b", 0), ("MIG-b0/1/0,MIG-b0/2/0", 1)),
    ],
)
def test_each_gpu_that_cuda_visible_devices_shows_has_a_rank(shown, count, monkeypatch):
    """Four are visible. With MIG parts, CUDA itself shows a process only one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gpus = {"_is_compiled": True, "_raw_device_count_nvml": 4}
    gpus["_raw_device_uuid_nvml"] = [f"GPU-b{at}-1" for at in range(4)]
    for name, known in gpus.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda known=known: known)
    monkeypatch.setattr("torch._C._cuda_getDeviceCount", lambda: 1, raising=False)
    chosen = []

    def choose(device):
        chosen.append(device.index)
        raise InterruptedError

    monkeypatch.setattr("torch.cuda.set_device", choose)
    world_size = machine.configured_topology(LaunchConfig()).world_size
    assert world_size == (count or machine.DEFAULT_PROCESSES)
    for rank in range(count):
        place = LaunchEnvironment(Launcher.FULLSHARD, rank, count, rank, count)
        for name, value in place.to_variables().items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InterruptedError):
            rendezvous.init_process_group()
    assert chosen == list(range(count))


def test_a_process_that_nobody_launched_has_no_group():
    import torch.distributed as dist

    rendezvous.init_process_group()
    assert not dist.is_initialized()
    rendezvous.shutdown()
