"""`fullshard launch`: runs any script on local ranks, with supervision and hang reports."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.arguments import DryRunFlag
from fullshard.cli.outcome import Outcome, launch_outcome
from fullshard.config.regular_files import did_you_mean_path
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from fullshard.config.schema import LaunchConfig
    from fullshard.launch.spawn import LocalLaunch, Machines

app = typer.Typer()

# All words after the script are the script's own.
_OWN_WORDS_FIRST = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def _named(*names: str) -> Any:
    """An option under torchrun's and Accelerate's names, with `-` and with `_`."""
    spelled = (n for name in names for n in (name, f"--{name[2:].replace('-', '_')}"))
    return typer.Option(*dict.fromkeys(spelled))


@app.command(context_settings=_OWN_WORDS_FIRST)
def launch(  # noqa: PLR0913  (one parameter an option)
    script: str,
    arguments: Annotated[list[str] | None, typer.Argument()] = None,
    module: Annotated[bool, typer.Option("--module", "-m")] = False,
    nproc_per_node: Annotated[str, _named("--nproc-per-node")] = "auto",
    num_processes: Annotated[int | None, _named("--num-processes")] = None,
    nnodes: Annotated[str | None, _named("--nnodes", "--num-machines")] = None,
    node_rank: Annotated[int | None, _named("--node-rank", "--machine-rank")] = None,
    master_addr: Annotated[str | None, _named("--master-addr", "--main_process_ip")] = None,
    master_port: Annotated[int | None, _named("--master-port", "--main_process_port")] = None,
    max_restarts: Annotated[int, _named("--max-restarts")] = 0,
    config_file: Annotated[Path | None, _named("--config-file")] = None,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,  # noqa: ARG001
    timeout: float | None = None,
    log_dir: Annotated[Path, _named("--log-dir")] = Path("runs/launch/logs"),
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Run SCRIPT on local ranks; the rendezvous is configured for you.

    One rank's error ends the others and is shown first; a dead or stuck rank is named, and so are
    ranks that disagree, for scripts that call fullshard.shard with the unit they wait in.

    Args:
        script: A Python file, or a module after -m.
        arguments: Arguments of the script.
        module: SCRIPT is a module, as after python -m.
        nproc_per_node: Ranks on this machine; auto, gpu or cpu.
        num_processes: Ranks on all machines together.
        nnodes: Machines; start this command on each. Default: the file's, or 1.
        node_rank: This machine's number, from 0.
        master_addr: Address of machine 0.
        master_port: A free port on machine 0.
        max_restarts: Restart all ranks up to N times.
        config_file: Processes, machines and sharding; other flags replace its values.
        standalone: torchrun's, and always true here.
        timeout: Seconds after which a rank that others wait for is stuck. Default: the file's, or
            600.
        log_dir: Folder for each rank's output.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.launch.spawn import LocalLaunch

    _check_script(script, module=module)
    if timeout is not None and not 0 < timeout < float("inf"):
        raise ConfigError(f"--timeout: expected a number > 0, got {timeout}.")
    file = _launch_section(config_file)
    machines = _machines(
        nnodes or str(file.num_machines),
        file.machine_rank if node_rank is None else node_rank,
        master_addr or file.main_process_ip,
        master_port or file.main_process_port or 0,
    )
    if num_processes is None and nproc_per_node == "auto":
        num_processes = file.world_size
    if num_processes is not None:
        nproc_per_node = _share(num_processes, machines.count, nproc_per_node)
    order = LocalLaunch(
        script,
        tuple(arguments or ()),
        _ranks_here(nproc_per_node),
        log_dir,
        stuck_s=file.timeout if timeout is None else timeout,
        machines=machines,
        config_file=config_file and config_file.absolute(),
    )
    if dry_run:
        ranks = f"ranks {order.ranks[0]} to {order.ranks[-1]} of {order.world_size}"
        print(f"would run {shlex.join([script, *order.args])} as {ranks}, logs in {log_dir}")
        return Outcome({"num_processes": order.num_processes, "log_dir": log_dir})
    return _run(order, max_restarts)


def _run(order: LocalLaunch, max_restarts: int) -> Outcome:
    """Launch, and restart after a failure up to `max_restarts` times."""
    from dataclasses import replace

    from fullshard.launch.spawn import launch_local_ranks, print_failure

    for rank in order.ranks:
        order.log(rank).unlink(missing_ok=True)  # of an earlier launch
    while True:
        result = launch_local_ranks(order)
        if result.failure is None or order.attempt >= max_restarts:
            facts = {"num_processes": order.num_processes, "log_dir": order.log_dir}
            return launch_outcome(order, result, **facts, restarts=order.attempt)
        print_failure(order, result)
        order = replace(order, attempt=order.attempt + 1)
        print(f"restarting: {order.attempt} of {max_restarts}")


def _check_script(script: str, *, module: bool) -> None:
    if module:
        return
    if not script.endswith(".py"):
        cure = f" For a module: -m {script}." if script.replace(".", "").isidentifier() else ""
        raise ConfigError(f"SCRIPT: expected a Python file, got '{script}'.{cure}")
    if not Path(script).is_file():
        near = did_you_mean_path(Path(script))
        raise ConfigError(
            f"SCRIPT: expected a file, got '{script}', which does not exist. {near}".rstrip()
        )


def _machines(count: str, index: int, address: str | None, port: int) -> Machines:
    """The machines of torchrun's flags. Its `--nnodes 1:4` would change the ranks during a run."""
    from fullshard.launch.spawn import Machines

    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"--nnodes: expected an integer >= 1, got '{count}'.")
    if not 0 <= index < int(count):
        raise ConfigError(f"--node-rank: expected 0 to {int(count) - 1}, got {index}.")
    if int(count) == 1:
        return Machines(port=port)
    if address is None or not port:
        raise ConfigError(
            f"--master-addr, --master-port: expected both with --nnodes {count}, got one or "
            "none. Name machine 0 and a free port there, the same on every machine (in a file: "
            "main_process_ip, main_process_port)."
        )
    return Machines(int(count), index, address, port)


def _share(num_processes: int, num_machines: int, per_node: str) -> str:
    """Ranks per machine: Accelerate counts those of all machines, torchrun those of one."""
    share, rest = divmod(num_processes, num_machines)
    if share < 1 or rest:
        raise ConfigError(
            f"--num-processes: expected a multiple of the {num_machines} machines, at least one "
            f"each; got {num_processes}."
        )
    if per_node not in ("auto", str(share)):
        raise ConfigError(
            f"--num-processes: expected what --nproc-per-node {per_node} says of {num_machines} "
            f"machines, got {num_processes}. Give one of the two."
        )
    return str(share)


def _launch_section(config_file: Path | None) -> LaunchConfig:
    """The file's launch section; the whole file is checked before any process starts."""
    from fullshard.config.load import load_config
    from fullshard.config.schema import LaunchConfig

    if config_file is None:
        return LaunchConfig()
    return load_config(config_file, needs_model=False).config.launch


def _ranks_here(text: str) -> int:
    """`4`, or torchrun's words."""
    from fullshard.launch.machine import DEFAULT_PROCESSES, num_visible_accelerators

    match text:
        case "auto":
            return num_visible_accelerators() or DEFAULT_PROCESSES
        case "gpu" if count := num_visible_accelerators():
            return count
        case "gpu":
            raise ConfigError("--nproc-per-node: expected a GPU on this machine, got none.")
        case "cpu":
            import os

            return os.cpu_count() or 1
    if not text.isdecimal():
        raise ConfigError(f"--nproc-per-node: expected a number, auto, gpu or cpu, got '{text}'.")
    return int(text)
