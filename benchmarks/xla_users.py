"""`python -m benchmarks.xla_users`: models of other libraries, ours and auto-sharded `jit`.

full_shard, shard_grad_op   `fullshard.jax.train_step` on eight devices of one process
auto                        the same sharded arrays and the same loss under `jax.jit` only:
                            XLA's partitioner chooses the collectives

With `--topology 8xH100-80GB` the steps are compiled for GPUs, which need not be installed, and only
their collectives are compared. The models are larger ones of tests/support/user_models.py.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import fullshard.jax as fj
from benchmarks.command import JsonFlag, command_line, run_script
from fullshard.bench.measurement import Estimate, Neighbours, Page, paired_ratio
from fullshard.cli.bench import OutFlag, WaitFlag, say, show
from fullshard.cli.outcome import Outcome
from fullshard.launch.machine import describe_versions
from fullshard.planner.arrays import Collectives
from fullshard.xla import aot
from fullshard.xla.opt_state import merged, opt_shardings, trained
from fullshard.xla.plan import XlaPlan, make_mesh
from fullshard.xla.step import State

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import user_models  # pyright: ignore[reportMissingImports]

NAME = "benchmarks.xla_users"
NUM_DEVICES, SAMPLES, WIDTH, LAYERS = 8, 1024, 64, 6
MODELS = [name for name in user_models.MODELS if name != "mixed"]  # the CNN in bfloat16
STRATEGIES = ("full_shard", "shard_grad_op")
AUTO = "auto"
LOSS_TOLERANCE = 2e-4
METHOD = (
    f"{SAMPLES} samples, blocks of width {WIDTH} and {LAYERS} layers, float32, AdamW. "
    "auto has the plan's shardings for parameters and optimizer state, samples "
    "over the devices, activations pinned to them between blocks, and `lax.scan` over the blocks.",
    "Both steps return the loss and the norm of the gradients.",
    "Dropout and noise differ between the engines, since keys are drawn per device; the losses of "
    f"the other models must agree within {LOSS_TOLERANCE:g}.",
    "Collectives are those of the compiled programs, one per tensor, with loops multiplied; bytes "
    "are those of full tensors.",
)


def normal(at: int, *shape: int) -> jax.Array:
    """Returns weights scaled to keep activations near one at this width."""
    return jax.random.normal(jax.random.key(at), shape) / math.sqrt(shape[-2:][0])


def auto_step(model: Any, plan: XlaPlan, tx: Any) -> Any:
    """Returns a jitted step, (state, batch, rng) -> (state, metrics), without a plan."""
    samples = NamedSharding(plan.mesh, PartitionSpec(user_models.AXES))

    def pin(leaf: jax.Array) -> jax.Array:
        is_samples = leaf.ndim > 1 and leaf.shape[0] == SAMPLES
        return lax.with_sharding_constraint(leaf, samples) if is_samples else leaf

    def scan(block: Any, x: Any, stacked: Any, inputs: Any = None) -> Any:
        def turn(x: Any, layer: Any) -> tuple[Any, None]:
            found = block(layer[0], x) if inputs is None else block(layer[0], x, layer[1])
            return jax.tree.map(pin, found), None

        return lax.scan(turn, jax.tree.map(pin, x), (stacked, inputs))[0]

    loss_fn = model.loss(scan, None)

    def loss(mine: Any, params: Any, batch: Any, more: dict[str, Any]) -> Any:
        total, count, *others = loss_fn(merged(plan, params, mine), batch, **more)
        return total / count, others[1] if len(others) > 1 else None

    def run(state: State, batch: Any, rng: Any) -> tuple[State, dict[str, Any]]:
        more = {"rng": rng} if model.has_rng else {}
        more |= {} if state.variables is None else {"variables": state.variables}
        mine = trained(plan, state.params)
        found = jax.value_and_grad(loss, has_aux=True)(mine, state.params, batch, more)
        (value, variables), grads = found
        updates, opt_state = tx.update(grads, state.opt_state, mine)
        params = merged(plan, state.params, optax.apply_updates(mine, updates))
        metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
        return State(params, opt_state, state.step + 1, plan, variables), metrics

    whole = plan.replicated
    lies = State(plan.shardings, opt_shardings(plan, tx), whole, plan, whole)
    return jax.jit(run, donate_argnums=0, out_shardings=(lies, whole))


class Trainee:
    """A model with the engine that trains it.

    Attributes:
        plan: Plan of its arrays.
        compile: Shapes or arrays of (state, batch) -> the compiled step.
    """

    def __init__(self, name: str, engine: str, mesh: Any) -> None:
        model, tx = user_models.MODELS[name](), optax.adamw(1e-3)
        strategy = "full_shard" if engine == AUTO else engine
        self.plan = plan = fj.plan(
            model.params, {"strategy": strategy}, mesh, blocks=model.blocks, freeze=model.freeze
        )
        self._model, self._tx, self._engine = model, tx, engine
        self._more = {"rng": jax.random.key(7)} if model.has_rng else {}

        def scan(block: Any, x: Any, stacked: Any, **inputs: Any) -> Any:
            return fj.scan_blocks(block, x, stacked, plan, **inputs)

        if engine == AUTO:
            step, key = auto_step(model, plan, tx), jax.random.key(7)
            self._step = lambda state, batch: step(state, batch, key)
            self.compile: Any = lambda *given: step.lower(*given, key).compile(_options(mesh))
        else:
            ours = fj.train_step(plan, model.loss(scan, user_models.AXES), tx)
            self._step = lambda state, batch: ours(state, batch, **self._more)
            self.compile = lambda *given: ours.compile(
                *given, compiler_options=_options(mesh), **self._more
            )

    def start(self) -> None:
        """Places the parameters, and compiles by running a first step."""
        self._state = fj.shard(self.plan, self._model.params, self._tx, self._model.variables)
        self.batch = jax.device_put(user_models.images(0), self.plan.batch_sharding())
        self.losses = [self.step()[2] for _ in range(3)]

    def step(self) -> tuple[float, float, float]:
        """Runs a step; returns its time and its processor time in seconds, and its loss."""
        began = time.perf_counter(), time.process_time()
        self._state, metrics = self._step(self._state, self.batch)
        jax.block_until_ready(self._state)
        wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
        return wall_s, cpu_s, float(metrics["loss"])

    def collectives(self) -> dict[str, Collectives]:
        """Returns the collectives of the compiled step."""
        state = aot.abstract_state(self.plan, self._tx)
        variables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.plan.replicated),
            self._model.variables,
        )
        state = State(state.params, state.opt_state, state.step, self.plan, variables)
        batch = {
            name: jax.ShapeDtypeStruct(
                x.shape, jnp.result_type(x), sharding=self.plan.batch_sharding()
            )
            for name, x in user_models.images(0).items()
        }
        return fj.census(self.compile(state, batch))


def _options(mesh: Any) -> dict[str, Any]:
    return aot.compiler_options(list(mesh.devices.flat))


def measure(names: Sequence[str], engines: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    """Measures all engines on each model, in turn."""
    rows: list[dict[str, Any]] = []
    mesh = make_mesh(1, NUM_DEVICES)
    for name in names:
        trainees = {engine: Trainee(name, engine, mesh) for engine in engines}
        moved = {engine: one.collectives() for engine, one in trainees.items()}
        times: dict[str, list[tuple[float, float]]] = {engine: [] for engine in engines}
        for one in trainees.values():
            one.start()
        for at in range(rounds):
            turn = at % len(engines)
            for engine in (*engines[turn:], *engines[:turn]):
                times[engine].append(trainees[engine].step()[:2])
        losses = {engine: one.losses for engine, one in trainees.items()}
        rows.append(row_of(name, moved, times, losses))
        say(f"{name}: {rows[-1]['ratios']}")
    return rows


def row_of(
    name: str,
    moved: Mapping[str, Mapping[str, Collectives]],
    times: Mapping[str, list[tuple[float, float]]],
    losses: Mapping[str, list[float]],
) -> dict[str, Any]:
    """Returns one row of the results."""
    counted = {
        engine: {kind: [c.count, c.num_bytes] for kind, c in found.items()}
        for engine, found in moved.items()
    }
    ratios = {
        engine: {
            what: paired_ratio(
                [t[at] for t in times[engine]], [t[at] for t in times[AUTO]]
            ).to_dict()
            for at, what in enumerate(("time", "cpu"))
        }
        for engine in times
        if engine != AUTO
    }
    apart = {
        engine: max(abs(a - b) for a, b in zip(found, losses[AUTO], strict=True))
        for engine, found in losses.items()
    }
    step_s = {engine: median(found)[0] for engine, found in times.items()}
    return {"name": name, "step_s": step_s, "ratios": ratios, "apart": apart, "moved": counted}


def total(found: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Returns the number and bytes of all collectives."""
    return sum(c[0] for c in found.values()), sum(c[1] for c in found.values())


def cells_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns one row of the page."""
    cells = [row["name"]]
    if row["step_s"]:
        cells.append(f"{row['step_s'][AUTO] * 1e3:.1f}")
        ratios = [row["ratios"][engine][what] for engine in STRATEGIES for what in ("time", "cpu")]
        cells += [str(Estimate(**ratio)) for ratio in ratios]
    for engine in (AUTO, *STRATEGIES):
        count, num_bytes = total(row["moved"][engine])
        cells.append(f"{count:,}, {num_bytes / 1e6:.2f} MB")
    return tuple(cells)


def notes_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns sentences about the goals."""
    notes: list[str] = []
    for engine in STRATEGIES:
        timed = [row for row in rows if row["step_s"]]
        for what, name in (("time", "step"), ("cpu", "processor time")) * bool(timed):
            found = {row["name"]: row["ratios"][engine][what]["value"] for row in timed}
            above = ", ".join(name for name, value in found.items() if value > 1) or "none"
            ratio = median(found.values())
            notes.append(
                f"{engine}: {ratio:.3f} of auto's {name} in the median (above 1.0: {above})."
            )
        for at, what in enumerate(("collectives", "bytes")):
            pairs = {
                row["name"]: (total(row["moved"][engine])[at], total(row["moved"][AUTO])[at])
                for row in rows
            }
            more = [f"{name} ({a / b:.2f})" for name, (a, b) in pairs.items() if a > b]
            said = f"more than auto's: {', '.join(more)}" if more else "none above auto's"
            ratio = median(a / b for a, b in pairs.values())
            notes.append(f"{engine}: {ratio:.2f} of auto's {what} in the median ({said}).")
    far = [
        f"{row['name']} under {engine} ({apart:.1e})"
        for row in rows
        if not user_models.MODELS[row["name"]]().has_rng
        for engine, apart in row["apart"].items()
        if not apart <= LOSS_TOLERANCE
    ]
    return [*notes, *([f"Losses differ: {', '.join(far)}."] if far else [])]


def main(
    topology: Annotated[str | None, typer.Option(help="8xH100-80GB. Default: CPUs, timed.")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Timed steps per engine.")] = 15,
    only: Annotated[list[str] | None, typer.Option(help="Model; repeatable. Default: all.")] = None,
    wait: WaitFlag = False,
    out: OutFlag = None,
    as_json: JsonFlag = False,  # noqa: ARG001  read by run_script
) -> Outcome:
    """Compare steps of user models with auto-sharded jit."""
    warnings.filterwarnings("ignore", "Explicitly requested dtype")  # float32 models
    names, engines = only or MODELS, (*STRATEGIES, AUTO)
    user_models.SAMPLES, user_models.WIDTH, user_models.LAYERS = SAMPLES, WIDTH, LAYERS
    user_models.normal = normal
    devices = aot.devices_of(topology, NUM_DEVICES)
    timed: Callable[..., Any] = measure
    with Neighbours(wait=wait, say=say) as neighbours:
        if topology is None:
            rows = timed(names, engines, rounds)
        else:
            mesh = make_mesh(1, len(devices), devices=devices)
            rows = []
            for name in names:
                moved = {engine: Trainee(name, engine, mesh).collectives() for engine in engines}
                rows.append(row_of(name, moved, {}, {}))
    where = (
        []
        if topology
        else [
            "auto, ms",
            *(f"{s} to auto{cpu} [95 %]" for s in STRATEGIES for cpu in ("", ", CPU")),
        ]
    )
    page = Page(
        name="jax_users" if topology is None else "jax_users_gpu",
        title="Models of other libraries beside auto-sharded jit",
        command=command_line(NAME),
        rows=rows,
        columns=["model", *where, *(f"{engine}: collectives" for engine in (AUTO, *STRATEGIES))],
        cells=[cells_of(row) for row in rows],
        method=METHOD,
        neighbours=neighbours,
        notes=notes_of(rows),
        versions=describe_versions(("fullshard", "jax", "jaxlib", "flax", "equinox", "optax")),
    )
    return show(page, out)


if __name__ == "__main__":
    run_script(NAME)
