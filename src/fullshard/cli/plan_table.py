"""`fullshard plan --table rows.csv --out predictions.csv`: a prediction for every row."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from fullshard.cli.outcome import Outcome
from fullshard.config.regular import did_you_mean_path, read_regular
from fullshard.errors import ConfigError

SHOWN = 5  # rows that could not be read, of those that the terminal lists


def predict_table(table: Path, out: Path) -> Outcome:
    """Write the table's rows with predictions beside them.

    A row that cannot be read does not end the table: it has blanks, and says what was expected.

    Raises:
        ConfigError: The table is no CSV file with a header, or `out` cannot be written.
    """
    from fullshard.outlook.published import COLUMNS, predict

    columns, rows = _read(table)
    predictions = [predict(row) for row in rows]
    kept = [name for name in columns if name not in COLUMNS]
    try:
        with out.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*kept, *COLUMNS], extrasaction="ignore")
            writer.writeheader()
            writer.writerows({**row, **found} for row, found in zip(rows, predictions, strict=True))
    except OSError as error:
        raise ConfigError(f"--out: expected a file to write, got '{out}' ({error}).") from error
    failed = [
        {"row": place, "note": found["pred_note"]}
        for place, found in enumerate(predictions, start=1)
        if not found["pred_fits"]
    ]
    print(f"{len(rows) - len(failed)} of {len(rows)} rows predicted, in {out}.")
    for one in failed[:SHOWN]:
        print(f"  row {one['row']}: {one['note']}")
    return Outcome({"out": str(out), "rows": len(rows), "not_predicted": failed})


def _read(table: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and the rows of a CSV file; cells that a short row lacks are blank."""
    try:
        text = io.StringIO(read_regular(table).decode("utf-8-sig"), newline="")
        reader = csv.DictReader(text, restval="")
        columns = [name for name in reader.fieldnames or [] if name]
        rows = [{name: row[name] for name in columns} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"--table: expected a CSV file with a header, got '{table}' ({error}). "
            f"{did_you_mean_path(table)}".rstrip()
        ) from error
    if not {"gpu_model", "params_b", "model_name"} & set(columns):
        raise ConfigError(
            "--table: expected a header with columns such as model_name, params_b, gpu_model, "
            f"gpus, strategy; got {', '.join(columns[:6]) or 'none'}. See docs/planner.md."
        )
    return columns, rows
