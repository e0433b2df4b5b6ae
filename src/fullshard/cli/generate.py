"""`fullshard generate`: samples from what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullshard.cli.outcome import Outcome

app = typer.Typer(help="Generate text with the model of a run or of a folder.")


@app.command()
def generate(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or a Hugging Face model folder.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue. Default: the start of a text.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens to generate. Default: 200, or as many as the model has positions for."
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 42,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that FOLDER brings.")
    ] = False,
) -> Outcome:
    """Generate text with a trained model."""
    from fullshard.models import generate as sampling

    settings = sampling.SamplingSettings(max_new_tokens, temperature, seed)
    model_folder = sampling.model_folder_of(folder)
    sample = sampling.generate(model_folder, prompt, settings, trust=trust_remote_code)
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
