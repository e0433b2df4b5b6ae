"""The only reader of os.environ: how this process was launched, and its environment.

    ours       FULLSHARD_RANK ...  a rank that fullshard started
    torchrun   RANK, WORLD_SIZE .. also accelerate launch and other tools that set torch's names
    mpi        OMPI_COMM_WORLD_RANK, PMI_RANK ...     mpirun; under SLURM it starts its own daemons
    slurm      SLURM_PROCID ...    a task of a job step of several tasks (srun)

The first complete set in this order is used, so that our ranks ignore the variables of a
surrounding job. A contradiction within a set is a ConfigError that names the variable.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import UserDict
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Never

from fullshard.config.values import ConfigProblems, Problem, did_you_mean, show


class Launcher(StrEnum):
    """The launcher that started this process as one of several ranks."""

    FULLSHARD = "fullshard"
    TORCHRUN = "torchrun"
    MPI = "mpirun"
    SLURM = "slurm"


@dataclasses.dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place among the ranks.

    Args:
        launcher: the launcher whose variables were read.
        rank: 0 ... world_size - 1 over all machines.
        world_size: ranks on all machines.
        local_rank: rank among those of this machine; selects the device.
        local_world_size: ranks on this machine.
        master_addr: host of the rendezvous; None if it is not set.
        master_port: port of the rendezvous; None if it is not set.
        launch_dir: folder of the messages between launcher and ranks (our own launcher).
        log_dir: folder of the ranks' logs (our own launcher).
        run_id: equal on every rank and different for every launch; None if unknown.
        attempt: number of restarts before this launch; machines may count differently.
        start: number of this start of all ranks in a store that outlives them; all ranks know it
            after the rendezvous.
        timeout_s: seconds after which a rank counts as stuck; None if it is not set.
        config_file: the configuration file that the launcher was given for its script.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str | None = None
    master_port: int | None = None
    launch_dir: Path | None = None
    log_dir: Path | None = None
    run_id: str | None = None
    attempt: int = 0
    start: int = 0
    timeout_s: float | None = None
    config_file: Path | None = None

    @property
    def first_serves(self) -> bool:
        """Whether rank 0 serves the store of the rendezvous, not the launcher."""
        has_agent = self.launcher is Launcher.TORCHRUN and self.run_id is not None
        return self.launcher is not Launcher.FULLSHARD and not has_agent

    def to_variables(self) -> dict[str, str]:
        """The variables that make a child process this rank, under our names and torch's.

        torch's names are for libraries that read LOCAL_RANK, and for scripts that call
        `init_process_group`, which then uses our launcher's store.
        """
        values = {name: "" if value is None else value for name, value in vars(self).items()}
        del values["launcher"], values["start"]
        # Empty ones: the child does not inherit one from around the launcher.
        ours = {OURS + name.upper().removesuffix("_S"): value for name, value in values.items()}
        theirs = ["rank", "world_size", "local_rank", "local_world_size"]
        variables: dict[str, object] = {}
        if self.master_port is not None:
            theirs += ["master_addr", "master_port"]
            variables = {"TORCHELASTIC_USE_AGENT_STORE": True}  # the launcher hosts the store
        variables |= {name.upper(): getattr(self, name) for name in theirs}
        return {name: str(value) for name, value in {**ours, **variables}.items()}


def rank_log(log_dir: Path, rank: int) -> Path:
    """The log of a rank that our launcher started."""
    return log_dir / f"rank_{rank}.log"


OURS = "FULLSHARD_"
LONGEST_S = 10**9  # torch counts longer time-outs in more nanoseconds than it has bits for


class _Names(NamedTuple):
    """The variables that a launcher sets."""

    launcher: Launcher
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    run_id: str = ""
    attempt: str = ""


_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OURS = _Names(Launcher.FULLSHARD, *(OURS + name for name in (*_TORCH, "RUN_ID", "ATTEMPT")))
_TORCHRUN = _Names(Launcher.TORCHRUN, *_TORCH, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_SLURM = _Names(
    Launcher.SLURM, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"
)
# Open MPI; MPICH and Intel MPI (Hydra).
_OMPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_MPI = (
    _Names(Launcher.MPI, *(f"OMPI_COMM_WORLD_{n}" for n in _OMPI))._replace(
        run_id="PMIX_NAMESPACE"
    ),
    _Names(Launcher.MPI, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MPI_JOBID"),
)

_NOTABLE = (
    *("CUDA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "PYTHONHASHSEED"),
    *(OURS, "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "LD_PRELOAD"),
)

_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")


def read_launch_environment(
    variables: Mapping[str, str] | None = None,
) -> LaunchEnvironment | None:
    """Returns how this process was launched, or None if it is not a rank.

    Args:
        variables: read instead of os.environ, for tests and for the environments of children.

    Raises:
        ConfigError: a set of variables that is incomplete or contradicts itself.
    """
    given = os.environ if variables is None else variables
    reader = given if isinstance(given, _Variables) else _Variables(given)
    if reader.has_any(_OURS.rank, _OURS.world_size):
        return _launched(reader, _OURS, launch_dir=reader.path(OURS + "LAUNCH_DIR"))
    if reader.has_any(_TORCHRUN.rank, _TORCHRUN.world_size):
        return _read_torchrun(reader)
    for names in _MPI:
        # srun sets PMI_RANK, too.
        if reader.has_any(names.rank) and reader.has_any(names.local_rank, "OMPI_COMM_WORLD_RANK"):
            launch = _launched(reader, names)
            return None if launch.world_size == 1 else launch  # a single process, as under srun
    if reader.has_any("SLURM_STEP_ID") and reader.has_any("SLURM_PROCID"):
        return _read_slurm(reader)
    return None


def cache_folder(variables: Mapping[str, str] | None = None) -> Path:
    """The cache folder of this user; `variables` replaces os.environ in tests.

    A user without a name and HOME, as in containers, has one that cannot be made.
    """
    home = (os.environ if variables is None else variables).get("XDG_CACHE_HOME")
    own = os.path.expanduser("~/.cache")  # noqa: PTH111  (Path raises)
    return Path(home or (f"{os.devnull}/" * own.startswith("~") + own), "fullshard")


def notable_variables() -> dict[str, str]:
    """Variables that affect computation and communication, for reports; without host names."""
    private = ("SLURM_", "OMPI_", "PMI", "MASTER_ADDR", OURS)
    return {
        name: "(set)" if value and name.startswith(private) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_NOTABLE) and not name.endswith(("TOKEN", "KEY", "SECRET"))
    }


def unknown_variables() -> list[str]:
    """Variables with our prefix that nothing reads, in words; other ranks than 0 name none."""
    reader, known = _Variables(os.environ), _names_of_ours()
    try:
        launch = read_launch_environment(reader)
    except ConfigProblems:  # which commands that need the launch raise; the rest was not read
        launch, reader.read = None, {*known}
    names = sorted(name for name in os.environ if name.startswith(OURS))
    if launch and launch.rank:
        return []
    return [_without_effect(name, known) for name in names if name not in reader.read]


def _names_of_ours() -> list[str]:
    fields = [field.name for field in dataclasses.fields(LaunchEnvironment)[1:]]
    return [OURS + field.upper().removesuffix("_S") for field in fields]


def _without_effect(name: str, known: list[str]) -> str:
    advice = did_you_mean(name, known) or "It is unknown."
    says = "It is set for ranks that fullshard starts." if name in known else advice
    return f"{name} has no effect. {says}"


def settings_of_accelerate() -> list[str]:
    """Variables by which `accelerate launch` asks its own library to shard, or for a precision."""
    names = ("USE_FSDP", "USE_DEEPSPEED", "MIXED_PRECISION")
    found = {f"ACCELERATE_{name}": os.environ.get(f"ACCELERATE_{name}", "no") for name in names}
    return [
        f"{name}={value}" for name, value in found.items() if value.lower() not in ("no", "false")
    ]


def current_variables() -> dict[str, str]:
    """A copy of the whole environment, for the environment of a child process."""
    return dict(os.environ)


def drop_unusable_widths() -> None:
    """Removes widths of a terminal for which the help would be empty, endless or an error."""
    for name in ("COLUMNS", "TERMINAL_WIDTH"):
        width = os.environ.get(name, "")
        if not width.isdecimal() or len(width) > 4 or int(width) < 20:
            os.environ.pop(name, None)


def add_variables(variables: Mapping[str, str]) -> None:
    """Adds variables to the environment of this process, which was forked with its parent's."""
    os.environ.update(variables)


class _Variables(UserDict[str, str]):
    """Variables with typed readers; an empty variable counts as unset."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.read = set[str]()

    def __getitem__(self, name: str) -> str:
        self.read.add(name)
        return super().__getitem__(name)

    def has_any(self, *names: str) -> bool:
        return any(map(self.get, names))

    def path(self, name: str) -> Path | None:
        return Path(value) if (value := self.get(name)) else None

    def integer(self, name: str, *, at_least: int, below: int = 1 << 31) -> int | None:
        if not (value := self.get(name)):
            return None
        is_short = value.strip().isdecimal() and len(value) < 20
        if not is_short or not at_least <= int(value) < below:
            most = f" and < {below}" if is_short and int(value) >= below else ""
            _refuse(name, f"an integer >= {at_least}{most}", show(value))
        return int(value)

    def seconds(self, name: str) -> float | None:
        if not (value := self.get(name)):
            return None
        with suppress(ValueError):
            if 0 < float(value) < LONGEST_S:
                return float(value)
        _refuse(name, f"a number > 0 and < {LONGEST_S:,}", repr(value))

    def needed(self, name: str, *, at_least: int, because: str) -> int:
        value = self.integer(name, at_least=at_least)
        if value is None:
            _refuse(name, f"an integer >= {at_least}, because {because} is set", "nothing")
        return value


def _read_torchrun(reader: _Variables) -> LaunchEnvironment:
    if reader.has_any(_TORCHRUN.local_rank, _TORCHRUN.local_world_size):
        return _launched(reader, _TORCHRUN)
    address = reader.get("MASTER_ADDR") or ""
    if address not in _LOOPBACK:
        _refuse(
            "LOCAL_RANK",
            f"an integer >= 0, because MASTER_ADDR is {address!r}, which may be another machine",
            "nothing",
            "Set LOCAL_RANK and LOCAL_WORLD_SIZE, or start with torchrun",
        )
    # a rendezvous on this machine means that there is no other
    return _launched(reader, _TORCHRUN, _rank_of(reader, _TORCHRUN.rank, _TORCHRUN.world_size))


def _read_slurm(reader: _Variables) -> LaunchEnvironment | None:
    """Reads a task of a job step; a step with one task (a shell under srun) is no launch."""
    has_step = reader.has_any("SLURM_STEP_NUM_TASKS") or not reader.has_any("SLURM_NTASKS")
    names = _SLURM._replace(world_size="SLURM_STEP_NUM_TASKS") if has_step else _SLURM
    if (world_size := _rank_of(reader, names.rank, names.world_size)[1]) == 1:
        return None
    node = reader.integer("SLURM_NODEID", at_least=0) or 0
    per_node = _expand_counts(
        reader.get("SLURM_STEP_TASKS_PER_NODE") or reader.get("SLURM_TASKS_PER_NODE") or ""
    )
    local_rank = reader.needed(names.local_rank, at_least=0, because=names.rank)
    local = local_rank, per_node[node] if node < len(per_node) else world_size
    nodes = reader.get("SLURM_STEP_NODELIST") or reader.get("SLURM_JOB_NODELIST") or ""
    job, step = reader.get("SLURM_JOB_ID"), reader.get("SLURM_STEP_ID")
    launch = _launched(reader, names, local, run_id=f"{job}.{step}" if job else None)
    return dataclasses.replace(launch, master_addr=launch.master_addr or _first_host(nodes))


def _launched(
    reader: _Variables, names: _Names, local: tuple[int, int] | None = None, **more: Any
) -> LaunchEnvironment:
    """A rank's environment.

    Args:
        reader: reads the variables.
        names: the launcher's variables.
        local: local rank and local world size; None: read by their names.
        **more: further fields, which only some launchers have.
    """
    rank, world_size = _rank_of(reader, names.rank, names.world_size)
    local_rank, local_size = local or _rank_of(reader, names.local_rank, names.local_world_size)
    if local_size > world_size:
        expected = f"an integer <= {world_size}, which is {names.world_size}"
        _refuse(names.local_world_size, expected, str(local_size))
    if local_rank > rank:
        expected = f"an integer <= {rank}, which is the rank"
        _refuse(names.local_rank, expected, str(local_rank))
    prefix = OURS if names is _OURS else ""
    attempt = reader.integer(names.attempt, at_least=0) if names.attempt else None
    found: dict[str, Any] = {
        "master_addr": reader.get(prefix + "MASTER_ADDR") or None,
        "master_port": reader.integer(prefix + "MASTER_PORT", at_least=1, below=65536),
        "log_dir": reader.path(OURS + "LOG_DIR"),
        "timeout_s": reader.seconds(OURS + "TIMEOUT"),
        "config_file": reader.path(OURS + "CONFIG_FILE"),
        "run_id": reader.get(names.run_id) or None,
        "attempt": attempt or 0,
    }
    return LaunchEnvironment(
        names.launcher, rank, world_size, local_rank, local_size, **{**found, **more}
    )


def _rank_of(reader: _Variables, rank_name: str, size_name: str) -> tuple[int, int]:
    """A rank and its world size, which must be set together and agree."""
    rank = reader.needed(rank_name, at_least=0, because=size_name)
    size = reader.needed(size_name, at_least=1, because=rank_name)
    if rank >= size:
        _refuse(rank_name, f"an integer < {size}, because {size_name} is {size}", str(rank))
    return rank, size


def _expand_counts(text: str) -> list[int]:
    """Expands SLURM's tasks per node: `4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part.strip())
        if match is None:
            _refuse("SLURM_TASKS_PER_NODE", "counts like 4(x2),3", repr(text))
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_host(nodes: str) -> str | None:
    """The first host of SLURM's list: gpu07 of `gpu[07-09,12],x1`."""
    match = re.match(r"([^,\[\]]+)(?:\[(\w+))?", nodes)
    return match[1] + (match[2] or "") if match else None


def _refuse(name: str, expected: str, got: str, advice: str = "") -> Never:
    raise ConfigProblems([Problem(name, expected, got, advice, place="environment")])


def hide_accelerators() -> None:
    """Hides all GPUs if there are more local ranks than GPUs. Call before CUDA is used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
