# %% [markdown]
# # A walk through a plan
#
# Everything that fullshard does in a step follows from a plan: plain data, made without ranks,
# weights or a GPU. These cells build one, look into it, change one thing at a time, and read what
# that costs. Run them one after another in an editor that knows `# %%` cells, or all at once:
#
#     python examples/plan_walk.py

# %% A model by its shape, on four ranks
from __future__ import annotations

from collections import Counter

import fullshard as fs

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
}
MIB = 1 << 20

plan = fs.plan(LLAMA, world_size=4, param_dtype="bf16")
print(f"{plan.num_parameters:,} parameters in {plan.num_units} units\n")
print(plan.tree())

# %% [markdown]
# A *unit* is what is gathered and freed together: here every block, the embedding, the head, and
# the root with the norm that is left. Its parameters lie one after another in a flat buffer, which
# is cut into as many equal parts as there are ranks. So every rank owns some elements of some
# parameters, and nothing is padded but the end of a unit.

# %% Which elements are mine?
for rank in (0, 3):
    pieces = plan.view(rank).all_slices()
    first = pieces[0]
    print(
        f"rank {rank}: parts of {len(pieces)} parameters; the first is {first.name} "
        f"[{first.start:,}, {first.stop:,})"
    )
held = sum(piece.numel for rank in range(4) for piece in plan.view(rank).all_slices())
assert held == plan.num_parameters  # every element once

# %% [markdown]
# The events of a step are the plan's too. A gather is issued before its unit is needed (prefetch),
# into one of a few *slots* that the units take in turn; a release gives the slot back.

# %% One step, event by event
for event in plan.events[:12]:
    print(f"  {event.kind:<10} {plan.units[event.unit].title if event.unit >= 0 else ''}")
print("  ...")
print(dict(Counter(str(event.kind) for event in plan.events)))

# %% [markdown]
# What a rank holds, by kind. These are bytes, not estimates: the engine allocates what stands here.

# %% Memory by kind
for row in plan.rows():
    print(f"  {row['name']:<28}{row['bytes'] / MIB:>9.1f} MiB")

# %% [markdown]
# ## One change at a time
#
# A strategy is a row of data. `full_shard` gathers every unit twice and holds the least;
# `shard_grad_op` keeps gathered units until backward; `no_shard` holds everything and gathers
# nothing.

# %% Strategies compared
print(f"  {'strategy':<16}{'state, MiB':>12}{'gathered, MiB per step':>24}")
for strategy in ("full_shard", "shard_grad_op", "no_shard"):
    other = fs.plan(LLAMA, world_size=4, param_dtype="bf16", strategy=strategy)
    gathered = sum(event.num_bytes for event in other.events if event.kind == "gather")
    print(f"  {strategy:<16}{other.peak_bytes['device'] / MIB:>12.0f}{gathered / MIB:>24.0f}")

# %% [markdown]
# More ranks make the state of a rank smaller; what is left are the slots, which do not shrink.

# %% Ranks
for world_size in (1, 8, 64, 1024):
    other = fs.plan(LLAMA, world_size=world_size, local_world_size=min(8, world_size))
    print(f"  {world_size:>5} ranks: {other.peak_bytes['device'] / MIB:>8.1f} MiB of state a rank")

# %% [markdown]
# Deeper prefetch hides slower wires, and costs a slot each.

# %% Prefetch
for depth in (0, 1, 2):
    other = fs.plan(LLAMA, world_size=4, forward_prefetch=depth, backward_prefetch=depth)
    print(f"  depth {depth}: {other.peak_bytes['device'] / MIB:>8.1f} MiB")

# %% [markdown]
# `fullshard plan CONFIG --gpus 8xH100-80GB` adds activations and time on a device, says whether the
# run fits and what to change, and with `--out plan.html` draws all of this.
