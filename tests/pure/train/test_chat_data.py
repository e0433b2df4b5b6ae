"""Chat data: file formats, learned tokens, and packing into rows."""

import copy
import itertools
import json
import pickle
import resource
import signal
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fullshard.config.schema import DataConfig, ModelConfig, SftConfig
from fullshard.data import chat, chat_rows
from fullshard.data.arrays import mapped_once
from fullshard.data.chat import Example, encode, read_examples, set_template
from fullshard.data.chat_rows import best_fit, chat_source, dealt, make_chat_dataset
from fullshard.data.order import BatchShape, SampleOrder
from fullshard.data.records import files_at
from fullshard.data.text import DatasetSettings
from fullshard.data.tokenize import train_tokenizer
from fullshard.errors import ConfigError, DataError
from fullshard.recipes.base import load_data

# Marks nothing, and renders a turn differently if a later one follows.
UNMARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last and m['role'] == 'assistant' %} (now)"
    "{% endif %}{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
KEYS = ("tool_calls", "tools", "tools", "reasoning_content", "function_call")
CHAT = [
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(["two and two is four, sure, yes. Question: Answer:"] * 3, 300)
    set_template(made, None, ModelConfig(name_or_path="MODEL"))
    return made


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def examples(path):
    return list(read_examples(files_at(path).spans()))


def settings_of(length, fraction, sft):
    return DatasetSettings(length, 300, DataConfig(validation_fraction=fraction), sft=sft)


def source(folder, rows):
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return chat_source(folder / "chat.jsonl")


def pair(prompt, completion):
    return {"prompt": prompt, "completion": completion}


def learned_text(example, tokenizer, **learned):
    found = encode(example, tokenizer, SftConfig(**learned))
    ids = [i for i, flag in zip(found.ids, found.learned, strict=True) if flag]
    return tokenizer.decode(ids)


def test_token_ids_may_have_gaps(tmp_path):
    """A vocabulary covers all ids, not only as many as there are entries."""
    found = models.WordLevel({"two": 0, "four": 70_000, "<end>": 1}, unk_token="<end>")
    sparse = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(found), eos_token="<end>")
    settings = settings_of(8, 0.5, SftConfig(num_samples=0))
    rows = make_chat_dataset(source(tmp_path, [pair("two", "four")] * 2), settings, sparse)
    assert rows.facts.vocab_size == 70_001
    labels = rows.arrays(np.array([0]), held_out=False)["labels"]
    assert labels.tolist() == [[-100, 70_000, 1]]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": CHAT[:2]}, ["user: two and two?", "assistant: four"]),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            ["user: a", "assistant: b"],
        ),
        (
            {"system": "s", "conversations": [{"role": "user", "content": "a"}]},
            ["system: s", "user: a"],
        ),
        (
            {"instruction": "add", "input": "1, 2", "output": "3"},
            ["user: add\n\n1, 2", "assistant: 3"],
        ),
        (
            {"system_prompt": "s", "query": "add", "input": "1, 2", "response": "3", "history": []},
            ["system: s", "user: add\n\n1, 2", "assistant: 3"],
        ),
        (
            {
                "prompt": [{"role": "assistant", "content": "four", "weight": 0}],
                "completion": [{"role": "assistant", "content": "five"}],
            },
            ["assistant: four", "assistant: five"],
        ),
        ({"question": "q", "answer": "a"}, ["user: q", "assistant: a"]),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
                    {"role": "tool", "content": {"x": 1}},
                    {"role": "assistant", "content": None},
                ]
            },
            ["user: ab", "tool: {'x': 1}", "assistant: "],
        ),
    ],
)
def test_every_form_becomes_turns(tmp_path, record, messages):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (example,) = examples(path)
    assert [f"{m['role']}: {m['content']}" for m in example.messages] == messages


def test_parquet_and_datasets_folders_are_read_as_jsonl_is(tmp_path):
    import datasets

    rows = [{"messages": CHAT[:2]}, {"messages": CHAT}]
    made = datasets.Dataset.from_list(rows)
    made.to_parquet(tmp_path / "chat.parquet")
    datasets.DatasetDict(train=made).save_to_disk(tmp_path / "saved")
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [
        [e.messages for e in examples(tmp_path / name)]
        for name in ("chat.jsonl", "chat.parquet", "saved")
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"txt": "a"}', "expected columns among messages, "),
        ('{"messages": []}', "expected a list of messages at "),
        ('{"messages": [{"role": "user"}]}', "expected 'role' and 'content' in a message at "),
        ('{"messages": [{"role": null, "content": "a"}]}', "expected 'role' and 'content' in a"),
        ('{"messages": [{"role": "user", "content": {"a": 1}}]}', "got \"{'a': 1}\""),
        ('{"messages": [{"role": "user", "content": [{"image": 1}]}]}', "or parts with 'text', in"),
        ('{"instruction": 3, "output": "a"}', "expected text in column 'instruction', got int at "),
        ('{"instruction": "add", "input": [1], "output": "a"}', "column 'input', got list at "),
        ('{"messages": [{"role": "user", "content": "a"}], "system": 1}', "'system', got int at "),
        ('{"question": "q", "context": "c", "answer": "a"}', "got a part in 'context' at "),
        ('{"messages": [{"role": "user", "content": "a"}], "prompt": "b"}', "text in 'prompt'"),
        ('{"query": "q", "history": [["a", "b"]], "response": "a"}', "got a part in 'history' at "),
        ('{"prompt": "q", "system": "s", "completion": "a"}', "got a part in 'system' at "),
        ('{"question": "q", "input": "i", "answer": "a"}', "got a part in 'input' at "),
        ('{"messages": [{"role": "system", "content": "a"}], "system": "b"}', "one system message"),
        ('{"messages": [{"role": "user", "content": true}]}', "messages[0]; got 'True'"),
        ('{"messages": [{"role": "user", "content": NaN}]}', "messages[0]; got 'nan'"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image", "text": "a"}]}]}',
            "expected text, or parts with 'text', in the message at ",
        ),
        ('{"question": "q", "answer": "a", "response": "b"}', "and a text in 'response' that is"),
        ('{"prompt": "q", "completion": "a", "answer": "b"}', "and a text in 'answer' that is"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "conversations": '
            '[{"from": "human", "value": "b"}]}',
            "and a text in 'conversations' that is in none of its messages",
        ),
        ('{"question": "q", "answer": "a", "functions": [{"name": "f"}]}', "got 'functions' at "),
        ('{"instruction": "a", "output": null}', "got 'instruction', 'output (null)' at "),
        (
            '{"messages": [{"role": "user", "content": "a", "train": true}]}',
            "expected only trained answers, got train: True at ",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "loss": false}]}',
            "expected answers that are all trained, got loss: False at ",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}',
            "expected answers that are all trained, got weight: 0 at ",
        ),
        (
            '{"question": "q", "answer": "a", "weight": 0}',
            "records that are all trained, got weight",
        ),
        ('{"prompt": "q", "completion": "a", "label": false}', "all trained, got label: False at "),
        (
            '{"messages": [{"role": "assistant", "content": "a"}], "train": false}',
            "expected records that are all trained, got train: False at ",
        ),
        ('{"question": "q", "answer": "a", "weight": 0.5}', "are all trained, got weight: 0.5 at "),
        ('{"question": "q", "answer": "a", "mask": [0]}', "are all trained, got mask: [0] at "),
    ],
)
def test_a_wrong_record_is_named_with_its_line(tmp_path, line, said):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    with pytest.raises(DataError) as caught:
        examples(path)
    assert said in str(caught.value)
    assert f"{path}:2" in str(caught.value)


def test_only_answers_are_learned_with_and_without_marks(tokenizer):
    turns = Example(tuple(CHAT), 0, is_completion=False, place="here")
    assert learned_text(turns, tokenizer) == " four<|endoftext|> yes<|endoftext|>"
    everything = learned_text(turns, tokenizer, assistant_only_loss=False)
    assert everything.startswith("Question: two and two?\nAnswer: four<|endoftext|>")
    plain = train_tokenizer(["two and two is four"], 300)
    plain.chat_template = UNMARKED
    assert learned_text(turns, plain) == "four</s> (now)yes</s>"
    says = [{**CHAT[0], "content": "say four"}, *CHAT[1:]]  # the question contains the answer
    found = encode(Example(tuple(says), 0, False, "here"), plain, SftConfig())
    assert not any(found.learned[: len(plain("<user>say four</s><assistant>")["input_ids"])])
    begun = Example(tuple(CHAT[1:]), 0, is_completion=False, place="here")
    assert learned_text(begun, plain) == "four</s> (now)yes</s>"
    plain.chat_template = UNMARKED.replace("<assistant>", "<assistant> ").replace("}>", "}> ")
    assert learned_text(turns, plain) == " four</s> (now)yes</s>"  # " f" begins before the answer
    plain.chat_template = "{% for m in messages[:-1] %}{{ m.content }};{% endfor %}"
    with pytest.raises(DataError, match="expected the answer of message 1 in the chat temp"):
        learned_text(turns, plain)  # otherwise the question would be learned too


def test_the_probe_learns_neither_results_of_calls_nor_answers_without_their_reasoning():
    plain = train_tokenizer(["two and two is four"], 300)
    told = {"role": "tool", "name": "add", "content": "3"}
    call = {"role": "assistant", "content": "let me", "tool_calls": [{"name": "add"}]}
    turns = Example((CHAT[0], call, told, CHAT[1]), 0, is_completion=False, place="here")
    result = "{% if m.tool_calls %}call{{ loop.nextitem.content if not loop.last }}{% endif %}"
    plain.chat_template = f"{{% for m in messages %}}{result}{{{{ m.content }}}};{{% endfor %}}"
    with pytest.raises(DataError, match="expected the answer of message 1"):
        learned_text(turns, plain)
    plain.chat_template = UNMARKED.replace("}}>", "}}>{{ m.name + ':' if m.role == 'tool' }}")
    pair = Example((CHAT[0], told, CHAT[1]), 1, is_completion=True, place="here")
    assert learned_text(pair, plain) == "3</s> (now)four</s>"
    thought = {**CHAT[1], "content": "<think>\nhm, two\n</think> four"}
    plain.chat_template = UNMARKED.replace("m['content']", "m['content'].split('</think>')[-1]")
    with pytest.raises(DataError, match="expected a chat template that writes '</think>'"):
        learned_text(Example((CHAT[0], thought), 0, is_completion=False, place="here"), plain)
    empty = {**CHAT[1], "content": "<think>\n\n</think> four"}
    kept = Example((CHAT[0], thought, CHAT[2], empty), 0, is_completion=False, place="here")
    assert learned_text(kept, plain) == " four</s> (now) four</s>"


def test_answers_of_an_unknown_role_are_not_dropped(tokenizer):
    turns = Example((*CHAT[:3], {**CHAT[3], "role": "ai"}), 0, is_completion=False, place="here")
    with pytest.raises(DataError, match=r"expected a role among .* names, got 'ai' at here"):
        learned_text(turns, tokenizer)
    assert "yes" in learned_text(turns, tokenizer, assistant_only_loss=False)
    own = train_tokenizer(["two and two is four"], 300)
    own.chat_template = UNMARKED + "{% if 'ai' == messages[0]['role'] %}{% endif %}"
    assert learned_text(turns, own) == "four</s>"


def test_tools_and_reasoning_reach_the_template_and_the_built_in_one_refuses_them(
    tokenizer, tmp_path
):
    path, call = tmp_path / "chat.jsonl", {"function": {"name": "f", "arguments": {}}}
    turns = {"messages": [*CHAT[:1], {**CHAT[1], "tool_calls": [call]}]}
    rows = [turns, {"messages": CHAT[:2], "tools": [{"name": "f"}]}]
    rows.append({"messages": CHAT[:2], "tools": '[{"name": "g"}]'})
    for key in ("reasoning_content", "function_call"):
        rows.append({"messages": [*CHAT[:1], {**CHAT[1], key: "hmm"}]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = examples(path)
    for example in found:
        with pytest.raises(DataError, match="the built-in template has no form for"):
            learned_text(example, tokenizer)
    own = train_tokenizer(["two and two is four"], 300)
    own.chat_template = "{{ tools[0].name }}: " + UNMARKED
    everything = learned_text(found[2], own, assistant_only_loss=False)
    assert everything.startswith("g: ")
    own.chat_template = UNMARKED
    for example, key in zip(found, KEYS, strict=True):
        with pytest.raises(DataError, match=f"expected a chat template that writes '{key}'"):
            learned_text(example, own)


def test_an_answer_in_the_prompt_is_not_learned_though_the_template_marks_it(tokenizer):
    example = Example((CHAT[1], CHAT[3]), 1, is_completion=True, place="here")
    assert learned_text(example, tokenizer) == " yes<|endoftext|>"


def test_a_completion_is_learned_and_its_prompt_is_not(tokenizer):
    told = [{"role": "user", "content": "two and "}, {"role": "assistant", "content": "two"}]
    pair = Example(tuple(told), 1, is_completion=True, place="here", is_plain=True)
    assert learned_text(pair, tokenizer) == "two<|endoftext|>"
    assert learned_text(pair, tokenizer, completion_only_loss=False) == "two and two<|endoftext|>"


def test_sampled_prompts_begin_as_trained_prompts_do_and_empty_ones_are_left_out(tmp_path):
    from tokenizers.processors import TemplateProcessing

    found, rows = [], [pair("two", "four"), pair("two", "four"), pair("", "four")]
    made = train_tokenizer(["two and two is four"], 300)
    set_template(made, None, ModelConfig(name_or_path="MODEL"))
    for _ in range(2):
        settings = settings_of(16, 0.5, SftConfig(num_samples=2))
        data = make_chat_dataset(source(tmp_path, rows), settings, made)
        found += [data.samples, data.arrays(np.array([0]), held_out=True)["input_ids"][0].tolist()]
        end = ("<|endoftext|>", 0)
        backend = made.backend_tokenizer
        single = f"{end[0]} $A {end[0]}"
        backend.post_processor = TemplateProcessing(single=single, special_tokens=[end])
    two, four = (made(text, add_special_tokens=False)["input_ids"] for text in ("two", "four"))
    assert found == [(two,), [*two, *four, 0], ([0, *two], [0]), [0, *two, *four, 0]]


def test_cut_and_skipped_examples_are_counted_and_reported(tokenizer, tmp_path):
    answers = ["four", "yes " * 40, "two"]
    rows = [pair("two and two " * n, a) for n, a in zip((1, 1, 60), answers, strict=True)]
    settings = settings_of(40, 0.0, SftConfig(packing=True, num_samples=0))
    made = make_chat_dataset(source(tmp_path, rows), settings, tokenizer)
    assert made.facts.num_train_sequences == len(made.train) == 2
    assert made.train.lengths.max() == 40
    said = "; ".join(made.facts.notes)
    assert "2 examples truncated to 40 tokens" in said
    assert "1 examples without trained tokens are skipped" in said
    total = sum(
        len(encode(one, tokenizer, SftConfig()).ids) for one in examples(tmp_path / "chat.jsonl")
    )
    assert made.facts.num_dropped_tokens == total - made.facts.num_train_tokens > 0


def test_rows_are_the_examples_in_order_though_processes_share_the_parts(
    tokenizer, tmp_path, monkeypatch
):
    """The end is held out, and its prompts are found, also after parts without examples."""
    monkeypatch.setattr("fullshard.data.tokenize.SHARD_BYTES", 256)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    rows = [pair("two " * n, "four " * (1 + n % 3)) for n in range(1, 25)]
    data = source(tmp_path, rows)
    (tmp_path / "chat.jsonl").write_text("\n" * 600 + (tmp_path / "chat.jsonl").read_text())
    made = make_chat_dataset(data, settings_of(64, 0.25, SftConfig(num_samples=2)), tokenizer)
    assert len(made.train.values.sources[0]) > 4
    found = [encode(one, tokenizer, SftConfig()) for one in examples(tmp_path / "chat.jsonl")]
    for part, held_out in ((found[:18], False), (found[18:], True)):
        arrays = made.arrays(np.arange(len(part)), held_out=held_out)
        for at, one in enumerate(part):
            place = len(one.ids)
            assert arrays["input_ids"][at, :place].tolist() == one.ids
            learned = (arrays["labels"][at] != -100).tolist()
            assert learned == [*one.learned, *[False] * (len(learned) - place)]
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows[18:20]]
    assert list(made.samples) == prompts
    monkeypatch.setattr("fullshard.data.tokenize.SHARD_BYTES", 1 << 20)
    again = make_chat_dataset(data, settings_of(64, 0.25, SftConfig(num_samples=2)), tokenizer)
    assert len(again.train.values.sources[0]) == 1
    assert again.facts == made.facts  # the fingerprint as well


def test_the_banner_names_columns_that_are_not_read(tokenizer, tmp_path):
    """Examples are answers of preferences, and a column named like the part."""
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    row = {"messages": said, "chosen": said[1:], "rejected": said[1:]}
    more = {"split": "test", "id": 4, "prompt": "one", "tools": [], "system": None, "note": ""}
    for rows, told in (
        ([row | more], ["columns that are not read: chosen, id, rejected and 1 more"]),
        ([pair("one", "two")], []),
    ):
        made = make_chat_dataset(
            source(tmp_path, rows * 2), settings_of(64, 0.0, SftConfig()), tokenizer
        )
        assert list(made.facts.notes[1:]) == told


def test_padded_rows_have_one_length_and_padding_is_a_separate_document(tokenizer, tmp_path):
    rows = [pair("two " * n, "four") for n in (1, 2, 3, 4)]
    settings = settings_of(16, 0.0, SftConfig(packing=True, num_samples=0))
    made = make_chat_dataset(source(tmp_path, rows), settings, tokenizer)
    chosen = np.array([0, -1])
    plain = made.arrays(chosen, held_out=False)
    length = plain["input_ids"].shape[1]
    assert length < 16
    padded = made.padded().arrays(chosen, held_out=False)
    assert {name: array.shape for name, array in padded.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (2, 16)
    )
    for name in ("input_ids", "labels"):
        assert padded[name][:, :length].tolist() == plain[name].tolist()
    assert (padded["labels"][:, length:] == -100).all()
    sizes = [size for _, size in made.train.examples_of(0)]
    places = [*(range(size) for size in sizes), range(16 - sum(sizes))]
    assert padded["position_ids"].tolist() == [[*itertools.chain(*places)], list(range(16))]


def test_a_saved_dataset_loads_unchanged(tokenizer, tmp_path):
    rows = [pair("two " * n, "four") for n in range(1, 9)]
    settings = settings_of(32, 0.25, SftConfig(packing=True, num_samples=2))
    made = make_chat_dataset(source(tmp_path, rows), settings, tokenizer)
    made.save(tmp_path / "data")
    loaded = load_data(tmp_path / "data", ModelConfig(name_or_path="MODEL"))
    again = pickle.loads(pickle.dumps(loaded.without_tokenizer()))
    assert (loaded.facts, loaded.samples) == (made.facts, made.samples)
    assert len(loaded.samples) == 2
    for held_out, count in ((False, len(made.train)), (True, len(made.held_out))):
        chosen = np.arange(-1, count)
        batches = [one.arrays(chosen, held_out=held_out) for one in (made, loaded, again)]
        for other in batches[1:]:
            assert batches[0].keys() == other.keys()
            for name, array in batches[0].items():
                np.testing.assert_array_equal(other[name], array)


def test_the_cache_is_used_until_a_file_changes(tokenizer, tmp_path, monkeypatch):
    made, settings = [], settings_of(32, 0.0, SftConfig(packing=True, num_samples=0))
    monkeypatch.setattr(chat_rows, "encode", lambda *a: made.append("made") or encode(*a))

    def prepared(answer=None, settings=settings, other=tokenizer):
        data = source(tmp_path, [pair("two and two", answer)]) if answer else None
        return make_chat_dataset(data or chat_source(tmp_path / "chat.jsonl"), settings, other)

    first = prepared("four").facts
    assert prepared().facts == first
    shorter = settings_of(6, 0.0, SftConfig(num_samples=1))
    assert prepared(settings=shorter).facts.fingerprint != first.fingerprint
    assert made == ["made"]  # cached parts serve rows of any length
    second = prepared("yes").facts
    assert second.fingerprint != first.fingerprint
    assert made == ["made"] * 2
    for end in ("npy", "json"):
        for damaged in (tmp_path / "cache" / "fullshard" / "tokens").glob(f"*/*.{end}"):
            data = bytearray(damaged.read_bytes())
            data[-1 if end == "npy" else 0] ^= 1
            damaged.write_bytes(data)
        mapped_once.cache_clear()
        assert prepared().facts == second
    assert made == ["made"] * 4
    other = copy.deepcopy(tokenizer)
    other.chat_template = UNMARKED
    prepared(other=other)
    prepared(
        settings=settings_of(
            32, 0.0, SftConfig(packing=True, num_samples=0, completion_only_loss=False)
        )
    )
    assert made == ["made"] * 6
    other = copy.deepcopy(tokenizer)
    other.split_special_tokens = True
    prepared(other=other)
    other = copy.deepcopy(tokenizer)
    other.init_kwargs["add_bos_token"] = True
    prepared(other=other)
    other.init_kwargs["name_or_path"] = "elsewhere"
    prepared(other=other)
    assert made == ["made"] * 8


NO_ANSWERS = [{"messages": CHAT[::2]}]
ASKED = Example(tuple(CHAT[:2]), 0, is_completion=False, place="x")


@pytest.mark.parametrize(
    ("rows", "template", "said"),
    [
        (
            [pair("two and two " * 30, "four")],
            None,
            r"more tokens than \d{2,}, where .* begins, got",
        ),
        (NO_ANSWERS, None, r"role 'assistant'.* the roles are user \(2\)\. Rename"),
        ([pair("", ""), *NO_ANSWERS], None, r"the roles are user \(2\)\. Rename"),
        (NO_ANSWERS, UNMARKED, r"role 'assistant'.* the roles are user \(2\)\. Rename"),
        (
            [{"messages": CHAT[:2]}],
            "two {% generation %}{% endgeneration %} two",
            "template does not mark them",
        ),
        (
            [pair("", "")],
            None,
            "answers to train on, got none in 1 training examples: they are empty",
        ),
        ([], None, "expected records, got none in"),
    ],
)
def test_data_without_learned_tokens_is_an_error_that_names_the_cause(
    tokenizer, tmp_path, rows, template, said
):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template or other.chat_template
    settings = settings_of(8, 0.0, SftConfig(num_samples=0))
    with pytest.raises(DataError, match=said):
        make_chat_dataset(source(tmp_path, rows), settings, other)


@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize(
    ("bomb", "said"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "did not end within",
        ),
        ("{{ 'x' * 2000000000 }}", "needs more than 1024 MiB"),
    ],
)
def test_a_template_without_end_is_refused_and_limits_stay_as_they_were(
    tokenizer, bomb, said, marks, monkeypatch
):
    monkeypatch.setattr(chat, "TEMPLATE_LIMIT_S", 0.2)
    other = copy.deepcopy(tokenizer)
    other.chat_template = bomb + marks
    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match=rf"x that it refuses \(it {said}"):
        encode(ASKED, other, SftConfig())
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before


def test_a_long_text_without_spaces_trains_a_tokenizer_in_little_time():
    """Training is quadratic in a word's length; this text needed half a minute."""
    text = "ab" * 100_000 + " " * 100_000
    began = time.monotonic()
    made = train_tokenizer([text], 300)
    assert time.monotonic() - began < 10
    assert made.decode(made(text)["input_ids"]) == text


@given(st.lists(st.integers(1, 40), max_size=60))
def test_best_fit_packs_every_example_once_and_never_overfills(lengths):
    order, rows = best_fit(np.array(lengths, int), 40)
    assert sorted(order) == list(range(len(lengths)))
    sums = [sum(lengths[example] for example in row) for row in np.split(order, rows[1:-1])]
    sums = sums if lengths else []
    assert all(0 < total <= 40 for total in sums)
    assert sum(total <= 20 for total in sums) <= 1  # two half-empty rows would be one


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_dealing_keeps_the_rows_of_a_step_whatever_the_ranks(world, micro, accumulation, step):
    lengths = np.arange(60) * 7 % 31 + 1
    samples = 12
    shape = BatchShape(micro, -(-samples // (micro * world)) + accumulation - 1, world, samples)
    chosen = SampleOrder(60, shape, seed=3).of_step(step)
    found = dealt(chosen, lengths)
    assert found.shape == chosen.shape
    one = SampleOrder(60, BatchShape(12, 1, 1), seed=3).of_step(step)
    assert sorted(found[found >= 0]) == sorted(one.reshape(-1))


def test_ranks_of_a_micro_batch_get_rows_of_similar_length():
    lengths = np.arange(64) * 37 % 61 + 1
    chosen = SampleOrder(64, BatchShape(1, 8, 4), seed=0).of_step(0)

    def waiting(rows):
        by_micro = lengths[rows].reshape(8, 4)
        return (by_micro.max(axis=1, keepdims=True) - by_micro).sum()

    assert waiting(dealt(chosen, lengths)) < waiting(chosen) / 3


def test_a_template_file_is_utf_8_and_its_byte_order_mark_is_ignored(tmp_path, tokenizer):
    made, file = copy.deepcopy(tokenizer), tmp_path / "chat.jinja"
    file.write_bytes(b"\xef\xbb\xbf{{ messages }}")
    set_template(made, file, ModelConfig(name_or_path="MODEL"))
    assert made.chat_template == "{{ messages }}"
    file.write_bytes("{{ messages }}".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"chat.jinja': expected UTF-8 text; got UnicodeDecode"):
        set_template(made, file, ModelConfig(name_or_path="MODEL"))
    made.chat_template = 5
    with pytest.raises(ConfigError, match=r"a tokenizer whose chat_template is text, got int"):
        set_template(made, None, ModelConfig(name_or_path="MODEL"))
