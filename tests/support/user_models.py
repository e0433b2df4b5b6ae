"""Users' models in Linen, NNX, Equinox and plain JAX, and their steps.

Each is (parameters, loss) for `fullshard.jax`. `alone` trains one on a single device without
fullshard. The parts of the global batch run under `vmap`, so that BatchNorm finds a named axis, and
part i uses the documented key of part i.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

SAMPLES, CLASSES, WIDTH, LAYERS = 16, 10, 16, 3
AXES = ("replicate", "shard")


@dataclass(frozen=True)
class UserModel:
    """A user's arguments of fullshard.jax.

    Attributes:
        params: Unsharded parameters.
        loss: (how to run the blocks, names of the batch's axes) -> loss function.
        blocks: Paths of stacked layers.
        freeze: Globs of frozen arrays.
        variables: State that the loss updates without gradients.
        has_rng: Whether the loss takes a key.
    """

    params: Any
    loss: Callable[[Any, Any], Callable[..., Any]]
    blocks: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    variables: Any = None
    has_rng: bool = False


def images(at: int) -> dict[str, np.ndarray]:
    """Returns a global batch of small images and labels."""
    draw = np.random.default_rng(at)
    x = draw.normal(size=(SAMPLES, 8, 8, 2))
    return {"x": x, "y": draw.integers(0, CLASSES, SAMPLES)}


def cross_entropy(logits: Any, batch: Any) -> tuple[Any, Any]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.sum(), jnp.asarray(losses.size)


def normal(at: int, *shape: int) -> jax.Array:
    return 0.3 * jax.random.normal(jax.random.key(at), shape, jnp.float64)


def linen_cnn(param_dtype: Any = jnp.float64, dtype: Any = jnp.float64) -> UserModel:
    import flax.linen as nn

    class Cnn(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            more = {"param_dtype": param_dtype, "dtype": dtype}
            for features in (8, 24):
                x = nn.Conv(features, (3, 3), strides=2, **more)(x)
                x = nn.gelu(nn.GroupNorm(4, **more)(x))
            return nn.Dense(CLASSES, **more)(x.reshape(len(x), -1))

    module = Cnn()
    params = module.init(jax.random.key(0), images(0)["x"])["params"]

    def loss(scan: Any, axes: Any) -> Any:
        return lambda params, batch: cross_entropy(
            module.apply({"params": params}, batch["x"]), batch
        )

    return UserModel(params, loss)


def nnx_vit() -> UserModel:
    """A vision transformer: stacked blocks with dropout, and BatchNorm before the head."""
    from flax import nnx

    kind = {"param_dtype": jnp.float64, "dtype": jnp.float64}

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.before = nnx.LayerNorm(WIDTH, rngs=rngs, **kind)
            self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs, **kind)
            self.after = nnx.LayerNorm(WIDTH, rngs=rngs, **kind)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, **kind)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, **kind)
            self.dropout = nnx.Dropout(0.2)

        def __call__(self, x: Any, key: Any) -> Any:
            x = x + self.attention(self.before(x))
            h = nnx.gelu(self.up(self.after(x)))
            return x + self.dropout(self.down(h), rngs=nnx.Rngs(key))

    class Ends(nnx.Module):
        def __init__(self, axis_name: Any, rngs: Any) -> None:
            self.patches = nnx.Conv(2, WIDTH, (4, 4), strides=4, rngs=rngs, **kind)
            self.norm = nnx.BatchNorm(WIDTH, axis_name=axis_name, rngs=rngs, **kind)
            self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs, **kind)

    stack = nnx.vmap(Block)(nnx.Rngs(0).split(LAYERS))
    block, layers = nnx.split(stack)
    _, ends, stats = nnx.split(Ends(None, nnx.Rngs(1)), nnx.Param, nnx.BatchStat)
    params = {"ends": nnx.to_pure_dict(ends), "layers": nnx.to_pure_dict(layers)}

    def loss(scan: Any, axes: Any) -> Any:
        graph, like, _ = nnx.split(Ends(axes, nnx.Rngs(1)), nnx.Param, nnx.BatchStat)

        def run(layer: Any, x: Any, key: Any) -> Any:
            state = nnx.State(layers)
            nnx.replace_by_pure_dict(state, layer)
            return nnx.merge(block, state)(x, key)

        def of(params: Any, batch: Any, rng: Any, variables: Any) -> Any:
            state, running = nnx.State(like), nnx.State(stats)
            nnx.replace_by_pure_dict(state, params["ends"])
            nnx.replace_by_pure_dict(running, variables)
            model = nnx.merge(graph, state, running)
            x = model.patches(batch["x"]).reshape(len(batch["x"]), -1, WIDTH)
            x = scan(run, x, params["layers"], inputs=jax.random.split(rng, LAYERS))
            logits = model.head(model.norm(x.mean(1)))
            total, count = cross_entropy(logits, batch)
            right = (logits.argmax(-1) == batch["y"]).sum()
            new = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
            return total, count, {"accuracy": right}, new

        return of

    # Flax keeps them in float32.
    variables = jax.tree.map(lambda x: x.astype(jnp.float64), nnx.to_pure_dict(stats))
    return UserModel(params, loss, ("layers",), (), variables, has_rng=True)


def nnx_classifier(rngs: Any) -> Any:
    """An embedding, a mean and a layer, as in the tutorial."""
    from flax import nnx

    embed = nnx.Embed(50, 16, rngs=rngs)
    return nnx.Sequential(embed, lambda x: x.mean(1), nnx.Linear(16, 8, rngs=rngs))


def equinox_mlp() -> UserModel:
    import equinox as eqx

    import fullshard.jax as fj

    model = eqx.nn.MLP(128, CLASSES, 40, 2, dtype=jnp.float64, key=jax.random.key(0))
    params, rebuild = fj.split(model)

    def loss(scan: Any, axes: Any) -> Any:
        def of(params: Any, batch: Any) -> Any:
            logits = jax.vmap(rebuild(params))(batch["x"].reshape(len(batch["x"]), -1))
            return cross_entropy(logits, batch)

        return of

    return UserModel(params, loss)


def equinox_batchnorm() -> UserModel:
    """BatchNorm whose variables are its running state; vmap and devices name its axis."""
    import equinox as eqx

    import fullshard.jax as fj

    class Model(eqx.Module):
        first: Any
        norm: Any
        last: Any

        def __init__(self, axes: Any) -> None:
            first, last = jax.random.split(jax.random.key(0))
            names = ("batch", *axes) if axes else ("batch",)
            self.first = eqx.nn.Linear(128, 24, dtype=jnp.float64, key=first)
            self.norm = eqx.nn.BatchNorm(24, names, mode="batch", dtype=jnp.float64)
            self.last = eqx.nn.Linear(24, CLASSES, dtype=jnp.float64, key=last)

        def __call__(self, x: Any, state: Any) -> Any:
            x, state = self.norm(self.first(x), state)
            return self.last(jax.nn.relu(x)), state

    model, state = eqx.nn.make_with_state(Model)(())
    params, _ = fj.split(model)

    def loss(scan: Any, axes: Any) -> Any:
        names = (axes,) if isinstance(axes, str) else axes
        like, rebuild = fj.split(eqx.nn.make_with_state(Model)(names)[0])

        def of(params: Any, batch: Any, variables: Any) -> Any:
            x = batch["x"].reshape(len(batch["x"]), -1)
            model = rebuild(jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(params)))
            run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            logits, new = run(x, variables)
            return *cross_entropy(logits, batch), {}, new

        return of

    return UserModel(params, loss, variables=state)


def rnn() -> UserModel:
    """Two recurrent layers, each a scan over time inside a block; one more outside of blocks."""
    params = {
        "first": {
            "w": normal(0, 16, WIDTH),
            "u": normal(1, WIDTH, WIDTH),
            "bias": normal(2, WIDTH),
        },
        "head": normal(3, WIDTH, CLASSES),
        "layers": {
            "bias": normal(4, 2, WIDTH),
            "u": normal(5, 2, WIDTH, WIDTH),
            "w": normal(6, 2, WIDTH, WIDTH),
        },
    }

    def layer(params: Any, x: Any) -> Any:
        def turn(h: Any, x: Any) -> Any:
            h = jnp.tanh(x @ params["w"] + h @ params["u"] + params["bias"])
            return h, h

        start = jnp.zeros((x.shape[1], WIDTH), x.dtype)
        return lax.scan(turn, start, x)[1]

    def loss(scan: Any, axes: Any) -> Any:
        def of(params: Any, batch: Any) -> Any:
            x = batch["x"].reshape(len(batch["x"]), 8, -1).swapaxes(0, 1)
            x = scan(layer, layer(params["first"], x), params["layers"])
            return cross_entropy(x[-1] @ params["head"], batch)

        return of

    return UserModel(params, loss, ("layers",))


def experts() -> UserModel:
    """A mixture of experts with top-1 routing; the carry is (x, load-balancing loss)."""
    num = 4
    params = {
        "embed": normal(0, 128, WIDTH),
        "head": normal(1, WIDTH, CLASSES),
        "layers": {
            "bias": normal(2, LAYERS, num, WIDTH),
            "down": normal(3, LAYERS, num, 2 * WIDTH, WIDTH),
            "gain": 1 + normal(4, LAYERS, WIDTH),
            "router": normal(5, LAYERS, WIDTH, num),
            "up": normal(6, LAYERS, num, WIDTH, 2 * WIDTH),
        },
    }

    def block(layer: Any, carry: Any) -> Any:
        x, apart = carry
        h = x * layer["gain"]
        chance = jax.nn.softmax(h @ layer["router"])
        chosen = jax.nn.one_hot(chance.argmax(-1), num, dtype=x.dtype)
        up = jax.nn.gelu(jnp.einsum("bw,ewu->beu", h, layer["up"]))
        out = jnp.einsum("beu,euw->bew", up, layer["down"]) + layer["bias"]
        weight = (chosen * chance)[..., None]
        return x + (weight * out).sum(1), apart + (chosen * chance).sum()

    def loss(scan: Any, axes: Any) -> Any:
        def of(params: Any, batch: Any) -> Any:
            x = batch["x"].reshape(len(batch["x"]), -1) @ params["embed"]
            x, apart = scan(block, (x, jnp.zeros((), x.dtype)), params["layers"])
            total, count = cross_entropy(x @ params["head"], batch)
            return total + 0.01 * apart, count, {"balance": apart}

        return of

    return UserModel(params, loss, ("layers",))


def diffusion() -> UserModel:
    """Predicts noise; the time is multiplied by a `bias` and added to a `scale`."""
    params = {
        "in": normal(0, 128, WIDTH),
        "layers": {
            "bias": 1 + normal(1, LAYERS, WIDTH),  # multiplied, despite its name
            "scale": normal(2, LAYERS, WIDTH),  # added
            "w": normal(3, LAYERS, WIDTH, WIDTH),
        },
        "out": normal(4, WIDTH, 128),
        "time": normal(5, 8, WIDTH),
    }

    def block(layer: Any, carry: Any) -> Any:
        x, time = carry
        return x + jnp.sin(x @ layer["w"] * layer["bias"] + time + layer["scale"]), time

    def loss(scan: Any, axes: Any) -> Any:
        def of(params: Any, batch: Any, rng: Any) -> Any:
            clean = batch["x"].reshape(len(batch["x"]), -1)
            at, noise = jax.random.split(rng)
            t = jax.random.uniform(at, (len(clean), 1), clean.dtype)
            noise = jax.random.normal(noise, clean.shape, clean.dtype)
            time = jnp.sin(t * jnp.arange(1, 9)) @ params["time"]
            x = (jnp.cos(t) * clean + jnp.sin(t) * noise) @ params["in"]
            x, _ = scan(block, (x, time), params["layers"])
            return jnp.square(x @ params["out"] - noise).mean(-1).sum(), jnp.asarray(len(clean))

        return of

    return UserModel(params, loss, ("layers",), has_rng=True)


def lora() -> UserModel:
    """Trained adapters over a frozen base, inside and outside of blocks."""
    params = {
        "base": {"embed": normal(0, 128, WIDTH), "head": normal(1, WIDTH, CLASSES)},
        "layers": {
            "a": normal(2, LAYERS, WIDTH, 2),
            "b": normal(3, LAYERS, 2, WIDTH),
            "base": {"bias": normal(4, LAYERS, WIDTH), "w": normal(5, LAYERS, WIDTH, WIDTH)},
        },
        "scale": normal(6, WIDTH),
    }

    def block(layer: Any, x: Any) -> Any:
        base = layer["base"]
        return x + jnp.tanh(x @ base["w"] + base["bias"] + x @ layer["a"] @ layer["b"])

    def loss(scan: Any, axes: Any) -> Any:
        def of(params: Any, batch: Any) -> Any:
            x = batch["x"].reshape(len(batch["x"]), -1) @ params["base"]["embed"]
            x = scan(block, x, params["layers"]) * params["scale"]
            return cross_entropy(x @ params["base"]["head"], batch)

        return of

    return UserModel(params, loss, ("layers",), ("base.*", "layers.base.*"))


def mixed() -> UserModel:
    """Parameters in bfloat16; Linen computes in float32."""
    return linen_cnn(jnp.bfloat16, jnp.float32)


MODELS: dict[str, Callable[[], UserModel]] = {
    "linen_cnn": linen_cnn,
    "nnx_vit": nnx_vit,
    "equinox_mlp": equinox_mlp,
    "equinox_batchnorm": equinox_batchnorm,
    "rnn": rnn,
    "experts": experts,
    "diffusion": diffusion,
    "lora": lora,
    "mixed": mixed,
}


def planned_step(model: UserModel, tx: Any, config: Any, mesh: Any) -> tuple[Any, Any]:
    """Returns a plan of a model and its step."""
    import fullshard.jax as fj

    plan = fj.plan(model.params, config, mesh, blocks=model.blocks, freeze=model.freeze)

    def scan(block: Any, x: Any, stacked: Any, **inputs: Any) -> Any:
        return fj.scan_blocks(block, x, stacked, plan, **inputs)

    return plan, fj.train_step(plan, model.loss(scan, AXES), tx)


def moved(plan: Any, step: Any, state: Any, batch: Any, **more: Any) -> tuple[Any, Any]:
    """Returns the collectives of a step, as compiled and as planned."""
    import fullshard.jax as fj

    census = fj.census(step.compile(state, step.place(batch), **more))
    planned = plan.table.collectives(step.num_micro_batches)
    return census, {kind: c for kind, c in planned.items() if c.count}


def trainable(plan: Any, params: Any) -> tuple[Any, Any]:
    """Splits a tree into trained and other arrays, with None in the place of the others."""
    mine = plan.with_arrays(lambda array, leaf: leaf if array.trainable else None, params)
    return mine, plan.with_arrays(lambda array, leaf: None if array.trainable else leaf, params)


def apart(trees: Any) -> float:
    """Returns the largest difference of two trees' leaves."""
    pairs = zip(*map(jax.tree.leaves, trees), strict=True)
    return max((np.abs(np.subtract(a, b, dtype=float)).max() for a, b in pairs), default=0.0)


def scan_alone(block: Any, x: Any, stacked: Any, inputs: Any = None) -> Any:
    """Runs the blocks in a Python loop."""
    for at in range(len(jax.tree.leaves(stacked)[0])):
        layer, given = jax.tree.map(lambda leaf: leaf[at], (stacked, inputs))  # noqa: B023
        x = block(layer, x) if inputs is None else block(layer, x, given)
    return x


def alone(
    model: UserModel, params: Any, tx: Any, num_steps: int, num_parts: int, trainable: Any
) -> tuple[list[float], list[np.ndarray], Any]:
    """Returns losses, final parameters and variables of one device; parts run under `vmap`."""
    loss_fn = model.loss(scan_alone, "parts")
    tx = optax.with_extra_args_support(tx)

    def loss(mine: Any, rest: Any, batch: Any, keys: Any, variables: Any) -> Any:
        params = jax.tree.map(
            lambda a, b: b if a is None else a, mine, rest, is_leaf=lambda x: x is None
        )

        def part(batch: Any, key: Any) -> Any:
            more = {"rng": key} if model.has_rng else {}
            if variables is not None:
                more["variables"] = variables
            total, count, *others = loss_fn(params, batch, **more)
            new = others[1] if len(others) > 1 else None
            return total, count, jax.tree.map(_over_parts, new)

        totals, counts, new = jax.vmap(part, axis_name="parts")(batch, keys)
        return totals.sum() / counts.sum(), jax.tree.map(lambda leaf: leaf[0], new)

    @jax.jit
    def step(params: Any, state: Any, batch: Any, at: Any, variables: Any) -> Any:
        mine, rest = trainable(params)
        rng = jax.random.fold_in(jax.random.key(7), at)
        keys = jax.vmap(partial(jax.random.fold_in, rng))(jnp.arange(num_parts))
        parts = jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), batch)
        found = jax.value_and_grad(loss, has_aux=True)(mine, rest, parts, keys, variables)
        (value, variables), grads = found
        updates, state = tx.update(grads, state, mine, value=value)
        mine = optax.apply_updates(mine, updates)
        params = jax.tree.map(
            lambda a, b: b if a is None else a, mine, rest, is_leaf=lambda x: x is None
        )
        return params, state, variables, value

    variables, losses = model.variables, []
    params = jax.tree.map(jnp.asarray, params)
    state = jax.jit(tx.init)(trainable(params)[0])
    for at in range(num_steps):
        params, state, variables, value = step(params, state, images(at), at, variables)
        losses.append(float(value))
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(params)], variables


def _over_parts(leaf: Any) -> Any:
    """Averages floating-point variables; others are those of the first part."""
    return lax.pmean(leaf, "parts") if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
