"""Prints which of PyTorch's public FSDP tests the compat modules pass, by test function.

    passes     every case passes with its imports replaced by ours; the column `where` names one of
               our tests of the same behaviour
    refused    some case needs a feature that raises an error; `where` names the feature
    differs    some case expects behaviour that differs by design (docs/migrate); `where` says how

Only cases that PyTorch's own engine passes over gloo on CPUs are listed (files of 2.6.0, engine of
torch 2.13, `cuda` replaced by `cpu`, ranks as processes instead of threads). The test files are not
part of this repository; the counts were measured outside of it.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

LIST = Path(__file__).parents[1] / "docs" / "migrate" / "conformance.csv"
STATUSES = ("passes", "refused", "differs")


def read_list(path: Path = LIST) -> list[dict[str, str]]:
    """Returns the rows: file, function, cases, passed, status, where."""
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def main() -> int:
    """Prints the rows, the totals of each file, and the totals of all files."""
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
