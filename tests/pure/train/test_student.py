"""A student cut out of a mixture of experts has the teacher's weights and records which."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from fullshard.config.schema import DistillConfig, ModelConfig
from fullshard.data.tokenize import train_tokenizer
from fullshard.errors import ConfigError
from fullshard.models.student import (
    KeptParts,
    choose,
    counting,
    kept_layers,
    student_config,
    write_student,
)
from fullshard.recipes.registry import Command

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(num_experts=6, moe_intermediate_size=8, **SIZES),
    "mixtral": MixtralConfig(num_local_experts=6, **SIZES),
}


def build(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.rand_like(param) * 0.1)
    return model.eval()


def experts_of(model, layer):
    """Returns (num_experts, ...) of each fused parameter of a layer's experts, and router rows."""
    return [
        param
        for name, param in model.model.layers[layer].mlp.named_parameters()
        if "experts" in name or name == "gate.weight"
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_student_that_keeps_everything_equals_the_teacher(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path / "teacher")
    kept = KeptParts((0, 1, 2, 3), {}, {})
    write_student(tmp_path / "teacher", tmp_path / "student", CONFIGS[name], kept)
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    ids = torch.arange(10)[None]
    torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # issued by jax
def test_a_student_whose_writing_was_interrupted_is_written_again(tmp_path, monkeypatch):
    model, config, kept = build("mixtral"), CONFIGS["mixtral"], KeptParts((0, 1, 2, 3), {}, {})
    model.save_pretrained(tmp_path / "teacher")
    words = (tmp_path / "teacher", tmp_path / "student", config, kept)
    student = tmp_path / "student" / "config.json"
    with monkeypatch.context() as patched:
        patched.setattr(type(config), "save_pretrained", lambda *_: os.kill(os.getpid(), 9))
        child = os.fork()
        if child == 0:
            write_student(*words)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not student.parent.exists()
    write_student(*words)
    assert student.is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["student", "teacher"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_most_used_experts_of_the_kept_layers_stay_in_their_order(name, tmp_path):
    model, settings = build(name), DistillConfig(experts=3, layers=2)
    model.save_pretrained(tmp_path / "teacher")
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    with counting(model) as counts, torch.no_grad():
        model(ids)
    assert sorted(counts) == [0, 1, 2, 3]
    assert all(int(used.sum()) == ids.numel() * 2 for used in counts.values())
    kept = choose({layer: used.tolist() for layer, used in counts.items()}, 4, settings)
    assert kept.layers == (0, 3)
    config = student_config(CONFIGS[name], settings)
    write_student(tmp_path / "teacher", tmp_path / "student", config, kept)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    for place, layer in enumerate(kept.layers):
        most = list(kept.experts[layer])
        dropped = [expert for expert in range(6) if expert not in most]
        assert len(most) == 3
        assert most == sorted(most)
        assert counts[layer][most].min() >= counts[layer][dropped].max()
        for found, whole in zip(experts_of(student, place), experts_of(model, layer), strict=True):
            assert torch.equal(found, whole[most])
    said = list(kept.lines())
    assert said[0] == "layers 0, 3 of the teacher are kept"
    assert said[1].startswith(
        f"layer 0: experts {', '.join(map(str, kept.experts[0]))}, which got "
    )
    assert torch.isfinite(student(ids).logits).all()


def test_layers_are_kept_evenly_with_both_ends():
    assert kept_layers(8, 3) == (0, 4, 7)
    assert kept_layers(8, None) == tuple(range(8))
    assert kept_layers(8, 1) == (0,)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (CONFIGS["mixtral"], {"layers": 5}, "distill.layers: expected at most the teacher's 4"),
        (CONFIGS["mixtral"], {"experts": 1}, "expected between 2 (that a token goes to) and 6"),
        (CONFIGS["qwen3_moe"], {"experts": 7}, "and 6 (that the teacher has), got 7"),
        (LlamaConfig(), {"layers": 2}, "expected a teacher of type qwen3_moe or mixtral"),
    ],
)
def test_a_student_larger_than_its_teacher_is_refused(config, settings, said):
    with pytest.raises(ConfigError) as caught:
        student_config(config, DistillConfig(**settings))
    assert said in str(caught.value)


def test_another_tokenizer_is_refused(tmp_path):
    CONFIGS["mixtral"].save_pretrained(tmp_path)
    train_tokenizer(["some text"], 300).save_pretrained(tmp_path)
    same, other = train_tokenizer(["some text"], 300), train_tokenizer(["quite another"], 300)
    teacher = ModelConfig(name_or_path=str(tmp_path))
    config: Any = SimpleNamespace(teacher=teacher, distill=None)
    check_teacher = Command.DISTILL.kind.check
    check_teacher(config, same)
    with pytest.raises(ConfigError, match="expected the student's tokenizer"):
        check_teacher(config, other)
    config.distill = DistillConfig(loss="hidden")
    check_teacher(config, other)


def test_layers_stay_dense_or_sparse_and_other_lists_unchanged():
    config = Qwen3MoeConfig(decoder_sparse_step=2, eos_token_id=[1, 2, 3, 4], **SIZES)
    student = student_config(config, DistillConfig(layers=2))
    with torch.device("meta"):
        whole, part = map(AutoModelForCausalLM.from_config, (config, student))
    kinds = [[type(layer.mlp) for layer in model.model.layers] for model in (whole, part)]
    assert kinds[1] == [kinds[0][0], kinds[0][3]]
    assert len({*kinds[1]}) == 2
    assert student.eos_token_id == [1, 2, 3, 4]
