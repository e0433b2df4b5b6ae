"""An Accelerator whose models are sharded by our engine, in place."""

from __future__ import annotations

import json
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import DynamoBackend, convert_to_fp32
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

import fullshard as fs
from fullshard.config.environment import read_launch_environment, settings_of_accelerate
from fullshard.config.files import File, parse_text
from fullshard.config.load import load_config
from fullshard.config.sharding import ShardConfig
from fullshard.engine.engine import engine_of, is_sharded
from fullshard.engine.full_state import whole_states
from fullshard.engine.optimizers import WATCHED
from fullshard.engine.state import numel_of
from fullshard.errors import CheckpointError, ConfigError

_DATA_PARALLEL = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class ShardedAccelerator(Accelerator):
    """Accelerate's Accelerator with our sharding.

        from fullshard.integrations.accelerator import ShardedAccelerator as Accelerator

    Models are sharded in place and not wrapped. Batches, the loss scaler and the gathering of
    metrics are Accelerate's own.

    Args:
        sharding: Sharding configuration; None: that of the launcher's file, or full_shard.
    """

    def __init__(self, *args: Any, sharding: ShardConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)
        self.sharding = sharding or sharding_in(self.mixed_precision)

    @classmethod
    def taking_over(cls, accelerator: Accelerator, sharding: ShardConfig) -> ShardedAccelerator:
        """Converts an existing accelerator, since the Trainer creates and passes on its own."""
        _check(accelerator)
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator.sharding = sharding
        return accelerator

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shards the model if necessary; the engine handles mixed precision."""
        if not is_sharded(model):
            if self.sharding.tensor * self.sharding.expert > 1:
                raise ConfigError(
                    "sharding: expected only replicate and shard, because Accelerate and the "
                    "Trainer give every rank its own batch and keep the model's parameters; got "
                    f"tensor {self.sharding.tensor}, expert {self.sharding.expert}. Use fullshard "
                    "sft or train, or your own loop with fs.shard."
                )
            fs.shard(model, self.sharding)
            plugin: Any = self.state.dynamo_plugin
            if plugin.backend != DynamoBackend.NO:
                from accelerate.utils import compile_regions_fsdp2

                compile_regions_fsdp2(model, **plugin.to_kwargs())
        if not any(model is known for known in self._models):
            _show_as_whole(model)
            if self.native_amp:  # Accelerate's models return float32 too
                model.register_forward_hook(lambda _model, _args, made: convert_to_fp32(made))
            self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        """Leaves states where they are: those of shards, or of the owners of whole tensors."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def no_sync(self, model: nn.Module) -> Any:
        """Context in which backwards do not reduce gradients."""
        return fs.no_sync(model)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """The full state dict on rank 0, an empty one on other ranks. A collective."""
        return OrderedDict(fs.full_state_dict(model, rank0_only=True))  # for the detection of tied
        # weights

    def wait_for_everyone(self) -> None:
        """Waits for all ranks; raises on all if one is in a collective of a model instead."""
        for norms in [engine_of(model).norms for model in self._models]:
            norms.compare("wait_for_everyone()")
            norms.finish_checks()  # on GPUs the next backward would check it
        super().wait_for_everyone()

    # ---- Accelerate's own file format

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **more: Any
    ) -> Path:
        """Writes Accelerate's folder with full states. A collective."""
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
        """Reads Accelerate's folder; each rank keeps its part. A collective."""
        with self.register_load_state_pre_hook(_load_models):
            super().load_state(input_dir, load_kwargs, **more)
        for wrapped in self._optimizers:
            WATCHED.look(wrapped.optimizer)


def _check(accelerator: Accelerator) -> None:
    """Checks that Accelerate does not shard, and that it knows of all ranks.

    Raises:
        ConfigError: It shards, or each rank would train alone.
    """
    kind: Any = accelerator.distributed_type
    if asked := [one for one in settings_of_accelerate() if "USE" in one]:  # ignored on CPUs
        kind = asked[0]
    if asked or kind not in (DistributedType.NO, *_DATA_PARALLEL):
        raise ConfigError(
            "Accelerator: expected only data parallelism, because fullshard shards; got "
            f"{kind}. Remove its plugin; use fullshard launch or torchrun."
        )
    launch, known = read_launch_environment(), accelerator.num_processes
    if launch is not None and launch.world_size != known:
        raise ConfigError(
            f"Accelerator: expected the {launch.world_size} ranks of {launch.launcher}, got "
            f"num_processes {known}; each would train alone. Without a GPU use "
            "Accelerator(cpu=True), TrainingArguments(use_cpu=True) or fullshard launch."
        )


def _load_models(models: list[nn.Module], folder: str) -> None:
    """Replaces Accelerate's own loading of models, which compares full tensors."""
    for at, model in enumerate(models):
        file = Path(folder) / f"model{f'_{at}' if at else ''}.safetensors"
        if not file.exists():
            raise CheckpointError(
                f"{file}: expected a folder of Accelerator.save_state; this file is missing. Save "
                "with safe_serialization=True, its default."
            )
        fs.load_full_state(model, load_file(file))
    models.clear()


def _show_as_whole(model: nn.Module) -> None:
    """Makes a Hugging Face model count the full model and generate until all ranks have stopped.

    Each forward gathers. transformers checks the first flag, which is from torch's FSDP.
    torch.compile checks the second if the first exists.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            vars(module).update(
                _is_fsdp_managed_module=True,
                _fsdp_use_orig_params=True,
                num_parameters=_counter_of(weakref.ref(module)),
            )


def _counter_of(module: Callable[[], nn.Module | None]) -> Callable[..., int]:
    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        model: Any = module()
        embeddings = (m.weight for m in model.modules() if isinstance(m, nn.Embedding))
        skipped = set(map(id, embeddings)) if exclude_embeddings else set()
        params = (p for p in model.parameters() if p.requires_grad or not only_trainable)
        return sum(numel_of(p) for p in params if id(p) not in skipped)

    return num_parameters


ARGUMENTS = "TrainingArguments"

_SHARES = "fullshard shards this model. Leave it out"
_CASTS = "parameters would be converted behind the optimizer. Set bf16 or fp16"
_REFUSED = {
    "deepspeed": f"{_SHARES}; `fullshard config explain FILE` shows the translation of its keys.",
    "parallelism_config": f"{_SHARES}, and set `fsdp_config`.",
    "bf16_full_eval": f"{_CASTS}, which also holds in evaluation.",
    "fp16_full_eval": f"{_CASTS}, which also holds in evaluation.",
}

# Keys that TrainingArguments adds to every fsdp_config.
_ADDED = {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False}


def sharding_of(args: TrainingArguments) -> ShardConfig:
    """The sharding of TrainingArguments, over that of `fullshard launch --config_file`.

    Raises:
        ConfigError: An argument is not supported, or `fsdp_config` has an unknown key.
    """
    for name, reason in _REFUSED.items():
        if getattr(args, name):
            raise ConfigError(f"TrainingArguments.{name}: expected none, because {reason}")
    launch = read_launch_environment()
    if launch is not None and launch.config_file is not None:
        file, key = (
            load_config(launch.config_file, needs_model=False),
            "gradient_accumulation_steps",
        )
        steps, origin = getattr(file.config.training, key), file.origins[f"training.{key}"]
        if origin.written and steps != (got := getattr(args, key)):
            raise ConfigError(
                f"TrainingArguments.{key}: expected {steps}, as in {origin.place}; got {got}. Give "
                "both the same value, or remove the file's."
            )
    return _over_launch(_file_of(args))


def sharding_in(mixed_precision: str) -> ShardConfig:
    """The sharding of the launcher's file with Accelerate's mixed precision: no, bf16, fp16."""
    asked = {} if mixed_precision == "no" else {mixed_precision: True}
    training = {"bf16": False, "fp16": False} | asked
    return _over_launch(parse_text(json.dumps({"training": training}), "Accelerator"))


def _over_launch(own: File) -> ShardConfig:
    launch = read_launch_environment()
    given = launch.config_file if launch else None
    layers: list[Path | File] = [own] if given is None else [given, own]
    return load_config(layers, needs_model=False).config.sharding


def _file_of(args: TrainingArguments) -> File:
    """The arguments that concern sharding, in the form of a file."""
    training: dict[str, Any] = {}
    for name in ("bf16", "fp16"):
        if getattr(args, name):
            training[name] = True
    if args.fsdp:
        training["fsdp"] = args.fsdp
        config: dict[str, Any] = dict(args.fsdp_config) if args.fsdp_config else {}  # type: ignore[arg-type]
        training["fsdp_config"] = {k: v for k, v in config.items() if _ADDED.get(k, ...) != v}
    return parse_text(json.dumps({"training": training}), ARGUMENTS)
