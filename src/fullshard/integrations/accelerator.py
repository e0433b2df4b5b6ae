"""An Accelerator whose models are sharded by our engine, in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

import fullshard as fs
from fullshard.config.sharding import ShardConfig
from fullshard.engine.engine import is_sharded
from fullshard.engine.full_state import whole_states
from fullshard.engine.optimizers import WATCHED
from fullshard.errors import CheckpointError, ConfigError
from fullshard.integrations.settings import sharding_in

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
