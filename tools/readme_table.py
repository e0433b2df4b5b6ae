"""Writes the README's benchmark table from committed results.

Two marks in the README name the file of results; the text between them is replaced:

    <!-- results: benchmarks/results/step.json -->
    ...
    <!-- end of results -->

`make lint` fails if a table differs (tools/check_repository.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PLACE = re.compile(
    r"(?P<open><!-- results: (?P<path>\S+) -->\n).*?(?P<close><!-- end of results -->)", re.S
)
MIB = 2**20
OURS, PEER = "fullshard", "fsdp2"
NO_RESULTS = "No results are committed yet.\n"


def _ratio(row: dict[str, Any]) -> str:
    ratio = row["ratio_to_fsdp2"]
    return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _memory(row: dict[str, Any], peer: dict[str, Any]) -> str:
    own, other = row["memory_peak_bytes"] / MIB, peer["memory_peak_bytes"] / MIB
    return f"{own:.0f} MiB | {own / other:.2f}"


def _listed(facts: dict[str, Any]) -> str:
    """Formats a dictionary in one line: `cores 2, vector flags avx2 avx512f`."""
    words = {name: " ".join(v) if isinstance(v, list) else v for name, v in facts.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in words.items())


def to_table(results: dict[str, Any]) -> str:
    """Returns a Markdown table of fullshard and FSDP2, with machine and versions below it."""
    lines = [
        "| case | step time | relative to FSDP2 [95 %] | peak memory | relative to FSDP2 |",
        "|---|---|---|---|---|",
    ]
    rows = {(row["case"], row["name"]): row for row in results["rows"]}
    for (case, name), row in rows.items():
        if name == OURS:
            mark = " (loaded)" if row["loaded"] else ""
            step = f"{row['step_time_s'] * 1e3:.0f} ms{mark}"
            memory = _memory(row, rows[case, PEER])
            lines.append(
                f"| {case}, {row['num_ranks']} ranks | {step} | {_ratio(row)} | {memory} |"
            )
    machine, versions = _listed(results["machine"]), _listed(results["versions"])
    lines += ["", f"`{results['command']}`; machine: {machine}; versions: {versions}."]
    if any(row["loaded"] for row in results["rows"]):
        lines.append("Loaded: other processes used the machine during the measurement.")
    return "\n".join(lines) + "\n"


def filled(readme: str, root: Path) -> str:
    """Returns the README's text with every table replaced."""

    def replace(place: re.Match[str]) -> str:
        file = root / place["path"]
        if not file.exists():
            return place["open"] + NO_RESULTS + place["close"]
        results = json.loads(file.read_text(encoding="utf-8"))
        return place["open"] + to_table(results) + place["close"]

    return PLACE.sub(replace, readme)


def main(root: Path) -> None:
    """Updates README.md."""
    file = root / "README.md"
    file.write_text(filled(file.read_text(encoding="utf-8"), root), encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).resolve().parent.parent)
