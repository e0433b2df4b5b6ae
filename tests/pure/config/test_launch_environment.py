"""Reads from each launcher's variables how a process was launched."""

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.environment import (
    LaunchEnvironment,
    Launcher,
    cache_folder,
    current_variables,
    read_launch_environment,
)
from fullshard.errors import ConfigError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def test_without_variables_a_process_is_no_rank():
    assert read_launch_environment({}) is None
    assert read_launch_environment({"LOCAL_RANK": "0", "RANK": ""}) is None


def test_variables_of_torchrun_are_read():
    assert read_launch_environment(TORCHRUN) == LaunchEnvironment(
        launcher=Launcher.TORCHRUN,
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="node0",
        master_port=29500,
        run_id="job",
    )


def test_a_task_of_srun_is_a_rank():
    assert read_launch_environment(SRUN) == LaunchEnvironment(
        launcher=Launcher.SLURM,
        rank=5,
        world_size=7,
        local_rank=1,
        local_world_size=3,
        master_addr="gpu07",
        run_id="17.0",
    )


@pytest.mark.parametrize(
    "variables",
    [
        without(SRUN, "SLURM_STEP_ID"),  # the batch script itself, outside srun
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # a shell under srun
    ],
)
def test_a_single_process_of_slurm_starts_its_own_ranks(variables):
    assert read_launch_environment(variables) is None


OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-9@1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("variables", "run_id"), [(OPEN_MPI, "prterun-9@1"), (HYDRA, None), (SRUN | OPEN_MPI, None)]
)
def test_a_process_of_mpirun_is_a_rank_also_where_slurm_started_its_daemons(variables, run_id):
    found = read_launch_environment(variables)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size) == (Launcher.MPI, 5, 8)
    assert (found.local_rank, found.local_world_size) == (1, 4)
    assert run_id in (None, found.run_id)


def test_a_lone_process_of_mpirun_starts_its_own_ranks():
    lone = dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), "0")
    lone |= dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "1")
    assert read_launch_environment(lone) is None


def test_torchs_names_take_precedence_over_those_of_mpirun():
    """accelerate launch and wrappers of mpirun add torch's names."""
    found = read_launch_environment({**OPEN_MPI, **TORCHRUN})
    assert found is not None
    assert found.launcher is Launcher.TORCHRUN


def test_our_own_variables_take_precedence():
    ours = LaunchEnvironment(Launcher.FULLSHARD, 1, 2, 1, 2, launch_dir=Path("/s"), run_id="x")
    around = {"FULLSHARD_CONFIG_FILE": "a.yaml", "FULLSHARD_TIMEOUT": "1"}
    found = read_launch_environment({**SRUN, **TORCHRUN, **around, **ours.to_variables()})
    assert found == ours


sizes = st.integers(1, 64).flatmap(
    lambda local: st.tuples(
        st.integers(local, 512), st.just(local), st.integers(0, local - 1), st.integers(0, 511)
    )
)


@given(sizes, st.none() | st.text("abc/._ ", min_size=1))
def test_a_child_reads_the_variables_written_for_it(size, run_id):
    world_size, local_world_size, local_rank, above = size
    launch = LaunchEnvironment(
        launcher=Launcher.FULLSHARD,
        rank=min(world_size - 1, local_rank + above),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        launch_dir=Path("/tmp/launch"),
        log_dir=Path("runs/a b"),
        run_id=run_id,
    )
    variables = launch.to_variables()
    assert read_launch_environment(variables) == launch
    assert variables["LOCAL_RANK"] == str(local_rank)  # other libraries read torch's names


def test_a_rendezvous_on_this_machine_has_one_machine():
    local = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = read_launch_environment(local)
    assert (found.local_rank, found.local_world_size) == (1, 2)


@pytest.mark.parametrize(
    "variables",
    [
        without(TORCHRUN, "WORLD_SIZE"),
        without(TORCHRUN, "RANK"),
        {**TORCHRUN, "RANK": "4"},
        {**TORCHRUN, "RANK": "x"},
        {**TORCHRUN, "RANK": "-1"},
        {**TORCHRUN, "WORLD_SIZE": "0"},
        {**TORCHRUN, "MASTER_PORT": "http"},
        {**TORCHRUN, "MASTER_PORT": "99999"},
        {**TORCHRUN, "RANK": "9" * 20},
        without(TORCHRUN, "LOCAL_WORLD_SIZE"),
        {**TORCHRUN, "LOCAL_RANK": "2"},
        {**TORCHRUN, "LOCAL_WORLD_SIZE": "5"},
        {**TORCHRUN, "RANK": "0"},
        without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        {"FULLSHARD_RANK": "0"},
        {**TORCHRUN, "FULLSHARD_TIMEOUT": "nan"},
        {**TORCHRUN, "FULLSHARD_TIMEOUT": "-1"},
        without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        without(SRUN, "SLURM_LOCALID"),
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "four"},
    ],
)
def test_a_set_that_contradicts_itself_names_the_variable(variables, snapshot):
    with pytest.raises(ConfigError) as caught:
        read_launch_environment(variables)
    words = " ".join(f"{name}={value}" for name, value in variables.items())
    assert f"{words}\n--> {caught.value}" == snapshot


@pytest.mark.parametrize(
    ("per_node", "node", "local"),
    [("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("2", "0", 2), ("", "0", 7)],
)
def test_tasks_of_a_node_are_counted_as_slurm_writes_them(per_node, node, local):
    variables = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node}
    assert read_launch_environment(variables).local_world_size == local


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[07-09,12],x1", "gpu07"), ("a,b", "a"), ("one", "one"), ("n[3]", "n3"), ("", None)],
)
def test_the_first_host_is_that_of_the_list(nodes, host):
    variables = {**SRUN, "SLURM_STEP_NODELIST": nodes}
    assert read_launch_environment(variables).master_addr == host


def test_a_launch_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_launch_environment(TORCHRUN).rank = 0


def test_the_process_reads_its_own_environment(monkeypatch):
    for name in current_variables():
        if name.startswith(("FULLSHARD_", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_launch_environment().rank == 3
    assert current_variables()["RANK"] == "3"


def test_caches_are_in_the_users_cache_folder(monkeypatch):
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/fullshard")
    assert cache_folder({}) == Path.home() / ".cache" / "fullshard"
    monkeypatch.delenv("HOME")  # a container's user has no name
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    with pytest.raises(NotADirectoryError):
        cache_folder({}).mkdir(parents=True)
