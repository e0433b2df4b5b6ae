"""The one reader of os.environ: how this process was launched, and what surrounds it.

    ours       FULLSHARD_RANK ...  a rank that fullshard started itself
    torchrun   RANK, WORLD_SIZE .. also accelerate launch and whatever else sets torch's names
    mpi        OMPI_COMM_WORLD_RANK, PMI_RANK ...     mpirun; under SLURM it starts its own daemons
    slurm      SLURM_PROCID ...    a task of a job step of several tasks (srun)

The first complete set wins, in this order: a rank of ours never mistakes the variables of the job
around it for its own. A set that contradicts itself is a ConfigError that names the variable.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Never

from fullshard.config.problems import ConfigProblems, Problem, show


class Launcher(StrEnum):
    """Who started this process as one of several ranks."""

    FULLSHARD = "fullshard"
    TORCHRUN = "torchrun"
    MPI = "mpirun"
    SLURM = "slurm"


@dataclasses.dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place among the ranks.

    Args:
        launcher: whose variables said so.
        rank: 0 ... world_size - 1 over all machines.
        world_size: ranks of all machines.
        local_rank: rank among those of this machine; picks the device.
        local_world_size: ranks on this machine.
        master_addr: host of the rendezvous; None where nobody said.
        master_port: its port; None where nobody chose one.
        launch_dir: through which launcher and ranks talk (our own launcher).
        run_dir: the run's folder (our own launcher).
        run_id: equal on every rank and different for every launch; None unknown.
        attempt: how often the launch was started again before.
        timeout_s: after which a rank counts as stuck; None: nobody said.
        config_file: that the launcher was given for its script; None: none.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str | None = None
    master_port: int | None = None
    launch_dir: Path | None = None
    run_dir: Path | None = None
    run_id: str | None = None
    attempt: int = 0
    timeout_s: float | None = None
    config_file: Path | None = None

    def to_variables(self) -> dict[str, str]:
        """The environment that makes a child this rank (our own launcher's names and torch's).

        Torch's names are set too, so that libraries that read LOCAL_RANK find it, and a script's
        own `init_process_group` meets at our launcher's store.
        """
        sizes = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
        }
        places = {
            "LAUNCH_DIR": self.launch_dir,
            "TIMEOUT": self.timeout_s,
            "CONFIG_FILE": self.config_file,
            "ATTEMPT": self.attempt,
            "RUN_DIR": self.run_dir,
            "RUN_ID": self.run_id,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        ours = {**sizes, **{name: p for name, p in places.items() if p is not None}}
        variables = {OURS + name: str(value) for name, value in ours.items()}
        theirs: dict[str, object] = dict(sizes)
        if self.master_port is not None:
            theirs |= {"MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port}
            theirs |= {"TORCHELASTIC_USE_AGENT_STORE": True}  # the launcher serves, no rank does
        return variables | {name: str(value) for name, value in theirs.items()}


OURS = "FULLSHARD_"

# Rank, size, local rank, local size, what names the job: Open MPI; MPICH and Intel MPI (Hydra).
_MPI = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPI_JOBID"),
)

_NOTABLE = (
    *("CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "PYTHONHASHSEED"),
    *(OURS, "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "LD_PRELOAD"),
)

_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")


def read_launch_environment(
    variables: Mapping[str, str] | None = None,
) -> LaunchEnvironment | None:
    """How this process was launched, or None where it is no rank of anything.

    Args:
        variables: read instead of os.environ, for tests and for children's environments.

    Raises:
        ConfigError: a set of variables that is incomplete or contradicts itself.
    """
    reader = _Variables(os.environ if variables is None else variables)
    if reader.has_any(OURS + "RANK", OURS + "WORLD_SIZE"):
        return _read_ours(reader)
    if reader.has_any("RANK", "WORLD_SIZE"):
        return _read_torchrun(reader)
    for names in _MPI:
        if reader.has_any(names[0]) and reader.has_any(names[2]):
            return _read_mpi(reader, names)
    if reader.has_any("SLURM_STEP_ID") and reader.has_any("SLURM_PROCID"):
        return _read_slurm(reader)
    return None


def cache_folder(variables: Mapping[str, str] | None = None) -> Path:
    """Where caches of this user belong; `variables` instead of os.environ, for tests."""
    home = _Variables(os.environ if variables is None else variables).text("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "fullshard"


def tokenize_on_one_thread() -> None:
    """Tells the tokenizers library, where several processes share the cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def notable_variables() -> dict[str, str]:
    """What changes how ranks compute and talk, for reports; nothing that tells of hosts."""
    private = ("SLURM_", "OMPI_", "PMI", "MASTER_ADDR", OURS)
    return {
        name: "(set)" if name.startswith(private) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_NOTABLE) and not name.endswith(("TOKEN", "KEY", "SECRET"))
    }


def current_variables() -> dict[str, str]:
    """A copy of the whole environment, for the environment of a child process."""
    return dict(os.environ)


class _Variables:
    """Typed reading of single variables; an empty variable counts as unset, except as text."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def has_any(self, *names: str) -> bool:
        return any(self._variables.get(name) for name in names)

    def text(self, name: str) -> str | None:
        return self._variables.get(name)

    def path(self, name: str) -> Path | None:
        value = self._variables.get(name)
        return Path(value) if value else None

    def integer(self, name: str, *, at_least: int, below: int = 1 << 31) -> int | None:
        value = self._variables.get(name)
        if not value:
            return None
        is_short = value.strip().isdecimal() and len(value) < 20
        if not is_short or not at_least <= int(value) < below:
            most = f" and < {below}" if is_short and int(value) >= below else ""
            _refuse(name, f"an integer >= {at_least}{most}", show(value))
        return int(value)

    def number(self, name: str) -> float | None:
        value = self._variables.get(name)
        if not value:
            return None
        try:
            return float(value)
        except ValueError:
            _refuse(name, "a number", repr(value))

    def needed(self, name: str, *, at_least: int, because: str) -> int:
        value = self.integer(name, at_least=at_least)
        if value is None:
            _refuse(name, f"an integer >= {at_least}, because {because} is set", "nothing")
        return value


def _read_ours(reader: _Variables) -> LaunchEnvironment:
    return _launched(
        reader,
        Launcher.FULLSHARD,
        _rank_of(reader, OURS + "RANK", OURS + "WORLD_SIZE"),
        _rank_of(reader, OURS + "LOCAL_RANK", OURS + "LOCAL_WORLD_SIZE"),
        prefix=OURS,
        launch_dir=reader.path(OURS + "LAUNCH_DIR"),
        run_id=reader.text(OURS + "RUN_ID"),
        attempt=reader.integer(OURS + "ATTEMPT", at_least=0) or 0,
    )


def _read_torchrun(reader: _Variables) -> LaunchEnvironment:
    world = _rank_of(reader, "RANK", "WORLD_SIZE")
    address = reader.text("MASTER_ADDR") or ""
    if reader.has_any("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        local = _rank_of(reader, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif address in _LOOPBACK:
        local = world  # a rendezvous on this machine: there is no other
    else:
        _refuse(
            "LOCAL_RANK",
            f"an integer >= 0, because MASTER_ADDR is {address!r}, which may be another machine",
            "nothing",
            "Set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with torchrun",
        )
    return _launched(
        reader,
        Launcher.TORCHRUN,
        world,
        local,
        run_id=reader.text("TORCHELASTIC_RUN_ID"),
        attempt=reader.integer("TORCHELASTIC_RESTART_COUNT", at_least=0) or 0,
    )


def _read_mpi(reader: _Variables, names: tuple[str, ...]) -> LaunchEnvironment | None:
    """A process of mpirun. One alone launches nothing, as under srun."""
    world = _rank_of(reader, *names[:2])
    local = _rank_of(reader, *names[2:4])
    if world[1] == 1:
        return None
    prefix = names[2].removesuffix("LOCAL_RANK").removesuffix("LOCALRANKID")
    run_id = reader.text(names[4])
    return _launched(reader, Launcher.MPI, world, local, prefix=prefix, run_id=run_id)


def _read_slurm(reader: _Variables) -> LaunchEnvironment | None:
    """A task of a job step. A step of one task (a shell under srun) launches nothing."""
    sizes = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    size = next((name for name in sizes if reader.has_any(name)), sizes[0])
    rank, world_size = _rank_of(reader, "SLURM_PROCID", size)
    if world_size == 1:
        return None
    node = reader.integer("SLURM_NODEID", at_least=0) or 0
    per_node = _expand_counts(
        reader.text("SLURM_STEP_TASKS_PER_NODE") or reader.text("SLURM_TASKS_PER_NODE") or ""
    )
    local_rank = reader.needed("SLURM_LOCALID", at_least=0, because="SLURM_PROCID")
    local = local_rank, per_node[node] if node < len(per_node) else world_size
    nodes = reader.text("SLURM_STEP_NODELIST") or reader.text("SLURM_JOB_NODELIST") or ""
    job, step = reader.text("SLURM_JOB_ID"), reader.text("SLURM_STEP_ID")
    launch = _launched(
        reader,
        Launcher.SLURM,
        (rank, world_size),
        local,
        prefix="SLURM_",
        run_id=f"{job}.{step}" if job else None,
    )
    first = launch.master_addr or _first_host(nodes)
    return dataclasses.replace(launch, master_addr=first)


def _launched(
    reader: _Variables,
    launcher: Launcher,
    world: tuple[int, int],
    local: tuple[int, int],
    *,
    prefix: str = "",
    **more: Any,
) -> LaunchEnvironment:
    """A rank's environment, with what is read alike for all launchers.

    Args:
        reader: The variables.
        launcher: Who set them.
        world: Rank and world size.
        local: The same on this machine.
        prefix: What all names of the launcher begin with.
        **more: What only some launchers say.
    """
    meets = OURS if launcher is Launcher.FULLSHARD else ""
    launch = LaunchEnvironment(
        launcher,
        *world,
        *local,
        master_addr=reader.text(meets + "MASTER_ADDR") or None,
        master_port=reader.integer(meets + "MASTER_PORT", at_least=1, below=65536),
        run_dir=reader.path(OURS + "RUN_DIR"),
        timeout_s=reader.number(OURS + "TIMEOUT"),
        config_file=reader.path(OURS + "CONFIG_FILE"),
        **more,
    )
    return _check_local(launch, prefix)


def _rank_of(reader: _Variables, rank_name: str, size_name: str) -> tuple[int, int]:
    """A rank and its world size, which must be given together and agree."""
    rank = reader.needed(rank_name, at_least=0, because=size_name)
    size = reader.needed(size_name, at_least=1, because=rank_name)
    if rank >= size:
        _refuse(rank_name, f"an integer < {size}, because {size_name} is {size}", str(rank))
    return rank, size


def _check_local(launch: LaunchEnvironment, prefix: str) -> LaunchEnvironment:
    """A machine cannot hold more ranks than there are, nor a later rank than the rank itself."""
    if launch.local_world_size > launch.world_size:
        _refuse(
            prefix + "LOCAL_WORLD_SIZE",
            f"an integer <= {launch.world_size}, which is {prefix}WORLD_SIZE",
            str(launch.local_world_size),
        )
    if launch.local_rank > launch.rank:
        name = "SLURM_LOCALID" if launch.launcher is Launcher.SLURM else prefix + "LOCAL_RANK"
        _refuse(name, f"an integer <= {launch.rank}, which is the rank", str(launch.local_rank))
    return launch


def _expand_counts(text: str) -> list[int]:
    """`4(x2),3` as 4, 4, 3: tasks of every node, as SLURM writes them."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part.strip())
        if match is None:
            _refuse("SLURM_TASKS_PER_NODE", "counts like 4(x2),3", repr(text))
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str | None:
    """`gpu[07-09,12],x1` as gpu07: the first host of SLURM's list."""
    match = re.match(r"([^,\[\]]+)(?:\[(\w+))?", nodes)
    return match[1] + (match[2] or "") if match else None


def _refuse(name: str, expected: str, got: str, advice: str = "") -> Never:
    raise ConfigProblems([Problem(name, expected, got, advice, place="environment")])


def hide_accelerators() -> None:
    """Make this process see no GPU: for more local ranks than there are. Before CUDA is used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
