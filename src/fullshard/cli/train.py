"""`fullshard train`: pretraining from a configuration, or the main job without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fullshard.cli.outcome import Outcome, launch_outcome
from fullshard.cli.words import OPEN_WORDS, ConfigFlag, DryRunFlag, JsonFlag, Words, load
from fullshard.errors import ConfigError, FullshardError

if TYPE_CHECKING:
    from fullshard.config.environment import LaunchEnvironment
    from fullshard.config.load import Resolved
    from fullshard.train.start import CheckedRun

app = typer.Typer(
    help="Train a causal language model on text.",
)

COMMAND = "train"
FLAGS = ("--config", "--dry-run", "--json", "--max-restarts", "--resume")


@app.command(context_settings=OPEN_WORDS)
def train(
    words: Words = None,
    config: ConfigFlag = None,
    resume: Annotated[str, typer.Option(help="never, auto or a checkpoint's path.")] = "auto",
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", "--max_restarts", help="How often to go on by itself.")
    ] = 0,
    as_json: JsonFlag = False,  # noqa: ARG001  read by cli.app
    dry_run: DryRunFlag = False,
) -> Outcome:
    """Train a model; without a configuration file, the main job.

    The main job trains a small Llama on the text of Python's language reference, on two local
    ranks, in two or three minutes. --NAME VALUE is training.NAME=VALUE; torchrun's flags may stand
    behind `--`: fullshard train CONFIG -- --nproc-per-node 4.
    """
    from fullshard.config.environment import read_launch_environment
    from fullshard.train import start

    if resume not in ("auto", "never"):
        raise ConfigError(
            f"--resume: expected auto or never, got '{resume}'; a checkpoint's path is not yet "
            "supported. Leave it out."
        )
    if max_restarts:
        raise ConfigError(
            f"--max-restarts: expected 0, got {max_restarts}; a run that goes on by itself needs "
            "checkpoints, which are not yet supported. Leave it out."
        )
    launch = read_launch_environment()
    resolved = load(words, config, flags=FLAGS)
    resolved.check_supported(launch=launch)
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
