"""`fullshard sft`: its job without a configuration file, and the model it begins with."""

from __future__ import annotations

from fullshard.config.files import read_job
from fullshard.recipes.registry import RecipeCommand

COMMAND = RecipeCommand(
    sections=("sft",),
    job=lambda _: read_job("sft_job.yaml", __package__),
    begins_with=lambda config: (config.model.name_or_path, read_job()),
)
