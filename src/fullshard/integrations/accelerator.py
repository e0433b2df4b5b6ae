"""An Accelerator whose models are sharded by our engine, in place."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn

import fullshard as fs
from fullshard.config.sharding import ShardConfig
from fullshard.engine.engine import is_sharded


class ShardedAccelerator(Accelerator):
    """Accelerate's, but for what concerns sharding.

    A model stays the object that it is: nothing wraps it, and nothing must be unwrapped. Batches,
    the loss scaler, gathering of metrics are Accelerate's own.
    """

    sharding: ShardConfig

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
        return fs.full_state_dict(model, rank0_only=True)
