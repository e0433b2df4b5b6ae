"""Hugging Face architectures as they ship, tiny, with the inputs that each takes.

Dropout is off, since ranks and one process draw other numbers; all else is the configuration's
default where it is not a size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from support.inputs import (
    VOCABULARY,
    captioned_pictures,
    labelled_pictures,
    language,
    large_pictures,
    sounds,
    speech,
    translation,
    unmasked,
)
from support.models import Batch, perturbed
from support.reference import TOLERANCE

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"experts_implementation": "eager"}  # the grouped matmul has no float64


# ---- architectures -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A model of transformers and what it is trained on.

    Attributes:
        kind: Its model_type.
        auto: The class that makes it from a configuration.
        fields: Of its configuration, over the common sizes where it takes these.
        batch: The arguments of forward in a step on a rank.
        sizes: Whether the common sizes are its configuration's names.
        tolerance: 1e-12 but where float32 islands round weights that differ by less.
    """

    kind: str
    auto: str = "AutoModelForCausalLM"
    fields: dict[str, Any] = field(default_factory=dict)
    batch: Callable[[int, int], Batch] = language
    sizes: bool = True
    tolerance: float = TOLERANCE

    def build(self) -> nn.Module:
        """The model with perturbed weights in float64, in training mode."""
        import transformers

        fields = {**SIZES, **self.fields} if self.sizes else self.fields
        config = transformers.AutoConfig.for_model(self.kind, **fields)
        without_dropout(config)
        torch.manual_seed(0)
        return perturbed(getattr(transformers, self.auto).from_config(config).double())

    def work(self, model: nn.Module, step: int, rank: int) -> torch.Tensor:
        """One forward and backward; the loss that the model computes itself."""
        loss = model(**self.batch(step, rank)).loss
        loss.backward()
        return loss.detach()


def without_dropout(config: Any) -> None:
    """Set every probability to zero, in nested configurations too."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and name != "quantization_config":
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)


MASKED = "AutoModelForMaskedLM"
SEQ2SEQ = "AutoModelForSeq2SeqLM"
IMAGES = "AutoModelForImageClassification"
TOWER = {**SIZES, "image_size": 16, "patch_size": 8, "num_hidden_layers": 2}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SPEECH = {
    **ENCODER_DECODER,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 16,
}

ARCHITECTURES = {
    "llama": Architecture("llama"),
    "mistral": Architecture("mistral", fields={"sliding_window": 4}),
    "qwen3": Architecture("qwen3", fields={"head_dim": 8}),
    "gemma2": Architecture("gemma2", fields={"head_dim": 8, "sliding_window": 4}),
    "gemma3": Architecture(
        "gemma3_text", fields={"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
    ),
    "phi": Architecture("phi"),
    "phi3": Architecture("phi3"),
    "olmo2": Architecture("olmo2"),
    "cohere": Architecture("cohere"),
    "stablelm": Architecture("stablelm"),
    "starcoder2": Architecture("starcoder2"),
    "gpt_neox": Architecture("gpt_neox"),
    "falcon": Architecture("falcon"),
    "bloom": Architecture(
        "bloom",
        fields={"vocab_size": 96, "hidden_size": 32, "n_layer": 3, "n_head": 4},
        sizes=False,
    ),
    "gpt2": Architecture(  # tied
        "gpt2",
        fields={"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
        sizes=False,
    ),
    "gptj": Architecture(
        "gptj",
        fields={
            "vocab_size": 96,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 32,
            "rotary_dim": 4,
        },
        sizes=False,
    ),
    "opt": Architecture("opt", fields={"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral": Architecture(
        "mixtral",
        fields={"num_local_experts": 4, "output_router_logits": True, **EXPERTS},
    ),
    "qwen3_moe": Architecture(
        "qwen3_moe",
        fields={
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            **EXPERTS,
        },
    ),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        fields={
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            **EXPERTS,
        },
    ),
    "mamba": Architecture("mamba", fields={"state_size": 4}, batch=unmasked),
    "falcon_mamba": Architecture(
        "falcon_mamba",
        fields={"state_size": 4},
        batch=unmasked,
        # Decay rates are exponentials taken in float32: after an update, weights that differ in
        # their last bit of float64 may round to neighbours in float32.
        tolerance=1e-6,
    ),
    "mamba2": Architecture(
        "mamba2",
        fields={"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
        batch=unmasked,
    ),
    "jamba": Architecture(
        "jamba",
        fields={
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 4,
            "use_mamba_kernels": False,
            **EXPERTS,
        },
        batch=unmasked,
    ),
    "qwen3_next": Architecture(  # linear and full attention
        "qwen3_next",
        fields={
            "num_hidden_layers": 4,
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "use_cache": False,
            **EXPERTS,
        },
        batch=unmasked,
    ),
    "zamba2": Architecture(  # one block that is called from several places
        "zamba2",
        fields={
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
            "num_key_value_heads": 4,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_mem_blocks": 1,
            "mamba_d_state": 4,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "chunk_size": 4,
            "use_cache": False,
        },
        batch=unmasked,
    ),
    "lfm2": Architecture(
        "lfm2",
        fields={"layer_types": ["conv", "full_attention", "conv"], "use_cache": False},
        batch=unmasked,
    ),
    "rwkv": Architecture(
        "rwkv", fields={"attention_hidden_size": 32, "use_cache": False}, batch=unmasked
    ),
    "xlnet": Architecture(
        "xlnet",
        fields={"vocab_size": 96, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48},
        batch=unmasked,
        sizes=False,
    ),
    "bert": Architecture("bert", MASKED),
    "roberta": Architecture("roberta", MASKED),
    "distilbert": Architecture(
        "distilbert",
        MASKED,
        {"vocab_size": 96, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4},
        sizes=False,
    ),
    "electra": Architecture("electra", MASKED, {"embedding_size": 16}),
    "deberta_v2": Architecture("deberta-v2", MASKED, {"relative_attention": True}),
    "albert": Architecture("albert", MASKED, {"embedding_size": 16, "num_hidden_layers": 4}),
    "t5": Architecture("t5", SEQ2SEQ, T5, translation, sizes=False),
    "bart": Architecture("bart", SEQ2SEQ, ENCODER_DECODER, translation, sizes=False),
    "whisper": Architecture("whisper", "AutoModelForSpeechSeq2Seq", SPEECH, speech, sizes=False),
    "vit": Architecture(
        "vit", IMAGES, {"image_size": 16, "patch_size": 8, "num_labels": 5}, labelled_pictures
    ),
    "dinov2": Architecture(
        "dinov2", IMAGES, {"image_size": 16, "patch_size": 8, "num_labels": 5}, labelled_pictures
    ),
    "convnext": Architecture(
        "convnext",
        IMAGES,
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 5},
        large_pictures,
        sizes=False,
    ),
    "swin": Architecture(
        "swin",
        IMAGES,
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": 5,
        },
        large_pictures,
        sizes=False,
    ),
    "resnet": Architecture(
        "resnet",
        IMAGES,
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 5},
        large_pictures,
        sizes=False,
    ),
    "segformer": Architecture(
        "segformer",
        IMAGES,
        {
            "num_encoder_blocks": 2,
            "hidden_sizes": [8, 16],
            "depths": [1, 2],
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "num_labels": 5,
        },
        large_pictures,
        sizes=False,
    ),
    "wav2vec2": Architecture(
        "wav2vec2",
        "AutoModelForCTC",
        {
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "conv_dim": [16, 16],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
            "ctc_zero_infinity": True,
        },
        sounds,
        sizes=False,
    ),
    "clip": Architecture(
        "clip",
        "AutoModel",
        {"text_config": TOWER, "vision_config": TOWER, "projection_dim": 16},
        captioned_pictures,
        sizes=False,
    ),
}
