"""Writes the README's benchmark table from committed results, so that no figure is typed by hand.

A place in the README names its file of results; what stands between the two marks is replaced:

    <!-- results: benchmarks/results/step.json -->
    ...
    <!-- end of results -->

`--check` changes nothing and fails where the README holds something else.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PLACE = re.compile(
    r"(?P<open><!-- results: (?P<path>\S+) -->\n).*?(?P<close><!-- end of results -->)", re.S
)
MIB = 2**20
NO_RESULTS = "No results are committed yet.\n"


def _ratio(row: dict[str, Any]) -> str:
    ratio = row["ratio_to_fsdp2"]
    if ratio is None:
        return "-"
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _peak(row: dict[str, Any]) -> str:
    peak = row["memory_peak_bytes"]
    return "-" if peak is None else f"{peak / MIB:.0f}"


def _listed(facts: dict[str, Any]) -> str:
    """`cores 2, vector_flags avx2 avx512f`: a dictionary in one line."""
    words = {name: " ".join(v) if isinstance(v, list) else v for name, v in facts.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in words.items())


def to_table(results: dict[str, Any]) -> str:
    """The rows of one results file as a Markdown table, with machine and versions under it."""
    lines = [
        "| case | engine | step, ms | against FSDP2 [95 %] | peak memory, MiB |",
        "|---|---|---|---|---|",
    ]
    previous = None
    for row in results["rows"]:
        case = "" if row["case"] == previous else f"{row['case']}, {row['num_ranks']} ranks"
        previous = row["case"]
        mark = " (loaded)" if row["loaded"] else ""
        step = f"{row['step_time_s'] * 1e3:.0f}{mark}"
        lines.append(f"| {case} | {row['name']} | {step} | {_ratio(row)} | {_peak(row)} |")
    machine, versions = _listed(results["machine"]), _listed(results["versions"])
    lines += ["", f"`{results['command']}`; machine: {machine}; versions: {versions}."]
    if any(row["loaded"] for row in results["rows"]):
        lines.append("Loaded: other processes used the machine meanwhile.")
    return "\n".join(lines) + "\n"


def filled(readme: str, root: Path) -> str:
    """The README's text with every table made anew."""

    def replace(place: re.Match[str]) -> str:
        file = root / place["path"]
        if not file.exists():
            return place["open"] + NO_RESULTS + place["close"]
        results = json.loads(file.read_text(encoding="utf-8"))
        return place["open"] + to_table(results) + place["close"]

    return PLACE.sub(replace, readme)


def main(root: Path, *, only_check: bool) -> int:
    """Fills the tables in, or says whether they are as they would be filled in."""
    file = root / "README.md"
    before = file.read_text(encoding="utf-8")
    after = filled(before, root)
    if only_check:
        if before != after:
            print("README.md: expected the tables of the committed results. Run this script.")
        return int(before != after)
    file.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent, only_check="--check" in sys.argv[1:]))
