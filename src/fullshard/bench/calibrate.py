"""`fullshard bench calibrate`: what this machine reaches, for `fullshard plan` to count with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fullshard.bench.machine import IDLE_SHARE, Neighbours, wait_until_idle
from fullshard.bench.ranks import run_ranks
from fullshard.bench.step import WAIT_LIMIT_S
from fullshard.config.load import load_config
from fullshard.config.schema import RunConfig
from fullshard.launch.machine import describe_machine, describe_versions
from fullshard.outlook.calibration import Calibration, Ceilings, Host, Table, to_json

if TYPE_CHECKING:
    from fullshard.bench.ceilings import Sizes
    from fullshard.planner.plan import Plan
    from fullshard.planner.tracing import Work

MEASURE = "fullshard.bench.calibrate_rank:measure"
DEFAULT_RANKS = (1, 2, 4)
DEPTHS = (2, 6)  # blocks of the tiny models that show the host's time


@dataclass(frozen=True)
class Job:
    """What the ranks measure.

    Attributes:
        is_tiny: Few small sizes, which show only that it runs.
        has_kernels: Whether kernels and the host are measured, too.
        depths: Depths of the tiny models.
    """

    is_tiny: bool = False
    has_kernels: bool = True
    depths: tuple[int, ...] = DEPTHS

    @property
    def sizes(self) -> Sizes:
        """Of the tables."""
        from fullshard.bench.ceilings import TINY, Sizes

        return TINY if self.is_tiny else Sizes()


@dataclass(frozen=True)
class Options:
    """How to measure."""

    ranks: tuple[int, ...] = DEFAULT_RANKS
    is_tiny: bool = False
    wait: bool = False
    timeout_s: float = 3600.0


@dataclass(frozen=True)
class Found:
    """What was measured, and how busy others were meanwhile."""

    calibration: Calibration
    others_share: float
    became_idle: bool

    def to_json(self, command: str) -> str:
        """The file that `fullshard plan` reads."""
        about = {
            "versions": describe_versions(("fullshard", "torch")),
            "others_share": round(self.others_share, 3),
            "command": command,
        }
        return to_json(self.calibration, about)


def to_dict(found: Found) -> dict[str, object]:
    """What `--json` prints: the highest rate of products, and what the host takes."""
    rows = [
        {
            "num_ranks": num_ranks,
            **{f"matmul_{dtype}_flops": _best(host, dtype) for dtype in ("float32", "bfloat16")},
            **{f"host_{name}": getattr(host.host, name) for name in Host.__slots__},
        }
        for num_ranks, host in found.calibration.hosts.items()
    ]
    return {"rows": rows, "absent": [], "others_share": found.others_share}


def _best(host: Ceilings, dtype: str) -> float:
    points = host.operations[f"matmul nn {dtype}"].points
    return max(2 * prod(size) / seconds for size, seconds in points)


def told(found: Found) -> str:
    """The same in a few lines."""
    lines = [
        f"{num_ranks} rank(s), each: products at {_best(host, 'float32') / 1e9:.1f} (float32) and "
        f"{_best(host, 'bfloat16') / 1e9:.1f} (bfloat16) GFLOP/s; beside kernels "
        f"{1e6 * host.host.forward_s:.1f} us an operation of forward, "
        f"{1e6 * host.host.backward_s:.1f} us of backward, {1e6 * host.host.unit_s:.0f} us a unit"
        for num_ranks, host in found.calibration.hosts.items()
    ]
    busy = "LOADED" if found.others_share >= IDLE_SHARE or not found.became_idle else "idle"
    lines.append(f"Other processes used {found.others_share:.0%} of the cores meanwhile: {busy}.")
    return "\n".join(lines)


def run(options: Options, say: Callable[[str], None]) -> Found:
    """Measures with every number of ranks.

    Raises:
        FullshardError: a rank failed; its own error has been shown.
    """
    became_idle = wait_until_idle(WAIT_LIMIT_S, say) if options.wait else True
    machine = describe_machine()
    cores = Calibration(machine, {}).cores
    asked = dict.fromkeys(options.ranks)
    at_work = sorted({min(num_ranks, cores) for num_ranks in asked})
    found: dict[int, Ceilings] = {}
    with Neighbours() as neighbours:
        for num_ranks in [*at_work, *sorted(set(asked) - set(at_work))]:
            has_kernels = num_ranks in at_work
            say(f"{num_ranks} rank(s): {'kernels, the host, ' * has_kernels}messages")
            job = Job(options.is_tiny, has_kernels)
            what = f"bench calibrate: {num_ranks} ranks"
            ranks = run_ranks(MEASURE, job, num_ranks, what=what, timeout_s=options.timeout_s)
            if has_kernels:
                found[num_ranks] = _ceilings(num_ranks, ranks, machine)
            else:
                transfers = _tables([rank["transfers"] for rank in ranks])
                found[num_ranks] = crowded(found[cores], num_ranks, transfers)
    hosts = {num_ranks: found[num_ranks] for num_ranks in asked}
    return Found(Calibration(machine, hosts), neighbours.share, became_idle)


def crowded(whole: Ceilings, num_ranks: int, transfers: Mapping[str, Table]) -> Ceilings:
    """Of more ranks than cores: each takes the turns of those that share its core.

    Args:
        whole: Measured with one rank per core.
        num_ranks: More than that.
        transfers: As they were measured with so many.
    """
    crowd = num_ranks / whole.num_ranks
    operations = {
        name: Table(tuple((size, crowd * seconds) for size, seconds in table.points))
        for name, table in whole.operations.items()
    }
    host = Host(**{name: crowd * getattr(whole.host, name) for name in Host.__slots__})
    return Ceilings(num_ranks, operations, transfers, host)


def _ceilings(
    num_ranks: int, ranks: Sequence[dict[str, Any]], machine: Mapping[str, object]
) -> Ceilings:
    kernels = _tables([rank["operations"] for rank in ranks])
    messages = _tables([rank["transfers"] for rank in ranks])
    host = {name: fmean(rank["host"][name] for rank in ranks) for name in ranks[0]["host"]}
    bare = Ceilings(num_ranks, kernels, messages, Host())
    return replace(bare, host=host_of(bare, host, machine))


def _tables(ranks: Sequence[Mapping[str, list[Any]]]) -> dict[str, Table]:
    """The mean of the ranks, which are alike; a step waits for the slower one of a moment."""
    return {
        name: Table(
            tuple(
                (tuple(size), fmean(rank[name][at][1] for rank in ranks))
                for at, (size, _) in enumerate(points)
            )
        )
        for name, points in ranks[0].items()
    }


# ---- the host ------------------------------------------------------------------------------------


def host_config(depth: int) -> RunConfig:
    """A Llama whose kernels take nearly no time."""
    model = {
        **{"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64},
        **{"num_hidden_layers": depth, "num_attention_heads": 2, "num_key_value_heads": 2},
        "max_position_embeddings": 16,
    }
    words = {
        "model.config": json.dumps(model),
        "sharding.strategy": "full_shard",
        "sharding.transport": "fake",
        "training.per_device_train_batch_size": 1,
        "training.max_seq_length": 16,
    }
    return load_config(None, [f"{key}={value}" for key, value in words.items()]).config


def host_of(bare: Ceilings, measured: Mapping[str, float], machine: Mapping[str, object]) -> Host:
    """What is left of a tiny model's time when its kernels' is taken off.

    Args:
        bare: The tables, without a host.
        measured: Seconds of `forward` and `backward` of the deepest model without an engine, and
            of `step 2` ... with one.
        machine: Described.
    """
    from fullshard.outlook.player import step_time

    depths = sorted(int(name.split()[1]) for name in measured if name.startswith("step "))
    _, work = _traced(depths[-1], 1)
    passes = {"forward": 0.0, "backward": 0.0}
    for name in passes:
        found = [getattr(unit, name) for unit in work.values()]
        count = sum(sum(one.values()) for one in found)
        kernels = sum(times * bare.seconds(op) for one in found for op, times in one.items())
        passes[name] = max(0.0, measured[name] - kernels) / count
    host = Host(passes["forward"], passes["backward"])
    calibration = Calibration(machine, {bare.num_ranks: replace(bare, host=host)})
    left, turns = [], []
    for depth in (depths[0], depths[-1]):
        plan, work = _traced(depth, bare.num_ranks)
        counted = step_time(plan, work, calibration)
        assert counted is not None, "these ranks were measured"
        left.append(measured[f"step {depth}"] - counted.times.step)
        turns.append(2 * len(plan.units))
    unit_s = max(0.0, left[1] - left[0]) / (turns[1] - turns[0])
    return replace(host, unit_s=unit_s, step_s=max(0.0, left[0] - turns[0] * unit_s))


def _traced(depth: int, world_size: int) -> tuple[Plan, Work]:
    """The plan of a tiny model on the ranks of a host, and what it computes."""
    from fullshard.outlook.predict import Machine
    from fullshard.run.outlook import look_at

    config = host_config(depth)
    outlook = look_at(config, world_size, Machine(None, None))
    job = outlook.job
    assert job.work is not None, "the model is on meta"
    work = job.work(outlook.plan, config.sharding, job.batch.micro_batch)
    assert work is not None, "a Llama can be traced"
    return outlook.plan, work
