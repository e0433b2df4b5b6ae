"""Generating from tokens: sampling, and the process state that it does not change."""

import copy
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from fullshard.cli.generate import carry_out, read_prompts
from fullshard.errors import ConfigError, DivergedError
from fullshard.models.generate import Sampler, SamplingSettings, model_folder_of
from support.sizes import sizes_of

TOKENIZER: Any = SimpleNamespace(pad_token_id=0)


class Letters:
    """A tokenizer with one token per letter."""

    pad_token_id, bos_token_id = 0, 1

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) % 64 for letter in text]}

    def decode(self, ids, **_):
        return str(ids)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, eos_token_id=None, **sizes_of(16, 24, 2, layers=1))
    return AutoModelForCausalLM.from_config(config).eval()


def test_greedy_generation_does_not_change_the_random_numbers_of_a_run(model):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (new,) = Sampler(model, TOKENIZER, SamplingSettings(temperature=0)).continued([[1, 2, 3]], 4)
    assert len(new) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_older_than_the_checkpoints_of_its_run_is_reported(tmp_path, caplog):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    for saved in (4, 6):
        assert "of step 4" not in caplog.text
        record = {"measured": {"num_steps": 4}, "last_saved_step": saved}
        (tmp_path / "run.json").write_text(json.dumps(record))
        assert model_folder_of(tmp_path) == tmp_path / "model"
    assert "is of step 4; checkpoints of later steps" in caplog.text


def test_more_tokens_than_positions_are_reported_or_refused(caplog):
    for config in (
        LlamaConfig(**sizes_of(16, 24, 2, layers=1, vocab_size=64, max_position_embeddings=8)),
        GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=64, eos_token_id=None),
    ):
        sampler = Sampler(
            AutoModelForCausalLM.from_config(config).eval(), Letters(), SamplingSettings(9)
        )
        if config.model_type == "llama":  # rotary positions have no limit
            assert sampler.samples(["abc"])
            assert "positions for only 5 of 9 new tokens" in caplog.text
        else:
            with pytest.raises(ConfigError, match=r"max-new-tokens: expected at most 5, .* got 9"):
                sampler.samples(["abc"])


@pytest.mark.parametrize("template", ["{{", "{{ raise_exception('no') }}", "{{ x.y.z }}"])
def test_a_chat_template_that_fails_is_a_typed_error(model, template):
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="--chat: expected a chat template that takes a prompt"):
        Sampler(model, tokenizer, SamplingSettings(4)).samples(["a"], chat=True)


class Begun(Letters):
    """A tokenizer that adds start and end tokens to every text."""

    def __call__(self, text, *, add_special_tokens=True, **_):
        ids = super().__call__(text)["input_ids"]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


def test_a_prompt_begins_with_the_start_tokens_even_if_it_is_cut(model):
    seen = []
    sampler = Sampler(
        model, Begun(), SamplingSettings(1, 0), [lambda ids, scores: seen.extend(ids) or scores]
    )
    sampler.samples(["abc", "", "x" * (model.config.max_position_embeddings + 1)])
    cut, text, empty = (ids.tolist() for ids in seen)
    assert (text, empty) == ([1, *Letters()("abc")["input_ids"]], [1])
    assert cut == [1] + [ord("x") % 64] * (model.config.max_position_embeddings // 2 - 1)


@pytest.mark.parametrize(("temperature", "value"), [(0, "nan"), (0.7, "nan"), (0, "inf")])
def test_weights_that_are_no_numbers_generate_no_text(model, temperature, value):
    broken = copy.deepcopy(model)
    broken.lm_head.weight.data[3] = float(value)
    sampler = Sampler(broken, TOKENIZER, SamplingSettings(temperature=temperature))
    with pytest.raises(DivergedError, match="expected weights that give scores"):
        sampler.continued([[1, 2, 3]], 4)


def test_a_temperature_near_zero_takes_the_most_likely_tokens(model):
    first, second = (
        Sampler(model, TOKENIZER, SamplingSettings(temperature=t)).continued([[1, 2, 3]], 4)
        for t in (0, 1e-320)
    )
    assert first == second


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "a\u2028b\x0bc\r\nd\n\n", ["a\u2028b\x0bc", "d"]),
        ("a.JSONL", '{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\n', ["a\u2028b", "c"]),
    ],
)
def test_prompts_of_a_file_end_where_lines_do(name, content, expected, tmp_path):
    (tmp_path / name).write_bytes(content.encode())
    assert read_prompts(tmp_path / name) == expected


def test_a_prompt_that_sets_what_options_set_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "id": 1, "temperature": 0}')
    with pytest.raises(ConfigError, match="temperature in a row; options set it for all"):
        read_prompts(tmp_path / "a.jsonl")


def test_a_launcher_with_another_number_of_ranks_is_refused(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=r"--num-processes: expected 2, .*, got 3\."):
        carry_out(TOKENIZER, 3)


def test_sampled_tokens_depend_only_on_the_seed(model):
    def drawn(seed):
        settings = SamplingSettings(temperature=2.0, seed=seed)
        return Sampler(model, TOKENIZER, settings).continued([[1]], 8)[0]

    assert drawn(1) == drawn(1) != drawn(2)


def test_processors_change_the_scores_of_every_token(model):
    def only_seven(_, scores):
        return torch.where(torch.arange(64) == 7, scores, -torch.inf)

    sampler = Sampler(model, TOKENIZER, SamplingSettings(), [only_seven])
    assert sampler.continued([[1]], 3) == [[7, 7, 7]]


def test_rows_of_a_batch_end_where_each_alone_would(model):
    """The row that ends first is padded, and the padding is not part of it."""

    def ends_row_one(ids, scores):
        wanted = torch.where(ids[:, :1] == 1, 9, 8)  # 9 ends a text
        return torch.where(torch.arange(64) == wanted, 0.0, -torch.inf)

    model.generation_config.eos_token_id = [9, 10]
    try:
        sampler = Sampler(model, TOKENIZER, SamplingSettings(temperature=0), [ends_row_one])
        assert sampler.continued([[1, 3], [2, 3]], 3) == [[9], [8, 8, 8]]
    finally:
        model.generation_config.eos_token_id = None


def test_prompts_of_one_length_are_sampled_together_without_padding(model):
    seen: list[tuple[int, ...]] = []

    def watched(ids, scores):
        seen.append(tuple(ids.shape))
        return scores

    sampler = Sampler(model, Letters(), SamplingSettings(1, temperature=0), [watched])
    found = sampler.samples(["a", "bc", "d", "e", "fg"], batch_size=2)
    assert seen == [(2, 2), (2, 1), (1, 1)]
    assert [sample.prompt for sample in found] == ["a", "bc", "d", "e", "fg"]
    assert found == [sampler.samples([sample.prompt])[0] for sample in found]


def test_many_prompts_are_counted_while_they_are_sampled(model, monkeypatch, caplog):
    monkeypatch.setattr("fullshard.models.generate.SAY_S", 0.0)
    sampler = Sampler(model, Letters(), SamplingSettings(1, temperature=0))
    with caplog.at_level(logging.INFO, "fullshard"):
        sampler.samples(["a", "bc", "def"])
        assert caplog.messages == ["generate: 1 of 3 texts", "generate: 2 of 3 texts"]
        sampler.samples(["a"])
    assert len(caplog.messages) == 2


def test_sampling_settings_of_a_folder_are_ignored(caplog):
    drawn = SamplingSettings(temperature=0.5).arguments()
    assert drawn == {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
    }
    assert not caplog.text
    assert SamplingSettings(temperature=0, top_k=3).arguments()["do_sample"] is False
    assert "--top-k, --top-p: no effect with --temperature 0" in caplog.text
