"""`make gpu`: checks of the engine on a GPU, the most important ones first.

Each step prints one line and writes its result immediately. A step that hangs ends the process
after two minutes, with the stack of every thread. The steps need torch, numpy, psutil, pydantic,
safetensors and xxhash; `make gpu-wheels` downloads those that a machine lacks. With `--device cpu`
the same steps run on a CPU, which shows that the steps themselves work.
"""

# ruff: noqa: E402  sys.path is set before these imports

import argparse
import faulthandler
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT), str(ROOT / "src")]
if importlib.util.find_spec("pydantic") is None:
    sys.exit("make gpu needs pydantic. Run `make gpu-wheels`, and copy its folder to this machine.")

import gpu_checks
import torch
import torch.distributed as dist
from benchmarks.llama import LLAMA, TINY, LlamaBlock, Shape, build
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fullshard as fs
from fullshard.engine.engine import engine_of
from fullshard.transport import _torch_compat, streams
from support.streams import Groups, HostGroups, Played

RESULTS = ROOT / "benchmarks" / "results" / "gpu_steps.json"
SPUN = 2_000_000  # cycles, about a millisecond
HANGS_S = 120
GROUP_TIMEOUT = timedelta(seconds=60)


class Skipped(Exception):
    """Raised by a step that cannot run on this machine; its text is the reason."""


def say_what_is_here() -> str:
    """Return the versions and the device."""
    here = f"torch {torch.__version__}, Python {platform.python_version()}"
    if not on_cuda():
        return f"{here}, CPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{here}, NCCL {nccl}, {torch.cuda.get_device_name()}"


def call_collectives() -> str:
    """Check in-place collectives of a group that was split from the group of all ranks."""
    group = _torch_compat.new_group_of([[0]], "collectives")
    assert _torch_compat.group_timeout(group) == GROUP_TIMEOUT
    fulls = [torch.arange(64.0 * n, device=gpu_checks.DEVICE) for n in (1, 2)]
    fulls += [fulls[0].bfloat16()]
    wanted = [full.clone() for full in fulls]
    works = [_torch_compat.all_gather_many(fulls, fulls, group)]
    works += _torch_compat.reduce_scatter_many(fulls, fulls, group)
    for full in fulls:
        works += [dist.all_reduce(full, group=group, async_op=True)]
        works += [dist.all_to_all_single(full.clone(), full, group=group, async_op=True)]
    for work in works:
        work.wait()
    for full, before in zip(fulls, wanted, strict=True):
        assert torch.equal(full, before)
    return ""


def measure_context() -> str:
    """Measure memory outside of torch's allocator, and that of another communicator."""
    needs_cuda()
    square = torch.ones(1024, 1024, device=gpu_checks.DEVICE)
    torch.mm(square, square)  # loads cuBLAS
    before = _outside()
    group = _torch_compat.new_group_of([[0]], "context")
    dist.all_reduce(torch.zeros(1, device=gpu_checks.DEVICE), group=group)
    return f"{before:.0f} MiB, {_outside() - before:.0f} more for a communicator"


def _outside() -> float:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) / 2**20


def register_symmetric_memory() -> None:
    """Check that a slot in symmetric memory can be registered and gathered."""
    needs_cuda()
    memory, pool, device = _torch_compat.symmetric_memory()
    with torch.cuda.use_mem_pool(pool):
        slot = torch.zeros(1 << 20, device=device)
    memory.rendezvous(slot, dist.group.WORLD.group_name)  # pyright: ignore[reportOptionalMemberAccess]
    slot.fill_(3.0)
    _torch_compat.all_gather_many([slot], [slot], dist.group.WORLD).wait()
    assert bool((slot == 3.0).all())


def step(model: nn.Module, at: int = 0) -> None:
    """Run one forward and backward."""
    model(*gpu_checks.batch(at, 0)).backward()


class Late(streams.Streams):
    """Streams that delay all their work, so that a missing wait shows."""

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with super().on(stream):
            torch.cuda._sleep(SPUN)
            yield


def train_over(groups: Groups, several: Any, *, aside: bool, **settings: Any) -> list[torch.Tensor]:
    """Train three steps as one of four equal ranks; return the shards.

    Args:
        groups: The process groups.
        several: The device's streams.
        aside: Train on another stream than the model was sharded on.
        settings: Keyword arguments of `fs.shard`.
    """
    with groups.in_place(), sdpa_kernel(SDPBackend.MATH):  # deterministic gradients
        sizes = {} if "replicate" in settings else {"shard": 4}
        given = {**sizes, **settings, "transport": "fake", "wrap": ["Block"]}
        model = fs.shard(gpu_checks.build(), **given)
        optimizer = gpu_checks.make_optimizer(model.parameters())
        stream = several.make("side") if aside else several.current()
        several.join(stream, several.current())
        with several.on(stream):
            for at in range(3):
                step(model, at)
                fs.clip_grad_norm_(model, gpu_checks.MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        several.join(several.current(), stream)
        return [param.to_local().clone() for param in model.parameters()]


def compare_streams(*, late: bool, aside: bool, **settings: Any) -> None:
    """Check that collectives on separate streams give the bits of those on the step's stream."""
    if late:
        needs_cuda()
    real = streams.of(gpu_checks.DEVICE)
    several: Any = real or Played()
    one: Any = SimpleNamespace(
        current=several.current,
        make=lambda name: several.current(),
        join=lambda *_: None,
        on=lambda _: nullcontext(),
        event=several.event,
        wait=several.wait,
    )
    wanted = train_over(Groups(one), several, aside=False, **settings)
    around: Any = nullcontext()
    if late:
        several = Late(gpu_checks.DEVICE)
        around = patch.object(streams, "of", lambda _: several)
    with around:
        found = train_over(Groups(several), several, aside=aside, **settings)
    for one_shard, other in zip(found, wanted, strict=True):
        assert torch.equal(one_shard, other)


@contextmanager
def without_synchronisation() -> Iterator[None]:
    """A context in which a wait for the device raises an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def forbid_synchronisation(*, by_owner: bool = False, **settings: Any) -> None:
    """Check that the host does not wait for the device in a step, after the first ones."""
    needs_cuda()
    with Groups(streams.Streams(gpu_checks.DEVICE)).in_place():
        model = fs.shard(gpu_checks.build(), transport="fake", shard=4, wrap=["Block"], **settings)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if by_owner:
            optimizer = fs.owned(model, partial(torch.optim.SGD, lr=1e-3))
        for at in range(5):
            inputs = gpu_checks.batch(at, 0)
            # the first steps learn the order of units and probe the optimizer
            with without_synchronisation() if at >= 3 else nullcontext():
                with fs.no_sync(model):
                    model(*inputs).backward()
                model(*inputs).backward()
                fs.clip_grad_norm_(model, gpu_checks.MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()


def queue_updates() -> None:
    """Check that a run queues a step before it reads the previous loss, with equal results."""
    try:
        import gpu_runs
    except ImportError as error:
        raise Skipped("needs yaml and rich, which make gpu-wheels downloads") from error
    free = without_synchronisation if on_cuda() else None
    assert gpu_runs.train(free) == gpu_runs.train(None)


def count_threads() -> None:
    """Check that one thread runs all events and hooks of a backward."""
    model = fs.shard(gpu_checks.build(), wrap=["Block"], param_dtype="bfloat16")
    seen: set[int] = set()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: seen.add(threading.get_ident()))
    actions = engine_of(model).runtime.actions
    run_events = actions.run
    loss = model(*gpu_checks.batch(0, 0))

    def run_here(*arguments: Any) -> None:
        seen.add(threading.get_ident())
        run_events(*arguments)

    with patch.object(actions, "run", run_here):
        loss.backward()
    assert len(seen) == 1, seen


def time_weight_gradients() -> str:
    """Time a float32 weight gradient of bfloat16 factors: cast after the product, or written by it.

    Autograd casts. A product that writes float32 would need a layer of its own.
    """
    needs_cuda()
    shape = replace(LLAMA, seq=8192)
    kind: dict[str, Any] = {"device": gpu_checks.DEVICE, "dtype": torch.bfloat16}
    out, x = (
        torch.randn(shape.seq, shape.hidden, **kind),
        torch.randn(shape.seq, shape.width, **kind),
    )
    slots = [torch.empty(shape.hidden, shape.width, device=gpu_checks.DEVICE) for _ in range(2)]
    ways = (
        lambda: slots[0].copy_(torch.mm(out.t(), x)),
        lambda: torch.mm(out.t(), x, out_dtype=torch.float32, out=slots[1]),
    )
    cast, written = map(milliseconds, ways)
    assert (slots[0] - slots[1]).norm() < 1e-2 * slots[1].norm()
    return f"cast {cast:.3f} ms, written {written:.3f} ms"


def milliseconds(work: Callable[[], object], num_times: int = 20) -> float:
    """Return the time of one call on the device, after a warm-up."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for at in range(-3, num_times):
        if at == 0:
            start.record()
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / num_times


def train_two_ranks() -> None:
    """Check that two ranks that share the device train as one process, over gloo."""
    words = [sys.executable, str(HERE / "run.py"), "--device", gpu_checks.DEVICE.type]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--store", f"{folder}/store", "--rank"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        ranks = [subprocess.Popen([*words, str(at)], text=True, **pipes) for at in range(2)]
        try:
            said = [_output_of(rank) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(said)


def _output_of(rank: subprocess.Popen[str]) -> str:
    """Return the output of a rank; kill it if it hangs."""
    try:
        return rank.communicate(timeout=HANGS_S // 2 - 5 if on_cuda() else None)[0]
    except subprocess.TimeoutExpired:
        rank.kill()
        return rank.communicate()[0] + "hung"


def be_one_of_two(rank: int, store: str) -> None:
    """Run the checks on one of the two ranks."""
    if on_cuda():
        faulthandler.dump_traceback_later(HANGS_S // 2 - 10)
    place: dict[str, Any] = {"store": dist.FileStore(store, 2), "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT, **place)
    with HostGroups(streams.of(gpu_checks.DEVICE) or Played()).in_place():
        for dtype in gpu_checks.DTYPES:
            for strategy in gpu_checks.STRATEGIES:
                gpu_checks.check_parity(dtype, strategy, transport="c10d")
    dist.destroy_process_group()


def offload() -> None:
    """Check that offloaded state gives the losses of state on the device."""
    for settings in ({}, {"param_dtype": "bfloat16"})[: 1 + on_cuda()]:
        found, wanted = train(offload="cpu", **settings), train(**settings)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.0)
    model = fs.shard(gpu_checks.build(), wrap=["Block"], offload="cpu")
    locked = [param.to_local().is_pinned() for param in model.parameters()]
    assert all(locked) or not on_cuda()


def train(**settings: Any) -> torch.Tensor:
    """Return the losses of four steps of two micro-batches."""
    model = fs.shard(gpu_checks.build(), wrap=["Block"], **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for at in range(4):
        for part in range(2):
            losses.append(model(*gpu_checks.batch(at, part)))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach().cpu()


def compile_blocks(mode: str) -> None:
    """Check that compiled blocks give the same loss."""
    needs_cuda()
    model = fs.shard(gpu_checks.build(), wrap=["Block"])
    loss = model(*gpu_checks.batch(0, 0))
    for block in model.modules():
        if type(block).__name__ == "Block":
            block.compile(mode=mode)
    for _ in range(3):
        again = model(*gpu_checks.batch(0, 0))
        again.backward()
        torch.testing.assert_close(again, loss, rtol=1e-3, atol=1e-4)


def save_and_load() -> None:
    """Check that a checkpoint restores every shard."""
    folder = tempfile.mkdtemp()
    try:
        model = fs.shard(gpu_checks.build(), wrap=["Block"])
        before = [param.to_local().clone() for param in model.parameters()]
        fs.save(folder, model, step=1)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        fs.load(folder, model)
        for param, wanted in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.to_local(), wanted)
    finally:
        shutil.rmtree(folder)


def compare_losses() -> None:
    """Check that blocks of Llama train with the losses of torch's fully_shard, on one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = replace(LLAMA, num_blocks=2, seq=1024) if on_cuda() else TINY
    mesh = init_device_mesh(gpu_checks.DEVICE.type, (1,))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def theirs(model: nn.Sequential) -> None:
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=mixed)

    def ours(model: nn.Sequential) -> None:
        fs.shard(model, wrap=[LlamaBlock.__name__], param_dtype="bfloat16")

    wanted, found = (losses_of(shape, shard) for shard in (theirs, ours))
    assert wanted[0] > wanted[-1], wanted
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.0)


def losses_of(shape: Shape, shard: Callable[[Any], None]) -> torch.Tensor:
    """Return the losses of five steps."""
    model = build(shape, gpu_checks.DEVICE)
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape.batch, shape.seq, shape.width, generator=generator)
    losses = []
    for _ in range(5):
        losses.append(model(x.to(gpu_checks.DEVICE, torch.bfloat16)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach().cpu()


def bench() -> str:
    """Time blocks of Llama 3 8B as rank 0 of 8 and 64, plain compute and FSDP2."""
    try:
        import typer  # noqa: F401
    except ImportError as error:
        raise Skipped("needs typer, which make gpu-wheels downloads") from error
    size = ["--tiny", "--rounds", "3"]
    if on_cuda():
        results = RESULTS.parent.relative_to(ROOT)  # gpu.json and gpu.md
        size = ["--rounds", "10", "--out", str(results)]
    done = run_python("-m", "benchmarks.gpu", "--json", *size)
    rows = json.loads(done.stdout)["rows"]
    return "of plain: " + ", ".join(
        f"{row['name']} {row['ratio_to_plain']['value']:.3f} ({row['world_size']} ranks)"
        for row in rows
        if row["name"] != "plain"
    )


def sanitize() -> None:
    """Check that compute-sanitizer finds no access out of bounds in one small step.

    It patches every kernel. With NCCL, cuBLAS and a GPT it ran for more than 60 s on an H100. The
    step therefore runs a few small kernels of torch, without backtraces of the host. No GPU has
    run it yet, so its time is not known. Without torch's caching allocator, each tensor is a
    separate allocation, so that the tool sees an access beyond any of them.
    """
    tool, under = shutil.which("compute-sanitizer"), ()
    if on_cuda():
        if tool is None:
            raise Skipped("needs compute-sanitizer, a part of the CUDA toolkit")
        # not API errors: libraries try CUDA calls that may fail
        under = (tool, "--error-exitcode", "9", "--report-api-errors", "no")
        under += ("--show-backtrace", "device")
    words = (str(HERE / "run.py"), "--device", gpu_checks.DEVICE.type, "--small-step")
    with patch.dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1"):
        run_python(*words, under=under)


def take_small_step() -> None:
    """Train two LayerNorms for one step, without NCCL."""
    with Groups(streams.of(gpu_checks.DEVICE) or Played()).in_place():
        model = nn.Sequential(nn.LayerNorm(64), nn.LayerNorm(64)).to(gpu_checks.DEVICE)
        fs.shard(model, transport="fake", shard=4, wrap=["LayerNorm"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 64).to(gpu_checks.DEVICE)).sum().backward()
        fs.clip_grad_norm_(model, gpu_checks.MAX_NORM)
        optimizer.step()


def run_python(*words: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the repository; fail with its output."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*under, sys.executable, *words],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANGS_S - 10 if on_cuda() else None,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def on_cuda() -> bool:
    """Whether the steps run on a GPU."""
    return gpu_checks.DEVICE.type == "cuda"


def needs_cuda() -> None:
    """Raise Skipped on a CPU."""
    if not on_cuda():
        raise Skipped("needs CUDA")


def check(name: str, dtype: str, strategy: str) -> object:
    """Run one of gpu_checks."""
    if name == "memory":
        needs_cuda()
    return gpu_checks.CHECKS[name](dtype, strategy)


STEPS: dict[str, Callable[[], object]] = {
    "doctor": say_what_is_here,
    "collectives of one rank": call_collectives,
    "context": measure_context,
    "symmetric memory": register_symmetric_memory,
    **{
        f"{name}, {dtype}, {strategy}": partial(check, name, dtype, strategy)
        for name in ("parity", "events", "memory")
        for dtype in gpu_checks.DTYPES
        for strategy in gpu_checks.STRATEGIES
    },
    **{
        f"streams, late={late}, aside={aside}, {settings or 'float32'}": partial(
            compare_streams, late=late, aside=aside, **settings
        )
        for settings in (
            {},
            {"param_dtype": "bfloat16", "activation_checkpointing": "block"},
            {"strategy": "hybrid_shard", "shard": 2, "replicate": 2, "reduction": "ordered"},
            {"offload": "cpu"},
        )
        for late in (False, True)
        for aside in (False, True)
    },
    **{
        f"no synchronisation in a step, {settings or 'float32'}": partial(
            forbid_synchronisation, **settings
        )
        for settings in (
            {},
            {"param_dtype": "bfloat16", "activation_checkpointing": "block"},
            {"by_owner": True},
        )
    },
    "updates of a run are queued": queue_updates,
    "two ranks on one device": train_two_ranks,
    "one thread carries out a backward": count_threads,
    "weight gradients in float32": time_weight_gradients,
    "offload": offload,
    "compile, default": partial(compile_blocks, "default"),
    "compile, reduce-overhead": partial(compile_blocks, "reduce-overhead"),
    "save and load": save_and_load,
    "losses of FSDP2": compare_losses,
    "bench beside FSDP2": bench,
    "compute-sanitizer": sanitize,
}


def run(name: str, work: Callable[[], object]) -> dict[str, Any]:
    """Run one step, print its line and return its row."""
    start, status = time.perf_counter(), "ok"
    if on_cuda():  # no limit on a CPU
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
    try:
        why = str(work() or "")
    except Skipped as reason:
        status, why = "skipped", str(reason)
    except Exception:  # noqa: BLE001 the next steps say more
        status, why = "FAILED", traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()
    took_s = round(time.perf_counter() - start, 2)
    print(f"{status:8} {name} ({took_s} s) {why}".rstrip(), flush=True)
    return {"name": name, "status": status, "seconds": took_s, "why": why}


def main() -> int:
    """Run all steps; return 1 if one failed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run only steps whose names begin with one of these"
    )
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        help="rank of one of two processes that share the device; needs --store",
    )
    parser.add_argument("--store", help="file through which these processes connect")
    parser.add_argument(
        "--small-step", action="store_true", help="run the step for compute-sanitizer"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"file of results; on a GPU the default is {RESULTS.relative_to(ROOT)}",
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"make gpu: torch of {sys.executable} sees no GPU; nothing was run.", file=sys.stderr)
        print(
            "Set GPU_PYTHON to a Python whose torch has CUDA, or use DEVICE=cpu.", file=sys.stderr
        )
        return 2
    gpu_checks.DEVICE = torch.device(args.device)
    if args.device == "cpu":
        gpu_checks.CASE = replace(gpu_checks.CASE, width=128, layers=3, seq=16)
    if args.small_step:
        take_small_step()
        return 0
    if args.store is not None:
        be_one_of_two(args.rank, args.store)
        return 0
    place: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend, device = "gloo", None
    if args.device == "cuda":  # as the launcher does
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=GROUP_TIMEOUT, device_id=device, **place)
    out = args.out or (RESULTS if args.device == "cuda" else None)
    rows: list[dict[str, Any]] = []
    for name, work in STEPS.items():
        if name.startswith(tuple(args.only)):
            rows.append(run(name, work))
            if out is not None:
                text = json.dumps({"what": say_what_is_here(), "steps": rows}, indent=1)
                out.write_text(text + "\n")
    dist.destroy_process_group()
    return int(any(row["status"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
