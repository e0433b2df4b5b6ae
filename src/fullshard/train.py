"""Compare the same short run under several shardings; every number is measured.

names = ("FULL_SHARD", "NO_SHARD")
results = {name: train(create_fsdp_config(name), max_steps=20) for name in names}
print_comparison_table(results)
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from numbers import Real
from typing import Any

from fullshard.config.files import flatten
from fullshard.config.load import load_config
from fullshard.config.values import Strategy, parse
from fullshard.errors import ConfigError, FullshardError
from fullshard.observe.metrics import read_rows
from fullshard.recipes.registry import Command
from fullshard.run import start

__all__ = ["create_fsdp_config", "print_comparison_table", "train"]

WARM_UP = 2  # first steps, which allocate buffers and are not measured
GB = 1e9  # as tutorials count
# Heading, factor and format of each result of `train`; ALIASES are the names in tutorials.
COLUMNS = {
    "memory_gb": ("memory (GB)", 1, ".3f"),
    "samples_per_sec": ("samples/s", 1, ".1f"),
    "tokens_per_sec": ("tokens/s", 1, ",.0f"),
    "step_time_s": ("step (ms)", 1e3, ".1f"),
    "loss": ("loss", 1, ".4f"),
}
ALIASES = {"memory": "memory_gb", "throughput": "samples_per_sec"}


def create_fsdp_config(strategy: str = "FULL_SHARD", **sharding: Any) -> dict[str, Any]:
    """A configuration of the built-in job with a strategy.

    Args:
        strategy: Name of the strategy in any accepted spelling.
        **sharding: Further fields of ShardConfig.

    Returns:
        A mapping of configuration keys, which may be changed and passed to `train`.

    Raises:
        ConfigError: There is no such strategy.
    """
    return {"sharding": {"strategy": parse(Strategy, strategy, "strategy").value, **sharding}}


def train(config: Mapping[str, Any], max_steps: int = 20) -> dict[str, Any]:
    """Train on local ranks and measure.

    Args:
        config: Keys of a configuration file; the built-in job supplies the others.
        max_steps: Number of updates; the first two are not measured.

    Returns:
        strategy, memory_gb (of the rank whose process used the most, in 1e9 bytes),
        samples_per_sec, tokens_per_sec, step_time_s (medians), loss (of the last step), run_dir.

    Raises:
        FullshardError: The configuration is wrong, or a rank failed.
    """
    if max_steps <= WARM_UP:
        raise ConfigError(f"max_steps: expected more than {WARM_UP}, got {max_steps}.")
    given = flatten(dict(config))
    strategy = given.get("sharding.strategy", "full_shard")
    given = {"training.output_dir": f"runs/compare/{strategy}"} | given
    given |= {"training.max_steps": max_steps, "training.save_strategy": "no"}
    resolved = load_config(None, [f"{key}={_text(value)}" for key, value in given.items()])
    resolved.check_supported()
    world_size = start.world_size_of(resolved, None)
    resolved = resolved.for_ranks(world_size)
    checked = start.prepare_run(resolved, world_size, Command.TRAIN, "never")
    with start.made_folder(checked, Command.TRAIN) as folder:
        _, ended = start.start_ranks(folder, world_size, resolved.config.launch.timeout)
    if ended.exit_code != 0:
        said = ended.failure.message if ended.failure else "it was stopped"
        raise FullshardError(
            f"train: expected the run to succeed, got exit code {ended.exit_code}: {said}"
        )
    rows = [row for row in read_rows(folder.metrics) if "loss" in row]
    timed = rows[WARM_UP:]
    return {
        "strategy": resolved.config.sharding.strategy.value,
        "memory_gb": rows[-1]["memory_peak_bytes"] / GB,
        "samples_per_sec": statistics.median(row["samples_per_s"] for row in timed),
        "tokens_per_sec": statistics.median(row["tokens_per_s"] for row in timed),
        "step_time_s": statistics.median(row["step_time_s"] for row in timed),
        "loss": rows[-1]["loss"],
        "run_dir": str(folder.path),
    }


def print_comparison_table(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print one line per configuration and one column per quantity.

    Args:
        results: What `train` returned, by name; or numbers picked from it, under its keys, under
            `memory` and `throughput`, or under names of your own. A missing number prints as "-".
    """
    rows = {str(name): _named(found) for name, found in results.items()}
    present = [key for row in rows.values() for key in row]
    keys = [key for key in COLUMNS if key in present]
    keys += dict.fromkeys(key for key in present if key not in COLUMNS)
    columns = [[COLUMNS[key][0] if key in COLUMNS else key for key in keys]]
    columns += [[_cell(key, row.get(key)) for key in keys] for row in rows.values()]
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    width = max(map(len, ["configuration", *rows]))
    for name, cells in zip(["configuration", *rows], columns, strict=True):
        padded = (f"{cell:>{size}}" for cell, size in zip(cells, widths, strict=True))
        print("  ".join([f"{name:<{width}}", *padded]))  # noqa: T201  (its purpose)


def _named(found: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a result, under the names that `train` uses."""
    return {
        ALIASES.get(key, key): value
        for key, value in found.items()
        if isinstance(value, Real) and not isinstance(value, bool)
    }


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    _, scale, form = COLUMNS.get(key, ("", 1, ".4g"))
    return format(scale * value, form)


def _text(value: Any) -> str:
    """The value as a word of the command line."""
    return value if isinstance(value, str) else json.dumps(value)
