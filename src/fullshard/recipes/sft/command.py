"""`fullshard sft`: its job without a configuration file, the model it begins with, its checks."""

from __future__ import annotations

from collections.abc import Iterator

from fullshard.config.files import read_job
from fullshard.config.schema import RunConfig
from fullshard.config.values import Backend
from fullshard.errors import Problem
from fullshard.recipes.registry import Command, RecipeCommand


def check(config: RunConfig, _: Command) -> Iterator[Problem]:
    """Refuses prompts on XLA, which does not answer them."""
    sft = config.sft
    if config.backend is not Backend.JAX or sft is None:
        return
    if "num_samples" in sft.model_fields_set and sft.num_samples:
        says = f"{sft.num_samples} with backend: jax is not yet supported"
        yield Problem("sft.num_samples", "", says, "Leave it out; no prompts are answered")


COMMAND = RecipeCommand(
    sections=("sft",),
    check=check,
    job=lambda _: read_job("sft_job.yaml", __package__),
    begins_with=lambda config: (config.model.name_or_path, read_job()),
)
