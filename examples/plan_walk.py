# %% [markdown]
# # A walk through a plan
#
# A plan determines everything that fullshard does in a step. It is plain data, and making one needs
# no ranks, weights or GPU. These cells make a plan, inspect it, change one setting at a time, and
# show the cost. Run them one by one in an editor that supports `# %%` cells, or all at once:
#
#     python examples/plan_walk.py

# %% A model, described by its shapes, on four ranks
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
# The modules of a *unit* are gathered and freed together. Here the units are every block, the
# embedding, the head, and the root, which contains the last norm. A unit's parameters are stored
# one after another in a flat buffer, which is cut into one equal part per rank. So every rank owns
# some elements of some parameters, and only the end of a unit is padded.

# %% Which elements are mine?
for rank in (0, 3):
    pieces = plan.view(rank).all_slices()
    first = pieces[0]
    print(
        f"rank {rank}: parts of {len(pieces)} parameters; the first is {first.name} "
        f"[{first.start:,}, {first.stop:,})"
    )
held = sum(piece.numel for rank in range(4) for piece in plan.view(rank).all_slices())
assert held == plan.num_parameters  # each element has one owner

# %% [markdown]
# The plan also lists the events of a step. A gather is issued before its unit is needed (prefetch).
# It fills one of a few *slots*, which the units use in turn; a release frees the slot.

# %% One step, event by event
for event in plan.events[:12]:
    print(f"  {event.kind:<10} {plan.units[event.unit].title if event.unit >= 0 else ''}")
print("  ...")
print(dict(Counter(str(event.kind) for event in plan.events)))

# %% [markdown]
# A rank's memory by kind. These are exact bytes, not estimates: the engine allocates the same.

# %% Memory by kind
for row in plan.rows():
    print(f"  {row['name']:<28}{row['bytes'] / MIB:>9.1f} MiB")

# %% [markdown]
# ## One change at a time
#
# `full_shard` gathers every unit twice and needs the least memory. `shard_grad_op` keeps gathered
# units until backward. `no_shard` stores all state on every rank and gathers nothing.

# %% Strategies compared
print(f"  {'strategy':<16}{'state, MiB':>12}{'gathered, MiB per step':>24}")
for strategy in ("full_shard", "shard_grad_op", "no_shard"):
    other = fs.plan(LLAMA, world_size=4, param_dtype="bf16", strategy=strategy)
    gathered = sum(event.num_bytes for event in other.events if event.kind == "gather")
    print(f"  {strategy:<16}{other.peak_bytes['device'] / MIB:>12.0f}{gathered / MIB:>24.0f}")

# %% [markdown]
# With more ranks, the state of a rank becomes smaller. The slots do not.

# %% Ranks
for world_size in (1, 8, 64, 1024):
    other = fs.plan(LLAMA, world_size=world_size, local_world_size=min(8, world_size))
    print(f"  {world_size:>5} ranks: {other.peak_bytes['device'] / MIB:>8.1f} MiB of state")

# %% [markdown]
# Deeper prefetch hides slower networks; each unit of depth costs one slot.

# %% Prefetch
for depth in (0, 1, 2):
    other = fs.plan(LLAMA, world_size=4, forward_prefetch=depth, backward_prefetch=depth)
    print(f"  depth {depth}: {other.peak_bytes['device'] / MIB:>8.1f} MiB")

# %% [markdown]
# `fullshard plan CONFIG --gpus 8xH100-80GB` adds activations and time on a device, reports whether
# the run fits and what to change, and draws all of this with `--out plan.html`.
