"""Pages with charts: the data of charts for the page's script, and the templates.

A page is one file without a network. templates/plot.js draws axes and lines as SVG and reports what
the pointer does; charts.js adds values, zoom, log axes, smoothing and axes that ignore outliers.
Colours are CSS variables (`--series-1` ...), so that one page serves light and dark backgrounds.

    tables   {"steps": {"step": [1, 2], "loss": [6.5, 6.1]}, ...}    every number once
    charts   Chart("Loss", "nats per token", [Line("training", "steps", "loss"), ...])
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config.regular_files import packaged_table
from fullshard.errors import ConfigError
from fullshard.planner.text import axes_of, human_bytes

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_ROWS = 10_000  # a longer table keeps the extremes of windows

_SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

Column = list[float | None]
Table = dict[str, Column]


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: Label in the legend.
        table: Table with its points; "" for a level.
        y: Column of the table.
        color: Number of the page's series colour, from 1.
        style: `line`, `dots` (a line with points) or `dashed`.
        scale: Factor from the column to the chart's unit.
        level: Value of a horizontal line, in the chart's unit.
    """

    name: str
    table: str = ""
    y: str = ""
    color: int = 1
    style: str = "line"
    scale: float = 1
    level: float | None = None


@dataclass(frozen=True)
class Chart:
    """One chart: lines over a common x column.

    Attributes:
        title: Heading, unique on the page.
        unit: Unit of y, shown next to the heading and after values.
        lines: Lines; those without a point are left out.
        x: Column of x in every table; "time" is in seconds since 1970.
        is_wide: The chart takes the page's full width.
        is_stacked: Lines are stacked on each other.
        from_zero: The y axis includes zero.
        log2_x: The x axis is logarithmic.
        is_compared: A comparison of runs has this chart.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    x: str = "step"
    is_wide: bool = False
    is_stacked: bool = False
    from_zero: bool = True
    log2_x: bool = False
    is_compared: bool = True


def drawn(tables: Mapping[str, Table], charts: Iterable[Chart]) -> dict[str, Any]:
    """The data of a page's script: charts with at least one point, and their tables."""
    shown = list[dict[str, Any]]()
    for chart in charts:
        lines = [line for line in chart.lines if _has_points(tables, line)]
        if any(line.level is None for line in lines):
            scale, unit = _readable(chart.unit, tables, lines)
            rows = [asdict(line) for line in lines]
            for line in rows:
                line["scale"] *= scale
                line["level"] = None if line["level"] is None else line["level"] * scale
            shown.append({**asdict(chart), "unit": unit, "lines": rows})
    return {"tables": {name: thinned(table) for name, table in tables.items()}, "charts": shown}


def _readable(unit: str, tables: Mapping[str, Table], lines: Sequence[Line]) -> tuple[float, str]:
    """A factor and the unit after it: bytes become KiB, MiB or GiB, which suits the largest."""
    if not unit.startswith("bytes"):
        return 1, unit
    drawn = (tables[line.table][line.y] for line in lines if line.table)
    largest = max(value for column in drawn for value in column if value is not None)
    size, name = next(one for one in _SIZES if largest >= 2 * one[0] or one is _SIZES[-1])
    return 1 / size, unit.replace("bytes", name)


def _has_points(tables: Mapping[str, Table], line: Line) -> bool:
    if line.level is not None:
        return math.isfinite(line.level)
    values = tables.get(line.table, {}).get(line.y, ())
    # Communication of one rank, or inside of XLA's program, is zero: it was not measured.
    return any(values) if line.y == "comm_s" else any(value is not None for value in values)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Columns of the numbers of some rows, to six digits; None where there is no finite one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    is_exact = isinstance(value, int) or abs(value) >= 1e8  # bytes, and seconds since 1970
    return value if is_exact else float(f"{value:.6g}")


def thinned(table: Table, max_rows: int = MAX_ROWS) -> Table:
    """The rows of a table with the extremes of a column in windows of consecutive rows."""
    num_rows = max(map(len, table.values()), default=0)
    if num_rows <= max_rows:
        return table
    size = math.ceil(2 * len(table) * num_rows / max_rows)
    kept = set[int]()
    for start in range(0, num_rows, size):
        for column in table.values():
            window = column[start : start + size]
            found = [(value, start + at) for at, value in enumerate(window) if value is not None]
            if found:
                kept |= {min(found)[1], max(found)[1]}
    return {name: [column[at] for at in sorted(kept)] for name, column in table.items()}


def duration(seconds: float) -> str:
    """`42 s`, `12 min 05 s`, `3 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, hours = whole // 60, whole // 3600
    return f"{minutes} min {whole % 60:02} s" if hours == 0 else f"{hours} h {minutes % 60:02} min"


@cache
def layout() -> list[dict[str, Any]]:
    """The charts of a run's page, as charts.yaml has them."""
    return packaged_table("fullshard.observe", "templates/charts.yaml")


def write_page(target: Path, page: str) -> Path:
    """Writes a page.

    Raises:
        ConfigError: There is no place for such a file.
        OSError: The disk is full.
    """
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ConfigError(
            f"expected a file that can be written, got '{target}' ({error.strerror}). Remove the "
            "existing file, or set --out to another."
        ) from error
    return target


def render(template: str, **facts: Any) -> str:
    """Renders one of our templates; all text in it is escaped."""
    return _environment().get_template(template).render(facts)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fullshard.observe"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": human_bytes,
        "number": "{:g}".format,
        "place": "{:.1f}".format,
        "count": "{:,.0f}".format,
        "duration": duration,
        "axes": axes_of,
    }
    return environment
