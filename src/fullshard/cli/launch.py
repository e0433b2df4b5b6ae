"""`fullshard launch`: runs any script on local ranks, with supervision and hang reports."""

from __future__ import annotations

import fcntl
import os
import shlex
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.arguments import DryRunFlag, say_lost
from fullshard.cli.outcome import Outcome, launch_outcome
from fullshard.config.regular_files import did_you_mean_path
from fullshard.config.values import ConfigProblems
from fullshard.errors import ConfigError, untrusted

if TYPE_CHECKING:
    from fullshard.config.load import Resolved
    from fullshard.config.schema import LaunchConfig
    from fullshard.launch.spawn import LocalLaunch

_ACCUMULATE = "training.gradient_accumulation_steps"

app = typer.Typer()

# All words after the script belong to the script.
_OWN_WORDS_FIRST = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def _named(*names: str, **more: Any) -> Any:
    """An option under torchrun's and Accelerate's names, with `-` and with `_`."""
    spelled = (n for name in names for n in (name, f"--{name[2:].replace('-', '_')}"))
    return typer.Option(*dict.fromkeys(spelled), **more)


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
    max_restarts: Annotated[int, _named("--max-restarts", min=0)] = 0,
    config_file: Annotated[Path | None, _named("--config-file")] = None,
    standalone: Annotated[bool, typer.Option("--standalone", hidden=True)] = False,  # noqa: ARG001
    timeout: float | None = None,
    log_dir: Annotated[Path, _named("--log-dir")] = Path("runs/launch/logs"),
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Run SCRIPT on local ranks; the rendezvous is configured for you.

    If a rank fails, the others end and its error is shown first. A rank that died or is stuck is
    named. For scripts that call fullshard.shard, so are ranks that disagree, with the unit in which
    they wait.

    Args:
        script: A Python file, or with -m a module.
        arguments: Arguments of the script.
        module: SCRIPT is a module, as for python -m.
        nproc_per_node: Number of ranks on this machine, or auto, gpu (one per GPU) or cpu (one per
            core).
        num_processes: Number of ranks on all machines together. Default: see --nproc-per-node.
        nnodes: Number of machines; run this command on each. Default: 1, or the file's.
        node_rank: Number of this machine, counted from 0. Default: 0, or the file's.
        master_addr: Address of machine 0, needed for several machines. Accelerate's name for it,
            --main_process_ip, also works.
        master_port: A free port on machine 0, needed for several machines; also
            --main_process_port.
        max_restarts: Restart all ranks up to N times after a failure.
        config_file: File with processes, machines and sharding; flags override its values.
        standalone: torchrun's flag; it has no effect, because every launch here is standalone.
        timeout: Seconds without progress after which a rank counts as stuck. Default: 600, or the
            file's.
        log_dir: Folder for the output of each rank.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.launch.machine import num_visible_accelerators
    from fullshard.launch.spawn import LocalLaunch

    _check_script(script, module=module)
    flags = {
        "num_machines": nnodes,
        "machine_rank": node_rank,
        "main_process_ip": master_addr,
        "main_process_port": master_port or None,
        "num_processes": num_processes,
        "nproc_per_node": _ranks_here(nproc_per_node),
        "timeout": timeout,
    }
    resolved = None
    if config_file is not None:
        from fullshard.config.load import load_config

        resolved = load_config(config_file, needs_model=False)
    given = {k: value for k, value in flags.items() if value is not None}
    place = _placed(resolved.config.launch if resolved else None, given)
    _check_address(place)
    world = place.world_size or place.num_machines * (num_visible_accelerators() or 2)
    order = LocalLaunch(
        script,
        tuple(arguments or ()),
        world // place.num_machines,
        log_dir,
        stuck_s=place.timeout,
        machines=place,
        config_file=config_file and config_file.absolute(),
        variables=_for_accelerate(resolved),
    )
    if resolved and not (module and script.split(".")[0] == "fullshard"):  # which says it itself
        say_lost(resolved)
        _say_idle(resolved)
    if dry_run:
        ranks = f"ranks {order.ranks[0]} to {order.ranks[-1]} of {order.world_size}"
        print(f"would run {shlex.join([script, *order.args])} as {ranks}, logs in {log_dir}")
        return Outcome({"num_processes": order.num_processes, "log_dir": log_dir})
    return _run(order, max_restarts)


def _run(order: LocalLaunch, max_restarts: int) -> Outcome:
    """Launch, and restart after a failure up to `max_restarts` times."""
    from fullshard.launch.exit_codes import ExitCode, caught_stop_signals
    from fullshard.launch.rendezvous import await_end_of_attempt
    from fullshard.launch.spawn import launch_local_ranks, print_failure

    place = order.machines.main_process_ip or "", order.machines.main_process_port or 0
    stopped = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)  # also by a signal on another machine
    with ExitStack() as held, caught_stop_signals() as caught:
        order = _with_own_logs(replace(order, caught=caught), held)
        while True:
            result = launch_local_ranks(order)
            ended = result.failure is None or result.exit_code in stopped or caught
            if ended or order.attempt >= max_restarts:
                facts = {"num_processes": order.num_processes, "log_dir": order.log_dir}
                return launch_outcome(order, result, **facts, restarts=order.attempt)
            print_failure(order, result)
            order = replace(order, attempt=order.attempt + 1)
            print(f"restarting: {order.attempt} of {max_restarts}")
            if order.machines.machine_rank > 0:
                await_end_of_attempt(place, lambda: bool(caught))


def _with_own_logs(order: LocalLaunch, held: ExitStack) -> LocalLaunch:
    """Use the first folder of LOGS, LOGS.1, ... to which no other launch writes these ranks' logs.

    The logs are locked. Logs of an earlier launch are emptied.
    """
    for number in count():
        there = order.log_dir.absolute()
        there = there.with_name(f"{there.name}.{number}") if number else order.log_dir
        placed = replace(order, log_dir=there)
        with untrusted(
            f"--log-dir: '{there}'", "a folder to write to", ConfigError, "Use another folder."
        ):
            there.mkdir(parents=True, exist_ok=True)
        with ExitStack() as taken:
            logs = [taken.enter_context(placed.log(rank).open("ab")) for rank in placed.ranks]
            try:
                for log in logs:
                    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # a file system without locks
                pass
            held.push(taken.pop_all())
        if number:
            print(f"another launch writes to {order.log_dir}; these logs are in {placed.log_dir}")
        for log in logs:
            log.truncate(0)
        return placed
    raise AssertionError


def _check_script(script: str, *, module: bool) -> None:
    if module:
        return
    if not script.endswith(".py"):
        cure = f" For a module, use -m {script}." if script.replace(".", "").isidentifier() else ""
        raise ConfigError(f"SCRIPT: expected a Python file, got '{script}'.{cure}")
    if not Path(script).is_file():
        near = did_you_mean_path(Path(script))
        raise ConfigError(
            f"SCRIPT: expected a file, got '{script}', which does not exist. {near}".rstrip()
        )


def _for_accelerate(resolved: Resolved | None) -> dict[str, str]:
    """The variables by which `accelerate launch` passes its file's settings to a script."""
    from fullshard.launch.machine import num_visible_accelerators

    variables = {} if num_visible_accelerators() else {"ACCELERATE_USE_CPU": "true"}
    if resolved is not None:
        config = resolved.config
        dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(config.sharding.param_dtype or "", "no")
        variables["ACCELERATE_MIXED_PRECISION"] = dtype
        if resolved.origins[_ACCUMULATE].written:
            steps = str(config.training.gradient_accumulation_steps)
            variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = steps
    return variables


def _say_idle(resolved: Resolved) -> None:
    """Prints the keys of the file that only the commands of fullshard read."""
    from fullshard.config.training import MOVED  # they set keys of sharding, which scripts receive

    effective = {_ACCUMULATE, *(f"training.{name}" for name in MOVED)}
    keys = (key for key in resolved.origins if key.startswith("training.") and key not in effective)
    if idle := [origin for key in keys if (origin := resolved.origins[key]).written]:
        print(
            f"--config_file {idle[0].file}: {', '.join(o.written for o in idle)}: no effect on a "
            "script, which sets these itself; `fullshard train` reads them."
        )


def _placed(file: LaunchConfig | None, flags: dict[str, object]) -> LaunchConfig:
    """The launch section of the file, overridden by the given flags.

    The whole file is checked before any process starts. torchrun's `--nnodes 1:4`, which would
    change the number of ranks during a run, is refused.
    """
    from fullshard.config.schema import LaunchConfig

    kept = {}
    if file is not None:
        kept = {name: getattr(file, name) for name in file.model_fields_set}
    if flags.keys() & {"num_processes", "nproc_per_node"}:
        kept = kept | {"num_processes": None, "nproc_per_node": None}
    try:
        return LaunchConfig(**{**kept, **flags})
    except ConfigProblems as error:
        named = (replace(one, key=_flag_of(one.key)) for one in error.problems)
        raise ConfigProblems(named) from None


def _flag_of(key: str) -> str:
    """The flag of a key: torchrun's name, and Accelerate's if it differs."""
    torchs = {"num_machines": "--nnodes", "machine_rank": "--node-rank"}
    torchs |= {"main_process_ip": "--master-addr", "main_process_port": "--master-port"}
    own = f"--{key.replace('_', '-')}"
    return f"{torchs[key]} ({own})" if key in torchs else own


def _check_address(place: LaunchConfig) -> None:
    if place.num_machines > 1 and None in (place.main_process_ip, place.main_process_port):
        raise ConfigError(
            f"--master-addr, --master-port: expected both with --nnodes {place.num_machines}, got "
            "one or none. Give the address of machine 0 and a free port on it, the same on every "
            "machine (in a file: main_process_ip, main_process_port)."
        )
    if place.num_machines == 1 and (place.main_process_ip or place.main_process_port):
        print("--master-addr, --master-port: no effect on one machine, whose ranks use a free port")


def _ranks_here(text: str) -> int | None:
    """The number of ranks on this machine; None for auto."""
    from fullshard.launch.machine import num_visible_accelerators

    match text:
        case "auto":
            return None
        case "gpu" if count := num_visible_accelerators():
            return count
        case "gpu":
            raise ConfigError("--nproc-per-node: expected a GPU on this machine, got none.")
        case "cpu":
            return os.cpu_count() or 1
    if not text.isdecimal():
        raise ConfigError(f"--nproc-per-node: expected a number, auto, gpu or cpu, got '{text}'.")
    return int(text)
