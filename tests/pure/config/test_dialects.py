"""Files of other tools, as in their documentation, keep their meaning in our keys."""

import json
import re
from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from fullshard.config.dialects.accelerate import FSDP
from fullshard.config.dialects.translate import DIALECTS
from fullshard.config.files import parse_text
from fullshard.config.load import load_config, text_of
from fullshard.config.rules import Status
from fullshard.config.values import DType, HomeKind, Strategy, WrapKind
from fullshard.errors import ConfigError

FOLDER = Path(__file__).parent / "dialects"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.name != "fsdp_config.json")


@pytest.fixture
def load(load_file):
    """`load(text, *overrides)` reads a file with that text; several texts are several files."""
    return partial(load_file, needs_model=False)


def accelerate(*lines, top=""):
    return "\n".join(["distributed_type: FSDP", top, "fsdp_config:", *(f"  {x}" for x in lines)])


@pytest.mark.parametrize("name", FILES)
def test_a_file_reads_as_before(name, snapshot, monkeypatch):
    monkeypatch.chdir(FOLDER)
    resolved = load_config(Path(name), needs_model=False)
    shown = [
        line
        for line in text_of(resolved, with_defaults=True).splitlines()
        if not line.endswith("# default")
    ]
    assert "\n".join(shown) == snapshot


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_another_tool_has_a_note(name, monkeypatch):
    monkeypatch.chdir(FOLDER)
    keys = list(parse_text(Path(name).read_text().expandtabs(), name).origins)
    resolved = load_config(Path(name), needs_model=False)
    noted = {note.key for note in resolved.notes if note.place.startswith(f"{name}:")}
    kept = {origin.written for origin in resolved.origins.values() if origin.kind == "file"}
    holders = {key.rpartition(".")[0] for key in keys}
    silent = [
        key
        for key in keys
        if key not in holders | kept
        and not any(key == other or key.startswith(f"{other}.") for other in noted)
    ]
    assert silent == []
    assert all(note.why for note in resolved.notes)


@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        ("shard_grad_op", Strategy.SHARD_GRAD_OP),
        ("'2'", Strategy.SHARD_GRAD_OP),
        ("Hybrid_Shard", Strategy.HYBRID_SHARD),
        ("5", Strategy.HYBRID_SHARD_ZERO2),
    ],
)
@pytest.mark.parametrize("prefix", ["fsdp_", "", "FSDP_"])
def test_a_strategy_keeps_its_meaning(load, prefix, written, strategy):
    in_accelerate = load(accelerate(f"{prefix}sharding_strategy: {written}"))
    assert in_accelerate.config.strategy is strategy
    in_trainer = load(f"training: {{fsdp_config: {{{prefix}sharding_strategy: {written}}}}}")
    assert in_trainer.config.strategy is strategy


@pytest.mark.parametrize(
    ("written", "strategy", "offload"),
    [
        ("full_shard", Strategy.FULL_SHARD, None),
        ("full_shard auto_wrap offload", Strategy.FULL_SHARD, HomeKind.CPU),
        ("[shard_grad_op, auto_wrap]", Strategy.SHARD_GRAD_OP, None),
        ("no_shard", Strategy.NO_SHARD, None),
        ("hybrid_shard,auto_wrap", Strategy.HYBRID_SHARD, None),
        ("[hybrid_shard_zero2, offload]", Strategy.HYBRID_SHARD_ZERO2, HomeKind.CPU),
        ("true", Strategy.FULL_SHARD, None),
        (
            "{fsdp_sharding_strategy: 2, offload_params: 'true'}",
            Strategy.SHARD_GRAD_OP,
            HomeKind.CPU,
        ),
    ],
)
@pytest.mark.parametrize("form", ["fsdp: {}", "training: {{fsdp: {}}}"])
def test_fsdp_of_the_trainer_may_be_text_a_list_or_a_mapping(
    load, form, written, strategy, offload
):
    text = form.format(written if written[0] in "[{" or written == "true" else f'"{written}"')
    sharding = load(text if "training" in form else f"{text}\noutput_dir: x").config.sharding
    assert sharding.strategy is strategy
    assert (sharding.offload and sharding.offload.optimizer) == offload


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("zero_optimization: true\nfp16: {enabled: true, initial_scale_power: 8}", True),
        ("zero_optimization: true\nfp16: {enabled: true, initial_scale_power: 16}", False),
        ("zero_optimization: true\nscheduler: {params: {last_batch_iteration: 7}}", True),
        ("zero_optimization: {}\ntrain_batch_size: 8", False),
        ("output_dir: x\ntorch_dtype: bfloat16", True),
        ("output_dir: x\ndtype: auto", False),
        ("base_model: x\nshuffle_merged_datasets: false", True),
    ],
)
def test_a_key_that_would_change_numbers_is_lost_and_not_idle(load, text, is_lost):
    assert any(note.status is Status.LOST for note in load(text).notes) == is_lost


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("scheduler: {type: WarmupLR}", {"gradient_clipping", "lr", "warmup_num_steps"}),
        ("scheduler: {params: {warmup_num_steps: 9}}\ngradient_clipping: 0", {"lr"}),
        ("optimizer: {params: {lr: 1}}\ntraining: {max_grad_norm: 1}", {"scheduler"}),
        (
            "optimizer: {params: {lr: auto}}\ntraining: {lr_scheduler_type: linear}",
            {"gradient_clipping"},
        ),
    ],
)
def test_a_default_of_another_tool_that_is_not_ours_is_told(load, text, told):
    notes = load(f"zero_optimization: true\n{text}").notes
    assert {n.key.rpartition(".")[2] for n in notes if n.status is Status.NOT_GIVEN} == told


def test_no_is_a_word_in_accelerate_and_means_one_process(load):
    config = load("distributed_type: NO\nmixed_precision: no\nfsdp_config:\n").config
    assert (config.strategy, config.launch.num_processes) == (Strategy.NO_SHARD, 1)
    assert config.sharding.param_dtype is None
    assert load("distributed_type: NO\nnum_processes: 2\n").config.launch.num_processes == 2


def test_the_wrap_is_that_of_the_policy(load):
    def wrap(*lines):
        sharding = load(accelerate(*lines)).config.sharding
        return sharding.wrap, sharding.wrap_min_params

    assert wrap("auto_wrap_policy: NO_WRAP") == (WrapKind.NONE, 100_000_000)
    assert wrap("auto_wrap_policy: 2", "min_num_params: 1e6") == (WrapKind.SIZE, 1_000_000)
    assert wrap("min_num_params: '2000'") == (WrapKind.SIZE, 2000)
    named = "transformer_layer_cls_to_wrap: A, B"
    assert wrap("auto_wrap_policy: TRANSFORMER_BASED_WRAP", named)[0] == ("A", "B")
    assert wrap("auto_wrap_policy: NO_WRAP", named)[0] is WrapKind.NONE
    assert wrap("auto_wrap_policy: transformer_based_wrap")[0] is WrapKind.TRANSFORMER


@pytest.mark.parametrize("written", ["null", "NO_PREFETCH", "none", ""])
def test_no_backward_prefetch_is_a_choice(load, written):
    resolved = load(accelerate(f"fsdp_backward_prefetch: {written}"))
    assert resolved.config.sharding.backward_prefetch == 0


def test_a_flag_of_fsdp2_beside_a_hybrid_strategy_agrees_or_is_refused(load):
    hybrid = "fsdp_sharding_strategy: HYBRID_SHARD"
    assert load(accelerate(hybrid, "reshard_after_forward: true")).config.strategy == "hybrid_shard"
    with pytest.raises(ConfigError, match=r"a.yaml:5: .*: expected the value of sharding_strategy"):
        load(accelerate(hybrid, "reshard_after_forward: false"))


@pytest.mark.parametrize(
    ("stage", "strategy"),
    [
        ("0", Strategy.NO_SHARD),
        ("1", Strategy.SHARD_GRAD_OP),
        ("2", Strategy.SHARD_GRAD_OP),
        ("3", Strategy.FULL_SHARD),
    ],
)
def test_a_stage_of_zero_is_a_strategy(load, stage, strategy):
    assert load(f'{{"zero_optimization": {{"stage": {stage}}}}}').config.strategy is strategy
    plugin = f"distributed_type: DEEPSPEED\ndeepspeed_config: {{zero_stage: {stage}}}\n"
    assert load(plugin).config.strategy is strategy
    inline = f"training: {{deepspeed: {{zero_optimization: {{stage: {stage}}}}}}}"
    assert load(inline).config.strategy is strategy


@pytest.mark.parametrize(
    ("written", "homes", "folder"),
    [
        ({"offload_param": {"device": "nvme", "nvme_path": "/a"}}, "nvme cpu cpu", "/a"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}, "cpu nvme nvme", "/a"),
        (
            {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}},
            "cpu nvme nvme",
            None,
        ),
        (
            {
                "offload_optimizer": {"device": "nvme"},
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
            },
            "nvme nvme nvme",
            "/a",
        ),
        ({"offload_optimizer": {"device": "cpu", "nvme_path": "/a"}}, "cpu cpu cpu", None),
    ],
)
def test_state_on_nvme_stays_there_and_the_rest_is_on_the_host(load, written, homes, folder):
    flat = {
        f"{key}_{name.removeprefix('offload_')}": value
        for key, values in written.items()
        for name, value in values.items()
    }
    accelerate = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, **flat}}
    for text in ({"zero_optimization": {"stage": 3, **written}}, accelerate):
        offload = load(json.dumps(text)).config.sharding.offload
        found = (offload.parameters, offload.gradients, offload.optimizer)
        assert found == tuple(HomeKind(word) for word in homes.split())
        assert offload.folder == folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"zero_optimization": {"stage": 3,\n"offload_optimizer": {"device": "nvme", '
            '"nvme_path": "/a"},\n"offload_param": {"device": "nvme", "nvme_path": "/b"}}}',
            r"a.yaml:3: .*nvme_path.*a.yaml:2.*Give one of the two",
        ),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n"
            "  offload_params: false\n",
            r"a.yaml:4: .*offload_params: expected the value of .*a.yaml:3\), true; got false",
        ),
    ],
)
def test_two_values_of_one_meaning_are_refused_with_their_lines(load, text, said):
    with pytest.raises(ConfigError, match=said):
        load(text)


SPELT = "distributed_type: FSDP\nfsdp_config:"


@pytest.mark.parametrize(
    "text",
    [
        f"{SPELT} {{fsdp_sharding_strategy: 1, sharding_strategy: FULL_SHARD}}",
        f"{SPELT} {{fsdp_offload_params: false, offload_params: 'false'}}",
        f"{SPELT} {{fsdp_min_num_params: null, min_num_params: 7}}",
        "zero_optimization: {stage: 3, stage3_prefetch_bucket_size: auto, prefetch_bucket_size: 5}",
    ],
)
def test_two_spellings_of_one_meaning_agree(load, text):
    load(text)


@pytest.mark.parametrize(
    ("text", "override", "key", "why"),
    [
        (
            "learning_rate: 1e-4\nfsdp: full_shard offload\nfsdp_config: {offload_params: false}\n",
            "max_steps=2",
            "fsdp_config.offload_params",
            "fsdp (a.yaml:2) decides",
        ),
        (
            "distributed_type: FSDP\nmixed_precision: 'no'\n",
            "bf16=true",
            "mixed_precision",
            "bf16 (command line) decides",
        ),
        (
            '{"zero_optimization": {"stage": 3,\n"offload_param": {"device": "cpu"},\n'
            '"offload_optimizer": {"device": "none"}}}',
            "max_steps=2",
            "zero_optimization.offload_optimizer.device",
            "zero_optimization.offload_param.device (a.yaml:2) decides",
        ),
    ],
)
def test_a_value_overruled_by_another_key_has_no_effect(load, text, override, key, why):
    (note,) = (note for note in load(text, override).notes if note.key == key)
    assert (note.status, note.why) == (Status.NO_EFFECT, why)


def test_the_batch_of_all_ranks_is_divided(load):
    def batch(text, ranks, *overrides):
        training = load(text, *overrides).for_ranks(ranks).config.training
        return training.per_device_train_batch_size, training.gradient_accumulation_steps

    both = '{"train_batch_size": 16, "gradient_accumulation_steps": 2}'
    assert batch(both, 2) == (4, 2)
    assert batch(both, 2, "per_device_train_batch_size=3") == (3, 2)  # typed: it decides
    assert batch('{"train_batch_size": 16}', 4) == (4, 1)
    micro = '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}'
    assert batch(micro, 2) == (2, 4)
    with pytest.raises(ConfigError, match=r"^a.yaml:1: train_batch_size: expected a multiple of 6"):
        batch(both, 3)


def test_a_recipe_is_laid_over_a_machine_file_and_the_command_line_over_both(load):
    machine = accelerate("fsdp_offload_params: true", top="mixed_precision: bf16\nnum_processes: 4")
    recipe = "model_name_or_path: x\nlearning_rate: 1e-4\nmax_steps: 9\nbf16: false\n"
    resolved = load([machine, recipe], "max_steps=100", "num_processes=2")
    config = resolved.config
    assert (config.model.name_or_path, config.training.learning_rate) == ("x", 1e-4)
    assert (config.training.max_steps, config.launch.num_processes) == (100, 2)
    assert config.sharding.param_dtype is None  # bf16: false in the recipe
    assert config.sharding.offload.parameters is HomeKind.CPU
    assert resolved.dialects == ("Accelerate", "TrainingArguments")
    notes = {note.key: note for note in resolved.notes}
    assert notes["num_processes"].status is Status.NO_EFFECT
    assert notes["num_processes"].why == "num_processes (command line) decides"


def test_sections_of_ours_may_stand_in_any_file(load):
    own = "model: {config: {model_type: llama}}\ntraining: {max_steps: 2, fsdp: zero2}\n"
    config = load(own + "distributed_type: FSDP\nnum_processes: 2\n").config
    assert config.model.config == {"model_type": "llama"}
    assert (config.training.max_steps, config.launch.num_processes) == (2, 2)
    assert config.strategy is Strategy.SHARD_GRAD_OP


def test_the_command_line_accepts_hugging_face_names_too(load):
    file = "model: x\ntraining: {fsdp: full_shard offload, bf16: true}\n"
    sharding = load(file, "training.fsdp=no_shard", "fp16=true", "bf16=false").config.sharding
    assert (sharding.strategy, sharding.offload) == (Strategy.NO_SHARD, None)
    assert sharding.param_dtype is DType.FLOAT16
    typed = load(file, "distillation.training.fsdp=hybrid_shard", "fsdp_config.offload_params=yes")
    assert typed.config.strategy is Strategy.HYBRID_SHARD
    assert typed.config.sharding.offload.parameters is HomeKind.CPU


def test_a_file_of_the_command_line_never_silently_overrides_another(load, tmp_path):
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5, "zero_optimization": true}')
    assert load("model: x", "deepspeed=ds.json").config.training.max_grad_norm == 0.5
    expected = "^ds.json:1: gradient_clipping: expected the value of training"
    with pytest.raises(ConfigError, match=expected):
        load("model: x\ntraining: {max_grad_norm: 1}", "deepspeed=ds.json")


def test_interpolations_are_resolved_before_translation(load):
    text = "base: 3\ntraining: {seed: 4}\n"
    with pytest.raises(ConfigError, match="base: unknown key"):
        load(text)
    text = "training: {seed: 4, fsdp_config: {forward_prefetch: '${training.bf16}'}, bf16: true}"
    assert load(text).config.sharding.forward_prefetch == 1


@pytest.mark.parametrize("page", ["accelerate", "deepspeed", "trainer"])
def test_before_and_after_in_the_migration_pages_are_equal(load, page):
    text = (Path(__file__).parents[3] / "docs" / "migrate" / f"{page}.md").read_text()
    before, after = re.findall(r"```(?:yaml|json)\n(.*?)```", text, re.DOTALL)[:2]
    theirs, ours = load(before), load(after)
    assert theirs.config.to_dict() == ours.config.to_dict()
    assert theirs.notes
    assert not ours.notes or page == "trainer"  # its names are also ours


def test_every_key_that_the_installed_transformers_documents_is_known():
    transformers = pytest.importorskip("transformers")
    text = transformers.TrainingArguments.__doc__
    section = text[text.index("fsdp_config (`str`") : text.index("> DeepSpeed")]
    documented = re.findall(r"^ +- (\w+) \(", section, re.MULTILINE)
    assert len(documented) > 8
    assert [key for key in documented if key not in FSDP] == []


def test_marks_distinguish_dialects_from_each_other_and_ours():
    from fullshard.config.schema import RunConfig

    for dialect in DIALECTS:
        assert dialect.marks <= set(dialect.table)
        assert not dialect.marks & set(RunConfig.known_names())


def test_json_with_tabs_is_read(load):
    text = json.dumps({"zero_optimization": {"stage": 2}}, indent="\t")
    assert load(text, name="ds.json").config.strategy is Strategy.SHARD_GRAD_OP


def test_no_key_occurs_twice_in_a_table_of_keys():
    text = files("fullshard.config.dialects").joinpath("keys.yaml").read_text("utf-8")
    for table, rows in yaml.safe_load(text).items():
        names = " ".join(row.get("keys", "") for row in rows).split()
        assert sorted(set(names)) == sorted(names), table
