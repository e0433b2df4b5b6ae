"""Runs with optimizers of full tensors have the bits of the library's own in one process."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.optimization import Adafactor

import fullshard as fs
from fullshard.config.load import load_config
from fullshard.config.values import Optimizer
from fullshard.errors import ConfigError
from fullshard.models.build import build_sharded, given_model_config
from fullshard.observe.metrics import read_rows
from fullshard.run.optim import build_optimizer, check_optimizer
from support.models import ODD_LLAMA
from support.text import seeded_text


def alone(model, optim):
    """Steps of one process; fullshard chooses nothing here."""
    named = dict(model.named_parameters())
    plain = {n for n in named if "norm" in n}
    decayed = [p for n, p in named.items() if n not in plain]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [named[n] for n in named if n in plain], "weight_decay": 0.0},
    ]
    if optim == "adafactor":
        return [Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False)]
    if optim == "adamw_bnb_8bit":
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(groups, lr=1e-2, eps=1e-6)]
    matrices = [p for n, p in named.items() if "_proj" in n]
    groups[0]["params"] = [named["model.embed_tokens.weight"], named["lm_head.weight"]]
    muon = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    return [
        torch.optim.Muon(matrices, **muon),
        torch.optim.AdamW(groups, lr=1e-2, eps=1e-6, fused=True),
    ]


def has_the_bits(optim, words):
    """Compares three updates with gradients that are equal everywhere."""
    overrides = [f"model.config={json.dumps(ODD_LLAMA)}", f"optim={optim}", *words]
    numbers = ["learning_rate=1e-2", "weight_decay=0.1", "adam_epsilon=1e-6", "adam_beta2=0.999"]
    config = load_config(None, [*overrides, *numbers]).config
    model = build_sharded(config, given_model_config(config), torch.device("cpu"))
    params = {n: nn.Parameter(v) for n, v in fs.full_state_dict(model, rank0_only=False).items()}
    whole = nn.Module()
    whole.named_parameters = lambda: iter(params.items())  # type: ignore[method-assign]
    others = alone(whole, optim)
    optimizer = build_optimizer(model, config.training)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        for name, param in model.named_parameters():
            place = fs.sharding(param)
            grad = torch.randn(place.shape, generator=generator)
            params[name].grad = grad
            local = grad.reshape(-1)[place.start : place.stop].view(param.shape)
            param.grad = local.clone()  # type: ignore[assignment]
        for one in (optimizer, *others):
            one.step()
    for name, value in fs.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, params[name]), (name, (value - params[name]).abs().max())
    assert dist.get_world_size() == 1 or optim != "muon" or "owned Muon" in optimizer.kind


@pytest.mark.short(3)
@pytest.mark.parametrize("optim", ["muon", "adafactor", "adamw_bnb_8bit"])
@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (2, ["strategy=full_shard"]),  # the short case
        (1, []),
        (2, ["strategy=no_shard"]),
        (4, ["strategy=hybrid_shard", "sharding.replicate=2"]),
        (2, ["strategy=shard_grad_op", "sharding.transport=c10d"]),
        (3, ["strategy=full_shard"]),
    ],
)
def test_an_update_has_the_librarys_own_bits_on_every_mesh(ranks, num_ranks, words, optim):
    if optim == "adamw_bnb_8bit":
        pytest.importorskip("bitsandbytes")
    ranks(num_ranks)(has_the_bits, optim, words)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"adamw_bnb_8bit needs bitsandbytes.*fullshard\[bnb\]"):
        check_optimizer(Optimizer.ADAMW_BNB_8BIT)


CONFIG = """\
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
            num_attention_heads: 2, max_position_embeddings: 64}}
data: {{path: {folder}/text.txt, vocab_size: 300, validation_fraction: 0.1}}
training: {{output_dir: {folder}/run, per_device_train_batch_size: 6, max_seq_length: 32,
            learning_rate: 1e-2, lr_scheduler_type: constant, optim: muon, ema_decay: 0.5}}
"""


@pytest.mark.long
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, fullshard):
    (tmp_path / "text.txt").write_text(seeded_text(300))
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    for world_size, steps in ((2, 4), (3, 8)):
        words = [f"launch.num_processes={world_size}", f"max_steps={steps}"]
        fullshard("train", tmp_path / "config.yaml", *words, code=0)
    losses = [row["loss"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 8
    assert losses[4] < losses[0] - 0.3
    assert losses[7] < losses[4]
