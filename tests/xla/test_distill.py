"""Distillation on XLA learns the same as torch's recipe, from any supported teacher."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fullshard.config.schema import DistillConfig
from fullshard.config.values import DType
from fullshard.models.lora import PROJECTION
from fullshard.recipes.distill.loss import Distillation, TopK
from fullshard.recipes.head import Head
from support import decoders
from support.lazy import fj, fx, jax, jnp

NUM_STEPS = 4
RATE, NORM, EPSILON = 1e-2, 0.5, 1e-4
CHUNK = 13  # of 6 x 9 or 12 x 9 positions: the last chunk is padded


def settings_of(loss, alpha):
    return DistillConfig(loss=loss, alpha=alpha, temperature=1.7, beta=0.3, chunk_size=CHUNK)


def models_of(loss, dtype):
    """Returns torch's student and a teacher of another architecture, and their configurations."""
    own = decoders.config_of("qwen3", tie_word_embeddings=loss == "jsd")
    # The teacher's ten additional entries are padding, which the student lacks.
    kind = "mixtral" if loss == "reverse_kl" else "llama"
    other = decoders.config_of(kind, hidden_size=48, num_hidden_layers=3, vocab_size=106)
    models = [decoders.build(own, seed=1), decoders.build(other, seed=2)]
    with torch.no_grad():
        models[1].lm_head.weight.mul_(10)  # peaked distributions
    if dtype == "float32":  # transformers' models, with norms and positions in float32
        plain = [AutoModelForCausalLM.from_config(c, dtype=torch.float32) for c in (own, other)]
        for model, wide in zip(plain, models, strict=True):
            model.load_state_dict(wide.state_dict())
        models = plain
    return models, (own, other)


def in_torch(case, folder):
    """Losses, gradient norms and evaluation of torch's recipe; writes the initial weights."""
    loss, alpha, dtype, cached = case
    (own, other), _ = models_of(loss, dtype)
    own.save_pretrained(folder / "student")
    other.save_pretrained(folder / "teacher")
    if loss == "hidden":
        own.add_module(PROJECTION, projection(torch, dtype))
    s = settings_of(loss, alpha)
    Head(other.eval().requires_grad_(requires_grad=False))
    kept = TopK(None, None, None) if cached else other
    recipe = Distillation(Head(own), kept, s)
    optimizer = torch.optim.AdamW(own.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.1)
    losses, norms, brought = [], [], []
    for ids, labels in decoders.batches(NUM_STEPS):
        batch = {"input_ids": ids, "labels": labels}
        if cached:
            with torch.no_grad():
                top = other(input_ids=ids).logits[..., :96].topk(5)
            batch |= {"teacher_values": top.values, "teacher_ids": top.indices}
        brought.append({name: value.numpy() for name, value in batch.items()})
        total, count = recipe.loss(own.train(), batch)
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(own.parameters(), NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    with torch.no_grad():
        total, count = recipe.loss(own.eval(), batch)
    return losses, norms, float(total) / count, brought


def projection(torch, dtype):
    torch.manual_seed(3)
    return torch.nn.Linear(32, 48, bias=False, dtype=getattr(torch, dtype))


def in_jax(case, shard, folder, batches):
    """Losses, gradient norms and evaluation of the step on XLA."""
    from fullshard.run.on_xla import state_of

    loss, alpha, dtype, cached = case
    settings, (_, configs) = settings_of(loss, alpha), models_of(loss, dtype)
    own, other = (fx.decoder.DecoderConfig.of(config) for config in configs)
    tensor, expert = {"jsd": (2, 1), "reverse_kl": (1, 2)}.get(loss, (1, 1))
    own_devices = jax.devices()[: shard * tensor * expert]
    mesh = fj.make_mesh(1, shard, tensor=tensor, expert=expert, devices=own_devices)
    sharding = {"strategy": "full_shard", "master_dtype": dtype}
    bare = fx.decoder.planned(own.shapes(), sharding, mesh)
    params, shapes, more = fj.load(bare, folder / "student").params, own.shapes(), {}
    if loss == "hidden":
        more = {f"{fx.loss.PROJECTION}.weight": projection(torch, dtype).weight.detach()}
        shapes[fx.loss.PROJECTION] = {"weight": jax.ShapeDtypeStruct((48, 32), dtype)}
    plan = fx.decoder.planned(shapes, sharding, mesh)
    tx = fx.opt_state.adamw((0.9, 0.999), EPSILON, plan.map(lambda _: 0.1))
    state = state_of(plan, more, tx, params)
    student, teacher, given = fx.loss.Decoder(own, plan), None, None
    if not cached:
        table = fx.decoder.teacher_table(
            other.shapes(), "full_shard", DType(dtype), plan.table, expert
        )
        placed = fx.plan.XlaPlan(table, mesh, jax.tree.structure(other.shapes()))
        teacher = fx.loss.Decoder(other, placed)
        given = fx.step.Fixed(placed, fj.load(placed, folder / "teacher").params)
    step = fx.step.train_step(
        plan,
        fx.loss.distillation(student, teacher, settings),
        tx,
        max_grad_norm=NORM,
        given=given,
    )
    losses, norms = [], []
    for batch in batches:
        state, metrics = step(state, batch, learning_rate=RATE)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    told = fx.step.eval_step(plan, fx.loss.next_token(student, settings.tokens_at_once))
    total, count = told(state, batches[-1])
    return losses, norms, float(total) / float(count)


CASES = [
    # loss, alpha, dtype, from a cache, shard
    ("forward_kl", 0.6, "float64", False, 2),
    ("reverse_kl", 1.0, "float64", False, 1),  # a teacher with experts and a dense student
    ("jsd", 0.6, "float64", False, 2),  # with a tensor axis
    ("hidden", 0.7, "float64", False, 2),
    ("forward_kl", 0.8, "float64", True, 2),
]
SLOW = [  # transformers' models in float32
    ("forward_kl", 0.0, "float32", False, 1),
    ("reverse_kl", 0.6, "float32", False, 2),
    ("jsd", 1.0, "float32", False, 1),
    ("hidden", 0.6, "float32", False, 2),
    ("forward_kl", 1.0, "float32", True, 1),
]


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_steps_have_the_losses_of_the_torch_recipe(devices, tmp_path, case):
    *case, shard = case
    losses, norms, told, batches = devices(in_torch, case, tmp_path)
    found = devices(in_jax, case, shard, tmp_path, batches)
    tolerance = 1e-10 if case[2] == "float64" else 1e-5
    assert len(losses) == NUM_STEPS
    assert found[0] == pytest.approx(losses, rel=tolerance)
    assert found[1] == pytest.approx(norms, rel=tolerance * (1 if tolerance < 1e-8 else 10))
    assert found[2] == pytest.approx(told, rel=tolerance)


# ---- communication and memory of a step ----------------------------------------------------------

VOCABULARY, SAMPLES, LENGTH = 2048, 2, 65


def compiled(chunk_size, micro_batches=1):
    """A step of a student with a teacher on two devices, compiled from shapes; their plans."""
    own, other = (
        fx.decoder.DecoderConfig.of(
            decoders.config_of(name, vocab_size=VOCABULARY, tie_word_embeddings=False)
        )
        for name in ("qwen3", "llama")
    )
    mesh = fj.make_mesh(1, 2, devices=jax.devices()[:2])
    plan = fj.plan(own.shapes(), {}, mesh, blocks=fx.decoder.BLOCKS)
    table = fx.decoder.teacher_table(other.shapes(), "full_shard", DType.FLOAT32, plan.table)
    placed = fx.plan.XlaPlan(table, mesh, jax.tree.structure(other.shapes()))
    shapes = jax.tree.map(
        lambda x, lies: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies),
        other.shapes(),
        placed.shardings,
    )
    tx = fx.opt_state.adamw((0.9, 0.999), 1e-8, plan.map(lambda _: 0.0))
    settings = DistillConfig(chunk_size=chunk_size)
    step = fx.step.train_step(
        plan,
        fx.loss.distillation(fx.loss.Decoder(own, plan), fx.loss.Decoder(other, placed), settings),
        tx,
        num_micro_batches=micro_batches,
        given=fx.step.Fixed(placed, shapes),
    )
    lead = (micro_batches,) if micro_batches > 1 else ()
    ids = jax.ShapeDtypeStruct(
        (*lead, 2 * SAMPLES, LENGTH), jnp.int32, sharding=plan.batch_sharding(micro_batches)
    )
    batch = {"input_ids": ids, "labels": ids}
    return step.compile(fx.aot.abstract_state(plan, tx), batch, learning_rate=1e-3), plan, placed


def moved(micro_batches):
    with jax.enable_x64(False):  # like a run in float32
        program, plan, placed = compiled(16, micro_batches)
    found = {kind: (c.count, c.num_bytes) for kind, c in fj.census(program).items()}
    step = plan.table.collectives(micro_batches)  # read from the step, including the teacher's
    assert found == {kind: (c.count, c.num_bytes) for kind, c in step.items()}
    own = replace(plan.table, traced=()).collectives(micro_batches)
    planned = {kind: (c.count, c.num_bytes) for kind, c in own.items()}
    return found, planned, placed.table.forward_gathers(micro_batches)


@pytest.mark.short(1)
@pytest.mark.parametrize("micro_batches", [2, 1])
def test_a_teacher_is_gathered_once_per_forward_and_has_no_gradient(devices, micro_batches):
    found, planned, theirs = devices(moved, micro_batches)
    count, num_bytes = planned["all-gather"]
    assert theirs.count > 0
    # Small arrays are sent together, which only a traced plan knows.
    assert 0 < found["all-gather"][0] < count + theirs.count
    assert found["all-gather"][1] == num_bytes + theirs.num_bytes
    assert found["reduce-scatter"][1] == planned["reduce-scatter"][1]  # only of the student
    assert found["all-reduce"][1] == planned["all-reduce"][1]


def temporary():
    sizes = [compiled(chunk)[0].memory_analysis().temp_size_in_bytes for chunk in (1024, 16)]
    return sizes


@pytest.mark.long  # test_head.py tests the loss without a teacher
def test_no_device_allocates_logits_of_all_tokens(devices):
    whole, chunks = devices(temporary)
    logits = SAMPLES * (LENGTH - 1) * VOCABULARY * 4  # of one device in float32
    assert whole - chunks > 2 * logits  # logits of both models existed at once
