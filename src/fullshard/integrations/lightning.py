"""Lightning's ModelParallelStrategy, for modules that `fullshard.compat.fsdp2.fully_shard` shards.

Lightning's own strategy trains and saves them; it refuses to load, because it looks for parameters
that are DTensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import strategies  # pyright: ignore[reportMissingImports]
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict_loader import load

from fullshard.engine.optimizers import WATCHED


class ModelParallelStrategy(strategies.ModelParallelStrategy):
    """Lightning's strategy, which also loads our modules."""

    def load_checkpoint(self, checkpoint_path: Any, **more: Any) -> dict[str, Any]:
        """Loads a folder of shards or a file of full states. A collective."""
        path, model = Path(self.broadcast(checkpoint_path)), self.model
        is_folder = path.is_dir()
        rest = path / "meta.pt" if is_folder else path
        saved = self.checkpoint_io.load_checkpoint(rest, **more)
        if is_folder:
            weights = {"state_dict": states.get_model_state_dict(model)}
            load(weights, checkpoint_id=path)
            saved |= weights
        model.load_state_dict(saved.pop("state_dict"), strict=self.lightning_module.strict_loading)
        for at, optimizer in enumerate(self.optimizers):
            if is_folder:
                part = {f"optimizer_{at}": states.get_optimizer_state_dict(model, optimizer)}
                load(part, checkpoint_id=path)
                states.set_optimizer_state_dict(model, optimizer, part[f"optimizer_{at}"])
            else:
                optimizer.load_state_dict(saved["optimizer_states"][at])
                WATCHED.look(optimizer)
        return saved
