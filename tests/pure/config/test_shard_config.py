"""ShardConfig: contracted defaults, immutability, merging, validation."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.config.schema import ShardConfig
from fullshard.config.sharding import Offload
from fullshard.config.values import DType, HomeKind, Recompute, RecomputeKind, Strategy, WrapKind
from fullshard.errors import ConfigError

CONTRACT = {
    "strategy": "full_shard",
    "strategies": {},
    "replicate": None,
    "shard": None,
    "context": 1,
    "tensor": 1,
    "expert": 1,
    "wrap": "auto",
    "wrap_min_params": 100_000_000,
    "ignore": [],
    "fp32_modules": [],
    "master_dtype": None,
    "param_dtype": None,
    "reduce_dtype": None,
    "buffer_dtype": None,
    "output_dtype": None,
    "grad_reduction": "mean",
    "reduction": "native",
    "forward_prefetch": 1,
    "backward_prefetch": 1,
    "offload": None,
    "activation_checkpointing": "none",
    "grad_sync": "every_micro_batch",
    "transport": "auto",
    "symmetric_memory": False,
    "poison": False,
}


def test_fields_and_defaults_are_those_of_the_contract():
    assert ShardConfig().to_dict() == CONTRACT


def test_every_field_is_documented_in_the_json_schema():
    properties = ShardConfig.model_json_schema()["properties"]
    assert list(properties) == list(CONTRACT)
    assert all(len(field["description"]) > 20 for field in properties.values())


def test_fields_cannot_be_changed_afterwards():
    config = ShardConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.strategy = Strategy.NO_SHARD


def test_overrides_replace_fields_and_keep_the_others():
    base = ShardConfig(strategy="zero2", param_dtype="bf16")
    merged = ShardConfig.of(base, param_dtype="fp32", poison=True)
    assert merged == ShardConfig(strategy="zero2", param_dtype="fp32", poison=True)
    assert base.param_dtype is DType.BFLOAT16
    assert ShardConfig.of(None) == ShardConfig.of({}) == ShardConfig()
    assert ShardConfig.of({"strategy": "ddp"}, wrap="none").wrap is WrapKind.NONE


def test_a_base_that_is_no_configuration_is_refused():
    with pytest.raises(ConfigError, match=r"^expected a ShardConfig, a mapping or None; got str"):
        ShardConfig.of("full_shard")


@pytest.mark.parametrize(
    ("written", "offload"),
    [
        (None, None),
        (False, None),
        ("none", None),
        ("cpu", Offload(parameters="cpu", gradients="cpu", optimizer="cpu")),
        (True, Offload(parameters="cpu", gradients="cpu", optimizer="cpu")),
        ({"params": "cpu", "optim": "nvme"}, Offload(parameters="cpu", optimizer="nvme")),
    ],
)
def test_offload_is_a_home_for_each_kind_of_state(written, offload):
    assert ShardConfig(offload=written).offload == offload


def test_names_may_be_one_text_or_a_list():
    config = ShardConfig(ignore="router, *.bias", fp32_modules=["norm"])
    assert config.ignore == ("router", "*.bias")
    assert config.fp32_modules == ("norm",)


def test_a_callable_is_recorded_by_name_and_not_read_back_as_a_class():
    record = ShardConfig(wrap=json.dumps).to_dict()
    assert record["wrap"] == "<callable json.dumps>"
    with pytest.raises(ConfigError, match=r"^wrap: "):
        ShardConfig(**record)


def test_equal_configurations_are_equal_keys_of_a_dictionary():
    one, two = ShardConfig(offload="cpu", wrap=["A"]), ShardConfig(offload="cpu", wrap=["A"])
    assert {one: 1}[two] == 1


names = st.lists(st.text(st.sampled_from("abc_*.[]0"), min_size=1), max_size=3).map(tuple)
homes = st.none() | st.sampled_from(HomeKind)
configs = st.builds(
    dict,
    strategy=st.sampled_from(Strategy),
    replicate=st.none() | st.integers(1, 1024),
    shard=st.none() | st.integers(1, 1024),
    wrap=st.sampled_from(WrapKind) | st.just(("LlamaDecoderLayer", "Embedding")),
    wrap_min_params=st.integers(1, 10**12),
    ignore=names,
    master_dtype=st.none() | st.sampled_from(DType),
    forward_prefetch=st.integers(0, 8),
    offload=st.none() | st.builds(Offload, parameters=homes, gradients=homes, optimizer=homes),
    activation_checkpointing=st.builds(Recompute, st.just(RecomputeKind.BLOCK), st.integers(1, 9)),
    poison=st.booleans(),
)


@given(configs)
def test_a_record_reads_back_as_the_same_configuration(fields):
    config = ShardConfig(**fields)
    assert ShardConfig(**json.loads(json.dumps(config.to_dict()))) == config


@given(st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.none()))
def test_values_of_numbers_are_read_exactly_or_refused(value):
    try:
        number = float(value)
        is_count = not isinstance(value, bool) and 1 <= number < 2**63 and number == int(number)
    except (TypeError, ValueError, OverflowError):
        is_count = False
    if is_count:
        assert float(ShardConfig(wrap_min_params=value).wrap_min_params) == number
    else:
        with pytest.raises(ConfigError, match=r"^wrap_min_params: expected an integer >= 1, got "):
            ShardConfig(wrap_min_params=value)


def test_numbers_may_be_written_as_text():
    assert ShardConfig(wrap_min_params="1e8").wrap_min_params == 100_000_000
    assert ShardConfig(shard="4").shard == 4
