"""`python -m benchmarks.corpus`: large corpora: anonymous memory, time, and cost of a kill.

Each case runs the `fullshard train` command of docs/training.md ("a corpus of your own") on
generated text. The anonymous and shared memory of every process is sampled until the run ends. In
the case `killed`, the command gets SIGKILL when half of the text is tokenized, and is run again.
`streamed` runs the same command with `data.streaming=true` and an empty cache. With `--chats`, the
data are conversations in one JSONL file, and the command is `fullshard sft`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import Neighbours, Page
from fullshard.cli.bench import OutFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.config.environment import current_variables
from fullshard.data.tokenize import SHARD_BYTES
from fullshard.observe.metrics import process_bytes

NAME = "benchmarks.corpus"
MIB = 1 << 20
FILE_MIB = 250
SAMPLE_S = 0.1
RANK = "fullshard.launch.rank_entry"
WORDS = ("data.validation_fraction=0.001", "max_steps=50")
KINDS: tuple[str, ...] = ("command", "rank", "worker")
COLUMNS = (
    *("data, MiB", "case", "prepared after, s", "CPU until then, s", "CPU, s a GB"),
    *(f"peak of a {kind}, MiB" for kind in KINDS),
    *("parts made", "data_s, % of a step"),
)
METHOD = (
    "Lines of Python's documentation, drawn at random, in files of 250 MiB. The main job's model "
    "on two ranks, 50 steps and an evaluation of 0.1 % of the text, with a cache of its own.",
    "A peak is the largest anonymous memory of one process, with its share of shared memory and "
    "with modules, sampled every 0.1 s. The command trains the tokenizer and tokenizes; ranks "
    "train; a worker makes a rank's batches, and tokenizes in a stream. The row of 1 MiB shows "
    "what processes take without data.",
    "Prepared: when the first rank starts. CPU: of the command until then, all threads. Parts are "
    "16 MiB of text each. data_s: the sum over steps divided by the sum of step times.",
)
CHATS = (
    "Conversations of a question and up to 40 lines, drawn at random from Python's documentation, "
    "in one file. The main job's model after two steps, `fullshard sft` on two ranks, 50 steps and "
    "an evaluation of 0.1 % of the conversations, with a cache of its own.",
    *METHOD[1:],
    "Conversations are tokenized by a process per core, which are counted as workers.",
)


def main(
    sizes: Annotated[list[int] | None, typer.Option("--mib", help="Text size, MiB.")] = None,
    out: OutFlag = None,
    words: Annotated[list[str] | None, typer.Option("--set", help="Additional KEY=VALUE.")] = None,
    chats: Annotated[bool, typer.Option("--chats", help="Use conversations, not text.")] = False,
    streamed: Annotated[bool, typer.Option("--streamed", help="Run this case only.")] = False,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Train on text of several sizes; measure memory, time and the cost of a kill."""
    rows: list[dict[str, Any]] = []
    with Neighbours() as neighbours, tempfile.TemporaryDirectory() as place:
        recipe, keys = ["train"], tuple(words or ())
        if chats:
            write_text(corpus := Path(place, "text"), 1)
            _train(["train"], corpus, Path(place), ("max_steps=2",), None, "whole")
            recipe = ["sft", f"model={Path(place, 'run-text-first', 'model')}"]
        for mib in sizes or ((1, 500) if chats else (1, 1000, 2000)):
            corpus = Path(place, f"data-{mib}")
            (write_chats if chats else write_text)(corpus, mib)
            rows += cases(recipe, corpus, Path(place), keys, only_streamed=streamed)
    name, title = NAME.partition(".")[2], "A corpus larger than memory"
    name += "_streamed" * streamed
    if chats:
        name, title = f"{name}_chats", "Conversations larger than memory"
    cells = [_cells(row) for row in rows]
    told = (name, title, command_line(NAME), rows, COLUMNS, cells, CHATS if chats else METHOD)
    return show(Page(*told, neighbours), out)


def write_text(folder: Path, mib: int) -> None:
    """Writes text files into a folder."""
    from pydoc_data.topics import topics

    lines = [line for topic in sorted(topics) for line in topics[topic].splitlines() if line]
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(-(-mib // FILE_MIB)):
        with (folder / f"{number:03}.txt").open("w", encoding="utf-8") as file:
            size = min(FILE_MIB, mib - number * FILE_MIB) << 20
            while file.tell() < size:
                file.write("\n".join(draw.choices(lines, k=10_000)) + "\n")


def write_chats(folder: Path, mib: int) -> None:
    """Writes a file of conversations: one question, up to 40 lines of answer each."""
    from pydoc_data.topics import topics

    lines = [line for topic in sorted(topics) for line in topics[topic].splitlines() if line]
    draw = random.Random(0)
    folder.mkdir(parents=True)
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        while file.tell() < mib << 20:
            answer = "\n".join(draw.choices(lines, k=draw.randint(1, 40)))
            said = (("user", draw.choice(lines)), ("assistant", answer))
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in said]}))
            file.write("\n")


def cases(
    recipe: Sequence[str],
    corpus: Path,
    place: Path,
    words: Sequence[str],
    *,
    only_streamed: bool = False,
) -> Iterator[dict[str, Any]]:
    """Runs once; for a text of several parts also killed half-way, run again, and streamed."""
    size = sum(file.stat().st_size for file in corpus.iterdir())
    half = size // SHARD_BYTES // 2
    streamed = ("streamed",) if recipe[0] == "train" else ()
    several = streamed if only_streamed else ("killed", "typed again", *streamed)
    for case in several if half else ("whole",):
        more = ("data.streaming=true",) if case == "streamed" else ()
        row = _train(
            recipe, corpus, place, (*words, *more), half if case == "killed" else None, case
        )
        row |= {"corpus_bytes": size, "case": case}
        say(str(row))
        yield row


def _train(
    recipe: Sequence[str],
    corpus: Path,
    place: Path,
    words: Sequence[str],
    kill: int | None,
    case: str,
) -> dict[str, Any]:
    """Runs the command; with `kill`, kills it after that many parts."""
    named = f"{corpus.name}-{'streamed' if case == 'streamed' else 'first'}"
    cache, run = place / f"cache-{named}", place / f"run-{named}"
    made = set(cache.rglob("*.npy"))
    told = (f"data.path={corpus}", f"output_dir={run}", *WORDS, *words)
    command = [sys.executable, "-m", "fullshard", *recipe, *told]
    variables = {**current_variables(), "XDG_CACHE_HOME": str(cache)}
    peaks, prepared = dict.fromkeys(KINDS, 0), dict[str, float]()
    began = time.monotonic()
    with subprocess.Popen(command, env=variables) as process:
        while process.poll() is None:
            for kind, size, cpu_s in _processes(process.pid):
                peaks[kind] = max(peaks[kind], size)
                if kind == "command" and not (run / "logs").exists():
                    prepared = {"prepared_s": time.monotonic() - began, "prepared_cpu_s": cpu_s}
            if kill is not None and len(list(cache.rglob("*.npy"))) >= kill:
                process.kill()
            time.sleep(SAMPLE_S)
    if process.returncode != (0 if kill is None else -9):
        raise RuntimeError(f"{command}: exit code {process.returncode}")
    steps = []
    if kill is None:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, lines) if "step_time_s" in row]
    shares = [sum(row[key] for row in steps[1:]) for key in ("data_s", "step_time_s")]
    return {
        **prepared,
        **{f"{kind}_anonymous_bytes": peak for kind, peak in peaks.items()},
        "parts_made": len(set(cache.rglob("*.npy")) - made),
        "data_share": shares[0] / shares[1] if steps else None,
    }


def _processes(pid: int) -> Iterator[tuple[str, int, float]]:
    """Returns kind, memory and processor time of the command and its descendants."""
    with suppress(psutil.Error):
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                kind = "rank" if RANK in " ".join(process.cmdline()) else "worker"
                kind = "command" if process.pid == pid else kind
                yield kind, process_bytes(process.pid), sum(process.cpu_times()[:2])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    size, share = row["corpus_bytes"], row["data_share"]
    mebibytes = [row[f"{kind}_anonymous_bytes"] / MIB for kind in KINDS]
    made = row["parts_made"]
    return (
        f"{size / MIB:,.0f}",
        row["case"],
        f"{row['prepared_s']:,.0f}",
        f"{row['prepared_cpu_s']:,.0f}",
        f"{row['prepared_cpu_s'] / (made * SHARD_BYTES) * 1e9:,.0f}" if made else "",
        *(f"{one:,.0f}" if one else "" for one in mebibytes),
        f"{made:,}",
        f"{share:.3%}" if share is not None else "",
    )


if __name__ == "__main__":
    run_script(NAME)
