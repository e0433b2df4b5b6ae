"""The sections of single recipes: supervised fine-tuning, adapters, distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from fullshard.config.fields import Count, Depth, Flag, Names, Number, Positive, Share, Text, Word
from fullshard.config.section import Section
from fullshard.config.values import DistillLoss, DType, Home, Strategy


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
    """A Jinja file, or a folder with a tokenizer. None: the tokenizer's own, else a plain one."""

    num_samples: Depth = 2
    """Number of held-out prompts whose answers are shown at every evaluation."""

    sample_tokens: Count = 48
    """Most tokens of an answer to a held-out prompt."""


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
    """An adapter is scaled by lora_alpha / r."""

    lora_dropout: Share = 0.0
    """Share of an adapter's inputs that is dropped."""

    target_modules: Names = ()
    """Ends of the names of the layers that get an adapter. Empty: all linear layers but the
    head."""


class DistillConfig(Section):
    """How a student learns from a teacher."""

    ALIASES: ClassVar[Mapping[str, str]] = {"kd_ratio": "alpha", "loss_type": "loss"}

    loss: Word[DistillLoss] = DistillLoss.FORWARD_KL
    """forward_kl | reverse_kl | jsd | hidden (mean square of projected hidden states)."""

    temperature: Positive = 2.0
    """Divides the logits of student and teacher; the loss is multiplied by its square."""

    alpha: Annotated[float, Number(at_least=0, below=1.0000001)] = 0.5
    """Weight of the teacher's loss; the rest is cross-entropy (alias kd_ratio)."""

    beta: Annotated[float, Number(above=0, below=1)] = 0.5
    """Weight of the teacher in the mixture of jsd."""

    chunk_size: Count | None = None
    """Tokens whose logits are in memory at a time. None: training.loss_chunk_size."""

    teacher_dtype: Word[DType] | None = None
    """Dtype of the teacher's weights. None: bfloat16 on accelerators, else float32."""

    teacher_strategy: Word[Strategy] | None = None
    """Sharding strategy of the teacher. None: the student's."""

    teacher_offload: Word[Home] | None = None
    """Where the teacher's weights are kept between forwards: cpu | nvme (files in the run's
    folder). None: on the device."""

    cache: Text | None = None
    """Folder of the teacher's top_k logits, written by `distill cache`: no teacher runs."""

    top_k: Count = 64
    """Logits per token that `distill cache` keeps."""

    experts: Count | None = None
    """Experts per layer that the student takes from the teacher: the most used ones."""

    layers: Count | None = None
    """Layers that the student takes from the teacher: evenly spaced, with the first and the
    last."""

    @property
    def tokens_at_once(self) -> int:
        """Tokens whose logits are in memory at a time, once all settings are filled in."""
        return self.chunk_size or 1 << 30
