"""Every value of a resolved configuration has an origin."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.files import Origin, OriginKind, flatten
from fullshard.config.load import load_config, write_yaml
from fullshard.config.schema import RunConfig, TrainingConfig
from fullshard.config.values import IntervalStrategy, LrSchedule, Strategy
from fullshard.errors import CheckpointError, ConfigError, DataError

FILE = """\
model: folder/of/a/model
data: story.txt
strategy: zero2
training:
  evaluation_strategy: no
  bf16: true
  learning_rate: 5e-5
  ddp_timeout: 30
"""


@pytest.fixture
def resolve(load_file):
    return partial(load_file, name="train.yaml")


def explained(resolved):
    """Returns the origins that are not defaults, as text."""
    return {
        key: str(origin)
        for key, origin in resolved.origins.items()
        if origin.kind is not OriginKind.DEFAULT
    }


def test_values_of_a_file_have_its_lines(resolve, snapshot):
    assert explained(resolve(FILE)) == snapshot


def test_an_origin_is_plain_data(resolve):
    origins = resolve(FILE, "max_steps=5").origins
    assert origins["training.eval_strategy"] == Origin(
        OriginKind.FILE, "train.yaml", 5, "training.evaluation_strategy"
    )
    assert origins["training.max_steps"] == Origin(OriginKind.COMMAND_LINE, written="max_steps")
    assert origins["training.seed"] == Origin(OriginKind.DEFAULT)
    assert origins["sharding.param_dtype"].kind is OriginKind.DERIVED


def test_every_value_has_an_origin(resolve):
    resolved = resolve(FILE)
    assert set(resolved.origins) == set(flatten(resolved.config.to_dict()))


def test_keys_merged_by_yaml_have_the_line_of_their_definition(resolve):
    text = (
        "teacher:\n  config:\n    model_type: t\n    x: &base\n      seed: 3\n      max_steps: 4\n"
        "model: x\ntraining:\n  <<: *base\n  seed: 5\n"
    )
    resolved = resolve(text)
    assert resolved.config.training.seed == 5
    assert resolved.config.training.max_steps == 4
    assert str(resolved.origins["training.seed"]) == "train.yaml:10"
    assert str(resolved.origins["training.max_steps"]) == "train.yaml:6"


def test_the_written_configuration_explains_itself(resolve, snapshot):
    text = resolve(FILE, "max_steps=5").to_yaml()
    lines = [line for line in text.splitlines() if not line.endswith("# default")]
    assert "\n".join(lines) == snapshot


letters = st.sampled_from("${}\\:'\"#-no 1e5") | st.characters(exclude_categories=["Cs"])
words = st.text(letters, min_size=1, max_size=8).filter(
    lambda t: t.strip() and t != "???" and "\0" not in t
)
scalars = st.none() | st.booleans() | st.integers() | words | st.floats(allow_nan=False)
# Every tool with dotted keys, including ours, reads a key with a dot as two keys.
keys = st.text("abcno_019:# -", min_size=1, max_size=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2),
    max_leaves=4,
)
trees = st.dictionaries(keys, values, max_size=2)


@given(output_dir=words, free=trees, rate=st.floats(0, 1), steps=st.integers(1, 9))
def test_any_configuration_survives_being_written(tmp_path_factory, output_dir, free, rate, steps):
    config = RunConfig(
        model={"config": {**free, "model_type": "llama"}},
        data=output_dir,
        training={"output_dir": output_dir, "learning_rate": rate, "save_steps": steps},
    )
    text = write_yaml(config, dict.fromkeys(flatten(config.to_dict()), Origin(OriginKind.DEFAULT)))
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path).config == config


def test_a_later_error_shows_the_place_of_its_key(resolve):
    resolved = resolve(FILE, "vocab_size=5")

    def located(text, cls=ConfigError):
        error = resolved.located(cls(text))
        assert type(error) is cls
        return str(error)

    assert located("data.path: no such file") == "train.yaml:2: data.path: no such file"
    assert located("training.eval_strategy: why") == "train.yaml:5: training.eval_strategy: why"
    assert located("data.vocab_size: too few") == "command line: data.vocab_size: too few"
    assert located("strategy: too few ranks") == "train.yaml:3: sharding.strategy: too few ranks"
    assert located("shard: too many") == "sharding.shard: too many"
    assert located("data.text_column: no such column") == "data.text_column: no such column"
    assert located("something else: entirely") == "something else: entirely"
    assert located("data.path: is empty", DataError) == "train.yaml:2: data.path: is empty"
    assert located("nothing of a file", CheckpointError) == "nothing of a file"


def test_values_of_a_file_are_read_as_intended(resolve):
    training = resolve(
        "model: x\ntraining: {evaluation_strategy: no, learning_rate: 1e-4, max_steps: '1e2',"
        " lr_scheduler_type: constant-with-warmup}\n"
    ).config.training
    assert training == TrainingConfig(
        eval_strategy=IntervalStrategy.NO,
        learning_rate=1e-4,
        max_steps=100,
        lr_scheduler_type=LrSchedule.CONSTANT_WITH_WARMUP,
    )


def test_an_empty_section_is_all_defaults(resolve):
    assert resolve("model: x\ntraining:\ndata:\n").config == RunConfig(model="x")


def test_a_byte_order_mark_is_no_part_of_the_first_key(resolve):
    assert resolve("\ufeffmodel: x\n").config == RunConfig(model="x")


def test_json_is_yaml(resolve):
    config = resolve('{"model": "x", "strategy": "NO_SHARD", "training": {"seed": 1}}').config
    assert config.strategy is Strategy.NO_SHARD
    assert config.training.seed == 1
