"""A decoder as functions on trees of arrays, with HF's names: Llama, Qwen2, Qwen3, and mixtures of
experts as Mixtral and Qwen3-MoE have them.

    model.embed_tokens.weight                       (vocabulary, hidden)
    model.layers.self_attn.q_proj.weight            (layers, heads x head_dim, hidden)     stacked
    model.layers.mlp.experts.down_proj              (layers, experts, hidden, inner)
    ...
    model.norm.weight                               (hidden,)
    lm_head.weight                                  (vocabulary, hidden), unless tied

Weights keep torch's orientation, (out, in): a checkpoint is neither transposed nor renamed, and
XLA folds the transpose into the product. Norms and softmax compute in float32 or wider.

[Note: experts on XLA]
`weighted_sum` returns each token's weighted sum over the experts that it chose. Pairs of
a token and an expert are sorted by expert, and divided into blocks of equal size that have one
expert each:

    pairs     e0 e0 e0 e0 e0 | e1 | e2 e2 e2
    blocks    e0 e0 | e0 e0 | e0 -- | e1 -- | e2 e2 | e2 --

Shapes must not depend on data, but the number of turns of a loop may. The loop runs the blocks that
there are: no token is dropped, and an expert without tokens costs nothing. jax derives no gradient
of such a loop, so it is written here. Backward computes each block again: only tokens are kept.

A grouped product (`jax.lax.ragged_dot`) is compiled for CPUs and GPUs as a dense one, with every
expert for every pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fullshard.config.schema import RunConfig, ShardConfig
from fullshard.config.values import DType, Strategy
from fullshard.errors import ConfigError
from fullshard.planner.arrays import ArraysPlan
from fullshard.planner.mesh import Topology, check_divides, mesh_of, row_of
from fullshard.planner.optimizers import states_of
from fullshard.planner.spec import check_any_trained, check_globs
from fullshard.xla.gather import brought, first_expert, scan_blocks, shared, summed, taken_back
from fullshard.xla.plan import Tree, XlaPlan, named_leaves, plan_with, table_of

BLOCKS = ("model.layers",)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED = -100  # the ignored label
MODEL_TYPES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_BIASED = ("llama", "qwen3", "qwen3_moe")  # the others do not read `attention_bias`
_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps"),
    *("num_attention_heads", "num_key_value_heads"),
)
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder's configuration, with the names of Hugging Face's.

    Attributes:
        qkv_bias: Whether queries, keys and values have biases; `o_bias`, `mlp_bias` likewise.
        qk_norm: Whether queries and keys are normalized per head.
        rope: rope_theta, rope_type and the parameters of that type.
        num_experts: Experts of a layer, of inner width `intermediate_size`; 0: the model is dense.
        num_experts_per_tok: Number of experts that a token chooses.
        norm_topk_prob: Whether the weights of these are divided by their sum.
        pad_token_id: The token whose embedding is not trained; None: all are.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: dict[str, Any]
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    pad_token_id: int | None = None

    @classmethod
    def of(cls, config: Any, key: str = "model.config") -> DecoderConfig:
        """Creates it from a Hugging Face configuration.

        Args:
            config: The model's configuration.
            key: Configuration key that error messages name.

        Raises:
            ConfigError: The model has a feature that this decoder does not support.
        """
        kind = config.model_type
        expect = partial(_expect, key)
        expect("model_type", kind, MODEL_TYPES)
        expect("hidden_act", config.hidden_act, ("silu",))
        expect("attention_dropout", config.attention_dropout, (0.0,))
        expect("auto_map", getattr(config, "auto_map", None), (None,))  # code of the folder
        rope = dict(config.rope_parameters)
        expect("rope_parameters.rope_type", rope.get("rope_type", "default"), ROPE_TYPES)
        layers = getattr(config, "layer_types", None) or ()
        for layer in layers:
            expect("layer_types", layer, ("full_attention",))
        if not layers and kind in ("mixtral", "qwen3_moe"):
            expect("sliding_window", config.sliding_window, (None,))
        bias = kind in _BIASED and bool(getattr(config, "attention_bias", False))
        pad = getattr(config, "pad_token_id", None)  # older configurations have -1: the last one
        return cls(
            **{name: getattr(config, name) for name in _SAME} | _of_experts(config, expect),
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=bias or kind == "qwen2",
            o_bias=bias,
            mlp_bias=kind == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            rope=rope,
            pad_token_id=pad + config.vocab_size if pad is not None and pad < 0 else pad,
        )

    def check_axes(self, sharding: ShardConfig, key: str = "", *, alone: bool = True) -> None:
        """Checks that tensor and expert axes divide what they cut.

        Args:
            sharding: Sizes of the axes.
            key: Before names of axes in an error.
            alone: Whether no other model has experts.

        Raises:
            ConfigError: An axis does not divide it.
        """
        inner = "num_experts" if self.num_experts else "intermediate_size"
        names = ("num_attention_heads", "num_key_value_heads", inner)
        sizes = {name: getattr(self, name) for name in names}
        said = ", ".join(f"{name} {size}" for name, size in sizes.items())
        tensor, expert = sharding.tensor, sharding.expert
        check_divides(f"{key}tensor", tensor, math.gcd(*sizes.values()), f"which divides {said}")
        if self.num_experts:
            what = f"num_experts {self.num_experts} / tensor {tensor}"
            check_divides(f"{key}expert", expert, self.num_experts // tensor, what)
        elif expert > 1 and alone:
            raise ConfigError(
                f"{key}expert: expected 1 for a model without experts; got {expert}. Leave it out, "
                "so that these devices shard all arrays."
            )

    def frozen(self, globs: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of the arrays whose parameters match a glob, as torch names them.

        Raises:
            ConfigError: A glob matches nothing, or not every layer of an array.
        """
        start, found, every = BLOCKS[0], list[str](), list[str]()
        for name, _ in named_leaves(self.shapes()):
            inner, layers = name.removeprefix(start), range(self.num_hidden_layers)
            names = [name] if inner == name else [f"{start}.{at}{inner}" for at in layers]
            hits = sum(any(fnmatchcase(one, glob) for glob in globs) for one in names)
            if 0 < hits < len(names):
                raise ConfigError(
                    "freeze: expected globs that match all layers or none with backend: jax, whose "
                    f"layers are one array; got {list(globs)}, which match {hits} of {len(names)} "
                    f"layers of {name}. Freeze all, or use backend: torch."
                )
            found += [name] * (hits > 0)
            every += names
        check_globs("freeze", globs, every, "parameters")
        return tuple(found)

    def shapes(self, dtype: Any = jnp.float32) -> Tree:
        """Returns the tree of parameter shapes."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layer = {
            "input_layernorm": {"weight": (hidden,)},
            "post_attention_layernorm": {"weight": (hidden,)},
            "self_attn": {
                "q_proj": _linear(queries, hidden, bias=self.qkv_bias),
                "k_proj": _linear(keys, hidden, bias=self.qkv_bias),
                "v_proj": _linear(keys, hidden, bias=self.qkv_bias),
                "o_proj": _linear(hidden, queries, bias=self.o_bias),
            },
            "mlp": {
                "gate_proj": _linear(inner, hidden, bias=self.mlp_bias),
                "up_proj": _linear(inner, hidden, bias=self.mlp_bias),
                "down_proj": _linear(hidden, inner, bias=self.mlp_bias),
            },
        }
        if (num := self.num_experts) > 0:
            cubes = {"gate_up_proj": (num, 2 * inner, hidden), "down_proj": (num, hidden, inner)}
            layer["mlp"] = {"gate": _linear(num, hidden, bias=False), "experts": cubes}
        if self.qk_norm:
            layer["self_attn"] |= {n: {"weight": (self.head_dim,)} for n in ("q_norm", "k_norm")}
        stacked = jax.tree.map(lambda s: (self.num_hidden_layers, *s), layer, is_leaf=_is_shape)
        tree: dict[str, Any] = {
            "model": {
                "embed_tokens": {"weight": (self.vocab_size, hidden)},
                "layers": stacked,
                "norm": {"weight": (hidden,)},
            }
        }
        if not self.tie_word_embeddings:
            tree["lm_head"] = {"weight": (self.vocab_size, hidden)}
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, dtype), tree, is_leaf=_is_shape)


def plan_table(model_config: Any, run: RunConfig, world_size: int, more: Tree = None) -> ArraysPlan:
    """Returns the plan of a run on this backend; needs no device.

    Args:
        model_config: The model's Hugging Face configuration.
        run: The run's configuration.
        world_size: Number of devices.
        more: Shapes of additional arrays that are trained with the model.

    Raises:
        ConfigError: The decoder does not support this model, or the mesh is impossible.
    """
    decoder, sharding = DecoderConfig.of(model_config), run.sharding
    decoder.check_axes(sharding, alone=run.teacher is None)
    mesh = mesh_of(sharding, Topology(world_size))
    shapes, cuts = {**decoder.shapes(), **(more or {})}, rules(sharding.expert, sharding.tensor)
    table = table_of(shapes, sharding, mesh, BLOCKS, decoder.frozen(run.freeze), cuts)
    check_any_trained(run.freeze, sum(array.trainable for array in table.arrays))
    return replace(table, model_kind=model_config.model_type, optimizer=states_of(run.training))


def teacher_table(
    shapes: Tree, strategy: Strategy, dtype: DType, student: ArraysPlan, expert: int = 1
) -> ArraysPlan:
    """Returns the plan of a teacher's arrays; needs no device.

    Args:
        shapes: Shapes of the teacher's arrays.
        strategy: no_shard replicates it on every device; the others shard it as the student.
        dtype: The dtype in which weights are stored, gathered and computed with.
        student: The student's plan, whose mesh is used.
        expert: Size of the expert axis.

    Raises:
        ConfigError: The strategy needs a different mesh than the student's.
    """
    own, theirs = row_of(strategy), row_of(student.strategy)
    alike = theirs.shard_params and own.hybrid == theirs.hybrid
    if own.shard_params and not alike and student.mesh.num_copies > 1:
        raise ConfigError(
            "distill.teacher_strategy: expected no_shard or the student's strategy "
            f"({student.strategy}) with backend: jax, whose teacher uses the student's mesh; got "
            f"{strategy}. Choose one of them, or use backend: torch."
        )
    mesh = student.mesh if own.shard_params else student.mesh.unsharded()
    settings = ShardConfig.of(None, strategy=strategy, master_dtype=dtype)
    return table_of(shapes, settings, mesh, BLOCKS, ("*",), rules(expert, mesh.inner))


def rules(expert: int, tensor: int) -> dict[str, tuple[int, int]]:
    """The cuts of tensor and expert axes, in the form of `xla.plan.Rules`.

    As in transformers' plans, a tensor axis cuts rows of what divides the heads and the inner
    width, and columns of what joins them. The embedding and the head stay whole. Experts are
    divided one from another, over both axes.
    """
    rows = (f"*.{name}_proj.*" for name in ("q", "k", "v", "gate", "up"))
    columns = ("*.o_proj.weight", "*.down_proj.weight")
    found = {**dict.fromkeys(rows, (0, tensor)), **dict.fromkeys(columns, (1, tensor))}
    return found | {"*.experts.*": (0, expert * tensor)}


def planned(
    shapes: Tree, sharding: ShardConfig, mesh: Any = None, freeze: Sequence[str] = ()
) -> XlaPlan:
    """Plans the decoder's arrays, with others if any, on devices; arguments as for `plan`."""
    return plan_with(rules, shapes, sharding, mesh, BLOCKS, freeze)


def logits_of(config: DecoderConfig, plan: XlaPlan, params: Tree, batch: Any) -> jax.Array:
    """(batch, length, vocabulary) logits of (batch, length) token ids.

    Args:
        config: The model.
        plan: Plan of its arrays.
        params: Whole arrays, and shards of the blocks.
        batch: `input_ids`, and where rows hold several documents `position_ids`, which restart
            with each: no token sees another document. See [Note: documents] in
            data/chat_rows.py.
    """

    return hidden_of(config, plan, params, batch) @ head_of(config, params).T


def hidden_of(
    config: DecoderConfig,
    plan: XlaPlan,
    params: Tree,
    batch: Any,
    scan: Callable[..., jax.Array] | None = None,
) -> jax.Array:
    """(batch, length, hidden) states before the head; arguments as for `logits_of`.

    `scan` applies the blocks instead of the plan: (block, x, stacked arrays) -> x.
    """
    model, ids, places = params["model"], batch["input_ids"], batch.get("position_ids")
    x = model["embed_tokens"]["weight"][ids]
    if config.pad_token_id is not None:  # nn.Embedding(padding_idx) does not train it
        x = jnp.where((ids == config.pad_token_id)[..., None], jax.lax.stop_gradient(x), x)
    turns = _rotations(config, ids.shape[1], x.dtype)
    seen = jnp.tril(jnp.ones((ids.shape[1], ids.shape[1]), bool))
    if places is not None:
        turns = turns[0][places], turns[1][places]
        documents = jnp.cumsum(places[:, 1:] != places[:, :-1] + 1, axis=1)
        documents = jnp.pad(documents, ((0, 0), (1, 0)))
        seen = seen & (documents[:, :, None] == documents[:, None, :])
        seen = seen[:, None, None]
    # Adding a bias instead of `where` spares the backward a mask as large as the scores.
    hidden = jnp.where(seen, 0.0, -jnp.inf).astype(_wide(x).dtype)
    scan = scan or partial(scan_blocks, plan=plan, unit=BLOCKS[0])
    x = scan(partial(_block, config, plan, (turns, hidden)), x, model["layers"])
    return _norm(x, model["norm"]["weight"], config.rms_norm_eps)


def head_of(config: DecoderConfig, params: Tree) -> jax.Array:
    """(vocabulary, hidden): the weight of the head, or of the tied embedding."""
    tied = config.tie_word_embeddings
    return params["model"]["embed_tokens"]["weight"] if tied else params["lm_head"]["weight"]


def loss_fn(config: DecoderConfig, plan: XlaPlan) -> Callable[[Tree, Any], Any]:
    """Makes (parameters, batch) -> (summed next-token loss, number of label tokens).

    The batch is that of `logits_of` with `labels`, (batch, length); -100 is ignored.
    """

    def loss(params: Tree, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = logits_of(config, plan, params, batch)[:, :-1]
        return token_loss(logits, batch["labels"][:, 1:])

    return loss


def token_loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Summed cross-entropy, in float32 or wider, over labels other than -100, and their number."""
    logits = _wide(logits)
    counts = labels != IGNORED
    chosen = jnp.where(counts, labels, 0)[..., None]
    likely = jnp.take_along_axis(logits, chosen, axis=-1)[..., 0]
    each = jax.nn.logsumexp(logits, axis=-1) - likely
    return jnp.sum(jnp.where(counts, each, 0.0)), jnp.sum(counts)


def _block(
    config: DecoderConfig, plan: XlaPlan, places: Any, layer: Tree, x: jax.Array
) -> jax.Array:
    mlp, eps = layer["mlp"], config.rms_norm_eps
    h = _norm(x, layer["input_layernorm"]["weight"], eps)
    x = x + _attention(config, plan, places, layer["self_attn"], h)
    h = shared(plan, _norm(x, layer["post_attention_layernorm"]["weight"], eps))
    if config.num_experts:
        return x + _mixture(config, plan, mlp, h.reshape(-1, x.shape[-1])).reshape(x.shape)
    inner = jax.nn.silu(_apply(mlp["gate_proj"], h)) * _apply(mlp["up_proj"], h)
    return x + _apply(mlp["down_proj"], inner, plan)


def _mixture(config: DecoderConfig, plan: XlaPlan, mlp: Tree, x: jax.Array) -> jax.Array:
    """(tokens, hidden), the weighted sums of the experts that tokens choose.

    Tokens travel with their logits, so that all devices of an expert axis see the same choices.
    """
    logits = x @ shared(plan, mlp["gate"]["weight"]).T
    tokens, logits = jnp.split(brought(plan, jnp.concatenate([x, logits], 1)), [x.shape[1]], 1)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(_wide(logits)), config.num_experts_per_tok)
    if config.norm_topk_prob:
        shares = shares / shares.sum(-1, keepdims=True)
    chosen = chosen - first_expert(plan, len(mlp["experts"]["down_proj"]))
    how = chosen, mlp["experts"], config.num_experts
    return summed(plan, taken_back(plan, weighted_sum(tokens, shares.astype(x.dtype), *how)))


def _attention(
    config: DecoderConfig, plan: XlaPlan, places: Any, attn: Tree, x: jax.Array
) -> jax.Array:
    """Causal grouped-query attention, with the heads of this device."""
    (batch, length, _), (turns, hidden) = x.shape, places
    x, dim = shared(plan, x), config.head_dim
    q, k, v = (
        _apply(attn[f"{name}_proj"], x).reshape(batch, length, -1, dim) for name in ("q", "k", "v")
    )
    if config.qk_norm:
        q, k = (
            _norm(heads, shared(plan, attn[f"{name}_norm"]["weight"]), config.rms_norm_eps)
            for name, heads in (("q", q), ("k", k))
        )
    q, k = _rotate(q, turns), _rotate(k, turns)
    q = q.reshape(batch, length, k.shape[2], -1, dim)
    scores = _wide(jnp.einsum("bqghd,bkgd->bghqk", q, k) * dim**-0.5)
    weights = jax.nn.softmax(scores + hidden, axis=-1).astype(x.dtype)
    found = jnp.einsum("bghqk,bkgd->bqghd", weights, v)
    return _apply(attn["o_proj"], found.reshape(batch, length, -1), plan)


def _apply(linear: Tree, x: jax.Array, plan: XlaPlan | None = None) -> jax.Array:
    """A linear layer; with a plan, its columns are divided over the tensor axis."""
    out = x @ linear["weight"].T
    out = out if plan is None else summed(plan, out)
    return out + linear["bias"] if "bias" in linear else out


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = _wide(x)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def _rotate(x: jax.Array, turns: tuple[Any, Any]) -> jax.Array:
    """Applies rotary positions to (batch, length, heads, head_dim); pairs are (i, i + half)."""
    cos, sin = (turn[..., None, :] for turn in turns)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def _rotations(config: DecoderConfig, length: int, dtype: Any) -> tuple[Any, Any]:
    """Cosines and sines, (length, head_dim), in float32 or wider; constants of the program."""
    wide = np.promote_types(np.float32, np.float32 if dtype.itemsize < 4 else dtype)
    steps = np.arange(0, config.head_dim, 2, dtype=wide) / wide.type(config.head_dim)
    frequencies = wide.type(1) / wide.type(config.rope["rope_theta"]) ** steps
    frequencies = _scaled(frequencies, config.rope)
    angles = np.arange(length, dtype=wide)[:, None] * frequencies.astype(wide)
    angles = np.concatenate([angles, angles], axis=-1)
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def _scaled(frequencies: np.ndarray, rope: dict[str, Any]) -> np.ndarray:
    """Frequencies scaled for texts longer than those of pretraining.

    References:
        transformers/modeling_rope_utils.py: `linear` and `llama3`.
    """
    match rope.get("rope_type", "default"):
        case "linear":
            return frequencies / rope["factor"]
        case "llama3":
            before = rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            waves = 2 * math.pi / frequencies
            share = np.clip((before / waves - low) / (high - low), 0, 1)
            return (1 - share) * frequencies / rope["factor"] + share * frequencies
        case _:
            return frequencies


def _of_experts(config: Any, expect: Callable[..., None]) -> dict[str, Any]:
    """Fields of a mixture of experts; none if the model is dense."""
    if not getattr(config, "num_experts", 0):
        return {}
    plain = {"router_jitter_noise": 0.0, "decoder_sparse_step": 1, "mlp_only_layers": []}
    for name, value in plain.items():
        expect(name, getattr(config, name, value), (value,))
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "norm_topk_prob": getattr(config, "norm_topk_prob", True),
        "intermediate_size": getattr(config, "moe_intermediate_size", config.intermediate_size),
    }


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _linear(rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {"weight": (rows, columns)} | ({"bias": (rows,)} if bias else {})


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


def _expect(model: str, key: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{model}.{key}: expected one of {', '.join(map(str, known))} with backend: jax, whose "
            f"decoder supports no other; got {value}. Use backend: torch."
        )


# ---- experts of a mixture

MOST_ROWS = 256  # of a block; smaller ones where an expert has fewer pairs on average


class _Route(NamedTuple):
    """Pairs of a token and an expert, sorted by expert, in blocks.

    Attributes:
        order: (pairs + rows of a block,) indices of pairs, filled up with the number of pairs.
        ends: (experts,) end of each expert's pairs in this order.
        counts: (experts,) number of pairs per expert.
        blocks: (experts,) number of their blocks.
        stops: (experts,) number of blocks up to the expert's last.
    """

    order: jax.Array
    ends: jax.Array
    counts: jax.Array
    blocks: jax.Array
    stops: jax.Array


def weighted_sum(
    tokens: jax.Array, shares: jax.Array, chosen: jax.Array, experts: Any, num_experts: int
) -> jax.Array:
    """Returns (tokens, width), the sum over each token's experts. See [Note: experts on XLA].

    Args:
        tokens: (tokens, width) inputs of the experts.
        shares: (tokens, chosen) weight of each expert that a token chose.
        chosen: (tokens, chosen) its index in `experts`; any other number is none of these.
        experts: `gate_up_proj` (experts, 2 x inner, width) and `down_proj` (experts, width, inner).
        num_experts: Number of all experts, which tokens choose from.
    """
    gate_up, down = experts["gate_up_proj"], experts["down_proj"]
    own, size = len(gate_up), min(MOST_ROWS, -(-chosen.size // num_experts))
    ids = jnp.where((chosen >= 0) & (chosen < own), chosen, own).reshape(-1)
    order = jnp.pad(jnp.argsort(ids), (0, size), constant_values=ids.size)
    counts = jnp.sum(ids[:, None] == jnp.arange(own), axis=0)
    blocks = -(-counts // size)
    route = _Route(order, jnp.cumsum(counts), counts, blocks, jnp.cumsum(blocks))
    found = jax.custom_vjp(partial(_forward, size))
    found.defvjp(lambda *given: (_forward(size, *given), given), partial(_backward, size))
    return found(tokens, shares.reshape(-1), gate_up, down, route)


def _forward(size: int, *given: Any) -> jax.Array:
    tokens = given[0]

    def turn(at: Any, total: jax.Array) -> jax.Array:
        (token, *_), inputs = _pairs(at, size, given)
        return total.at[token].add(_expert(*inputs).astype(total.dtype), mode="drop")

    total = lax.fori_loop(0, given[-1].stops[-1], turn, _wide_zeros(tokens))
    return total.astype(tokens.dtype)


def _backward(size: int, given: Any, grad: jax.Array) -> Any:
    *arrays, route = given

    def turn(at: Any, sums: list[jax.Array]) -> list[jax.Array]:
        places, inputs = _pairs(at, size, given)
        _, pull = jax.vjp(_expert, *inputs)
        found = zip(sums, places, pull(_rows(grad, places[0])), strict=True)
        return [total.at[i].add(x.astype(total.dtype), mode="drop") for total, i, x in found]

    sums = lax.fori_loop(0, route.stops[-1], turn, [_wide_zeros(array) for array in arrays])
    return *(x.astype(array.dtype) for x, array in zip(sums, arrays, strict=True)), None


def _pairs(at: Any, size: int, given: Any) -> tuple[Any, Any]:
    """Places and values of a block's tokens, shares and weights; rows without a pair are zero."""
    tokens, shares, gate_up, down, route = given
    expert = jnp.sum(route.stops <= at)
    start = route.ends[expert] - route.counts[expert]
    start += (at - route.stops[expert] + route.blocks[expert]) * size
    is_there = start + jnp.arange(size) < route.ends[expert]
    pair = jnp.where(is_there, lax.dynamic_slice(route.order, (start,), (size,)), len(shares))
    token = pair // (len(shares) // len(tokens))
    inputs = _rows(tokens, token), _rows(shares, pair), gate_up[expert], down[expert]
    return (token, pair, expert, expert), inputs


def _expert(rows: jax.Array, shares: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    gate, up = jnp.split(rows @ gate_up.T, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down.T * shares[:, None]


def _rows(array: jax.Array, places: jax.Array) -> jax.Array:
    return array.at[places].get(mode="fill", fill_value=0)


def _wide_zeros(array: jax.Array) -> jax.Array:
    return jnp.zeros(array.shape, jnp.promote_types(array.dtype, jnp.float32))
