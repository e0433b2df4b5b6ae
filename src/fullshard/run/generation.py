"""`fullshard generate`, in this process or on several ranks that share the model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

from fullshard.config.schema import RunConfig
from fullshard.engine.engine import engine_of
from fullshard.engine.homes import default_device
from fullshard.engine.hugging_face import read_config, read_model, read_tokenizer
from fullshard.errors import ConfigError, printable, untrusted
from fullshard.launch import rendezvous
from fullshard.models.build import build_sharded, check_weights, weights_folder
from fullshard.models.config import quiet_libraries
from fullshard.models.generate import Sample, Sampler, SamplingSettings, ScoreProcessor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Request:
    """A request for text.

    Attributes:
        folder: A Hugging Face model folder with weights and tokenizer.
        prompts: Texts to continue; an empty one becomes the beginning-of-text token.
        settings: How tokens are sampled.
        batch_size: Largest number of prompts that are sampled together.
        chat: Treat each prompt as a user's message in the tokenizer's chat template.
        trust: Whether Python code in the folder may run.
    """

    folder: Path
    prompts: tuple[str, ...] = ("",)
    settings: SamplingSettings = field(default_factory=SamplingSettings)
    batch_size: int = 8
    chat: bool = False
    trust: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"--batch-size: expected an integer >= 1, got {self.batch_size}.")
        with untrusted("--prompt", "UTF-8 text", ConfigError, "Write it in the locale's encoding."):
            "".join(self.prompts).encode()


def generate(
    request: Request, out: TextIO | None = None, *, is_sharded: bool = False
) -> list[Sample]:
    """Samples from a local model folder.

    Args:
        request: Model folder, prompts and settings.
        out: Stream for the texts; a single text is written token by token. None: no output.
        is_sharded: The ranks of the process group share the model, and this is a collective.

    Raises:
        ConfigError: The folder cannot be loaded, or a prompt is empty and has no start token.
    """
    quiet_libraries()
    model, tokenizer = _load(request, is_sharded=is_sharded)
    alone = out if len(request.prompts) == 1 else None  # transformers streams one row
    streamer = None if alone is None else _streamer(tokenizer, request, alone)
    try:
        with sampling(model) if is_sharded else contextlib.nullcontext() as same:
            processors = [] if same is None else [same]
            sampler = Sampler(model, tokenizer, request.settings, processors, streamer)
            found = sampler.samples(
                request.prompts, batch_size=request.batch_size, chat=request.chat
            )
    except ConfigError as error:
        if error.__cause__ is None:
            raise
        raise ConfigError(f"FOLDER: '{request.folder}': {error}") from error
    if out is not None and streamer is None:
        texts = (_shown(request, one.prompt) + printable(one.continuation) for one in found)
        out.write("\n\n".join(texts) + "\n")
    return found


@contextlib.contextmanager
def sampling(model: nn.Module) -> Iterator[ScoreProcessor]:
    """Puts a sharded model into evaluation; yields a processor that copies rank 0's scores.

    Ranks whose scores round differently would draw different tokens and wait for each other.
    """
    engine = engine_of(model)

    def same(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_first = engine.rank == 0
        shared = scores.double() if is_first else torch.zeros_like(scores, dtype=torch.float64)
        engine.transport.all_reduce(shared.view(-1))
        return shared.to(scores.dtype)

    was_training = model.training
    model.eval()
    try:
        yield same
    finally:
        model.train(was_training)


def be_a_rank(request: Request) -> list[Sample]:
    """Samples as one of the ranks that share the model; rank 0 prints the texts."""
    rendezvous.init_process_group()
    out = sys.stdout if dist.get_rank() == 0 else None
    found = generate(request, out, is_sharded=dist.get_world_size() > 1)
    rendezvous.shutdown()
    return found


def _load(request: Request, *, is_sharded: bool) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model, in evaluation on this rank's device, and the tokenizer."""
    from transformers import GenerationConfig

    folder, trust = request.folder, request.trust
    config = read_config(folder, "FOLDER", trust=trust)
    tokenizer = read_tokenizer(folder, "FOLDER", trust=trust)
    if hasattr(config, "num_experts_per_tok") and config.dtype is torch.float64:
        config._experts_implementation = "eager"  # the grouped product has no float64
    settings, file = None, folder / "generation_config.json"
    if file.is_file():
        advice = "Copy the file again, or remove it to generate with transformers' own settings."
        with untrusted(f"FOLDER: '{file}'", "settings of transformers", ConfigError, advice):
            settings = GenerationConfig.from_pretrained(folder, local_files_only=True)
    device = default_device()
    wanted, advice = "a model folder with weights and tokenizer", "Copy or export the model again."
    with untrusted(f"FOLDER: '{folder}'", wanted, ConfigError, advice):
        model: Any = _sharded(request, config, device) if is_sharded else read_model(folder, config)
    if settings is not None:  # without them, transformers derives some from the model
        model.generation_config = settings
    return (model if is_sharded else model.to(device)).eval(), tokenizer


def _sharded(request: Request, config: PretrainedConfig, device: torch.device) -> nn.Module:
    """The sharded model, in the dtype of its files, without room for gradients."""
    settings: dict[str, Any] = {
        "model": {"name_or_path": str(request.folder), "trust_remote_code": request.trust},
        "sharding": {"master_dtype": getattr(config, "dtype", None) or torch.float32},
    }
    frozen, run = methodcaller("requires_grad_", requires_grad=False), RunConfig(**settings)
    if weights_folder(run) is None:  # a training run would begin with random ones
        raise FileNotFoundError("no weights")
    check_weights(run)
    return build_sharded(run, config, device, frozen)


def _shown(request: Request, prompt: str) -> str:
    return printable(prompt) + "\n" * request.chat


def _streamer(tokenizer: Any, request: Request, out: TextIO) -> Any:
    """Prints the prompt, and tokens as they are sampled."""
    from transformers import TextStreamer

    prompt = [_shown(request, request.prompts[0])]

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: FBT001, FBT002  transformers' own
            out.write((prompt.pop() if prompt else "") + printable(text) + "\n" * stream_end)
            out.flush()

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
