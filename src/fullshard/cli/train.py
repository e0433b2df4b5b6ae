"""`fullshard train`: pretraining from a configuration, or the main job without one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.outcome import Outcome, launch_outcome
from fullshard.errors import ConfigError, FullshardError

if TYPE_CHECKING:
    from fullshard.config.environment import LaunchEnvironment
    from fullshard.config.load import Resolved
    from fullshard.train.start import CheckedRun

app = typer.Typer(
    help="Train a causal language model on text.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)

COMMAND = "train"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    resume: Annotated[str, typer.Option(help="never, auto or a checkpoint's path.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,  # noqa: ARG001  read by cli.app
    dry_run: Annotated[bool, typer.Option(help="Check everything, show the plan, stop.")] = False,
) -> Outcome:
    """[CONFIG.yaml] [KEY=VALUE ...]: trains; without a file, the main job.

    The main job trains a small Llama on the text of Python's language reference, on two local
    ranks, in two or three minutes. --NAME VALUE is training.NAME=VALUE.
    """
    from fullshard.config.environment import read_launch_environment
    from fullshard.train import start

    if resume not in ("auto", "never"):
        raise ConfigError(
            f"--resume: expected auto or never, got '{resume}'; a checkpoint's path is not yet "
            "supported. Leave it out."
        )
    launch = read_launch_environment()
    resolved = _resolve(context.args, launch)
    world_size = start.world_size_of(resolved, launch)
    if launch is not None and not dry_run:
        return _be_a_rank(resolved, launch)
    checked = start.check(resolved, world_size, COMMAND)
    if dry_run:
        return _show_plan(checked)
    folder, moved = start.make_folder(checked, COMMAND)
    if moved is not None:
        print(f"the older run in {folder.path} is now in {moved}")
    local, result = start.start_ranks(folder, world_size, resolved.config.launch.timeout)
    return launch_outcome(local, result, run_dir=folder.path, **folder.read_record())


def _resolve(words: list[str], launch: LaunchEnvironment | None) -> Resolved:
    """The configuration that a command line means."""
    from fullshard.config.load import load_config
    from fullshard.config.overrides import overrides_from_args

    path = None
    if words and not words[0].startswith("-") and ("=" not in words[0] or Path(words[0]).exists()):
        path, words = Path(words[0]), words[1:]
    resolved = load_config(path, overrides_from_args(words))
    resolved.check_supported(launch=launch)
    return resolved


def _be_a_rank(resolved: Resolved, launch: LaunchEnvironment) -> Outcome:
    """Under torchrun or srun: rank 0 prepares while the others wait for it at the rendezvous."""
    from fullshard.launch.rank_entry import run_rank
    from fullshard.observe.report import write_report
    from fullshard.train import start
    from fullshard.train.pretrain import run
    from fullshard.train.run_folder import RunFolder

    folder = RunFolder(start.output_dir_of(resolved, COMMAND))

    def main() -> None:
        if launch.rank == 0:
            checked = start.check(resolved, launch.world_size, COMMAND)
            start.make_folder(checked, COMMAND)
        try:
            run(resolved.config, folder.path)
        except FullshardError:
            if launch.rank == 0 and folder.record.is_file():
                write_report(folder.path)
            raise

    run_rank(main)
    if launch.rank != 0:
        return Outcome()
    return Outcome({"run_dir": folder.path, **folder.read_record()})


def _show_plan(checked: CheckedRun) -> Outcome:
    """What would be run."""
    from fullshard.train.result import planned

    facts = checked.prepared.dataset.facts
    print(f"would train into {checked.output_dir}")
    print(
        f"data: {facts.origin}: {facts.num_train_tokens:,} tokens to train on, "
        f"{facts.num_held_out_tokens:,} held out"
    )
    if facts.baseline is not None:
        print(f"interpolated bigram: {facts.baseline.nats:.4f} nats a token")
    print(checked.plan.tree())
    return Outcome(
        {"run_dir": checked.output_dir, "planned": planned(checked.plan, checked.prepared.steps)}
    )
