"""`fullshard bench`: measurements beside the peers that are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli import bench_plans
from fullshard.cli.bench_words import OutFlag, WaitFlag, command_line, say, show
from fullshard.cli.outcome import Outcome
from fullshard.cli.words import DryRunFlag, JsonFlag

if TYPE_CHECKING:
    from fullshard.bench.cases import Case, Peer

app = typer.Typer(no_args_is_help=True, help="Measure side by side with the peers.")
app.add_typer(bench_plans.app)


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
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Time a training step of ours, FSDP2, FSDP1 and DDP, in turn in one process group."""
    from fullshard.bench import cases

    peers, absent = cases.installed_peers(tuple(engine or cases.PEERS))
    chosen = [cases.find_case(name) for name in case or cases.DEFAULT_CASES]
    if dry_run:
        return _show_dry_run(chosen, peers, absent)
    from fullshard.bench import report
    from fullshard.bench import step as bench_step
    from fullshard.errors import VerifyError
    from fullshard.launch import machine

    options = bench_step.Options(
        num_rounds=rounds, measure_memory=memory, wait=wait, timeout_s=timeout
    )
    results = tuple(bench_step.run_case(shape, peers, options, say) for shape in chosen)
    found = report.Report(
        cases=results,
        absent=tuple(absent),
        machine=machine.describe_machine(),
        versions=machine.describe_versions(tuple(sorted({"torch", *(p.package for p in peers)}))),
        command=command_line("step"),
    )
    result = report.to_dict(found)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "step.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "step.md").write_text(report.to_markdown(found))
        if drawing := report.to_drawing(found):
            (out / "step.svg").write_text(drawing)
    print(report.to_markdown(found))
    errors = [error for shape in results for error in bench_step.loss_errors(shape)]
    for error in errors:
        say(f"VerifyError: {error}")
    return Outcome(result, exit_code=VerifyError.exit_code if errors else 0)


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
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Time each transport's fetch and reduce of a flat buffer beside a memory copy."""
    from fullshard.bench import comm as bench

    sizes = tuple(bench.MIB * size for size in mib or bench.DEFAULT_MIB)
    job = bench.Job(tuple(transport or bench.TRANSPORTS), sizes, rounds)
    worlds = ranks or bench.DEFAULT_RANKS
    bench.check(job, worlds)
    found = bench.run(job, worlds, timeout_s=timeout, wait=wait, say=say)
    return show(bench.page_of(found, command_line("comm")), out)


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
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Time saving and loading beside the disk's own speed and torch's distributed checkpoints."""
    import tempfile

    from fullshard.bench import io as bench

    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-io-", dir=place) as folder:
        job = bench.Job(bench.MIB * mib, rounds, folder)
        found = bench.run(job, ranks, timeout_s=timeout, wait=wait, say=say)
    return show(bench.page_of(found, command_line("io")), out)


@app.command()
def host(
    world: Annotated[int, typer.Option(min=2, help="Ranks of the fake world.")] = 64,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each.")] = 61,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Measure the host time of a unit, forward and backward, beside FSDP2's."""
    from fullshard.bench import host as bench

    found = bench.run(world, rounds, wait=wait, say=say)
    return show(bench.page_of(found, command_line("host")), out)


@app.command()
def scale(
    world: Annotated[
        list[int] | None, typer.Option(help="Ranks; may be given again. Default: 8 to 4096.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Timed turns of each world.")] = 21,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Measure planning and a step's bookkeeping of one rank over the size of the world."""
    from fullshard.bench import scale as bench

    worlds = world or bench.WORLDS
    bench.check(worlds)
    found = bench.run(worlds, rounds, wait=wait, say=say)
    return show(bench.page_of(found, command_line("scale")), out)


@app.command()
def overlap(  # noqa: PLR0913  (one parameter an option)
    layers: Annotated[int, typer.Option(min=3, help="Blocks of the model.")] = 24,
    compute_per_wire: Annotated[
        float, typer.Option(min=0.01, help="A block's forward over its gather's time on the wire.")
    ] = 1.1,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each depth.")] = 11,
    timeout: Annotated[float, typer.Option(help="Seconds for the group of ranks.")] = 1800.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Measure how much of a slow wire's time hides behind compute, by prefetch depth."""
    from fullshard.bench import overlap as bench

    job = bench.Job(rounds, compute_per_wire, layers)
    command = command_line("overlap")
    return show(bench.run(job, command=command, timeout_s=timeout, wait=wait, say=say), out)


@app.command()
def copies(
    case: Annotated[
        list[str] | None,
        typer.Option(help="A case of bench step; may be given again. Default: 109M, 109M-bf16."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one group of ranks.")] = 900.0,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Count the bytes that copies of a training step read and write, beside FSDP2's."""
    from fullshard.bench import copies as bench
    from fullshard.bench.cases import find_case

    chosen = [find_case(name) for name in case or ("109M", "109M-bf16")]
    page = bench.run(chosen, command=command_line("copies"), timeout_s=timeout, say=say)
    return show(page, out)


@app.command()
def memory(
    model: Annotated[
        list[str] | None,
        typer.Option(help="llama, gpt2, qwen3_moe ...; may be given again. Default: all ten."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one group of ranks.")] = 3600.0,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Compare the memory that the plan says with the peak of the allocator's live bytes."""
    from fullshard.bench import peaks as bench

    cases = bench.find_cases(model or ())
    return show(bench.run(cases, command=command_line("memory"), timeout_s=timeout, say=say), out)


@app.command("compile")
def compiled(  # noqa: PLR0913  (one parameter an option)
    case: Annotated[str, typer.Option(help="A case of bench step.")] = "29M",
    backend: Annotated[str, typer.Option(help="Of torch.compile.")] = "inductor",
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each.")] = 11,
    timeout: Annotated[float, typer.Option(help="Seconds for the group of ranks.")] = 1800.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Time blocks compiled by torch.compile under ours and FSDP2, and count recompiles."""
    from fullshard.bench import compile as bench
    from fullshard.bench.cases import find_case

    job, command = bench.Job(find_case(case), rounds, backend), command_line("compile")
    return show(bench.run(job, command=command, timeout_s=timeout, wait=wait, say=say), out)


@app.command("jax")
def xla(
    case: Annotated[str, typer.Option(help="29M or tiny.")] = "29M",
    rounds: Annotated[int, typer.Option(min=2, help="Timed steps of each.")] = 11,
    timeout: Annotated[float, typer.Option(help="Seconds for the group of ranks.")] = 900.0,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Time the JAX engine on two gloo processes beside one process and beside XLA's partitioner."""
    from fullshard.bench import xla as bench

    job, command = bench.Job(bench.find_shape(case), rounds), command_line("jax")
    return show(bench.run(job, command=command, timeout_s=timeout, wait=wait, say=say), out)


@app.command()
def gpu(
    tiny: Annotated[bool, typer.Option("--tiny", help="Small blocks, on a CPU too.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="Timed steps of each.")] = 15,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Measure blocks of Llama 3 8B on one GPU as a rank of 8 and 64, beside FSDP2."""
    from fullshard.bench import gpu as bench

    return show(bench.run(rounds, tiny=tiny, command=command_line("gpu"), say=say), out)


StepsFlag = Annotated[int, typer.Option(min=3, help="Updates of every run.")]


@app.command()
def strategies(
    max_steps: StepsFlag = 20,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
) -> Outcome:
    """Train the main job's model under every strategy, and compare memory and speed."""
    names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
    shardings: dict[str, dict[str, Any]] = {name: {"strategy": name} for name in names}
    return _compare("strategies", shardings, max_steps, out)


@app.command()
def prefetch(
    max_steps: StepsFlag = 20,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by the app
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
    from fullshard.train.compare import create_fsdp_config, print_comparison_table, train

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
