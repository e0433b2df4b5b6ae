"""Prints how the compat modules stand to PyTorch's public FSDP tests, by their functions' names.

    passes     every case of PyTorch's function passes, its imports led here; a test of our own that
               asks the same
    refused    some case rests on what is refused by name: what
    differs    some case asks what is other here by design, see docs/migrate: how

Cases are those that PyTorch's own engine passes on gloo and the CPU (2.6.0's files, torch 2.13's
engine, cuda read as cpu, threads of ranks as processes); what it does not pass there is not listed.
The files are not part of this repository: the counts were measured beside it.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

LIST = Path(__file__).parents[1] / "docs" / "migrate" / "conformance.csv"
STATUSES = ("passes", "refused", "differs")


def read_list(path: Path = LIST) -> list[dict[str, str]]:
    """The rows: file, function, cases, passed, status, where."""
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def main() -> int:
    """Print the list, the totals of each file, and those of all."""
    rows = read_list()
    cases, passed = Counter[str](), Counter[str]()
    for row in rows:
        count = f"{row['passed']:>3} of {row['cases']:>3}"
        print(f"{row['status']:8} {count} {row['file']:36} {row['function']:56} {row['where']}")
        cases[row["file"]] += int(row["cases"])
        passed[row["file"]] += int(row["passed"])
    for file in cases:
        print(f"{passed[file]:>3} of {cases[file]:>3} {file}")
    found = Counter(row["status"] for row in rows)
    print(", ".join(f"{found[status]} {status}" for status in STATUSES))
    print(f"{passed.total()} of {cases.total()} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
