"""Sampling from a model, for `fullshard generate`, evaluations and the end of a run."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config.values import show
from fullshard.engine.hugging_face import start_of
from fullshard.errors import ConfigError, DivergedError, printable, untrusted
from fullshard.models.config import check_model_folder, check_no_checkpoint, num_positions

logger = logging.getLogger(__name__)

ScoreProcessor = Callable[[Any, Any], Any]  # (ids, scores) -> scores, both (samples, ...)

MOST_NEW_TOKENS = 200  # if no limit is given
SAY_S = 5.0  # seconds between lines of progress
LEAST_TEMPERATURE = 1e-6  # below it counts as 0: scores are divided by it and would be infinite


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are sampled.

    Attributes:
        max_new_tokens: Largest number of new tokens; None: as many as the model has positions for,
            at most 200.
        temperature: Sampling temperature; 0 always selects the most likely token.
        seed: Seed of the random numbers.
        top_k: Sample from this many most likely tokens; 0: from all.
        top_p: Sample from the most likely tokens whose probabilities reach this sum; 1: from all.
        repetition_penalty: Divides the scores of tokens that occurred before (multiplies negative
            ones): https://arxiv.org/abs/1909.05858. 1: unchanged.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.7
    seed: int = 42
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        most, finite = self.max_new_tokens, float("inf")
        for name, fits, expected in (
            ("max_new_tokens", most is None or most >= 1, "an integer >= 1"),
            ("temperature", 0 <= self.temperature < finite, "a number >= 0"),
            ("seed", 0 <= self.seed < 1 << 63, "an integer >= 0 and < 2^63"),
            ("top_k", self.top_k >= 0, "an integer >= 0"),
            ("top_p", 0 < self.top_p <= 1, "a number > 0 and <= 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < finite, "a number > 0"),
        ):
            if not fits:
                option, value = name.replace("_", "-"), show(getattr(self, name))
                raise ConfigError(f"--{option}: expected {expected}, got {value}.")
        if self.temperature < LEAST_TEMPERATURE and (self.top_k, self.top_p) != (0, 1):
            logger.warning("--top-k, --top-p: no effect with --temperature 0, which never samples")

    def arguments(self) -> dict[str, Any]:
        """Arguments of transformers' `generate`; all are given, so a model's folder sets none."""
        settings: dict[str, Any] = {"repetition_penalty": self.repetition_penalty}
        if self.temperature < LEAST_TEMPERATURE:
            return {**settings, "do_sample": False}
        draws = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {**settings, "do_sample": True, **draws}


@dataclass(frozen=True)
class Sample:
    """A prompt and the model's continuation."""

    prompt: str
    continuation: str
    num_new_tokens: int

    @property
    def text(self) -> str:
        """Prompt and continuation without control characters, which an untrained model writes."""
        return printable(self.prompt + self.continuation)


def model_folder_of(folder: Path) -> Path:
    """The model folder of a run, or the folder itself if it is a model folder.

    Raises:
        ConfigError: It is neither, or the run has no model yet.
    """
    if (folder / "run.json").is_file():
        if not (folder / "model" / "config.json").is_file():
            raise ConfigError(
                f"FOLDER: expected a run that has finished, got '{folder}' without a model. Let "
                "the run finish, or pass a model folder."
            )
        with suppress(OSError, ValueError, LookupError, TypeError):
            record: Any = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            made, saved = record["measured"]["num_steps"], record["last_saved_step"]
            if saved > made:
                warning = "'%s' is of step %d; checkpoints of later steps: fullshard ckpt export %s"
                logger.warning(warning, folder / "model", made, folder)
        return folder / "model"
    check_model_folder(folder, "FOLDER")
    check_no_checkpoint(folder, "FOLDER")
    return folder


def _checked(_ids: Any, scores: Any) -> Any:
    """Refuse NaN and infinity, from which no meaningful token could be sampled."""
    if not (scores < float("inf")).all():
        raise DivergedError(
            "expected weights that give scores for tokens, got NaN or infinity. "
            "Use an earlier checkpoint."
        )
    return scores


@dataclass(frozen=True)
class Sampler:
    """Samples text; a collective if the model is sharded.

    Attributes:
        model: The model, in evaluation.
        tokenizer: Tokenizer of the model.
        settings: How tokens are sampled.
        processors: Functions (ids, scores) -> scores that are called for every token.
        streamer: transformers' TextStreamer, which supports only one prompt.
    """

    model: Any
    tokenizer: Any
    settings: SamplingSettings
    processors: Sequence[ScoreProcessor] = ()
    streamer: Any = None

    def samples(
        self, prompts: Sequence[str], *, batch_size: int = 1, chat: bool = False
    ) -> list[Sample]:
        """Continues texts.

        Prompts with the same number of tokens are sampled together, so that no sample sees padding.
        The seed of a batch is the configured seed plus the number of the batch.

        Args:
            prompts: Texts to continue; an empty one becomes the beginning-of-text token.
            batch_size: Largest number of prompts that are sampled together.
            chat: Treat each prompt as a user's message in the tokenizer's chat template.

        Returns:
            One sample per prompt, in their order.

        Raises:
            ConfigError: A prompt is empty and has no start token, or the model cannot generate.
        """
        rows = [self._tokens(prompt, chat=chat) for prompt in prompts]
        found, said = dict[int, Sample](), time.monotonic()
        for number, batch in enumerate(_batches(rows, batch_size)):
            ids = [rows[index] for index in batch]
            most = self.settings.max_new_tokens or self._room(len(ids[0]))
            if (room := self._room(len(ids[0]), most)) < most:
                warning = "the model has positions for only %d of %d new tokens here"
                logger.warning(warning, room, most)
            for index, new in zip(batch, self.continued(ids, most, number), strict=True):
                text: str = self.tokenizer.decode(new, skip_special_tokens=True)
                found[index] = Sample(prompts[index], text, len(new))
            if time.monotonic() - said >= SAY_S and len(found) < len(rows):
                said = time.monotonic()
                logger.info("generate: %s of %s texts", f"{len(found):,}", f"{len(rows):,}")
        return [found[index] for index in range(len(rows))]

    def continued(
        self, rows: Sequence[Sequence[int]], most: int, batch: int = 0
    ) -> list[list[int]]:
        """Continues rows of tokens of one length by at most `most` tokens each."""
        import torch

        model, settings = self.model, self.settings
        device = next(model.buffers(), next(model.parameters(), torch.empty(0))).device
        inputs = torch.tensor([list(row) for row in rows], device=device)
        if settings.temperature > 0:  # greedy sampling does not change the random state of a run
            torch.manual_seed((settings.seed + batch) % (1 << 63))
        try:
            with torch.no_grad():
                output: torch.Tensor = model.generate(
                    inputs,
                    attention_mask=torch.ones_like(inputs),
                    max_new_tokens=most,
                    pad_token_id=self.tokenizer.pad_token_id,
                    logits_processor=[*self.processors, _checked],
                    streamer=self.streamer,
                    **settings.arguments(),
                )
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            if self._room(len(rows[0]), most) < most:
                raise ConfigError(
                    f"--max-new-tokens: expected at most {self._room(len(rows[0]), most)}, for "
                    f"which the model has positions after the prompt, got {most}."
                ) from error
            raise ConfigError(
                f"expected a model that can generate with its generation_config.json, got "
                f"{type(model).__name__} ({type(error).__name__}: {error}). "
                "Correct the model's config.json or generation_config.json."
            ) from error
        end = model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        return [_until(ends, new) for new in output[:, inputs.shape[1] :].tolist()]

    def _tokens(self, prompt: str, *, chat: bool) -> list[int]:
        """Tokens of a prompt, shortened if the model has too few positions to continue.

        Raises:
            ConfigError: There are none, or the tokenizer has no chat template.
        """
        tokenizer = self.tokenizer
        if chat and not tokenizer.chat_template:
            raise ConfigError(
                "--chat: expected a tokenizer with a chat template, got one without. "
                "Leave --chat out, or add chat_template.jinja to the model's folder."
            )
        if chat:
            said = {"conversation": [{"role": "user", "content": prompt}], "tokenize": False}
            with untrusted("--chat", "a chat template that takes a prompt", ConfigError):
                prompt = tokenizer.apply_chat_template(add_generation_prompt=True, **said)
        start = () if chat else start_of(tokenizer)  # a chat template writes its own
        ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
        positions = num_positions(self.model.config) or len(start) + len(ids) + 1
        if len(start) + len(ids) >= positions:
            text = "the model has %d positions: of the prompt's %d tokens only the last %d are used"
            keep = max(1, positions // 2 - len(start))
            logger.warning(text, positions, len(ids), keep)
            ids = ids[-keep:]
        ids = [*start, *ids]
        if not ids and isinstance(tokenizer.bos_token_id, int):
            ids = [tokenizer.bos_token_id]
        if not ids:
            raise ConfigError(
                "--prompt: expected text, got none, and the tokenizer has no beginning-of-text "
                "token to start from. Pass a prompt."
            )
        return ids

    def _room(self, num_prompt_tokens: int, most: int = MOST_NEW_TOKENS) -> int:
        """Number of tokens, at most `most`, that fit into the model's positions after a prompt."""
        positions = num_positions(self.model.config)
        return min(most, positions - num_prompt_tokens) if positions else most


def _batches(rows: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Batches of indices of rows of one length, longest rows first."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    batches: list[list[int]] = []
    for index in order:
        last = batches[-1] if batches else []
        if last and len(last) < size and len(rows[last[0]]) == len(rows[index]):
            last.append(index)
        else:
            batches.append([index])
    return batches


def _until(ends: Sequence[int | None], new: list[int]) -> list[int]:
    """New tokens up to the first end token; the rest is padding."""
    first = next((place for place, token in enumerate(new) if token in ends), len(new))
    return new[: first + 1]
