"""Sampling from a model folder: what `fullshard generate` and the end of a run do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from fullshard.engine.hugging_face import read_config, read_model, read_tokenizer
from fullshard.errors import ConfigError, printable, untrusted
from fullshard.models.config import (
    check_model_folder,
    num_positions,
    quiet_libraries,
    require_transformers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ScoreProcessor = Callable[[Any, Any], Any]  # (ids, scores) -> scores, both (1, ...)

MOST_NEW_TOKENS = 200  # where nobody says how many


@dataclass(frozen=True)
class SamplingSettings:
    """How text is drawn.

    Attributes:
        max_new_tokens: Most tokens to add; None: as many as the model has positions for, at most
            200.
        temperature: 0 takes the most likely token every time.
        seed: Seed of the draws.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.7
    seed: int = 42

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(
                f"--max-new-tokens: expected an integer >= 1, got {self.max_new_tokens}."
            )
        if not self.temperature >= 0:
            raise ConfigError(f"--temperature: expected a number >= 0, got {self.temperature}.")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed: expected an integer >= 0 and < 2^63, got {self.seed}.")


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model wrote after it."""

    prompt: str
    continuation: str
    num_new_tokens: int

    @property
    def text(self) -> str:
        """Both, fit for a terminal: an untrained model writes control characters too."""
        return printable(self.prompt + self.continuation)


def model_folder_of(folder: Path) -> Path:
    """The model folder of a run, or the folder itself where it is a model folder.

    Raises:
        ConfigError: It is neither, or the run has not written its model.
    """
    if (folder / "run.json").is_file():
        if not (folder / "model" / "config.json").is_file():
            raise ConfigError(
                f"FOLDER: expected a run that has finished, got '{folder}' without a model. "
                "Let the run finish, or name a model folder."
            )
        return folder / "model"
    check_model_folder(folder, "FOLDER")
    return folder


def generate(
    folder: Path, prompt: str | None, settings: SamplingSettings, *, trust: bool = False
) -> Sample:
    """Samples from a local model folder.

    Args:
        folder: A Hugging Face model folder with weights and tokenizer.
        prompt: Text to go on from; None: the model's beginning-of-text token.
        settings: How to draw.
        trust: Whether Python code that the folder brings may run.

    Raises:
        ConfigError: The folder cannot be loaded, or there is nothing to go on from.
    """
    require_transformers()
    quiet_libraries()
    with untrusted("--prompt", "UTF-8 text", ConfigError, "Write it in the locale's encoding."):
        (prompt or "").encode()
    model, tokenizer = _load(folder, trust=trust)
    try:
        return sample(model, tokenizer, prompt, settings)
    except ConfigError as error:
        if error.__cause__ is None:
            raise
        raise ConfigError(f"FOLDER: '{folder}': {error}") from error


def sample(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | None,
    settings: SamplingSettings,
    processors: Sequence[ScoreProcessor] = (),
) -> Sample:
    """Goes on from a text; a collective where the model is sharded.

    Args:
        model: In evaluation.
        tokenizer: Its tokenizer.
        prompt: None: the beginning-of-text token.
        settings: How to draw.
        processors: (ids, scores) -> scores, for every token.

    Raises:
        ConfigError: There is nothing to go on from, or the model cannot generate.
    """
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    if len(ids) >= (positions := num_positions(model.config) or len(ids) + 1):
        told = "the model has %d positions: of the prompt's %d tokens the last %d are used"
        keep = max(1, positions // 2)
        logger.warning(told, positions, len(ids), keep)
        ids = ids[-keep:]
    start = tokenizer.bos_token_id
    if not ids and isinstance(start, int):
        ids = [start]
    if not ids:
        raise ConfigError(
            "--prompt: expected text, got none, and the tokenizer has no beginning-of-text token "
            "to start from. Give a prompt."
        )
    most = settings.max_new_tokens or _room(model, len(ids))
    new = continued(model, ids, most, tokenizer, settings, processors)
    text = tokenizer.decode(new, skip_special_tokens=True)
    assert isinstance(text, str), "one list of tokens is one text"
    return Sample(prompt or "", text, len(new))


def continued(
    model: Any,
    ids: Sequence[int],
    most: int,
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings,
    processors: Sequence[ScoreProcessor] = (),
) -> list[int]:
    """At most `most` tokens after these; see `sample`."""
    import torch

    inputs = torch.tensor([list(ids)], device=next(model.buffers(), torch.empty(0)).device)
    how: dict[str, Any] = {"do_sample": False}
    if settings.temperature > 0:
        how = {"do_sample": True, "temperature": settings.temperature, "top_k": 0}
        torch.manual_seed(settings.seed)  # only here: dropout of a run under way has a state too
    try:
        with torch.no_grad():
            output: torch.Tensor = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=most,
                pad_token_id=tokenizer.pad_token_id,
                logits_processor=list(processors),
                **how,
            )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"expected a model that can generate with its generation_config.json, got "
            f"{type(model).__name__} ({type(error).__name__}: {error}). Correct its files."
        ) from error
    return output[0, inputs.shape[1] :].tolist()


def _room(model: PreTrainedModel, num_prompt_tokens: int) -> int:
    """Tokens that may be added before a text is longer than what the model was made for."""
    positions = num_positions(model.config)
    return min(MOST_NEW_TOKENS, positions - num_prompt_tokens) if positions else MOST_NEW_TOKENS


def _load(folder: Path, *, trust: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    config = read_config(folder, "FOLDER", trust=trust)
    tokenizer = read_tokenizer(folder, "FOLDER", trust=trust)
    try:
        model: Any = read_model(folder, config)
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"FOLDER: expected a model folder with weights and tokenizer, got '{folder}', which "
            f"transformers cannot load ({error}). Name another folder."
        ) from error
    return model.eval(), tokenizer
