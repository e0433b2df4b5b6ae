"""`python -m benchmarks.times`: planned step time, compared with the time of a run.

The plan uses a calibration of this machine: tables of kernels, messages and a tiny model. None of
the measured runs is part of it. Each run is a separate `fullshard train`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import Neighbours, Page
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig
from fullshard.errors import ConfigError
from fullshard.outlook.devices import Calibration
from fullshard.outlook.predict import Machine, Outlook

NAME = "benchmarks.times"
COLUMNS = (
    *("run", "ranks", "strategy", "recompute", "compute", "batch x length"),
    *("planned, ms", "measured, ms", "error"),
)
METHOD = (
    "Planned is the step time of `fullshard plan --calibration`: operations of a trace of the "
    "model, each at the rate of its shape, messages at those of their sizes, the plan's events "
    "played. The calibration has no model but tiny ones of width 32, which show the host's time.",
    "Measured is `step_time_s` of `fullshard train` on the embedded text, the median of the steps "
    "after the first three; ranks are processes of one thread each, started anew for each run.",
)
WARM_UP = 3
GOAL = 0.10


@dataclass(frozen=True)
class TimedCase:
    """A run with planned and measured step time."""

    name: str
    num_ranks: int
    model: dict[str, Any]
    batch: int
    length: int
    strategy: str = "full_shard"
    recompute: str = "none"
    accumulation: int = 1
    sharding: dict[str, Any] = field(default_factory=dict)

    @property
    def compute(self) -> str:
        """Returns the compute dtype."""
        return self.sharding.get("param_dtype", "float32")

    def words(self, num_steps: int) -> dict[str, Any]:
        """Returns the arguments of `fullshard train`."""
        return {
            "model.config": json.dumps({"max_position_embeddings": self.length, **self.model}),
            "sharding.strategy": self.strategy,
            "sharding.activation_checkpointing": self.recompute,
            **{f"sharding.{key}": value for key, value in self.sharding.items()},
            "training.per_device_train_batch_size": self.batch,
            "training.gradient_accumulation_steps": self.accumulation,
            "training.max_seq_length": self.length,
            "training.max_steps": num_steps,
            "training.learning_rate": 1e-3,
            "training.save_strategy": "no",
            "training.eval_strategy": "no",
            "launch.num_processes": self.num_ranks,
        }

    def config(self) -> RunConfig:
        """Returns the configuration of the run."""
        words = self.words(WARM_UP + 1).items()
        return load_config(None, [f"{key}={value}" for key, value in words]).config


def _llama(width: int, inner: int, depth: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {
        **{"vocab_size": 512, "hidden_size": width, "intermediate_size": inner},
        **{"num_hidden_layers": depth, "num_attention_heads": heads, "num_key_value_heads": heads},
    }
    return {"model_type": "llama", "tie_word_embeddings": False, **sizes, **more}


def _gpt2(width: int, depth: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 512, "n_embd": width, "n_layer": depth, "n_head": heads}
    return {
        "model_type": "gpt2",
        **sizes,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        **more,
    }


CASES = (
    TimedCase("llama 384 x 6", 1, _llama(384, 1024, 6, 6), 4, 192),
    TimedCase("gpt2 256 x 8", 1, _gpt2(256, 8, 8), 8, 128, recompute="block"),
    TimedCase("llama 320 x 4", 2, _llama(320, 896, 4, 5), 6, 160),
    TimedCase("llama 512 x 8", 2, _llama(512, 1376, 8, 8, num_key_value_heads=2), 2, 256),
    TimedCase("gpt2 448 x 5", 2, _gpt2(448, 5, 7), 4, 224, "shard_grad_op"),
    TimedCase("llama 256 x 12", 2, _llama(256, 704, 12, 4), 3, 320, recompute="block"),
    TimedCase("qwen2 384 x 5", 2, _llama(384, 960, 5, 6, model_type="qwen2"), 4, 128, "no_shard"),
    TimedCase(
        "llama 640 x 4, direct",
        2,
        _llama(640, 1728, 4, 10),
        1,
        384,
        sharding={"transport": "direct"},
    ),
    TimedCase(
        "llama 384 x 8, bf16",
        2,
        _llama(384, 1024, 8, 6),
        4,
        192,
        "shard_grad_op",
        accumulation=2,
        sharding={"param_dtype": "bfloat16"},
    ),
    TimedCase("llama 256 x 5", 4, _llama(256, 640, 5, 4), 2, 128),
)


def find_cases(names: Sequence[str]) -> list[TimedCase]:
    """Returns the cases with these names; all if none is given.

    Raises:
        ConfigError: One is unknown.
    """
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise ConfigError(f"--case: expected one of {'; '.join(known)}; got {name!r}.")
    return [known[name] for name in names] or list(CASES)


def planned(case: TimedCase, calibration: Calibration) -> Outlook:
    """Returns the step time of `fullshard plan --calibration`."""
    from fullshard.planner.mesh import Topology
    from fullshard.run.outlook import look_at, transport_here

    config = case.config()
    sharding = transport_here(config.sharding, Topology(case.num_ranks))
    config = config.model_copy(update={"sharding": sharding})
    return look_at(config, case.num_ranks, Machine(None, None, calibration))


def measured(case: TimedCase, num_steps: int, folder: Path) -> list[float]:
    """Returns the seconds of a run's steps, without the first ones."""
    from fullshard.observe.metrics import read_rows
    from fullshard.train import train

    words = {**case.words(num_steps), "training.output_dir": str(folder)}
    words.pop("training.max_steps")
    found = train(words, num_steps)
    rows = read_rows(Path(found["run_dir"]) / "metrics.jsonl")
    return [row["step_time_s"] for row in rows if "loss" in row][WARM_UP:]


@dataclass(frozen=True)
class Options:
    """Settings of the measurement."""

    num_steps: int = 20
    wait: bool = False


def run(
    cases: Sequence[TimedCase],
    calibration: Calibration,
    options: Options,
    *,
    command: str,
    say: Callable[[str], None],
) -> Page:
    """Plans and measures every case."""
    rows: list[dict[str, Any]] = []
    measured_beside = Neighbours(wait=options.wait, say=say)
    with measured_beside as neighbours, tempfile.TemporaryDirectory(prefix="bench-time-") as folder:
        for at, case in enumerate(cases):
            outlook = planned(case, calibration)
            if outlook.times is None:
                raise ConfigError(
                    f"calibration: expected {case.num_ranks} ranks among those measured; got "
                    f"{', '.join(map(str, calibration.hosts))}. Measure them: fullshard bench "
                    f"calibrate --ranks {case.num_ranks}."
                )
            steps = measured(case, options.num_steps, Path(folder) / str(at))
            rows.append(_row(case, outlook, steps))
            row = rows[-1]
            say(f"{case.name}: {1e3 * row['planned_s']:.0f} ms planned, {row['error']:+.1%}")
    return Page(
        "time",
        "Planned and measured step times",
        command,
        rows,
        COLUMNS,
        [_cells(row) for row in rows],
        METHOD,
        neighbours,
        notes=(summary([row["error"] for row in rows]),),
    )


def _row(case: TimedCase, outlook: Outlook, steps: Sequence[float]) -> dict[str, Any]:
    assert outlook.times is not None, "the caller has looked"
    taken = statistics.median(steps)
    return {
        **{key: value for key, value in asdict(case).items() if key != "model"},
        "model": case.model,
        "compute": case.compute,
        "planned_s": outlook.times.step,
        "measured_s": taken,
        "num_steps": len(steps),
        "spread_s": [min(steps), max(steps)],
        "parts_s": {name: seconds for name, seconds in asdict(outlook.times).items() if seconds},
        "error": outlook.times.step / taken - 1,
    }


def summary(errors: Sequence[float]) -> str:
    """Returns the errors in one line."""
    sizes = sorted(abs(error) for error in errors)
    within = sum(size <= GOAL for size in sizes)
    return (
        f"{len(sizes)} runs: median error {statistics.median(sizes):.1%}, largest "
        f"{sizes[-1]:.1%}; {within} of them within {GOAL:.0%}."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    times = f" x {row['accumulation']}" if row["accumulation"] > 1 else ""
    return (
        row["name"],
        str(row["num_ranks"]),
        row["strategy"],
        row["recompute"],
        row["compute"],
        f"{row['batch']} x {row['length']}{times}",
        f"{1e3 * row['planned_s']:.1f}",
        f"{1e3 * row['measured_s']:.1f}",
        f"{row['error']:+.1%}",
    )


def main(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Name of a run; repeatable. Default: all ten."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="File written by bench calibrate. Default: its default path."),
    ] = None,
    steps: Annotated[int, typer.Option(min=5, help="Updates per run.")] = 20,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Compare the planned step time with the measured one."""
    from fullshard.config.environment import cache_folder
    from fullshard.outlook.devices import CALIBRATION_FILE, read_calibration

    cases = find_cases(case or ())
    known = read_calibration(calibration or cache_folder() / CALIBRATION_FILE)
    options, command = Options(steps, wait), command_line(NAME)
    return show(run(cases, known, options, command=command, say=say), out)


if __name__ == "__main__":
    run_script(NAME)
