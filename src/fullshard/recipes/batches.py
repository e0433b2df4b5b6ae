"""The data of a run: made once, before the ranks start, and mapped by every rank.

    text    documents -> packed sequences                  Dataset
    chat    conversations -> rows, some of it learned      ChatDataset

`fullshard train` is for text, `fullshard sft` for chat data; `fullshard distill` takes either.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fullshard.config.schema import ModelConfig, RunConfig, SftConfig
from fullshard.data.chat import set_template
from fullshard.data.chat_rows import ChatDataset, ChatSettings, chat_source, make_chat_dataset
from fullshard.data.dataset import PreparedData, load_facts
from fullshard.data.text import Dataset, DatasetSettings, Source, make_dataset, new_tokenizer
from fullshard.errors import ConfigError
from fullshard.recipes.registry import Command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_data(
    config: RunConfig,
    command: Command,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> PreparedData:
    """Reads, tokenizes and packs the data of a run.

    Args:
        config: Configuration of the run.
        command: Recipe of the run.
        tokenizer: Tokenizer of the run; None trains one on the data.
        vocab_size: Largest vocabulary of a trained tokenizer.

    Raises:
        DataError: The data cannot be used.
    """
    data, training, sft = config.data, config.training, config.sft or SftConfig()
    path, is_chat = Path(data.path) if data.path else None, command.kind.uses_chats(config)
    _check_streaming(config, command, is_chat=is_chat)
    if is_chat:
        if data.mixture:
            raise ConfigError(
                "data.mixture: expected text or tokens, got a recipe of conversations. "
                "Put them into one folder and name it (data.path)."
            )
        source, notes = chat_source(path), list[str]()
        tokenizer = tokenizer or new_tokenizer([source], [source.files.spans()], vocab_size, notes)
        template = Path(sft.chat_template_path) if sft.chat_template_path else None
        set_template(tokenizer, template, config.model)
        chats = ChatSettings(training.max_seq_length, data.validation_fraction, sft)
        return make_chat_dataset(source, chats, tokenizer, notes)
    settings = DatasetSettings(training.max_seq_length, vocab_size, data, training.seed)
    column = data.text_column
    sources = [
        Source.at(Path(one.path), one.weight, one.text_column or column, f"data.mixture.{number}")
        for number, one in enumerate(data.mixture)
    ]
    return make_dataset(sources or [Source.at(path, text_column=column)], settings, tokenizer)


def _check_streaming(config: RunConfig, command: Command, *, is_chat: bool) -> None:
    """Raises ConfigError where rows must be numbered before training."""
    cached = command is Command.CACHE or (config.distill and config.distill.cache)
    got = "a cache of the teacher's logits" if cached else ""
    got = "conversations" if is_chat else got
    if config.data.streaming and got:
        raise ConfigError(
            f"data.streaming: expected a run on text or tokens, got {got}, which needs all rows "
            "before training. Leave it out."
        )


def load_data(folder: Path, model: ModelConfig) -> PreparedData:
    """Maps the prepared data of a run.

    Args:
        folder: Folder of the data.
        model: Model section; decides whether the tokenizer's own code may run.

    Raises:
        DataError: The folder has no data.
    """
    kind, facts, tokenizer = load_facts(folder, trust=model.trust_remote_code)
    return (ChatDataset if kind == ChatDataset.kind else Dataset).load(folder, facts, tokenizer)
