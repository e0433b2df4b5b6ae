"""`fullshard generate`: samples from what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.outcome import Outcome

app = typer.Typer(help="Sample from a run or a model folder.")


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or a Hugging Face model folder.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to go on from. Default: the beginning of a text.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens to add. Default: what the model has room for, at most 200."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0: the most likely token every time.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 42,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,  # noqa: ARG001  read by cli.app
) -> Outcome:
    """Go on from a prompt with a trained model."""
    from fullshard.train import generate as sampling

    settings = sampling.SamplingSettings(max_new_tokens, temperature, seed)
    model_folder = sampling.model_folder_of(folder)
    sample = sampling.generate(model_folder, prompt, settings)
    print(sample.text)
    return Outcome(
        {
            "model": model_folder,
            "prompt": sample.prompt,
            "continuation": sample.continuation,
            "num_new_tokens": sample.num_new_tokens,
            "seed": settings.seed,
        }
    )
