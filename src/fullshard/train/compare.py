"""The same short run under several shardings, side by side: every number is measured.

names = ("FULL_SHARD", "NO_SHARD")
results = {name: train(create_fsdp_config(name), max_steps=20) for name in names}
print_comparison_table(results)
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from fullshard.config.load import load_config
from fullshard.config.values import Command, Strategy, parse
from fullshard.config.write import flatten
from fullshard.errors import ConfigError, FullshardError
from fullshard.observe.metrics import read_rows
from fullshard.train import start

WARM_UP = 2  # steps that are left out: the first ones make buffers
GB = 1e9  # the documents' habit


def create_fsdp_config(strategy: str = "FULL_SHARD", **sharding: Any) -> dict[str, Any]:
    """A configuration of the main job under a strategy.

    Args:
        strategy: In any accepted spelling.
        **sharding: Further fields of ShardConfig.

    Returns:
        A mapping of a configuration's keys, to be changed at will and handed to `train`.

    Raises:
        ConfigError: There is no such strategy.
    """
    return {"sharding": {"strategy": parse(Strategy, strategy, "strategy").value, **sharding}}


def train(config: Mapping[str, Any], max_steps: int = 20) -> dict[str, Any]:
    """Train on local ranks and measure.

    Args:
        config: Keys of a configuration file; what it leaves out is the main job's.
        max_steps: Updates; those after the second are measured.

    Returns:
        strategy, memory_gb (most that a rank's process used, in 1e9 bytes), samples_per_sec,
        tokens_per_sec, step_time_s (medians), loss (of the last step), run_dir.

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
    checked = start.check(resolved, world_size, Command.TRAIN, "never")
    folder, _ = start.make_folder(checked, Command.TRAIN)
    _, ended = start.start_ranks(folder, world_size, resolved.config.launch.timeout)
    if ended.exit_code != 0:
        said = ended.failure.message if ended.failure else "it was stopped"
        raise FullshardError(
            f"train: expected a run that ends well, got exit code {ended.exit_code}: {said}"
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
    """Print what `train` measured, a line a name."""
    width = max([len("configuration"), *map(len, results)])
    lines = [f"{'configuration':<{width}}  memory (GB)  samples/s  tokens/s  step (ms)"]
    lines += [
        f"{name:<{width}}  {found['memory_gb']:>11.3f}  {found['samples_per_sec']:>9.1f}  "
        f"{found['tokens_per_sec']:>8,.0f}  {1e3 * found['step_time_s']:>9.1f}"
        for name, found in results.items()
    ]
    print("\n".join(lines))  # noqa: T201  (that is what it is for)


def _text(value: Any) -> str:
    """As the command line has it."""
    return value if isinstance(value, str) else json.dumps(value)
