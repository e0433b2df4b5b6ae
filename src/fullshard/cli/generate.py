"""`fullshard generate`: samples from a trained model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullshard.cli.outcome import Outcome, launch_outcome, rank_failed
from fullshard.errors import ConfigError, untrusted

if TYPE_CHECKING:
    from fullshard.models.generate import Sample
    from fullshard.run.generation import Request

# Keys that a row may not have, because they would change nothing.
_FOR_ALL = {"system", "seed", "temperature", "top_k", "top_p"}
_FOR_ALL |= {"max_new_tokens", "repetition_penalty"}
app = typer.Typer(help="Generate text with a trained model.")


@app.command()
def generate(  # noqa: PLR0913  a flag each
    folder: Path,
    prompt: list[str] | None = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int = 42,
    chat: Annotated[bool, typer.Option("--chat")] = False,
    batch_size: int = 8,
    num_processes: int = 1,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
) -> Outcome:
    """Generate text with a trained model.

    A single text is printed token by token; several texts are printed at the end. Under torchrun
    the model is sharded over the ranks.

    Args:
        folder: A run's folder or a Hugging Face model folder.
        prompt: Text to continue. Repeat for several. Default: an empty text.
        prompts: File with one prompt per line, or a .jsonl file with the key `prompt`; - reads
            standard input.
        max_new_tokens: Maximum number of tokens to generate. Default: 200, or fewer if the model
            has fewer positions left.
        temperature: Sampling temperature; 0 always selects the most likely token.
        top_k: Sample from the K most likely tokens; 0: from all tokens.
        top_p: Sample from the most likely tokens whose probabilities add up to P.
        repetition_penalty: Values above 1 make tokens that already occurred less likely.
        seed: Random seed.
        chat: Apply the tokenizer's chat template to each prompt.
        batch_size: Maximum number of prompts of equal length that are sampled together.
        num_processes: Number of local ranks over which the model is sharded.
        trust_remote_code: Allow Python code in FOLDER to run.
    """
    from fullshard.models.generate import SamplingSettings, model_folder_of

    settings = SamplingSettings(max_new_tokens, temperature, seed, top_k, top_p, repetition_penalty)
    if num_processes < 1:
        raise ConfigError(f"--num-processes: expected an integer >= 1, got {num_processes}.")
    texts = (*(prompt or ()), *(read_prompts(prompts) if prompts is not None else ())) or ("",)
    model = model_folder_of(folder)
    from fullshard.run.generation import Request

    request = Request(model, texts, settings, batch_size, chat, trust_remote_code)
    return carry_out(request, num_processes)


def carry_out(request: Request, num_processes: int) -> Outcome:
    from fullshard.config.environment import read_launch_environment
    from fullshard.launch.local_call import call_on_ranks
    from fullshard.launch.rank_entry import run_rank
    from fullshard.run import generation

    found: list[Sample] = []
    launched = read_launch_environment()
    if launched is not None:
        if num_processes not in (1, launched.world_size):
            raise ConfigError(
                f"--num-processes: expected {launched.world_size}, the ranks of the launcher, got "
                f"{num_processes}. Remove --num-processes."
            )
        run_rank(lambda: found.extend(generation.be_a_rank(request)), rank_failed)
        if launched.rank != 0:
            return Outcome()
    elif num_processes == 1:
        found = generation.generate(request, sys.stdout)
    else:
        function = f"{generation.__name__}:{generation.be_a_rank.__name__}"
        launch, result, answers = call_on_ranks(function, request, num_processes)
        if result.exit_code:
            return launch_outcome(launch, result)
        found = answers[0]
    samples = [asdict(sample) for sample in found]
    return Outcome(
        {"model": request.folder, "seed": request.settings.seed, **samples[0], "samples": samples}
    )


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file.

    Raises:
        ConfigError: The file cannot be read, or contains no prompts.
    """
    from fullshard.config.regular_files import did_you_mean_path, read_regular

    expected = "a file with one prompt per line, or JSON objects with the key prompt"
    advice = did_you_mean_path(file) or "Correct the file."
    with untrusted(f"--prompts: '{file}'", expected, ConfigError, advice):
        data = sys.stdin.buffer.read() if str(file) == "-" else read_regular(file)
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
        lines = [line for line in text.split("\n") if line.strip()]
        if file.suffix.lower() == ".jsonl":
            rows: list[Any] = [json.loads(line) for line in lines]
            lines = [row["prompt"] for row in rows]
            "".join(lines)  # raises if a prompt is not text
            if ignored := {key for row in rows for key in row} & _FOR_ALL:
                raise ValueError(f"{', '.join(sorted(ignored))} in a row; options set it for all")
    if not lines:
        raise ConfigError(f"--prompts: expected {expected}, got '{file}', which has no prompts.")
    return lines
