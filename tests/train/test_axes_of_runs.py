"""Runs with a tensor or expert axis have the losses and models of one process, also resumed.

All runs are in float64 with the same number of sequences per update.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, OPTConfig

import fullshard as fs
from fullshard.config.schema import LoraConfig, ShardConfig
from fullshard.errors import ConfigError, DataError, EngineError
from fullshard.models.lora import add_adapters
from fullshard.observe.metrics import read_rows
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.plan import Plan
from fullshard.recipes.base import Seat
from fullshard.recipes.context import check_context, part_of
from support.model_folder import small_config, write_chats, write_model
from support.text import seeded_text

pytestmark = pytest.mark.timeout(400)

LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "tie_word_embeddings": True}
MIXTURE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "experts_implementation": "eager",  # the grouped matmul does not support float64
}
ROOT = Path(__file__).parents[2]
TWO = ShardConfig(context=2)
ONES = {name: torch.ones(2, 4, dtype=torch.long) for name in ("input_ids", "labels")}
SEAT = Seat(0, 2, torch.device("cpu"), TWO)
MISTRAL = {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8}
FALCON_H1 = {"model_type": "falcon_h1", "num_key_value_heads": 2}  # attention and Mamba layers
DOGE = {"model_type": "doge", "num_key_value_heads": 2, "keep_window_size": 4}
BY_LENGTH = {
    **LLAMA,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}
GPT_NEO = {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 2]]}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
TRAINING = {
    "max_steps": 4,
    "train_batch_size": 8,
    "per_device_eval_batch_size": 5,
    "max_seq_length": 32,
    "learning_rate": 2e-2,
    "lr_scheduler_type": "constant",
    "eval_steps": 2,
    "save_steps": 2,
    "seed": 7,
}


class Runs:
    """Runs of one model; those of one process are cached."""

    def __init__(self, fullshard, folder):
        self.fullshard, self.folder = fullshard, folder
        (folder / "text.txt").write_text(seeded_text(500))
        self._alone: dict[str, Path] = {}

    def config(self, model):
        path = self.folder / f"{model['model_type']}.yaml"
        data = {"path": f"{self.folder}/text.txt", "vocab_size": 300, "validation_fraction": 0.1}
        sharding, settings = {"master_dtype": "float64"}, {"config": SIZES | model}
        whole = {"model": settings, "data": data, "sharding": sharding, "training": TRAINING}
        path.write_text(json.dumps(whole))
        return path

    def run(self, model, name, num_ranks, *words):
        folder = self.folder / f"{model['model_type']}-{name}"
        ranks = f"launch.num_processes={num_ranks}"
        done = self.fullshard(
            "train", self.config(model), f"output_dir={folder}", ranks, *words, code=0
        )
        assert "differs from the one above" not in done.err
        assert "truncated to dtype" not in done.err  # jax warns if it does not support float64
        return folder

    def alone(self, model, *words):
        key = "-".join((model["model_type"], *words))
        if key not in self._alone:
            self._alone[key] = self.run(model, "-".join(("alone", *words)), 1, *words)
        return self._alone[key]


@pytest.fixture(scope="module")
def runs(fullshard, tmp_path_factory):
    return Runs(fullshard, tmp_path_factory.mktemp("axes"))


def numbers(folder):
    """Returns losses, norms of gradients and held-out losses by step."""
    rows = list(read_rows(folder / "metrics.jsonl"))
    return [row[key] for row in rows for key in ("loss", "grad_norm", "eval_loss") if key in row]


def assert_same(found, wanted):
    assert numbers(found) == pytest.approx(numbers(wanted), rel=1e-10)
    models = [AutoModelForCausalLM.from_pretrained(f / "model") for f in (found, wanted)]
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], rtol=1e-8, atol=1e-9), name


@pytest.mark.short(1)
@pytest.mark.parametrize(
    ("model", "num_ranks", "axes", "mesh"),
    [
        (MIXTURE, 2, ("expert=2",), "replicate 1 x shard 1 x expert 2"),
        (LLAMA, 2, ("tensor=2",), "replicate 1 x shard 1 x tensor 2"),
        (LLAMA, 2, ("context=2", "loss_chunk_size=0"), "replicate 1 x shard 2"),
        (LLAMA, 4, ("tensor=2", "strategy=no_shard"), "replicate 2 x shard 1 x tensor 2"),
        (MIXTURE, 4, ("expert=2", "tensor=2"), "replicate 1 x shard 1 x expert 2 x tensor 2"),
        (LLAMA, 4, ("context=4", "activation_checkpointing=block"), "replicate 1 x shard 4"),
        (LLAMA, 4, ("context=2", "replicate=1", "shard=2"), "replicate 1 x shard 4"),
        (LLAMA, 4, ("context=2", "strategy=no_shard"), "replicate 4 x shard 1"),
        (LLAMA, 4, ("context=2", "tensor=2"), "replicate 1 x shard 2 x tensor 2"),
        (MIXTURE, 4, ("context=2", "expert=2"), "replicate 1 x shard 2 x expert 2"),
        (LLAMA, 4, ("tensor=2", "optim=muon"), "replicate 1 x shard 2 x tensor 2"),
        (LLAMA, 4, ("tensor=2", "backend=jax"), "replicate 1 x shard 2 x tensor 2"),
        (MIXTURE, 4, ("expert=2", "backend=jax"), "replicate 1 x shard 2 x expert 2"),
        (MIXTURE, 4, ("expert=2", "optim=adafactor"), "replicate 1 x shard 2 x expert 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_run_with_other_axes_equals_one_process(runs, model, num_ranks, axes, mesh):
    name = "-".join(axes)
    found = runs.run(model, name, num_ranks, *axes)
    assert_same(
        found, runs.alone(model, *(w for w in axes if w.startswith(("optim=", "backend="))))
    )
    text = (found / "plan.json").read_text()
    plan = ArraysPlan.from_json(text) or Plan.from_json(text)
    assert f"{num_ranks} ranks ({mesh})" in plan.tree().replace("devices", "ranks")
    record = json.loads((runs.alone(model) / "run.json").read_text())
    assert plan.num_parameters == record["planned"]["num_parameters"]


@pytest.mark.long
@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "mesh").glob("*.yaml")), ids=lambda p: p.stem
)
def test_an_example_of_an_axis_learns(fullshard, tmp_path, path):
    words = [f"output_dir={tmp_path}/run", "max_steps=20", "eval_steps=20", "logging_steps=1"]
    fullshard("train", path, *words, code=0)
    losses = [row["loss"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "meshes", "rel"),
    [
        (MIXTURE, [(2, "tensor=2"), (4, "expert=2")], 1e-10),
        # transformers computes norms and positions in float32, unlike XLA
        (LLAMA, [(4, "tensor=2", "backend=jax"), (2, "tensor=2")], 1e-7),
    ],
    ids=["torch", "jax"],
)
def test_a_run_resumes_on_another_mesh(runs, model, meshes, rel):
    first = runs.run(model, "resumed", *meshes[0], "max_steps=2")
    second = runs.run(model, "resumed", *meshes[1])
    assert first == second
    rows = [row["loss"] for row in read_rows(second / "metrics.jsonl") if "loss" in row]
    wanted = [
        row["loss"] for row in read_rows(runs.alone(model) / "metrics.jsonl") if "loss" in row
    ]
    assert rows == pytest.approx(wanted, rel=rel)


def write_mixture(folder, text, **how):
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    write_model(folder, small_config("qwen3_moe", num_key_value_heads=1, **experts), text, **how)
    file = folder / "config.json"  # the grouped matmul does not support float64
    file.write_text(json.dumps(json.loads(file.read_text()) | {"experts_implementation": "eager"}))


@pytest.mark.long
@pytest.mark.parametrize(
    "axis",
    [
        "context=2 packing=true",
        "tensor=2 lora.r=4",
        "expert=2 lora.r=4 lora.target_modules=[q_proj,o_proj]",
        "context=2",
        "tensor=2",
    ],
)
def test_conversations_of_different_lengths_train_as_in_one_process(runs, tmp_path, axis):
    text = write_chats(tmp_path / "chat.jsonl", 64)
    if "expert" in axis:
        write_mixture(tmp_path / "base", text)
    else:
        write_model(tmp_path / "base", small_config(num_key_value_heads=2), text)
    words = [f"model={tmp_path}/base", f"data.path={tmp_path}/chat.jsonl", "max_length=64"]
    words += ["master_dtype=float64", "train_batch_size=8", "max_steps=3", "learning_rate=1e-2"]
    folders = []
    axis, *more_words = axis.split()
    words += more_words
    for name, more in (("one", ["num_processes=1"]), ("two", ["num_processes=2", axis])):
        folders.append(tmp_path / name)
        runs.fullshard("sft", *words, f"output_dir={folders[-1]}", *more, code=0)
    assert_same(folders[1], folders[0])


@pytest.mark.long
@pytest.mark.parametrize("is_kept", [False, True], ids=["cut student", "kept logits"])
def test_a_student_with_divided_sequences_learns_as_in_one_process(runs, tmp_path, caplog, is_kept):
    text = write_chats(tmp_path / "chat.jsonl", 48)
    write_mixture(tmp_path / "base", text, sure=20)
    words = [f"teacher={tmp_path}/base", f"data.path={tmp_path}/chat.jsonl", "max_length=64"]
    words += ["master_dtype=float64", "teacher_dtype=float64", "train_batch_size=8", "max_steps=3"]
    words += ["learning_rate=1e-2", "distill.alpha=0.7", "distill.top_k=300"]
    cut = [] if is_kept else ["layers=1", "experts=2"]
    found = []
    for name, more in (("one", ["num_processes=1"]), ("two", ["num_processes=2", "context=2"])):
        run = [*words, *more, f"output_dir={tmp_path}/{name}"]
        if is_kept:
            run += [f"distill.cache={tmp_path}/{name}-logits", f"model={tmp_path}/base"]
            runs.fullshard("distill", "cache", *run, code=0)
        runs.fullshard("distill", *run, *cut, code=0)
        said = "distill.teacher_dtype has no effect, because distill.cache is set"
        assert (said in caplog.messages) == is_kept
        assert any(line.startswith("distill.top_k has no effect") for line in caplog.messages)
        found.append(tmp_path / name)
    assert_same(found[1], found[0])


def batches_of(step):
    """Returns two batches of four rows: padded on both sides, and packed documents."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 300, (2, 4, 16), generator=draw)
    places, masks = torch.arange(16), torch.ones(4, 16, dtype=torch.long)
    masks[1, :3], masks[2, 11:] = 0, 0
    labels = [ids[0].masked_fill(masks == 0, -100), ids[1].masked_fill(places < step, -100)]
    positions = torch.stack([torch.cat([places[:n], places[: 16 - n]]) for n in (16, 5, 8, 11)])
    padded = {"input_ids": ids[0], "labels": labels[0], "attention_mask": masks}
    # With a mask, positions do not divide a row into documents.
    padded["position_ids"] = (masks.cumsum(1) - 1).clamp(min=0)
    return padded, {"input_ids": ids[1], "labels": labels[1], "position_ids": positions}


def own_loop(place, size):
    """Returns losses and weights of a user's loop, in which `size` ranks divide each sequence."""
    torch.manual_seed(3)
    config = small_config(num_attention_heads=4, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_config(config).double().train()
    part = dict
    if place is not None:
        part = fs.divide_sequences(model, size)
        model = copy.deepcopy(model)
        fs.shard(model, activation_checkpointing="block")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = 0.0  # one backward recomputes the layers of two forwards
        for batch in batches_of(step):
            rows = slice(None) if place is None else slice(place // size, None, 4 // size)
            known = part({name: x[rows] for name, x in batch.items()})
            labels = known.pop("shift_labels", F.pad(known["labels"][:, 1:], (0, 1), value=-100))
            count = known.pop("num_items_in_batch", None)
            given = {"use_cache": False} | {k: x for k, x in known.items() if k != "labels"}
            logits = model(**given).logits
            if count is None:  # mean over groups of each group's mean
                groups = [
                    (labels[at :: 4 // size], logits[at :: 4 // size]) for at in range(4 // size)
                ]
                means = [F.cross_entropy(x.flatten(0, 1), y.flatten()) for y, x in groups]
                loss = loss + sum(means) / len(means)
            else:
                total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                loss = loss + total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():  # a forward of undivided rows
        losses.append(model.eval()(input_ids=batches_of(0)[0]["input_ids"]).logits.sum().item())
        rows = slice(None) if place is None else slice(place // size, None, 4 // size)
        known = part({name: x[rows] for name, x in batches_of(0)[1].items()})
        given = ("input_ids", "position_ids", "documents")  # only the body, without a loss
        states = model.model(**{k: x for k, x in known.items() if k in given}, use_cache=False)
        share = 4 if place is None else 1
        losses.append(states.last_hidden_state.abs().sum().item() / share)
    return losses, model.state_dict() if place is None else fs.full_state_dict(model)


def on_a_rank(size):
    return own_loop(dist.get_rank(), size)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_custom_loop_may_divide_sequences(ranks, size):
    wanted, weights = own_loop(None, size)
    found = ranks(4)(on_a_rank, size)
    losses = [sum(values) / 4 for values in zip(*(losses for losses, _ in found), strict=True)]
    assert losses == pytest.approx(wanted, rel=1e-10)
    for name, value in found[0][1].items():
        assert torch.allclose(value, weights[name], rtol=1e-8, atol=1e-10), name


def test_positions_of_parts_have_the_meaning_of_transformers():
    one_row = part_of(ONES | {"position_ids": torch.arange(4)[None]}, SEAT)
    assert one_row["position_ids"].tolist() == [[0, 1]] * 2
    packed = ONES | {"position_ids": torch.tensor([[5, 6, 5, 6]] * 2)}
    assert part_of(packed, SEAT)["documents"].tolist() == [[0, 0, 1, 1]] * 2
    beside = part_of(packed | {"attention_mask": torch.tensor([[1, 1, 1, 0]] * 2)}, SEAT)
    assert beside["documents"].tolist() == [[0, 0, 0, -1]] * 2


def test_sequences_that_cannot_be_divided_are_refused():
    model = AutoModelForCausalLM.from_config(small_config())
    both_ways = AutoModelForCausalLM.from_config(small_config(is_causal=False))
    for call, error, said in (
        (lambda: check_context(both_ways, TWO), ConfigError, "with is_causal: false"),
        (lambda: fs.divide_sequences(model, 2), ConfigError, "context: expected a divisor of 1"),
        (lambda: fs.shard(model, context=2), ConfigError, "Call fs.divide_sequences"),
        (lambda: check_context(torch.nn.Linear(2, 2), TWO), ConfigError, "got Linear"),
        (lambda: part_of({"input_ids": torch.ones(1, 4)}, SEAT), DataError, "got input_ids"),
        (
            lambda: part_of(ONES | {"attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, SEAT),
            DataError,
            "expected position_ids for an attention_mask",
        ),
    ):
        with pytest.raises(error, match=said):
            call()


def test_a_model_that_mixes_documents_may_divide_sequences():
    sizes = {"hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = OPTConfig(**sizes, word_embed_proj_dim=64)
    check_context(AutoModelForCausalLM.from_config(config), TWO)


@pytest.mark.parametrize(
    ("model", "num_ranks", "words", "said"),
    [
        (LLAMA, 2, ["expert=2"], "sharding.expert: expected 1 for LlamaForCausalLM, for which"),
        (
            LLAMA,
            4,
            ["tensor=4"],
            "sharding.tensor: expected a divisor of 2, num_key_value_heads; "
            "got 4. The nearest size that divides everything on this axis is 2.",
        ),
        (LLAMA, 3, ["tensor=2"], "sharding.tensor: expected a divisor of 3 (the ranks of a host)"),
        (LLAMA, 4, ["tensor=2", "shard=3"], "expected a divisor of 2 (4 ranks / tensor 2); got 3"),
        (MIXTURE, 6, ["expert=3"], "sharding.expert: expected a divisor of 8, dimension 0 of "),
        (MIXTURE, 8, ["expert=4", "tensor=2", "shard=2"], "(8 ranks / expert 4 / tensor 2); got 2"),
        (LLAMA, 4, ["tensor=4", "backend=jax"], "sharding.tensor: expected a divisor of 2 (which"),
        (LLAMA, 2, ["expert=2", "backend=jax"], "sharding.expert: expected 1 for a model without"),
        (MIXTURE, 3, ["expert=3", "backend=jax"], "a divisor of 8 (num_experts 8 / tensor 1); got"),
        (LLAMA, 6, ["context=4"], "context: expected a divisor of 6 (ranks / expert / tensor)"),
        (LLAMA, 8, ["context=8"], "divisor of 4 (num_attention_heads / tensor); got 8. The"),
        (LLAMA, 2, ["context=2", "max_seq_length=33"], "divisor of 33 (training.max_seq_length)"),
        (MISTRAL, 2, ["context=2"], "MistralForCausalLM with sliding_window. Leave it out"),
        (GPT_NEO, 2, ["context=2"], "GPTNeoForCausalLM with attention of its own. Leave it out"),
        pytest.param(
            FALCON_H1,
            2,
            ["context=2"],
            "FalconH1ForCausalLM with hybrid",
            marks=pytest.mark.slow,
        ),
        (BY_LENGTH, 2, ["context=2"], "LlamaForCausalLM with rope_type dynamic, which depends"),
        (DOGE, 2, ["context=2"], "DogeForCausalLM with layers that read other tokens"),
        (LLAMA, 2, ["context=2", "backend=jax"], "context: 2 is not yet supported. Use shard"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_axes_that_do_not_fit_are_refused_before_ranks_start(runs, model, num_ranks, words, said):
    folder = f"output_dir={runs.folder}/refused"
    done = runs.fullshard(
        "train",
        runs.config(model),
        folder,
        f"num_processes={num_ranks}",
        *words,
        "train_batch_size=24",
        code=2,
    )
    assert said in done.err
    assert not (runs.folder / "refused").exists()


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # issued by peft
def test_adapters_of_experts_are_refused():
    pytest.importorskip("peft")
    with torch.device("meta"):
        config = small_config("qwen3_moe", num_experts=4, moe_intermediate_size=8)
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"got all-linear \(peft adapts experts too, which"):
        add_adapters(model, LoraConfig(r=2))


def test_adapters_of_an_embedding_are_refused():
    pytest.importorskip("peft")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(**SIZES))
    with pytest.raises(ConfigError, match=r"peft adds \S+lora_embedding_A\S+, which is not yet"):
        add_adapters(model, LoraConfig(target_modules=("embed_tokens",)))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "adapted"])
def test_experts_that_no_axis_divides_are_refused(is_tied):
    with torch.device("meta"):
        config = small_config("qwen3_moe", num_experts=4, moe_intermediate_size=8)
        model = AutoModelForCausalLM.from_config(config)
        if is_tied:
            layers = model.model.layers
            layers[1].mlp.experts.down_proj = layers[0].mlp.experts.down_proj
        else:
            peft = pytest.importorskip("peft")
            of = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
            peft.inject_adapter_in_model(peft.LoraConfig(**of), model)
    with pytest.raises(
        ConfigError, match=rf"got model.layers.{is_tied:d}.mlp.experts\S*, which is"
    ):
        fs.plan(model, expert=2, world_size=2)


def test_a_plan_follows_freezing_and_casts_of_its_model():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(**SIZES))

    def trained(tensor: int) -> set[str]:
        plan = fs.plan(model, tensor=tensor, world_size=2)
        groups = [group for group in plan.groups if group.trainable]
        return {f"{p.name} {g.dtypes.master}" for g in groups for p in g.layout.placements}

    assert trained(2) == trained(1)
    model.model.layers.requires_grad_(False)
    assert trained(2) == trained(1)
    model.to(torch.bfloat16)
    assert trained(2) == trained(1)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # called by peft
def test_a_plan_shards_the_adapters_of_sharded_layers():
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small_config(**SIZES))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))

    plan = fs.plan(model, tensor=2, world_size=2)
    parts = {p.name: p.parts for group in plan.groups for p in group.layout.placements}
    layer = "base_model.model.model.layers.0.self_attn"
    wanted = {
        "q_proj": {"base_layer": 2, "lora_A.default": 1, "lora_B.default": 2},  # by rows
        "o_proj": {"base_layer": 2, "lora_A.default": 2, "lora_B.default": 1},  # by columns
    }
    for name, sizes in wanted.items():
        assert {one: parts[f"{layer}.{name}.{one}.weight"] for one in sizes} == sizes


def test_settings_that_a_sharded_model_lacks_are_refused_before_sharding():
    model = AutoModelForCausalLM.from_config(small_config(**SIZES))
    with pytest.raises(ConfigError, match=r"^sample: expected"):
        fs.shard(model, tensor=2, sample={"input_ids": torch.zeros(1, 4, dtype=torch.int64)})
    names = {"wrap": ["LlamaDecoderlayer"], "ignore": ["*.lm_haed"], "fp32_modules": ["*.nrom"]}
    for key, value in names.items():
        with pytest.raises(ConfigError, match=f"^{key}: "):
            fs.shard(model, tensor=2, **{key: value})
    fs.shard(model)
    with pytest.raises(EngineError, match="expected a model that was not sharded"):
        fs.shard(model, tensor=2)
