"""An Accelerator whose models are sharded by our engine, in place."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

import fullshard as fs
from fullshard.config.environment import read_launch_environment
from fullshard.config.files import File, parse_text
from fullshard.config.load import load_config
from fullshard.config.sharding import ShardConfig
from fullshard.engine.engine import is_sharded
from fullshard.engine.full_state import whole_states
from fullshard.engine.optimizers import WATCHED
from fullshard.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import TrainingArguments

_DATA_PARALLEL = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class ShardedAccelerator(Accelerator):
    """Accelerate's, but for what concerns sharding.

        from fullshard.integrations.accelerator import ShardedAccelerator as Accelerator

    A model stays the object that it is: nothing wraps it, and nothing must be unwrapped. Batches,
    the loss scaler, gathering of metrics are Accelerate's own.

    Args:
        sharding: How models are sharded; None: as the launcher's file says, or full_shard.
    """

    def __init__(self, *args: Any, sharding: ShardConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.distributed_type not in (DistributedType.NO, *_DATA_PARALLEL):
            raise ConfigError(
                f"Accelerator: expected data parallelism alone, because fullshard shards; got "
                f"{self.distributed_type}. Leave its plugin out, and start the script with "
                "fullshard launch or torchrun."
            )
        self.sharding = sharding or sharding_in(self.mixed_precision)

    @classmethod
    def taking_over(cls, accelerator: Accelerator, sharding: ShardConfig) -> ShardedAccelerator:
        """The same accelerator. The Trainer makes it itself and others hold it by then."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator.sharding = sharding
        return accelerator

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,  # noqa: ARG002, FBT001  Accelerate's signature
        evaluation_mode: bool = False,  # noqa: ARG002, FBT001, FBT002
    ) -> nn.Module:
        """Shard it, if it is not; mixed precision is the engine's."""
        if not is_sharded(model):
            fs.shard(model, self.sharding)
            _generate_together(model)
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Backwards inside keep their gradients on this rank."""
        with fs.no_sync(model):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:  # noqa: ARG002, FBT001, FBT002
        """The whole model on the first rank, nothing on the others. A collective."""
        return OrderedDict(fs.full_state_dict(model, rank0_only=True))  # tied ones are looked for

    # ---- Accelerate's own files, which runs without us read and write too

    def save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,  # noqa: FBT001, FBT002
        **more: Any,
    ) -> Path:
        """Accelerate's folder, whole. A collective."""
        with ExitStack() as stack:
            for wrapped in self._optimizers:
                handle = wrapped.optimizer.register_state_dict_post_hook(
                    lambda _, state: whole_states(self._models[0], state)
                )
                stack.callback(handle.remove)
            return super().save_state(output_dir, safe_serialization, **more)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """Read Accelerate's folder; each rank keeps its part. A collective."""
        with self.register_load_state_pre_hook(_load_models):
            super().load_state(input_dir, load_kwargs, **more)
        for wrapped in self._optimizers:
            WATCHED.look(wrapped.optimizer)


def _load_models(models: list[nn.Module], folder: str) -> None:
    """In place of Accelerate's own reading, which compares memory."""
    for at, model in enumerate(models):
        file = Path(folder) / f"model{f'_{at}' if at else ''}.safetensors"
        if not file.exists():
            raise CheckpointError(
                f"{file}: expected a folder of Accelerator.save_state; this file is not there. "
                "Save with safe_serialization=True, its default."
            )
        fs.load_full_state(model, load_file(file))
    models.clear()


def _generate_together(model: nn.Module) -> None:
    """Let `generate` go on until all ranks have stopped, since each of its forwards gathers.

    transformers asks for this name of torch's FSDP, and torch.compile for the second where it
    finds the first.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module).update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


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
