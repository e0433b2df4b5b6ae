"""What a Trainer's arguments, and the file that a launcher was given, ask of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.config.environment import read_launch_environment
from fullshard.config.files import File, parse_text
from fullshard.config.load import load_config
from fullshard.config.sharding import ShardConfig
from fullshard.errors import ConfigError

if TYPE_CHECKING:
    from transformers import TrainingArguments

ARGUMENTS = "TrainingArguments"

# What TrainingArguments adds to every fsdp_config, asked for or not.
_ADDED = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}


def sharding_of(args: TrainingArguments) -> ShardConfig:
    """The sharding that the arguments ask for, over that of `fullshard launch --config_file`.

    Raises:
        ConfigError: DeepSpeed is asked for too, or a key of `fsdp_config` is none.
    """
    if args.deepspeed:
        raise ConfigError(
            "TrainingArguments.deepspeed: expected none, because fullshard shards this model. "
            "Leave it out; `fullshard config explain FILE` shows what its keys are here."
        )
    return _over_launch(_file_of(args))


def sharding_in(mixed_precision: str) -> ShardConfig:
    """The sharding of the launcher's file, in Accelerate's mixed precision: no, bf16, fp16."""
    training = {} if mixed_precision == "no" else {mixed_precision: True}
    return _over_launch(parse_text(json.dumps({"training": training}), "Accelerator"))


def _over_launch(own: File) -> ShardConfig:
    launch = read_launch_environment()
    given = launch.config_file if launch else None
    layers: list[Path | File] = [] if given is None else [given]
    return load_config([*layers, own], needs_model=False).config.sharding


def _file_of(args: TrainingArguments) -> File:
    """The arguments that concern sharding, as if they stood in a file."""
    training: dict[str, Any] = {}
    for name in ("bf16", "fp16"):
        if getattr(args, name):
            training[name] = True
    if args.fsdp:
        training["fsdp"] = args.fsdp
        config: dict[str, Any] = dict(args.fsdp_config) if args.fsdp_config else {}  # type: ignore[arg-type]
        training["fsdp_config"] = {
            key: value for key, value in config.items() if _ADDED.get(key, ...) != value
        }
    return parse_text(json.dumps({"training": training}), ARGUMENTS)
