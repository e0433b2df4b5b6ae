"""`fullshard bench`: measurements beside the peers that are installed."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.outcome import Outcome
from fullshard.cli.words import DryRunFlag

if TYPE_CHECKING:
    from fullshard.bench.cases import Case, Peer
    from fullshard.bench.page import Page

WaitFlag = Annotated[
    bool, typer.Option("--wait", help="Wait up to ten minutes for idle neighbours.")
]
OutFlag = Annotated[
    Path | None, typer.Option(help="Folder for the results' JSON and page.", file_okay=False)
]

app = typer.Typer(
    no_args_is_help=True, help="Measure fullshard and the peers that are installed, side by side."
)


@app.command()
def step(  # noqa: PLR0913  (one parameter an option)
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="29M, 109M, 29M-4, 109M-bf16, moe, lora or tiny; may be given again. "
            "Default: all but tiny."
        ),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="An engine to run; may be given again. Default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of every engine.")] = 11,
    memory: Annotated[bool, typer.Option(help="Also run each engine alone for its memory.")] = True,
    wait: WaitFlag = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one group of ranks.")] = 1800.0,
    out: OutFlag = None,
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Time a training step of fullshard, FSDP2, FSDP1 and DDP, in turn in one process group."""
    from fullshard.bench import cases

    peers, absent = cases.installed_peers(tuple(engine or cases.PEERS))
    chosen = [cases.find_case(name) for name in case or cases.DEFAULT_CASES]
    from fullshard.bench import step as bench
    from fullshard.errors import VerifyError

    options = bench.StepOptions(rounds, memory, wait, timeout)
    minutes = max(1, round(bench.expected_s(chosen, peers, options) / 60))
    advice = "" if case else " --case NAME runs one of them; --case tiny takes the least time."
    say(
        f"{len(chosen)} case(s) of {len(peers)} engines: about {minutes:,} minute(s) on this "
        f"machine when it is idle.{advice}"
    )
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
    transport: Annotated[
        list[str] | None, typer.Option(help="c10d, direct or shared; may be given again.")
    ] = None,
    mib: Annotated[
        list[int] | None, typer.Option(min=1, help="Size of the flat buffer; may be given again.")
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Local ranks; may be given again.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Timed turns of each.")] = 15,
    timeout: Annotated[float, typer.Option(help="Seconds for one group of ranks.")] = 900.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
) -> Outcome:
    """Time each transport's fetch and reduce of a flat buffer beside a memory copy."""
    from fullshard.bench import comm as bench

    sizes = tuple(bench.MIB * size for size in mib or bench.DEFAULT_MIB)
    job = bench.CommJob(tuple(transport or bench.TRANSPORTS), sizes, rounds)
    worlds, command = ranks or bench.DEFAULT_RANKS, command_line("comm")
    bench.check(job, worlds)
    page = bench.run(job, worlds, command=command, timeout_s=timeout, wait=wait, say=say)
    return show(page, out)


@app.command()
def io(  # noqa: PLR0913  (one parameter an option)
    place: Annotated[
        Path, typer.Option(help="Folder whose disk is measured.", file_okay=False)
    ] = Path("runs"),
    mib: Annotated[int, typer.Option(min=24, help="Size of the checkpoint.")] = 768,
    ranks: Annotated[int, typer.Option(min=1, help="Local ranks.")] = 2,
    rounds: Annotated[int, typer.Option(min=3, help="Timed turns of each.")] = 7,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it.")] = 1200.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
) -> Outcome:
    """Time saving and loading beside the disk's own speed and torch's distributed checkpoints."""
    import tempfile

    from fullshard.bench import io as bench

    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-io-", dir=place) as folder:
        job, command = bench.IoJob(bench.MIB * mib, rounds, folder), command_line("io")
        page = bench.run(job, ranks, command=command, timeout_s=timeout, wait=wait, say=say)
    return show(page, out)


@app.command()
def calibrate(
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Local ranks at work at once; may be given again. Default: 1 2 4."
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Few small sizes: shows only that it runs.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one group of ranks.")] = 3600.0,
    wait: WaitFlag = False,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: where fullshard plan looks for it."),
    ] = None,
) -> Outcome:
    """Measure what this machine reaches, so that `fullshard plan` can say the time of a step."""
    from fullshard.bench import calibrate as bench
    from fullshard.config.environment import cache_folder
    from fullshard.outlook.calibration import FILE_NAME

    worlds = ranks or bench.DEFAULT_RANKS
    found = bench.run(worlds, is_tiny=tiny, wait=wait, timeout_s=timeout, say=say)
    path = out or cache_folder() / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(bench.file_text(*found, command_line("calibrate")), encoding="utf-8")
    print(bench.summary(*found))
    print(f"Calibration: {path}")
    return Outcome({**bench.to_dict(*found), "path": str(path)})


StepsFlag = Annotated[int, typer.Option(min=3, help="Updates of every run.")]


@app.command()
def strategies(
    max_steps: StepsFlag = 20,
    out: OutFlag = None,
) -> Outcome:
    """Train the main job's model under every strategy, and compare memory and speed."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
    shardings: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in names}
    return _compare("strategies", shardings, max_steps, out)


@app.command()
def prefetch(
    max_steps: StepsFlag = 20,
    out: OutFlag = None,
) -> Outcome:
    """Train the main job's model with prefetch in no, one or both directions, and compare.

    Over the process group's collectives: ranks that share their weights have nothing to fetch.
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
    from fullshard.bench.figures import draw_comparison
    from fullshard.train import create_fsdp_config, print_comparison_table, train

    results: dict[str, dict[str, Any]] = {}
    for name, sharding in shardings.items():
        config = create_fsdp_config(**sharding)
        config["training"] = {"output_dir": f"runs/compare/{name.lower()}"}
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
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{what}.json").write_text(json.dumps(result, indent=1) + "\n")
        words = {"tokens_per_s": "tokens a second", "memory_peak_bytes": "peak of memory, bytes"}
        (out / f"{what}.svg").write_text(draw_comparison(f"By {what}", rows, words))
    return Outcome(result)


def _show_dry_run(chosen: list[Case], peers: list[Peer], absent: list[str]) -> Outcome:
    for shape in chosen:
        print(shape.describe())
    for peer in peers:
        print(f"  {peer.name}: {peer.about}")
    for name in absent:
        print(f"  {name}: not installed")
    return Outcome(
        {
            "cases": [shape.name for shape in chosen],
            "engines": [peer.name for peer in peers],
            "absent": absent,
        }
    )


def say(text: str) -> None:
    """To people, whatever --json prints."""
    print(text, file=sys.stderr, flush=True)


def show(page: Page, out: Path | None) -> Outcome:
    """Print a page, and write it where that is asked for."""
    if out is not None:
        page.write(out)
    print(page.to_markdown())
    return Outcome(page.to_dict())


def command_line(name: str) -> str:
    """As it was typed, for a page."""
    words = sys.argv[1:]
    return shlex.join(["fullshard", *([] if words[:1] == ["bench"] else ["bench", name]), *words])
