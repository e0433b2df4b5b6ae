"""transformers' Trainer and its subclasses on our engine.

    from fullshard.integrations.transformers import Trainer       # was: from transformers import
    from fullshard.integrations.transformers import SFTTrainer    # was: from trl import
    MyTrainer = sharded(MyTrainer)                                # any other

The loop, batches, schedule and logs stay theirs. Our engine shards the model, and a checkpoint of
the run contains `fullshard/`, in our format, in place of optimizer.pt and scheduler.pt.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from torch import nn
from transformers.training_args import OptimizerNames

import fullshard as fs
from fullshard.engine import optimizers
from fullshard.engine.engine import is_sharded
from fullshard.engine.parameter import ShardedParameter
from fullshard.engine.state import numel_of
from fullshard.errors import ConfigError, FullshardError, NotElementwiseError
from fullshard.integrations.accelerator import sharding_of

if TYPE_CHECKING:
    from trl.trainer.sft_trainer import SFTTrainer

    Trainer = transformers.Trainer

__all__ = ["SFTTrainer", "ShardedTrainer", "Trainer", "sharded"]

OURS = "fullshard"
BLOCKWISE = ("bitsandbytes", "torchao")  # packages whose kernels quantise blocks of whole tensors

TrainerT = TypeVar("TrainerT", bound=transformers.Trainer)


class ShardedTrainer(transformers.Trainer):
    """Overrides of a Trainer whose model our engine shards; see `sharded`."""

    accelerator: Any
    optimizer: Any
    lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Replaces the accelerator, so that Accelerate does not shard too."""
        from fullshard.integrations.accelerator import ShardedAccelerator

        sharding = sharding_of(self.args)
        self.args.fsdp_plugin_args = None
        super().create_accelerator_and_postprocess()
        ShardedAccelerator.taking_over(self.accelerator, sharding)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer; one that needs whole tensors gets each on one rank."""
        is_new = self.optimizer is None
        made = super().create_optimizer(model)
        if is_new and not _steps_on_shards(made):
            args, found = self.args, model or self._the_model
            given: Any = self.optimizer_cls_and_kwargs
            _, settings = given or self.get_optimizer_cls_and_kwargs(args, found)  # type: ignore[arg-type]
            settings.pop("params", None)
            try:
                whole = self.accelerator.prepare_model(found)
                make = functools.partial(type(made), **settings)
                self.optimizer = fs.owned(whole, make, made.param_groups)
            except FullshardError as error:
                name = OptimizerNames(args.optim).value
                raise ConfigError(f"TrainingArguments.optim={name}: {error}") from error
            # Settings of single tensors, which bitsandbytes keeps by the tensor's id.
            manager: Any = getattr(made, "mng", None)
            for module, name, given in manager.module_weight_config_triple if manager else ():
                manager.pid2config[id(self.optimizer.whole_of(getattr(module, name)))] = given
        return self.optimizer

    def get_num_trainable_parameters(self) -> int:
        """The number for the full model."""
        return sum(numel_of(p) for p in self._the_model.parameters() if p.requires_grad)

    @property
    def _the_model(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves a Hugging Face folder, or an adapter's folder. A collective."""
        if is_sharded(self._the_model):
            self._save(output_dir or self.args.output_dir, state_dict=self._values())
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        else:
            super().save_model(output_dir, _internal_call)

    def _values(self) -> dict[str, torch.Tensor]:
        """The weights to save: all, or those of the adapter."""
        model = self._the_model
        if not hasattr(model, "peft_config"):
            return fs.full_state_dict(model, rank0_only=True)
        trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
        whole = ((name, _whole(param)) for name, param in trained)  # all ranks take part
        return {name: value for name, value in whole if self.args.should_save}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {"scheduler": self.lr_scheduler.state_dict()}
        fs.save(Path(output_dir) / OURS, self._the_model, self._plain_optimizer, **state)

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without Accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # ---- loading ----

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Loads a checkpoint; ours is read later, with the optimizer, once the model is sharded."""
        if not _has_ours(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and _has_ours(checkpoint):
            state = fs.load(Path(checkpoint) / OURS, self._the_model, self._plain_optimizer)
            self.lr_scheduler.load_state_dict(state["scheduler"])
        else:  # each rank keeps its part of a plain Trainer's states
            super()._load_optimizer_and_scheduler(checkpoint)
            optimizers.WATCHED.look(self._plain_optimizer)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and _has_ours(best):
            fs.load(Path(best) / OURS, self._the_model)
        else:
            super()._load_best_model()


def sharded(trainer: type[TrainerT]) -> type[TrainerT]:
    """Makes a trainer class of the same name whose model our engine shards.

    Args:
        trainer: transformers.Trainer, or a subclass.
    """
    made: Any = type(trainer.__name__, (ShardedTrainer, trainer), {"__doc__": trainer.__doc__})
    return made


def __getattr__(name: str) -> Any:
    """Creates `Trainer` and `SFTTrainer` on first use."""
    if name not in ("Trainer", "SFTTrainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made(name)


@functools.cache
def _made(name: str) -> type[transformers.Trainer]:
    if name == "Trainer":
        return sharded(transformers.Trainer)
    try:
        from trl.trainer.sft_trainer import SFTTrainer
    except ImportError as error:
        raise ConfigError(
            "SFTTrainer: expected the package trl; it is not installed. Run pip install "
            "'fullshard[trainer]'."
        ) from error
    return sharded(SFTTrainer)


def _steps_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    if kind.__module__.split(".")[0] in BLOCKWISE:
        return False
    try:
        for group in optimizer.param_groups:
            optimizers.probe(kind, optimizers.settings_in(group), torch.empty(0))
    except NotElementwiseError:
        return False
    return True


def _has_ours(folder: str) -> bool:
    return (Path(folder) / OURS).exists()  # an unreadable checkpoint is an error


def _whole(param: Any) -> torch.Tensor:
    return (param.full_tensor() if isinstance(param, ShardedParameter) else param).detach().cpu()
