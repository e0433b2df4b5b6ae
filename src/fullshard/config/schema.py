"""RunConfig, the schema of a configuration file, and its sections under our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import BeforeValidator, field_validator, model_validator

from fullshard.config.environment import LONGEST_S
from fullshard.config.fields import (
    Count,
    Depth,
    Flag,
    Names,
    Number,
    Positive,
    Rejected,
    Section,
    Share,
    Text,
    as_json,
)
from fullshard.config.sharding import ShardConfig
from fullshard.config.training import TrainingConfig
from fullshard.config.values import (
    Backend,
    ConfigProblems,
    DistillLoss,
    DType,
    HomeKind,
    Problem,
    Strategy,
    TokenDType,
    show,
)


class ModelConfig(Section):
    """A model: a Hugging Face folder, or a configuration with random initial weights."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "model_name_or_path": "name_or_path",
        "path": "name_or_path",
    }

    name_or_path: Text | None = None
    """Folder with config.json, and optionally weights and a tokenizer."""

    config: dict[str, Any] | None = None
    """Contents of config.json: model_type, and the values that differ from its defaults."""

    trust_remote_code: Flag = False
    """Run Python code from the model's or tokenizer's folder (auto_map). The code has your
    permissions; read it first."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if (self.name_or_path is None) == (self.config is None):
            got = "neither" if self.config is None else "both"
            raise ConfigProblems([Problem("", "one of name_or_path and config", got)])
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            got = show(self.config["model_type"]) if "model_type" in self.config else "nothing"
            expected = "the name of an architecture, such as llama"
            raise ConfigProblems([Problem("config.model_type", expected, got)])
        return self

    @field_validator("config", mode="before")
    @classmethod
    def _is_json(cls, value: object) -> object:
        return as_json(value)


class SourceConfig(Section):
    """A source of a mixture."""

    path: Text
    """File, folder or pattern, as for data.path."""

    weight: Positive = 1.0
    """Share of an epoch's sequences, relative to the other weights."""

    text_column: Text | None = None
    """Column or key of the text. None: data.text_column."""


class DataConfig(Section):
    """The training text."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "dataset_name": "path",
        "dataset_path": "path",
        "dataset_text_field": "text_column",
    }

    path: Text | None = None
    """A file, folder or pattern: text, JSONL, parquet, a saved dataset of `datasets`, .bin or .npy
    files of tokens. None: text that ships with every Python."""

    mixture: tuple[SourceConfig, ...] = ()
    """Instead of path: a list of {path, weight}; the sequences of an epoch are divided by weight.
    An empty list is an error unless path is set, as in a run's config.yaml."""

    dtype: TokenDType | None = None
    """Dtype of .bin files of tokens without a header. None: uint16, as in nanoGPT."""

    text_column: Text = "text"
    """Column or key of the text in JSONL and parquet files."""

    tokenizer: Text | None = None
    """Folder of a tokenizer. None: the model's own, or one trained on the data."""

    vocab_size: Annotated[int, Number(at_least=1, below=10**7)] | None = None
    """Maximum vocabulary of a tokenizer that is trained on the data. None: the model's."""

    validation_fraction: Share = 0.05
    """Share of each source that is held out for evaluation."""

    separate_documents: Flag = False
    """true: documents that share a sequence do not attend to each other (text; for conversations,
    sft.packing does so)."""

    streaming: Flag = False
    """true: tokenize text during training, a few parts ahead, instead of before it."""

    shuffle_buffer: Count = 4096
    """Number of sequences shuffled together with data.streaming; above 4,096, at most one pass."""

    bigram_baseline: Flag | None = None
    """true: fit a bigram model as a baseline for the loss (about 50 bytes per token). None:
    only for the embedded text."""

    @property
    def uses_baseline(self) -> bool:
        if self.bigram_baseline is None:
            return self.path is None and not self.mixture and not self.streaming
        return self.bigram_baseline

    @model_validator(mode="after")
    def _path_or_mixture(self) -> Self:
        if self.path is not None and self.mixture:
            raise ConfigProblems([Problem("mixture", "one of path and mixture", "both")])
        if self.bigram_baseline and self.streaming:
            got = "true with data.streaming", "The baseline counts all pairs first"
            raise ConfigProblems([Problem("bigram_baseline", "false", *got)])
        if not self.mixture and self.model_fields_set & {"path", "mixture"} == {"mixture"}:
            got = "an empty list", "Leave the key out to train on the embedded text"
            raise ConfigProblems([Problem("mixture", "at least one source", *got)])
        return self


class SftConfig(Section):
    """Supervised fine-tuning, under the names of TRL; `training` accepts these names too."""

    packing: Flag | None = None
    """true: put several whole examples into a sequence; they do not attend to each other. None:
    false."""

    completion_only_loss: Flag | None = None
    """false: train on prompts too, in prompt/completion data. None: true."""

    assistant_only_loss: Flag | None = None
    """false: train on all turns of conversations. None: true (TRL: false)."""

    chat_template_path: Text | None = None
    """Chat template: a Jinja file or a tokenizer's folder. None: the tokenizer's or a plain one."""

    num_samples: Depth = 2
    """Number of held-out prompts whose answers are shown at every evaluation."""

    sample_tokens: Count = 48
    """Maximum number of tokens of an answer to a held-out prompt."""


class LoraConfig(Section):
    """Low-rank adapters, under the names of PEFT's LoraConfig."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "lora_r": "r",
        "alpha": "lora_alpha",
        "dropout": "lora_dropout",
        "lora_target_modules": "target_modules",
    }

    r: Count = 16
    """Rank of an adapter."""

    lora_alpha: Positive = 32.0
    """Adapters are scaled by lora_alpha / r."""

    lora_dropout: Share = 0.0
    """Dropout of an adapter's inputs."""

    target_modules: Names = ()
    """Ends of the names of the layers that get an adapter. Empty: all linear layers but the
    head."""


class DistillConfig(Section):
    """Distillation of a teacher into a student."""

    ALIASES: ClassVar[Mapping[str, str]] = {"kd_ratio": "alpha", "loss_type": "loss"}

    loss: DistillLoss = DistillLoss.FORWARD_KL
    """forward_kl | reverse_kl | jsd | hidden (mean square of projected hidden states)."""

    temperature: Annotated[float, Number(at_least=1e-6, below=1000)] = 2.0
    """Divides the logits of student and teacher; the loss is multiplied by its square, which
    multiplies the rounding of float32, too."""

    alpha: Annotated[float, Number(at_least=0, below=1.0000001)] = 0.5
    """Weight of the teacher's loss; cross-entropy has the remaining weight (alias kd_ratio)."""

    beta: Annotated[float, Number(above=0, below=1)] = 0.5
    """Weight of the teacher in the mixture of jsd."""

    chunk_size: Count | None = None
    """Number of tokens whose logits are in memory at a time. None: training.loss_chunk_size."""

    teacher_dtype: DType | None = None
    """Dtype of the teacher's weights. None: bfloat16 on accelerators, otherwise float32."""

    teacher_strategy: Strategy | None = None
    """Sharding strategy of the teacher. None: the student's."""

    teacher_offload: HomeKind | None = None
    """Memory of the teacher's weights between forwards: cpu | nvme (files in the run's folder).
    None: the device."""

    cache: Text | None = None
    """Folder of the teacher's top_k logits, written by `distill cache`; replaces the teacher."""

    top_k: Count = 64
    """Number of logits per token that `distill cache` stores."""

    experts: Count | None = None
    """Number of experts per layer that the student takes from the teacher, the most used ones."""

    layers: Count | None = None
    """Number of layers that the student takes from the teacher, evenly spaced, with the first and
    the last."""

    @property
    def tokens_at_once(self) -> int:
        """The number of tokens whose logits are in memory at once, after defaults are applied."""
        return self.chunk_size or 1 << 30


class LaunchConfig(Section):
    """The processes, under Accelerate's names."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "ddp_timeout": "timeout",
        "nnodes": "num_machines",
        "node_rank": "machine_rank",
        "master_addr": "main_process_ip",
        "master_port": "main_process_port",
    }

    num_processes: Count | None = None
    """Number of ranks on all machines together. None: one per visible accelerator, or 2."""

    nproc_per_node: Count | None = None
    """Number of ranks per machine, as for torchrun."""

    num_machines: Count = 1
    """Number of machines."""

    machine_rank: Depth = 0
    """Number of this machine, counted from 0."""

    main_process_ip: Text | None = None
    """Host of rank 0, if there are several machines."""

    main_process_port: Annotated[int, Number(at_least=1, below=65536)] | None = None
    """Port of the rendezvous on the host of rank 0, if there are several machines."""

    timeout: Annotated[float, Number(at_least=1, below=LONGEST_S)] = 600.0
    """Seconds after which a waiting rank counts as stuck (alias ddp_timeout)."""

    @model_validator(mode="after")
    def _machines_agree(self) -> Self:
        problems: list[Problem] = []
        machines = f"num_machines is {self.num_machines}"
        if self.machine_rank >= self.num_machines:
            expected = f"an integer < {self.num_machines}, because {machines}"
            problems.append(Problem("machine_rank", expected, show(self.machine_rank)))
        if self.num_processes is not None and self.num_processes % self.num_machines:
            expected = f"a multiple of {self.num_machines}, because {machines}"
            advice = "It counts the processes of all machines"
            problems.append(Problem("num_processes", expected, show(self.num_processes), advice))
        world, given = self.world_size, show(self.nproc_per_node)
        if self.nproc_per_node and world != self.nproc_per_node * self.num_machines:
            expected = f"a number that gives num_processes ({world}), because {machines}"
            problems.append(Problem("nproc_per_node", expected, given, "Give one of the two"))
        if problems:
            raise ConfigProblems(problems)
        return self

    @property
    def world_size(self) -> int | None:
        """Ranks on all machines together; None: not given."""
        per_node = self.nproc_per_node
        return self.num_processes or (per_node and per_node * self.num_machines)


def _read_model(value: object) -> object:
    """Reads plain text as a folder."""
    if isinstance(value, str):
        return {"name_or_path": value}
    return _mapping(value, ModelConfig, "a folder, or a mapping with name_or_path or config")


def _read_data(value: object) -> object:
    """Reads plain text as a path, and null as the embedded text."""
    if isinstance(value, str):
        return {"path": value}
    return {} if value is None else _mapping(value, DataConfig, "a path, or a mapping with path")


def _mapping(value: object, section: type[Section], expected: str) -> object:
    if isinstance(value, section | Mapping):
        return cast("object", value)
    raise Rejected(expected)


Model = Annotated[ModelConfig, BeforeValidator(_read_model)]
# An empty section (`training:` without keys) has all defaults.
SECTION = BeforeValidator(lambda value: {} if value is None else value)


class RunConfig(Section):
    """The whole configuration, from files and a command line."""

    ALIASES: ClassVar[Mapping[str, str]] = {"student": "model"}  # of the teacher

    backend: Backend = Backend.TORCH
    """Engine that runs the plan: torch | jax."""

    model: Model
    """A Hugging Face folder, or {config: {model_type: ...}} for random weights."""

    data: Annotated[DataConfig, BeforeValidator(_read_data)] = DataConfig()
    """A path, or {path: ...}. Default: text that ships with every Python."""

    sharding: Annotated[ShardConfig, SECTION] = ShardConfig()
    """How the model is sharded. `strategy` is also accepted at the top level."""

    training: Annotated[TrainingConfig, SECTION] = TrainingConfig()
    """Hugging Face's TrainingArguments."""

    launch: Annotated[LaunchConfig, SECTION] = LaunchConfig()
    """The processes."""

    freeze: Names = ()
    """Parameter names (globs) that are not trained."""

    teacher: Model | None = None
    """Distillation: the model from which the student learns."""

    lora: LoraConfig | None = None
    """Adapters, which are trained instead of the model's parameters."""

    sft: SftConfig | None = None
    """Supervised fine-tuning."""

    distill: DistillConfig | None = None
    """Distillation: temperature, alpha, loss."""

    @property
    def strategy(self) -> Strategy:
        """`sharding.strategy`, also accepted at the top level of a file."""
        return self.sharding.strategy

    @classmethod
    def known_names(cls) -> list[str]:
        """The names of all keys, and `strategy`."""
        return [*super().known_names(), "strategy"]

    @classmethod
    def unknown(cls, key: str) -> Problem:
        """The problem of a section's key at the top level; names the section."""
        for name, section in (("sharding", ShardConfig), ("training", TrainingConfig)):
            if key in section.field_names() or key in section.ALIASES:
                return Problem(key, "", "unknown key", f"Write {name}.{key}")
        return super().unknown(key)
