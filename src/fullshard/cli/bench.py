"""`fullshard bench`: measures fullshard and the peers that are installed."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.arguments import DryRunFlag
from fullshard.cli.outcome import Outcome, check_out
from fullshard.errors import ConfigError, VerifyError, WillNotFitError, untrusted

if TYPE_CHECKING:
    from fullshard.bench.measurement import Page
    from fullshard.bench.step import Case, Peer

WaitFlag = Annotated[
    bool, typer.Option("--wait", help="Wait up to ten minutes until the machine is idle.")
]
OutFlag = Annotated[
    Path | None, typer.Option(help="Folder for the results, as JSON and page.", file_okay=False)
]
TimeLimit = Annotated[float, typer.Option(min=1, max=1e9)]

app = typer.Typer(no_args_is_help=True, help="Compare fullshard with the peers that are installed.")


@app.command()
def step(  # noqa: PLR0913  (one parameter an option)
    case: list[str] | None = None,
    engine: list[str] | None = None,
    rounds: Annotated[int, typer.Option(min=3)] = 11,
    memory: bool = True,
    wait: WaitFlag = False,
    timeout: TimeLimit = 1800.0,
    out: OutFlag = None,
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Time a training step of fullshard, FSDP2, FSDP1 and DDP, in turn, in one process group.

    Args:
        case: Case to run: 29M, 109M, 29M-4, 109M-bf16, moe, lora or tiny. Repeat for several.
            Default: all but tiny.
        engine: Engine to run. Repeat for several. Default: all.
        rounds: Number of timed steps per engine.
        memory: Also run each engine alone to measure its memory.
        wait: see `WaitFlag`.
        timeout: Time limit for one group of ranks, in seconds.
        out: see `OutFlag`.
        dry_run: see `DryRunFlag`.
    """
    from fullshard.bench import step as bench

    peers, absent = bench.installed_peers(tuple(engine or bench.PEERS))
    chosen = [bench.find_case(name) for name in case or bench.DEFAULT_CASES]
    options = bench.StepOptions(rounds, memory, wait, timeout)
    expected_s = bench.expected_s(chosen, peers, options)
    announce("bench step", expected_s, out)
    if dry_run:
        return _show_dry_run(chosen, peers, absent)
    results = [bench.run_case(one, peers, options, say) for one in chosen]
    found = show(bench.page_of(results, absent, command_line("step")), out)
    errors = [error for one in results for error in bench.loss_errors(one)]
    for error in errors:
        say(f"VerifyError: {error}")
    return Outcome(found.result, exit_code=VerifyError.exit_code if errors else 0)


@app.command()
def comm(  # noqa: PLR0913  (one parameter an option)
    transport: list[str] | None = None,
    mib: Annotated[list[int] | None, typer.Option(min=1)] = None,
    ranks: Annotated[list[int] | None, typer.Option(min=2)] = None,
    rounds: Annotated[int, typer.Option(min=3)] = 15,
    timeout: TimeLimit = 900.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
) -> Outcome:
    """Time the fetch and the reduction of a flat buffer over each transport, and a memory copy.

    Args:
        transport: c10d, direct or shared. Repeat for several. Default: all.
        mib: Size of the flat buffer in MiB. Repeat for several. Default: 1, 16, 64.
        ranks: Number of local ranks. Repeat for several. Default: 2, 4.
        rounds: Number of timed repetitions per measurement.
        timeout: Time limit for one group of ranks, in seconds.
        wait: see `WaitFlag`.
        out: see `OutFlag`.
    """
    from fullshard.bench import comm as bench

    sizes = tuple(bench.MIB * size for size in mib or bench.DEFAULT_MIB)
    job = bench.CommJob(tuple(transport or bench.TRANSPORTS), sizes, rounds)
    worlds, command = ranks or bench.DEFAULT_RANKS, command_line("comm")
    bench.check(job, worlds)
    announce("bench comm", len(worlds) * sum(sizes) * rounds / 8e7, out)
    page = bench.run(job, worlds, command=command, timeout_s=timeout, wait=wait, say=say)
    return show(page, out)


@app.command()
def io(  # noqa: PLR0913  (one parameter an option)
    place: Annotated[Path, typer.Option(file_okay=False)] = Path("runs"),
    mib: Annotated[int, typer.Option(min=24)] = 768,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    rounds: Annotated[int, typer.Option(min=3)] = 7,
    timeout: TimeLimit = 1200.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
) -> Outcome:
    """Time saving and loading, raw disk access, and torch's distributed checkpoints.

    Args:
        place: Folder whose disk is measured.
        mib: Size of the checkpoint in MiB.
        ranks: Number of local ranks.
        rounds: Number of timed repetitions per measurement.
        timeout: Time limit for the whole command, in seconds.
        wait: see `WaitFlag`.
        out: see `OutFlag`.
    """
    import shutil
    import tempfile

    from fullshard.bench import io as bench

    announce("bench io", mib * rounds / 80, out)
    with untrusted("--place", "a folder to write to", ConfigError, "Choose another folder."):
        place.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="bench-io-", dir=place)
    with made as folder:
        if mib > (free := shutil.disk_usage(folder).free >> 20):
            text = f"--mib: expected at most {free}, the free MiB at '{place}', got {mib}."
            raise WillNotFitError(f"{text} Lower --mib, or choose another --place.")
        job, command = bench.IoJob(bench.MIB * mib, rounds, folder), command_line("io")
        page = bench.run(job, ranks, command=command, timeout_s=timeout, wait=wait, say=say)
    return show(page, out)


@app.command()
def calibrate(
    ranks: Annotated[list[int] | None, typer.Option(min=1)] = None,
    tiny: Annotated[bool, typer.Option("--tiny")] = False,
    timeout: TimeLimit = 3600.0,
    wait: WaitFlag = False,
    out: Annotated[Path | None, typer.Option(dir_okay=False)] = None,
) -> Outcome:
    """Measure this machine, so that `fullshard plan` can forecast the step time.

    Args:
        ranks: Number of local ranks that compute at the same time. Repeat for several. Default: 1,
            2, 4.
        tiny: Measure a few small sizes only, to test the command.
        timeout: Time limit for one group of ranks, in seconds.
        wait: see `WaitFlag`.
        out: File to write. Default: the file that `fullshard plan` reads.
    """
    from fullshard.bench import calibrate as bench
    from fullshard.config.environment import cache_folder
    from fullshard.outlook.devices import CALIBRATION_FILE

    worlds, path = ranks or bench.DEFAULT_RANKS, out or cache_folder() / CALIBRATION_FILE
    announce("bench calibrate", (30 if tiny else 180) * len(worlds), path.parent)
    found = bench.run(worlds, is_tiny=tiny, wait=wait, timeout_s=timeout, say=say)
    path.write_text(bench.file_text(*found, command_line("calibrate")), encoding="utf-8")
    print(f"{bench.summary(*found)}\nCalibration: {path}")
    return Outcome({**bench.to_dict(*found), "path": str(path)})


StepsFlag = Annotated[int, typer.Option(min=3, help="Number of optimizer steps per run.")]


@app.command()
def strategies(max_steps: StepsFlag = 20, out: OutFlag = None) -> Outcome:
    """Train the built-in job under every strategy, and compare memory and speed."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
    shardings: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in names}
    return _compare("strategies", shardings, max_steps, out)


@app.command()
def prefetch(max_steps: StepsFlag = 20, out: OutFlag = None) -> Outcome:
    """Train the built-in job without prefetch, with it in one direction and in both, and compare.

    The runs use the collectives of the process group, because ranks that share weights fetch
    nothing.
    """
    depths = {"none": (0, 0), "forward": (1, 0), "backward": (0, 1), "both": (1, 1)}
    shardings: dict[str, dict[str, Any]] = {
        name: {"transport": "c10d", "forward_prefetch": ahead, "backward_prefetch": behind}
        for name, (ahead, behind) in depths.items()
    }
    return _compare("prefetch", shardings, max_steps, out)


def _compare(
    what: str, shardings: dict[str, dict[str, Any]], max_steps: int, out: Path | None
) -> Outcome:
    from fullshard.train import create_fsdp_config, print_comparison_table, train

    results: dict[str, dict[str, Any]] = {}
    announce(f"bench {what}", len(shardings) * 3 * max_steps, out)
    for name, sharding in shardings.items():
        training = {"output_dir": f"runs/compare/{name.lower()}"}
        config = {**create_fsdp_config(**sharding), "training": training}
        results[name] = train(config, max_steps)
    print_comparison_table(results)
    rows = [
        {
            "name": name,
            "strategy": found["strategy"],
            "step_time_s": found["step_time_s"],
            "tokens_per_s": found["tokens_per_sec"],
            "memory_peak_bytes": round(found["memory_gb"] * 1e9),
        }
        for name, found in results.items()
    ]
    result: dict[str, Any] = {"rows": rows, "absent": [], "command": command_line(what)}
    if out is not None:
        (out / f"{what}.json").write_text(json.dumps(result, indent=1) + "\n")
    return Outcome(result)


def _show_dry_run(chosen: list[Case], peers: list[Peer], absent: list[str]) -> Outcome:
    print(*(shape.describe() for shape in chosen), sep="\n")
    print(*(f"  {peer.name}: {peer.about}" for peer in peers), sep="\n")
    for name in absent:
        print(f"  {name}: not installed")
    return Outcome(
        {
            "cases": [shape.name for shape in chosen],
            "engines": [peer.name for peer in peers],
            "absent": absent,
        }
    )


def announce(what: str, guess_s: float, out: Path | None) -> None:
    """Check --out, and print an estimate of how long a command takes.

    Args:
        what: Command.
        guess_s: Rough estimate in seconds, in proportion to the work.
        out: Value of --out.
    """
    from fullshard.observe.chart import duration

    check_out(out, is_folder=True)
    say(f"{what}: about {duration(guess_s)} (an estimate).")


def say(text: str) -> None:
    """Print to standard error, with or without --json."""
    print(text, file=sys.stderr, flush=True)


def show(page: Page, out: Path | None) -> Outcome:
    """Print a page, and write it if --out is given."""
    if out is not None:
        page.write(out)
    print(page.to_markdown())
    return Outcome(page.to_dict())


def command_line(name: str) -> str:
    """The command line as it was typed, for a page."""
    words = sys.argv[1:]
    return shlex.join(["fullshard", *([] if words[:1] == ["bench"] else ["bench", name]), *words])
