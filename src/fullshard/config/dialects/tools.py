"""The keys of other tools: one table per tool, each with the functions that its keys need.

    MESH, DISTRIBUTED, TORCHTITAN    axes of a mesh
    DEEPSPEED                        DeepSpeed's JSON
    ACCELERATE                       Accelerate's YAML; FSDP is its `fsdp_config`
    TRAINING, FLAT                   Hugging Face's TrainingArguments, under `training:` or flat
    AXOLOTL                          axolotl's YAML

Keys whose meaning needs no code are in keys.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

from fullshard.config.dialects.rules import (
    NOTHING,
    Meaning,
    Rule,
    Said,
    Status,
    Table,
    choice,
    each,
    file_rule,
    happens,
    is_auto,
    is_empty,
    is_neutral,
    mapping_of,
    no_effect,
    refused,
    rows,
    to,
    translated,
    unless,
    word_among,
)
from fullshard.config.fields import Rejected, means_same, to_flag, to_names, to_number
from fullshard.config.keys import canonical
from fullshard.config.names import MOVED, names
from fullshard.config.schema import TrainingConfig
from fullshard.config.values import Strategy, did_you_mean, parse, spellings, words_of

# ---- axes of a mesh ------------------------------------------------------------------------------
#   tool             replicate             shard            tensor           expert
#   transformers     dp_replicate_size     fsdp_size        tp_size          ep_size
#   Accelerate       dp_replicate_size     dp_shard_size    tp_size          ep_size
#   torchtitan       data_parallel_...     data_parallel_.. tensor_par...    expert_parallel_degree
#   DeepSpeed                                               autotp_size      autoep_size
#
# Accelerate's cp_size and sp_size, and torchtitan's context_parallel_degree, are our `context`.
#
# Other tools count the ranks that divide the experts among those of the shard and tensor axes. Here
# they are an axis of their own: of shard 4 x tensor 2 with ep_size 4, it is shard 2 x expert 2 x
# tensor 2.

_TENSOR_PLAN = "the tensor plan cuts the experts over the same ranks"


def _size(value: object) -> int:
    """A size, or 1 for a value that is none; the key's own rule reports it."""
    found = to_number(value)
    return int(found) if found is not None and found >= 1 and found == int(found) else 1


def _expert(said: Said, tensor: str, expert: str) -> int:
    """Our expert axis."""
    return max(1, _size(said.get(expert)) // _size(said.get(tensor)))


def axes(replicate: str, shard: str, tensor: str, expert: str) -> dict[str, Rule]:
    """Rules for the sizes of four axes under a tool's names."""

    @unless(1)
    def of_expert(value: object, said: Said) -> Meaning:
        size, beside = _size(value), _size(said.get(tensor))
        if beside == 1:
            return translated({"sharding.expert": value})
        if size % beside:
            raise Rejected(f"a multiple of {tensor}, {beside}")
        if size == beside:
            return Meaning(Status.NO_EFFECT, _TENSOR_PLAN)
        return translated({"sharding.expert": size // beside}, f"{expert} / {tensor}")

    @unless(-1, 0)
    def of_shard(value: object, said: Said) -> Meaning:
        size, groups = _size(value), _expert(said, tensor, expert)
        if groups == 1:
            return translated({"sharding.shard": value})
        if size % groups:
            raise Rejected(f"a multiple of {groups}, over whose groups of ranks experts are spread")
        return translated({"sharding.shard": size // groups}, f"sharding.expert is {groups} of it")

    sizes = {shard: of_shard, tensor: to("sharding.tensor", "", 1), expert: of_expert}
    return {replicate: to("sharding.replicate", "", -1, 0), **sizes}


# Accelerate's `parallelism_config`, also in axolotl's file.
MESH: Table = {
    **axes("dp_replicate_size", "dp_shard_size", "tp_size", "ep_size"),
    **rows("MESH"),
}

# transformers' `distributed_config`.
DISTRIBUTED: Table = {
    **axes("dp_replicate_size", "fsdp_size", "tp_size", "ep_size"),
    **rows("DISTRIBUTED"),
}

# torchtitan's `parallelism`.
TORCHTITAN: Table = {
    **axes(
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "tensor_parallel_degree",
        "expert_parallel_degree",
    ),
    **rows("TORCHTITAN"),
}


@unless(1)
def _autoep(value: object, said: Said) -> Meaning:
    """DeepSpeed's group of experts; the tensor axis is in another table."""
    if not to_flag(said.get("enabled", True)):
        return Meaning(Status.NO_EFFECT, "it is off")
    tensor = mapping_of(said.get("tensor_parallel"))
    beside = {"autoep_size": value, "autotp_size": tensor.get("autotp_size")}
    return axes("", "", "autotp_size", "autoep_size")["autoep_size"](value, beside)


# DeepSpeed's `tensor_parallel` and `expert_parallel`.
AUTO_TP: Table = {"tp": rows("TP"), **rows("AUTO_TP")}
AUTO_EP: Table = {"autoep_size": _autoep, **rows("AUTO_EP")}


# ---- DeepSpeed -----------------------------------------------------------------------------------

HOMES: Mapping[str, object] = {"none": None, "cpu": "cpu", "nvme": "nvme"}

_STAGES = {
    "0": ("no_shard", "stage 0 replicates everything"),
    "1": ("shard_grad_op", "stage 1, with gradients sharded too: less memory, the same losses"),
    "2": ("shard_grad_op", "stage 2"),
    "3": ("full_shard", "stage 3"),
}


@unless()
def stage(value: object, said: Said) -> Meaning:
    """A ZeRO stage; with MiCS it is sharded within a group."""
    if is_auto(value):
        return Meaning(Status.NO_EFFECT, "auto: sharding.strategy decides")
    strategy, why = _STAGES[word_among(value, _STAGES)]
    group = to_number(said.get("mics_shard_size"))
    if group is not None and group > 0:
        return translated({"sharding.strategy": "hybrid_shard"}, "mics_shard_size makes copies")
    return translated({"sharding.strategy": strategy}, why)


def _zero(value: object, said: Said) -> Meaning:
    """`zero_optimization: true` is stage 1."""
    return stage("1" if to_flag(value) else "0", said)


@unless()
def home(value: object, said: Said) -> Meaning:
    """The memory of DeepSpeed's parameters, or of optimizer states with gradients.

    torch's optimizers update parameters in place, so here all state is offloaded.
    """
    if HOMES[word_among(value, HOMES)] is None:
        return happens("sharding.offload")
    why = "parameters, gradients and optimizer state are offloaded together"
    parameters, optimizer = _device(said, "offload_param"), _device(said, "offload_optimizer")
    if "nvme" not in (parameters, optimizer):
        return translated({"sharding.offload": "cpu"}, why)
    homes = {"parameters": parameters, "gradients": optimizer, "optimizer": optimizer}
    return translated({f"sharding.offload.{key}": home for key, home in homes.items()}, why)


def _device(said: Said, key: str) -> object:
    """The device, from a nested or flat key; an invalid value is reported by its own rule."""
    value = mapping_of(said.get(key)).get("device", said.get(f"{key}_device"))
    return next((HOMES[word] for word in words_of(value) if HOMES.get(word)), "cpu")


def nvme_path(key: str) -> Rule:
    """The NVMe folder, if the key `offload_*` uses NVMe."""

    @unless("none")
    def rule(value: object, said: Said) -> Meaning:
        if _device(said, key) != "nvme":
            return Meaning(Status.NO_EFFECT, "the device is not nvme")
        why = "unnamed files in it, which disappear when the run ends"
        return translated({"sharding.offload.folder": value}, why)

    return rule


def _old_offload(value: object, said: Said) -> Meaning:
    return home("cpu" if to_flag(value) else "none", said)


def _betas(value: object, _: Said) -> Meaning:
    if is_auto(value):
        return Meaning(Status.NO_EFFECT, "auto: training.adam_beta1 and adam_beta2 decide")
    betas = cast("list[object]", value) if isinstance(value, list) else []
    if len(betas) != 2:
        raise Rejected("two numbers")
    return translated({"training.adam_beta1": betas[0], "training.adam_beta2": betas[1]})


def _autocast(value: object, said: Said) -> Meaning:
    enabled = said.get("enabled")
    if is_empty(enabled) or not to_flag(enabled):
        return Meaning(Status.NO_EFFECT, "torch_autocast is off")
    return translated({"sharding.param_dtype": value}, "units compute in it")


ZERO: Table = {
    **rows("ZERO"),
    "stage": stage,
    **{
        key: {"device": home, "nvme_path": nvme_path(key), **rows("OFFLOAD")}
        for key in ("offload_optimizer", "offload_param")
    },
    **each(_old_offload, "cpu_offload cpu_offload_params cpu_offload_param"),
}

DEEPSPEED: Table = {
    **rows("DEEPSPEED"),
    "zero_optimization": {"": _zero, **ZERO},
    "bf16": rows("BF16"),
    "fp16": rows("FP16"),
    "torch_autocast": {"dtype": _autocast, **rows("AUTOCAST")},
    "data_types": rows("DATA_TYPES"),
    "tensor_parallel": AUTO_TP,
    "expert_parallel": AUTO_EP,
    "optimizer": {"params": {"betas": _betas, **rows("OPTIMIZER_PARAMS")}, **rows("OPTIMIZER")},
    "scheduler": {"params": rows("SCHEDULER_PARAMS"), **rows("SCHEDULER")},
}


# ---- Accelerate ----------------------------------------------------------------------------------
# The Trainer and axolotl also have the keys of `fsdp_config`, with or without `fsdp_`.

_WRAP: Mapping[str, str] = {
    **dict.fromkeys(("transformer_based_wrap", "1"), "transformer"),
    **dict.fromkeys(("size_based_wrap", "2"), "size"),
    **dict.fromkeys(("no_wrap", "3"), "none"),
}
_BACKWARD: Mapping[str, object] = {
    **dict.fromkeys(("backward_pre", "1"), 1),
    **dict.fromkeys(("backward_post", "no_prefetch", "none", "2", "3"), 0),
}

_strategy = to("sharding.strategy")


@unless()
def _reshard(value: object, said: Said) -> Meaning:
    """Reads FSDP2's flag, or FSDP1's strategy under FSDP2's name."""
    try:
        word: object = Strategy.FULL_SHARD if to_flag(value) else Strategy.SHARD_GRAD_OP
    except Rejected:
        return _strategy(value, said)
    named = said.get("sharding_strategy")
    if is_empty(named):
        return translated({"sharding.strategy": word}, f"FSDP2's flag for {word}")
    hybrids = {
        Strategy.HYBRID_SHARD: Strategy.FULL_SHARD,
        Strategy.HYBRID_SHARD_ZERO2: Strategy.SHARD_GRAD_OP,
    }
    strategy = parse(Strategy, named, "")
    if hybrids.get(strategy, strategy) is not word:
        raise Rejected(f"the value of sharding_strategy, {strategy}", "Give one of the two")
    return Meaning(Status.NO_EFFECT, "sharding_strategy has the same meaning")


def _policy(said: Said) -> str:
    """The wrap for a policy; empty if the policy is absent or invalid."""
    words = words_of(said.get("auto_wrap_policy"))
    return next((_WRAP[word] for word in words if word in _WRAP), "")


@unless()
def _auto_wrap_policy(value: object, said: Said) -> Meaning:
    policy = _WRAP[word_among(value, _WRAP)]
    if policy == "transformer" and not is_empty(said.get("transformer_layer_cls_to_wrap")):
        return Meaning(Status.NO_EFFECT, "transformer_layer_cls_to_wrap names the units")
    return translated({"sharding.wrap": policy})


@unless()
def _layer_classes(value: object, said: Said) -> Meaning:
    if _policy(said) in ("size", "none"):
        return Meaning(Status.NO_EFFECT, "auto_wrap_policy chooses the units in another way")
    return translated({"sharding.wrap": list(to_names(value))})


@unless(0)
def _min_num_params(value: object, said: Said) -> Meaning:
    policy = _policy(said)
    named = not is_empty(said.get("transformer_layer_cls_to_wrap"))
    if policy in ("transformer", "none") or (named and not policy):
        return Meaning(Status.NO_EFFECT, "it applies to SIZE_BASED_WRAP only")
    values = {"sharding.wrap_min_params": value}
    return translated(values if policy else {"sharding.wrap": "size", **values})


def _backward_prefetch(value: object, said: Said) -> Meaning:
    """Reads the prefetch; null disables it, like torch's `backward_prefetch=None`."""
    word = "none" if value is None else value
    return choice("sharding.backward_prefetch", _BACKWARD, "a depth in units")(word, said)


def _globs(value: object) -> list[str]:
    """Converts Accelerate's regular expressions for full names to globs."""
    parts = [part for name in to_names(value) for part in name.split("|")]
    globs = [part.replace("\\.", ".").replace(".*", "*").strip("()^$") for part in parts]
    if any(set(glob) & set("\\[](){}+?^$") for glob in globs):
        raise Rejected("names of modules, with .* and | as the only wildcards")
    return globs


FSDP: Table = {
    **rows("FSDP"),
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "auto_wrap_policy": _auto_wrap_policy,
    "transformer_layer_cls_to_wrap": _layer_classes,
    "min_num_params": _min_num_params,
    **each(_backward_prefetch, "backward_prefetch backward_prefetch_policy"),
    "ignored_modules": to("sharding.ignore", "as globs", read=_globs),
}

# The strategy of each type; None: given by that engine's configuration.
_DDP = "multi_gpu multi_cpu multi_xpu multi_npu multi_mlu multi_hpu no"
_TYPES: Mapping[str, str | None] = {
    **dict.fromkeys(("fsdp", "deepspeed"), None),
    **dict.fromkeys(_DDP.split(), "no_shard"),
}
_TYPES_LATER = ("megatron_lm", "xla", "tpu")


def _distributed_type(value: object, said: Said) -> Meaning:
    if not is_empty(value) and is_neutral(value, _TYPES_LATER):
        raise refused(value, "Use FSDP")
    word = word_among(value, _TYPES)
    strategy = _TYPES[word]
    if strategy is None:
        engine = "fsdp_config" if word == "fsdp" else "deepspeed_config"
        return Meaning(Status.TRANSLATED, f"fullshard's engine runs the settings of {engine}")
    values: dict[str, object] = {"sharding.strategy": strategy}
    if word == "no" and is_empty(said.get("num_processes")):
        values["launch.num_processes"] = 1
    return translated(values, "every rank stores everything")


DEEPSPEED_PLUGIN: Table = {
    **rows("DEEPSPEED_PLUGIN"),
    "zero_stage": stage,
    **each(home, "offload_optimizer_device offload_param_device"),
    "offload_optimizer_nvme_path": nvme_path("offload_optimizer"),
    "offload_param_nvme_path": nvme_path("offload_param"),
    "deepspeed_config_file": file_rule,
}

ACCELERATE: Table = {
    **rows("ACCELERATE"),
    "distributed_type": _distributed_type,
    "fsdp_config": FSDP,
    "deepspeed_config": DEEPSPEED_PLUGIN,
    "parallelism_config": MESH,
}


# ---- Hugging Face's Trainer ----------------------------------------------------------------------
# Most names are fields of TrainingConfig. TRAINING has the others: `fsdp`, `fsdp_config`,
# `deepspeed`, and names without effect or support (keys.yaml).

_WORDS = ("auto_wrap", "offload")


@unless()
def _fsdp(value: object, said: Said) -> Meaning:
    """Reads `full_shard auto_wrap offload` as text or list, or FSDP2's flag.

    A mapping is read as an `fsdp_config`.
    """
    try:
        on = to_flag(value)
    except Rejected:
        return _fsdp_words(value)
    if not on:
        return Meaning(Status.NO_EFFECT, "sharding.strategy decides, with or without it")
    if _names_strategy(said.get("fsdp_config")):
        return Meaning(Status.NO_EFFECT, "fsdp_config names the strategy")
    return translated({"sharding.strategy": Strategy.FULL_SHARD})


def _fsdp_words(value: object) -> Meaning:
    members = cast("Iterable[object]", value) if isinstance(value, list) else (value,)
    parts = [p for m in members for p in str(getattr(m, "value", m)).replace(",", " ").split()]
    known = {**spellings(Strategy), **dict.fromkeys(_WORDS, None)}
    own = (*(strategy.value for strategy in Strategy if strategy is not Strategy.AUTO), *_WORDS)
    values: dict[str, object] = {}
    for part in parts:
        word = next((word for word in words_of(part) if word in known), "")
        if not word:
            raise Rejected(f"words among {', '.join(own)}", did_you_mean(part, own))
        if word == "offload":
            values["sharding.offload"] = "cpu"
        elif word not in _WORDS:
            if "sharding.strategy" in values:
                raise Rejected("one strategy, and auto_wrap and offload")
            values["sharding.strategy"] = known[word]
    if not values:  # only `auto_wrap`
        return Meaning(Status.NO_EFFECT, "units are found in every model")
    return translated(values)


def _names_strategy(config: object) -> bool:
    names = {str(key).removeprefix("fsdp_") for key in mapping_of(config)}
    return bool(names & {"sharding_strategy", "reshard_after_forward"})


def _min_params(value: object, said: Said) -> Meaning:
    if is_neutral(value, (0,)) or not is_empty(said.get("fsdp_transformer_layer_cls_to_wrap")):
        return happens("sharding.wrap")
    return translated({"sharding.wrap": "size", "sharding.wrap_min_params": value})


def _decides(name: str, target: str) -> Rule:
    """A flag that sets a key of `sharding` (`bf16`) and is kept."""

    def rule(value: object, _: Said) -> Meaning:
        if value is None:
            return NOTHING
        why = f"decides {target}" if words_of(value)[:1] == ("true",) else "it is off"
        status = Status.TRANSLATED if "decides" in why else Status.NO_EFFECT
        return Meaning(status, why, {f"training.{name}": value})

    return rule


def _use_peft(value: object, said: Said) -> Meaning:
    if is_empty(value) or not to_flag(value):
        return happens("lora.r")
    return translated({"lora.r": 16 if is_empty(said.get("lora_r")) else said["lora_r"]})


def lora_keys(is_on: Callable[[Said], bool], off: str) -> dict[str, Rule]:
    """Rules for `lora_*`, which apply if another key enables adapters; `off`: the reason if not."""

    def rule_of(name: str) -> Rule:
        def rule(value: object, said: Said) -> Meaning:
            if is_empty(value) or not is_on(said):
                return Meaning(Status.NO_EFFECT, off)
            if means_same(value, "all-linear"):
                return happens("lora.target_modules")
            return translated({f"lora.{name}": value})

        return rule

    names = {"lora_r": "r", "lora_target_modules": "target_modules"}
    names |= {name: name for name in ("lora_alpha", "lora_dropout")}
    return {theirs: rule_of(ours) for theirs, ours in names.items()}


_LORA: Table = {
    "use_peft": _use_peft,
    **lora_keys(lambda said: to_flag(said.get("use_peft") or False), "use_peft is off"),
    "lora_task_type": no_effect("causal language models are trained"),
}


# Names below `training:` other than fields of TrainingConfig.
TRAINING: Table = {
    **names(),
    **{name: _decides(name, move.target) for name, move in MOVED.items() if move.stays},
    "fsdp": {"": _fsdp, **FSDP},
    "fsdp_config": FSDP,
    "fsdp_min_num_params": _min_params,
    "fsdp_transformer_layer_cls_to_wrap": to("sharding.wrap", read=lambda name: [name]),
    "deepspeed": {"": file_rule, **DEEPSPEED},
    "parallelism_config": MESH,
    "distributed_config": DISTRIBUTED,
    **_LORA,
}


def _field(name: str) -> Rule:
    """A field of TrainingConfig, or the key of another section that it sets."""
    key = canonical(f"training.{name}")

    def rule(value: object, _: Said) -> Meaning:
        return NOTHING if value is None else translated({key: value})

    return rule


# A flat file of these names, with or without TRL's script and model arguments.
FLAT: Table = {
    **rows("FLAT"),
    **{
        name: _field(name)
        for name in (*TrainingConfig.field_names(), *TrainingConfig.ALIASES, *MOVED)
        if name not in TRAINING
    },
    **TRAINING,
}

# A name that our own files do not have at the top level.
FLAT_MARKS = frozenset(FLAT) - {"model", "data"}


# ---- axolotl -------------------------------------------------------------------------------------


def _times_an_epoch(kind: str) -> Rule:
    """Converts `evals_per_epoch: 2` to a fraction of all steps."""

    @unless(0)
    def rule(value: object, said: Said) -> Meaning:
        if kind == "save" and value == 1:
            return translated({"training.save_strategy": "epoch"})
        times, all_epochs = to_number(value), to_number(said.get("num_epochs")) or 1
        if times is None or times <= 0:
            raise Rejected("a number > 0")
        share = min(1 / (times * all_epochs), 0.999)
        return translated({f"training.{kind}_steps": share}, "as a share of all steps")

    return rule


def _precision(name: str) -> Rule:
    @unless(False)
    def rule(value: object, _: Said) -> Meaning:
        if is_auto(value):
            return translated({f"training.{name}": True}, "axolotl checks the GPU; here it is on")
        return translated({f"training.{name}": value})

    return rule


@unless()
def _datasets(value: object, _: Said) -> Meaning:
    members = cast("list[object]", value) if isinstance(value, list) else [value]
    entry = mapping_of(members[0])
    if is_empty(entry.get("path")):
        raise Rejected("a list of mappings with path")
    why = "as plain text" + (", the first of the list" if len(members) > 1 else "")
    if entry.get("type") not in (None, "completion", "pretrain"):
        why += "; `fullshard sft` reads conversations, by their columns"
    values: dict[str, object] = {"data.path": entry["path"]}
    for name in ("field", "text_column"):
        if not is_empty(entry.get(name)):
            values["data.text_column"] = entry[name]
    return translated(values, why)


@unless("", False)
def _adapter(value: object, said: Said) -> Meaning:
    """Reads axolotl's adapter type."""
    if means_same(value, "lora"):
        return translated({"lora.r": 16 if is_empty(said.get("lora_r")) else said["lora_r"]})
    raise refused(value, "Write lora, or leave it out")


def _packing(value: object, _: Said) -> Meaning:
    if is_neutral(value, (False,)):
        return Meaning(Status.NO_EFFECT, "plain text is always packed, conversations are not")
    return translated({"sft.packing": value})


AXOLOTL: Table = {
    **rows("AXOLOTL", FLAT),
    "evals_per_epoch": _times_an_epoch("eval"),
    "saves_per_epoch": _times_an_epoch("save"),
    **each(_precision("bf16"), "bf16 bfloat16"),
    **each(_precision("fp16"), "fp16 float16"),
    "tf32": _precision("tf32"),
    **each(_datasets, "datasets pretraining_dataset"),
    "fsdp_config": FSDP,
    **axes("dp_replicate_size", "dp_shard_size", "tensor_parallel_size", "expert_parallel_size"),
    "sample_packing": _packing,
    "adapter": _adapter,
    **lora_keys(lambda said: means_same(said.get("adapter"), "lora"), "adapter is not lora"),
}
