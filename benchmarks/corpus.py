"""What a large corpus takes: makes text on the spot, trains on it, and measures anonymous memory.

python -m benchmarks.corpus text FOLDER --mib 2000      lines of Python's own documentation, drawn
python -m benchmarks.corpus measure FOLDER              fullshard train beside a small corpus
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import JsonFlag, run_script
from fullshard.cli.outcome import Outcome

FILE_MIB = 250
RANK = "fullshard.launch.rank_entry"
WORDS = (
    "data.validation_fraction=0.0005",
    "max_steps=5",
    "logging_steps=1",
    "eval_strategy=no",
    "save_strategy=no",
)


def main(folder: Path, mib: int = 2000, json: JsonFlag = False) -> Outcome:  # noqa: ARG001
    """Trains on a large corpus and on a small one; the peaks of anonymous memory."""
    if not folder.is_dir():
        write_text(folder, mib)
    with tempfile.TemporaryDirectory() as place:
        small = Path(place, "small")
        write_text(small, 1)
        return Outcome({"rows": [_train(path, Path(place)) for path in (small, folder)]})


def write_text(folder: Path, mib: int) -> None:
    """Writes files of text into a folder."""
    from pydoc_data.topics import topics

    lines = [line for topic in sorted(topics) for line in topics[topic].splitlines() if line]
    draw = random.Random(0)
    folder.mkdir(parents=True)
    for number in range(-(-mib // FILE_MIB)):
        with (folder / f"{number:03}.txt").open("w", encoding="utf-8") as file:
            size = min(FILE_MIB, mib - number * FILE_MIB) << 20
            while file.tell() < size:
                file.write("\n".join(draw.choices(lines, k=10_000)) + "\n")


def _train(corpus: Path, place: Path) -> dict[str, Any]:
    """Peaks of anonymous memory of the command, which tokenizes, and of ranks."""
    began = time.monotonic()
    run = (f"data.path={corpus}", f"output_dir={place / 'run'}", *WORDS)
    command = [sys.executable, "-m", "fullshard", "train", *run, "--resume", "never"]
    peaks = dict.fromkeys(("command", "rank"), 0)
    first_rank_s = None
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            for kind, size in _anonymous(process.pid):
                peaks[kind] = max(peaks[kind], size)
                if kind == "rank" and first_rank_s is None:
                    first_rank_s = time.monotonic() - began
            time.sleep(0.1)
    size = sum(file.stat().st_size for file in corpus.iterdir())
    row = {
        "corpus_bytes": size,
        "exit_code": process.returncode,
        "prepared_s": first_rank_s,
        **{f"{kind}_anonymous_bytes": peak for kind, peak in peaks.items()},
    }
    print(row, flush=True)
    return row


def _anonymous(pid: int) -> list[tuple[str, int]]:
    found = []
    try:
        whole = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    for process in whole:
        try:
            words = " ".join(process.cmdline())
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        except (psutil.Error, OSError):
            continue
        kind = "rank" if RANK in words else "command"
        size = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        found += [(kind, int(size[1]) << 10)] if size else []
    return found


if __name__ == "__main__":
    run_script("benchmarks.corpus")
