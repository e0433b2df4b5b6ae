"""Every spelling of other tools is understood, and no other."""

import pytest

from fullshard.config.schema import ShardConfig
from fullshard.config.values import (
    Choice,
    DType,
    IntervalStrategy,
    Recompute,
    RecomputeKind,
    Strategy,
    WrapKind,
    nearest,
    parse,
    parse_recompute,
)
from fullshard.errors import ConfigError

FULL, GRAD_OP, NONE = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD
HYBRID, HYBRID_2 = Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2


@pytest.mark.parametrize(
    ("member", "written"),
    [
        (FULL, ["full_shard", "FULL_SHARD", "full", "zero3", "ZeRO-3", "full-shard", 1, "1"]),
        (GRAD_OP, ["SHARD_GRAD_OP", "shard_grad_op", "zero2", 2]),
        (NONE, ["NO_SHARD", "ddp", "DDP", 3]),
        (HYBRID, ["HYBRID_SHARD", "hybrid_full", "hsdp", 4]),
        (HYBRID_2, ["HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", 5]),
    ],
)
def test_strategies_of_fsdp1_accelerate_and_deepspeed_are_ours(member, written):
    assert [parse(Strategy, word, "strategy") for word in written] == [member] * len(written)


@pytest.mark.parametrize(
    ("member", "written"),
    [
        (DType.BFLOAT16, ["bf16", "bfloat16", "torch.bfloat16", "BF16"]),
        (DType.FLOAT16, ["fp16", "half", "torch.half", "float16"]),
        (DType.FLOAT32, ["fp32", "float", "torch.float32"]),
        (DType.FLOAT64, ["fp64", "double", "torch.float64"]),
    ],
)
def test_dtypes_have_short_and_torch_names(member, written):
    assert [parse(DType, word, "dtype") for word in written] == [member] * len(written)


def test_objects_of_torch_are_read_by_their_printed_name():
    torch = pytest.importorskip("torch")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    config = ShardConfig(
        param_dtype=torch.bfloat16,
        strategy=fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2,
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST,
    )
    assert config.param_dtype is DType.BFLOAT16
    assert config.strategy is HYBRID_2
    assert config.backward_prefetch == 0


def test_every_number_of_fsdp1_is_the_strategy_of_that_number():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    for theirs in fsdp.ShardingStrategy:
        assert parse(Strategy, theirs.value, "") is parse(Strategy, theirs.name, "")


@pytest.mark.parametrize(
    ("written", "depth"),
    [
        ("BACKWARD_PRE", 1),
        ("backward_pre", 1),
        ("pre", 1),
        ("BACKWARD_POST", 0),
        ("NO_PREFETCH", 0),
        (None, 0),
        (False, 0),
        (True, 1),
        (3, 3),
        ("2", 2),
    ],
)
def test_words_of_backward_prefetch_are_depths(written, depth):
    assert ShardConfig(backward_prefetch=written).backward_prefetch == depth


@pytest.mark.parametrize(
    ("written", "wrap"),
    [
        ("TRANSFORMER_BASED_WRAP", WrapKind.TRANSFORMER),
        ("SIZE_BASED_WRAP", WrapKind.SIZE),
        ("NO_WRAP", WrapKind.NONE),
        (False, WrapKind.NONE),
        ("LlamaDecoderLayer", ("LlamaDecoderLayer",)),
        ("LlamaDecoderLayer, Embedding", ("LlamaDecoderLayer", "Embedding")),
        (["Transformer"], ("Transformer",)),
        (ShardConfig, ("ShardConfig",)),
        ({ShardConfig}, ("ShardConfig",)),
        (len, len),
    ],
)
def test_wrap_takes_kinds_class_names_classes_and_callables(written, wrap):
    assert ShardConfig(wrap=written).wrap == wrap


@pytest.mark.parametrize("written", ["transfomer", "TRANSFORMR_BASED_WRAP", 3, [], [""], None])
def test_wrap_refuses_what_is_neither_kind_nor_class_name(written):
    with pytest.raises(ConfigError, match=r"^wrap: expected one of auto, transformer, size, none"):
        ShardConfig(wrap=written)


@pytest.mark.parametrize(
    ("written", "recompute"),
    [
        ("none", Recompute(RecomputeKind.NONE)),
        (False, Recompute(RecomputeKind.NONE)),
        (True, Recompute(RecomputeKind.BLOCK)),
        ("every-3", Recompute(RecomputeKind.BLOCK, 3)),
        ("every_1", Recompute(RecomputeKind.BLOCK)),
        ("offload", Recompute(RecomputeKind.OFFLOAD)),
    ],
)
def test_activation_checkpointing_is_a_kind_and_an_interval(written, recompute):
    assert parse_recompute(written) == recompute
    assert parse_recompute(str(recompute)) == recompute


@pytest.mark.parametrize("written", ["every_0", "every_", "every_x", "blck", 2, None])
def test_activation_checkpointing_refuses_other_words(written):
    with pytest.raises(
        ConfigError, match=r"^activation_checkpointing: expected one of none, block"
    ):
        ShardConfig(activation_checkpointing=written)


def test_no_that_yaml_reads_as_false_is_the_word():
    assert parse(IntervalStrategy, False, "") is IntervalStrategy.NO


@pytest.mark.parametrize("value", [True, None, 0, 6, 0.3, 2.0, "", "x.y", [1], {"full": 1}])
def test_values_that_mean_no_strategy_are_refused(value):
    with pytest.raises(ConfigError, match=r"^a.b: expected one of full_shard, "):
        parse(Strategy, value, "a.b")


def test_every_spelling_means_one_member():
    for enum_cls in Choice.__subclasses__():
        assert list(enum_cls)
        words = [word for member in enum_cls for word in (member.value, *member.spellings)]
        assert len(words) == len(set(words)), enum_cls
        for member in enum_cls:
            for word in (member.value, *member.spellings):
                assert parse(enum_cls, word.upper(), "") is member


@pytest.mark.parametrize(
    ("word", "choices", "near"),
    [
        ("ful_shard", ["full_shard", "no_shard"], "full_shard"),
        ("cos", ["linear", "cosine", "constant"], "cosine"),
        ("const", ["constant", "constant_with_warmup"], "constant"),
        ("LEARNING-RATE", ["learning_rate"], "learning_rate"),
        ("prefetch_forward", ["backward_prefetch", "forward_prefetch"], "forward_prefetch"),
        ("xyz", ["full_shard", "no_shard"], None),
        ("", ["a"], None),
    ],
)
def test_nearest_finds_the_most_likely_name(word, choices, near):
    assert nearest(word, choices) == near
