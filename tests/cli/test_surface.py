"""The commands and their options are pinned: a new one is a decision, and is written down here."""

from __future__ import annotations

from typing import Any

import typer

from fullshard.cli.app import app

SURFACE = {
    "": ["--help", "--install-completion", "--json", "--show-completion", "--version"],
    "train": [
        "--config",
        "--config_file",
        "--dry-run",
        "--help",
        "--json",
        "--max-restarts",
        "--max_restarts",
        "--resume",
    ],
    "sft": [
        "--config",
        "--config_file",
        "--dry-run",
        "--help",
        "--json",
        "--max-restarts",
        "--max_restarts",
        "--resume",
    ],
    "distill": [
        "--config",
        "--config_file",
        "--dry-run",
        "--help",
        "--json",
        "--max-restarts",
        "--max_restarts",
        "--resume",
    ],
    "generate": [
        *("--batch-size", "--chat", "--help", "--json", "--max-new-tokens", "--num-processes"),
        *("--prompt", "--prompts", "--repetition-penalty", "--seed", "--temperature", "--top-k"),
        *("--top-p", "--trust-remote-code"),
    ],
    "plan": [
        "--calibration",
        "--config",
        "--config_file",
        "--devices",
        "--exact",
        "--gpus",
        "--help",
        "--json",
        "--nodes",
        "--optimizer-bytes",
        "--out",
        "--table",
        "--topology",
    ],
    "report": ["--help", "--json"],
    "verify": ["--config", "--config_file", "--dry-run", "--help", "--inject", "--json"],
    "bench": ["--help"],
    "bench step": [
        "--case",
        "--dry-run",
        "--engine",
        "--help",
        "--json",
        "--memory",
        "--no-memory",
        "--out",
        "--rounds",
        "--timeout",
        "--wait",
    ],
    "bench strategies": ["--help", "--json", "--max-steps", "--out"],
    "bench prefetch": ["--help", "--json", "--max-steps", "--out"],
    "bench comm": [
        "--help",
        "--json",
        "--mib",
        "--out",
        "--ranks",
        "--rounds",
        "--timeout",
        "--transport",
        "--wait",
    ],
    "bench calibrate": [
        "--help",
        "--json",
        "--out",
        "--ranks",
        "--timeout",
        "--tiny",
        "--wait",
    ],
    "bench io": [
        "--help",
        "--json",
        "--mib",
        "--out",
        "--place",
        "--ranks",
        "--rounds",
        "--timeout",
        "--wait",
    ],
    "ckpt": ["--help"],
    "ckpt ls": ["--help", "--json"],
    "ckpt inspect": ["--help", "--json"],
    "ckpt verify": ["--help", "--json"],
    "ckpt diff": ["--help", "--json"],
    "ckpt export": [
        "--config",
        "--dry-run",
        "--dtype",
        "--format",
        "--help",
        "--json",
        "--max-shard-size",
        "--max_shard_size",
    ],
    "ckpt import": ["--config", "--dry-run", "--help", "--json"],
    "ckpt prune": ["--dry-run", "--help", "--json", "--keep"],
    "doctor": ["--help", "--json", "--nproc-per-node", "--out"],
    "launch": [
        "--config-file",
        "--config_file",
        "--dry-run",
        "--help",
        "--json",
        "--log-dir",
        "--log_dir",
        "--machine-rank",
        "--machine_rank",
        "--main_process_ip",
        "--main_process_port",
        "--master-addr",
        "--master-port",
        "--master_addr",
        "--master_port",
        "--max-restarts",
        "--max_restarts",
        "--module",
        "--nnodes",
        "--node-rank",
        "--node_rank",
        "--nproc-per-node",
        "--nproc_per_node",
        "--num-machines",
        "--num-processes",
        "--num_machines",
        "--num_processes",
        "--standalone",
        "--timeout",
        "-m",
    ],
    "config": ["--help"],
    "config explain": ["--all", "--config", "--config_file", "--help", "--json"],
    "config lint": ["--config", "--config_file", "--help", "--json"],
    "config schema": ["--help", "--json", "--out"],
}


def options_of(command: Any, context: Any) -> list[str]:
    names = {
        name
        for param in command.get_params(context)
        for name in (*param.opts, *param.secondary_opts)
    }
    return sorted(name for name in names if name.startswith("-"))


def surface() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def visit(command: Any, path: tuple[str, ...]) -> None:
        context = command.make_context(
            " ".join(path) or "fullshard", ["--help"], resilient_parsing=True
        )
        found[" ".join(path)] = options_of(command, context)
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            visit(command.get_command(context, name), (*path, name))

    visit(typer.main.get_command(app), ())
    return found


def test_commands_and_options_are_exactly_these():
    assert surface() == SURFACE
