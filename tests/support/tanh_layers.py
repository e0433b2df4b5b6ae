"""The smallest model of stacked blocks, and its compiled step. Importing it does not start jax."""

import numpy as np

from support.lazy import fj, jax, jnp, optax

WIDTH, LAYERS = 64, 6


def compiled(config, shard=2, num_layers=LAYERS):
    """Returns a compiled step of tanh layers, its plan, and a function that runs it."""
    shapes = {"layers": {"w": jax.ShapeDtypeStruct((num_layers, WIDTH, WIDTH), jnp.float32)}}
    mesh = fj.make_mesh(1, shard, devices=jax.devices()[:shard])
    plan = fj.plan(shapes, config, mesh, blocks=["layers"])

    def loss(params, batch):
        def block(layer, x):
            return jnp.tanh(x @ layer["w"])

        x = fj.scan_blocks(
            block, batch["x"].astype(plan.table.arrays[0].dtypes.compute), params["layers"], plan
        )
        return x.astype(jnp.float32).sum(), jnp.asarray(len(x))

    tx = optax.with_extra_args_support(optax.inject_hyperparams(optax.sgd)(1e-3))
    step = fj.train_step(plan, loss, tx)
    ones = np.ones((num_layers, WIDTH, WIDTH), np.float32) / WIDTH
    state = fj.init(plan, lambda _: {"layers": {"w": jnp.asarray(ones)}}, tx)
    batch = {"x": np.ones((shard * 2, WIDTH), np.float32)}
    return step, state, batch, plan
