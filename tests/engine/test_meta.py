"""A model on meta gets the same initial values as an unsharded one, on any number of ranks."""

import json
import weakref

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import fullshard as fs
from fullshard.engine.initial import check_weights_of, has_weights_of
from fullshard.errors import ConfigError, UnsupportedModelError
from support.parity import whole_params
from support.ranks import on_ranks

COMMON = {"hidden_size": 32, "vocab_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
KINDS = {
    "llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1},
    "qwen3_moe": {
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mamba": {"state_size": 4, "bos_token_id": 1, "eos_token_id": 1},
    "bert": {"intermediate_size": 48, "is_decoder": True},
    "vit": {"intermediate_size": 48, "image_size": 16, "patch_size": 8},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
}


MOE = {
    **KINDS["qwen3_moe"],
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 24,
}


def make(kind, **fields):
    fields = {**COMMON, **KINDS.get(kind, MOE), **fields}
    config = transformers.AutoConfig.for_model(kind, **fields)
    auto = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModel
    return auto.from_config(config)


def on_meta(build, *args):
    with torch.device("meta"):
        return build(*args)


def seeded(build, *args):
    torch.manual_seed(3)
    return build(*args)


def assert_equal_to(model, whole, buffers=True):
    found = whole_params(model)
    wanted = dict(whole.named_parameters())
    assert found.keys() == wanted.keys()
    wrong = [name for name in wanted if not torch.equal(found[name], wanted[name].detach())]
    assert not wrong, wrong
    if buffers:
        theirs = dict(whole.named_buffers())
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, theirs[name]), name


@pytest.mark.short(3)
@pytest.mark.parametrize(
    ("kind", "world_size"), [("llama", 3), *((kind, 2) for kind in KINDS), ("llama", 1)]
)
@on_ranks("world_size")
def test_hugging_face_models_are_initialised_as_unsharded(kind):
    whole = seeded(make, kind)
    model = seeded(on_meta, make, kind)
    ids = {name: id(param) for name, param in model.named_parameters()}
    fs.shard(model, poison=True)
    assert {name: id(param) for name, param in model.named_parameters()} == ids
    assert_equal_to(model, whole)


class Own(nn.Module):
    """A custom module whose parts initialise themselves."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden, _ = self.attention(hidden, hidden, hidden)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return self.norm(hidden.mean(0))


class Custom(nn.Module):
    """A module whose `init_weights` initialises all of it, one part from another part's values."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.empty(6))
        self.init_weights()

    def init_weights(self):
        for param in self.parameters():
            nn.init.normal_(param)
        with torch.no_grad():
            self.second.weight.copy_(self.first.weight.t() @ self.first.weight)
            self.first.weight[2].zero_()

    def forward(self, x):
        return self.second(self.first(x)) * self.scale


@pytest.mark.parametrize("build", [Own, Custom])
@on_ranks(2)
def test_custom_modules_are_initialised_as_unsharded(build):
    whole = seeded(build)
    if hasattr(whole, "init_weights"):  # as after model.to_empty()
        seeded(whole.init_weights)
    model = on_meta(build)
    torch.manual_seed(3)
    fs.shard(model)
    assert_equal_to(model, whole)


class Forgotten(nn.Module):
    """No method initialises `scale`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.empty(4))


def test_uninitialised_parameters_are_named():
    model = on_meta(Forgotten)
    with pytest.raises(UnsupportedModelError, match="scale: expected a model on meta"):
        fs.shard(model)


def test_a_weak_reference_to_a_parameter_on_meta_is_refused():
    model = on_meta(nn.Linear, 4, 4)
    reference = weakref.ref(model.weight)
    with pytest.raises(UnsupportedModelError, match=r"weight: .*weak reference"):
        fs.shard(model)
    assert reference() is model.weight


def check_read(folder, strategy):
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = on_meta(transformers.AutoModelForCausalLM.from_config, whole.config)
    torch.manual_seed(dist.get_rank())  # reading draws no random numbers
    fs.shard(model, weights=folder, strategy=strategy)
    assert_equal_to(model, whole)
    ids = torch.arange(10).reshape(2, 5)
    theirs = whole.train()(input_ids=ids, labels=ids).loss
    ours = model.train()(input_ids=ids, labels=ids).loss
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_reads_only_its_ranges_of_a_folder(ranks, tmp_path, strategy, tied):
    model = make("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # several files and an index
    ranks(2)(check_read, str(tmp_path), strategy)


@pytest.mark.short(1)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_experts_are_read_by_ranges_of_files_with_one_expert_each(ranks, tmp_path, kind):
    model = make(kind)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(".experts.3." in name for name in names)  # otherwise there is nothing to assemble
    ranks(2)(check_read, str(tmp_path), "full_shard")


def test_quantized_weights_are_not_read_as_plain_values(tmp_path):
    make("qwen3_moe").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    coded = {**stored, name: stored[name].to(torch.float8_e4m3fn)}
    model = on_meta(make, "qwen3_moe")
    save_file(coded, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"expected .*down_proj in floating point; .* F8_E4M3"):
        fs.shard(model, weights=tmp_path)
    name_of_query = "model.layers.0.self_attn.q_proj.weight"
    query = stored[name_of_query].to(torch.int8)
    save_file({**stored, name_of_query: query}, tmp_path / "int8.safetensors")
    (tmp_path / "int8.safetensors").replace(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"q_proj.weight in floating point; .* has I8"):
        fs.shard(model, weights=tmp_path)
    save_file({**coded, f"{name}_scale_inv": torch.ones(1)}, tmp_path / "model.safetensors")
    assert not has_weights_of(model, tmp_path)  # transformers loads it


@pytest.mark.parametrize("lost", ["experts.2.up_proj", "experts.3.down_proj"])
def test_an_expert_that_the_files_lack_is_named(tmp_path, lost):
    make("qwen3_moe").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in stored.items() if f"layers.1.mlp.{lost}" not in name}
    assert len(kept) == len(stored) - 1
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weights: .*(lacks|expected) model\.layers\.1\.mlp"):
        fs.shard(on_meta(make, "qwen3_moe"), weights=tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"weights: expected a folder .* it has neither"):
        fs.shard(on_meta(make, "llama"), weights=tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        fs.shard(on_meta(make, "llama"), weights=tmp_path / "nowhere")


def test_a_folder_that_lacks_a_tensor_is_refused(tmp_path):
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    lacks = r"it lacks model.embed_tokens.weight, lm_head.weight, \S+ and \d+ more"
    with pytest.raises(ConfigError, match=lacks):
        fs.shard(on_meta(make, "llama"), weights=tmp_path)


@pytest.fixture
def llama_folder(tmp_path):
    """Returns a saved model's folder, and its tensors."""
    make("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    return tmp_path, load_file(tmp_path / "model.safetensors")


def test_tied_weights_that_differ_in_the_files_are_refused(llama_folder):
    folder, stored = llama_folder
    model = on_meta(make, "llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ConfigError, match=r"expected lm_head.weight to equal model.embed_tokens"):
        check_weights_of(model, folder)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, folder / "model.safetensors")
    check_weights_of(model, folder)


def test_weights_that_the_model_lacks_are_named(llama_folder, caplog):
    folder, stored = llama_folder
    check_weights_of(on_meta(make, "llama"), folder)
    assert not caplog.text
    stored["model.layers.7.mlp.up_proj.weight"] = torch.ones(2)
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)  # of older versions
    save_file(stored, folder / "model.safetensors")
    check_weights_of(on_meta(make, "llama"), folder)
    assert "weights that its config.json does not: model.layers.7.mlp.up_proj" in caplog.text


def test_weights_that_the_files_lack_are_named_before_a_run(llama_folder):
    folder, stored = llama_folder
    del stored["lm_head.weight"]  # tensors of a model that its config.json no longer ties
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"its files lack lm_head\.weight\. Copy or download"):
        check_weights_of(on_meta(make, "llama"), folder)
    stored["head"] = torch.ones(2)  # transformers may convert it, and reports if it does not
    save_file(stored, folder / "model.safetensors")
    check_weights_of(on_meta(make, "llama"), folder)


def test_a_tensor_that_two_files_hold_is_refused(llama_folder):
    folder, stored = llama_folder
    (folder / "model.safetensors").unlink()
    one = {name: value for name, value in stored.items() if "mlp" in name}
    other = {name: value for name, value in stored.items() if name not in one}
    save_file(one, folder / "a.safetensors")
    save_file({**other, min(one): one[min(one)] + 1}, folder / "b.safetensors")
    table = dict.fromkeys(one, "a.safetensors") | dict.fromkeys(other, "b.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    said = rf"expected {min(one)} only in .*a\.safetensors', .* '.*b\.safetensors' has it"
    with pytest.raises(ConfigError, match=said):
        check_weights_of(on_meta(make, "llama"), folder)
    save_file(other, folder / "b.safetensors")
    check_weights_of(on_meta(make, "llama"), folder)
    index.write_text(json.dumps({"weight_map": {**table, "other": "b.safetensors"}}))
    with pytest.raises(ConfigError, match=r"expected other only in .*b\.safetensors' lacks it"):
        check_weights_of(on_meta(make, "llama"), folder)
    index.write_text(json.dumps({"weight_map": table | {min(one): "b.safetensors"}}))
    with pytest.raises(ConfigError, match=f"expected {min(one)} in the file that .* names; got"):
        fs.shard(on_meta(make, "llama"), weights=folder)
    save_file({name: value + 1 for name, value in stored.items()}, folder / "model.safetensors")
    model = fs.shard(on_meta(make, "llama"), weights=folder)  # transformers would load it, too
    got = fs.full_state_dict(model)["model.norm.weight"]
    assert torch.equal(got, stored["model.norm.weight"] + 1)


def test_weights_for_a_model_that_has_values_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="weights: expected a model on meta"):
        fs.shard(nn.Linear(3, 3), weights=tmp_path)


@on_ranks(2)
def test_ranks_of_different_seeds_are_refused():
    torch.manual_seed(dist.get_rank())
    model = on_meta(nn.Linear, 4, 4)
    with pytest.raises(ConfigError, match="the same random state on every rank"):
        fs.shard(model)
    with pytest.raises(ConfigError, match="weight and 1 more: expected the same weights"):
        fs.shard(nn.Linear(4, 4))


def test_values_set_since_the_model_was_built_are_named():
    model = on_meta(make, "llama")
    model.value_head = on_meta(nn.Linear, 32, 1)
    with pytest.raises(UnsupportedModelError, match=r"value_head.weight, value_head.bias"):
        fs.shard(model)
