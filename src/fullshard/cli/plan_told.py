"""What `fullshard plan` says: a table for people, one object for programs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from fullshard.outlook.devices import Gpus
    from fullshard.outlook.predict import Outlook
    from fullshard.outlook.search import Study
    from fullshard.run.outlook import Lack


def to_dict(study: Study) -> dict[str, Any]:
    """What --json prints."""
    from fullshard.outlook.memory import checkpoint_bytes

    reserve = study.outlook.overhead()
    cached = sum(one.num_bytes for one in reserve if one.is_cached)
    outlook, made = study.outlook, study.outlook.plan
    return {
        "fits": outlook.fit,
        "peak_bytes": dict(outlook.peak_bytes),
        "reserved_bytes": max(outlook.reserved_bytes, outlook.peak_bytes["device"] + cached),
        "step_time_s": outlook.step_time_s,
        "rows": [{"name": row.name, "bytes": row.num_bytes} for row in outlook.rows],
        "advice": [
            {
                "changes": one.changes,
                "text": one.sentence(outlook),
                "fits": one.outlook.fit,
                "peak_bytes": one.outlook.peak_bytes["device"],
                "step_time_s": one.outlook.step_time_s,
            }
            for one in study.advice
        ],
        "reserve": [{"name": one.name, "bytes": one.num_bytes, "why": one.why} for one in reserve],
        "phases": [dataclasses.asdict(one) for one in outlook.phases(study.storage)],
        "checkpoint_bytes": checkpoint_bytes(made),
        "scaling": [dataclasses.asdict(point) for point in study.scaling],
        "memory_bytes": study.outlook.machine.memory_bytes,
        "plan": {
            "model": made.model_kind,
            "num_parameters": made.num_parameters,
            "strategy": made.strategy,
            "per_device_train_batch_size": round(outlook.job.batch.micro_batch),
            "gradient_accumulation_steps": round(outlook.job.batch.accumulation),
            "mesh": {"replicate": made.mesh.replicate, "shard": made.mesh.shard},
            "digest": made.digest(),
            "units": [
                {
                    "name": unit.name,
                    "kind": unit.kind,
                    "role": unit.role,
                    "numel": unit.numel,
                    "padding": unit.padding,
                    "trainable": unit.trainable,
                }
                for unit in made.units
            ],
        },
    }


def print_plan(study: Study, hardware: Gpus | None, lack: Lack | None) -> None:
    """What people read."""
    from fullshard.outlook.memory import Fit
    from fullshard.planner.text import human_bytes

    outlook = study.outlook
    print(outlook.plan.tree().partition("\nmemory of a rank")[0])
    _print_memory(outlook)
    how = "traced on the model" if outlook.is_traced else "counted from shapes"
    print(
        f"Activations, logits and gradients on their way are {how}, libraries' workspaces are "
        "estimated; everything else is exact."
    )
    _print_reserve(study)
    _print_phases(study)
    if outlook.step_time_s is not None and outlook.tokens_per_s is not None:
        how = ", as this machine was calibrated" if outlook.is_calibrated else ""
        speed = f"{outlook.tokens_per_s:,.0f} tokens a second"
        print(f"{outlook.step_time_s:.3g} s a step, {speed}{how}.")
    memory = study.outlook.machine.memory_bytes
    name = "a rank's part of this machine" if hardware is None else hardware.name or "GPU"
    if lack is not None:
        sentence = Fit.NO.sentence(lack.needed, lack.memory)
        print(f"{name} ({human_bytes(lack.memory)}): {sentence}")
    elif outlook.fit is not None and memory is not None:
        sentence = outlook.fit.sentence(outlook.peak_bytes["device"], memory)
        print(f"{name} ({human_bytes(memory)}): {sentence}")
    if hardware is not None and hardware.name and study.outlook.machine.device is None:
        print(f"{hardware.name}: its speed is not known. Describe it in a file (--devices).")
    for one in study.advice:
        print(f"  {one.sentence(outlook)}")


def _print_memory(outlook: Outlook) -> None:
    from fullshard.planner.text import human_bytes

    totals = {place: size for place, size in outlook.peak_bytes.items() if size}
    is_split = len(totals) > 1  # offloaded
    table = _table("memory of the largest rank", "name", "bytes", "", *(["where"] * is_split))
    for row in outlook.rows:
        where = [row.place] if is_split else []
        table.add_row(row.name, f"{row.num_bytes:,}", human_bytes(row.num_bytes), *where)
    table.add_section()
    for place, size in totals.items():
        table.add_row("together", f"{size:,}", human_bytes(size), *([place] if is_split else []))
    _show(table)


def _print_reserve(study: Study) -> None:
    from fullshard.planner.text import human_bytes

    rows = study.outlook.overhead()
    if not rows:
        return
    table = _table("held beside it (estimates)", "name", "", "why")
    for row in rows:
        table.add_row(row.name, human_bytes(row.num_bytes), row.why)
    _show(table)


def _print_phases(study: Study) -> None:
    from fullshard.outlook.memory import checkpoint_bytes
    from fullshard.planner.text import human_bytes

    phases = study.outlook.phases(study.storage)
    places = [
        place for place in ("device", "host", "disk") if any(getattr(one, place) for one in phases)
    ]
    table = _table("the most in each phase", "phase", *places)
    for one in phases:
        table.add_row(one.name, *(human_bytes(getattr(one, place)) for place in places))
    _show(table)
    size = checkpoint_bytes(study.outlook.plan)
    kept, told = study.storage.keep, f"A checkpoint takes {human_bytes(size)} of disk"
    if kept is not None:
        told += (
            f"; the {kept} that are kept {human_bytes(kept * size)}, and "
            f"{human_bytes((kept + 1) * size)} while one more is written"
        )
    print(f"{told}.")


def _table(title: str, *columns: str) -> Table:
    """Columns of numbers but for the first, `where` and `why`."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    lines = box.HEAVY_HEAD if Console().is_terminal else None
    table = Table(title=title, title_justify="left", box=lines)
    for at, column in enumerate(columns):
        is_word = at == 0 or column in ("where", "why")
        table.add_column(column, justify="left" if is_word else "right")
    return table


def _show(table: Table) -> None:
    from rich.console import Console

    Console(soft_wrap=True).print(table)


def print_choice(outlook: Outlook) -> None:
    """What stands for `auto`."""
    batch = outlook.job.batch
    print(
        f"auto is strategy={outlook.config.strategy} "
        f"per_device_train_batch_size={batch.micro_batch:.12g} "
        f"gradient_accumulation_steps={batch.accumulation:.12g} here."
    )
