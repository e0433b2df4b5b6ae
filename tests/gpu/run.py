"""`make gpu`: what the engine must do on a GPU, in the order in which it is worth knowing.

Each step prints one line. It needs torch, numpy, psutil, safetensors and xxhash; where pydantic is
missing, `stand_in/` takes its place. With `--device cpu` the same steps run on a CPU, which says
that they can run, and nothing of a GPU.
"""

# ruff: noqa: E402  where modules are is said before they are imported

from __future__ import annotations

import argparse
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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT), str(ROOT / "src")]
if importlib.util.find_spec("pydantic") is None:
    sys.path.insert(0, str(HERE / "stand_in"))

import gpu_checks
import torch
import torch.distributed as dist
from benchmarks.llama import LLAMA, TINY, LlamaBlock, Shape, build
from torch import nn

import fullshard as fs
from fullshard.transport import streams
from support.streams import Groups, Played

RESULTS = ROOT / "benchmarks" / "results" / "gpu_steps.json"
SPUN = 5_000_000  # cycles, some milliseconds


class Skipped(Exception):
    """A step that this machine cannot take; says why."""


def say_what_is_here() -> str:
    """Return torch, Python and the device."""
    name = torch.cuda.get_device_name() if gpu_checks.DEVICE.type == "cuda" else "CPU"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {name}"


def step(model: nn.Module, at: int = 0) -> None:
    """Run one forward and backward."""
    model(*gpu_checks.batch(at, 0)).backward()


def train_over(groups: Groups | None, **settings: Any) -> list[torch.Tensor]:
    """Three steps as one rank of four equal ones; the shards afterwards."""
    assert groups is not None
    with groups.in_place():
        model = fs.shard(gpu_checks.build(), transport="fake", shard=4, wrap=["Block"], **settings)
        optimizer = gpu_checks.make_optimizer(model.parameters())
        for at in range(3):
            step(model, at)
            fs.clip_grad_norm_(model, gpu_checks.MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return [param.to_local().clone() for param in model.parameters()]


def compare_streams(*, late: bool, aside: bool, **settings: Any) -> None:
    """Collectives on streams of their own give the bits of those on the step's stream."""
    real = streams.of(gpu_checks.DEVICE)
    several: Any = real or Played()
    one = SimpleNamespace(
        current=several.current,
        make=lambda name: several.current(),
        join=lambda *_: None,
        on=several.on,
        event=several.event,
        wait=several.wait,
    )
    spin = partial(torch.cuda._sleep, SPUN) if late and real is not None else lambda: None
    wanted = train_over(Groups(one), **settings)
    stream = several.make("side") if aside else several.current()
    several.join(stream, several.current())
    with several.on(stream):
        found = train_over(Groups(several, spin), **settings)
    several.join(several.current(), stream)
    for one_shard, other in zip(found, wanted, strict=True):
        assert torch.equal(one_shard, other)


def forbid_synchronisation() -> None:
    """A step in its steady state never waits for the device."""
    needs_cuda()
    model = fs.shard(gpu_checks.build(), wrap=["Block"])
    for at in range(3):
        step(model, at)
        model.zero_grad()
    inputs = gpu_checks.batch(3, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(*inputs).backward()
        fs.clip_grad_norm_(model, gpu_checks.MAX_NORM)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def count_threads() -> None:
    """All hooks of a backward are called by one thread."""
    model = fs.shard(gpu_checks.build(), wrap=["Block"])
    seen: set[int] = set()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: seen.add(threading.get_ident()))
    step(model)
    assert len(seen) == 1, seen


def offload() -> None:
    """Offloaded state trains with the losses of state on the device."""
    for settings in ({}, {"param_dtype": "bfloat16"})[: 1 + on_cuda()]:
        found, wanted = train(offload="cpu", **settings), train(**settings)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.0)
    model = fs.shard(gpu_checks.build(), wrap=["Block"], offload="cpu")
    locked = [param.to_local().is_pinned() for param in model.parameters()]
    assert all(locked) or not on_cuda()


def train(**settings: Any) -> torch.Tensor:
    """Losses of four steps, the gradients of two micro-batches each."""
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
    """Compiled blocks give the loss of others."""
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
    """A checkpoint gives every shard back."""
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
    """Blocks of Llama train with the losses of torch's fully_shard: both are whole on one rank."""
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
    """Losses of five steps."""
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
    """Steps of Llama 3 8B's blocks as rank 0 of 8 and 64, beside plain compute and FSDP2."""
    if importlib.util.find_spec("typer") is None:
        raise Skipped("needs typer, which make gpu-wheels collects")
    size = ["--rounds", "10"] if on_cuda() else ["--tiny", "--rounds", "3"]
    done = run_python("-m", "benchmarks.gpu", "--json", *size)
    rows = json.loads(done.stdout)["rows"]
    return "of plain: " + ", ".join(
        f"{row['name']} {row['ratio_to_plain']:.3f} ({row['world_size']} ranks)"
        for row in rows
        if row["name"] != "plain"
    )


def sanitize() -> None:
    """compute-sanitizer finds no access outside of memory in one small step."""
    needs_cuda()
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        raise Skipped("needs compute-sanitizer, a part of the CUDA toolkit")
    checked = [str(HERE / "run.py"), "--only", "events, float32, full_shard", "--out", os.devnull]
    run_python(*checked, under=(tool, "--error-exitcode", "9"))


def run_python(*words: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run this Python with these words, in the repository; its output if it fails."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*under, sys.executable, *words],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
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


def check(name: str, dtype: str, strategy: str) -> None:
    """One of gpu_checks."""
    if name == "memory":
        needs_cuda()
    gpu_checks.CHECKS[name](dtype, strategy)


STEPS: dict[str, Callable[[], object]] = {
    "doctor": say_what_is_here,
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
        for settings in ({}, {"param_dtype": "bfloat16", "activation_checkpointing": "block"})
        for late in (False, True)
        for aside in (False, True)
    },
    "no synchronisation in a step": forbid_synchronisation,
    "one thread calls hooks": count_threads,
    "offload": offload,
    "compile, default": partial(compile_blocks, "default"),
    "compile, reduce-overhead": partial(compile_blocks, "reduce-overhead"),
    "save and load": save_and_load,
    "losses of FSDP2": compare_losses,
    "bench beside FSDP2": bench,
    "compute-sanitizer": sanitize,
}


def run(name: str, work: Callable[[], object]) -> dict[str, Any]:
    """Take one step, print its line, return its row."""
    start, status = time.perf_counter(), "ok"
    try:
        why = str(work() or "")
    except Skipped as reason:
        status, why = "skipped", str(reason)
    except Exception:  # noqa: BLE001 the next steps say more
        status, why = "FAILED", traceback.format_exc()
    took_s = round(time.perf_counter() - start, 2)
    print(f"{status:8} {name} ({took_s} s) {why}".rstrip(), flush=True)
    return {"name": name, "status": status, "seconds": took_s, "why": why}


def main() -> int:
    """All steps; 1 where one failed, 2 without the device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[""], help="steps whose names begin so")
    parser.add_argument("--out", type=Path, help=f"{RESULTS.relative_to(ROOT)} on a GPU")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"make gpu: torch of {sys.executable} sees no GPU; nothing was run.", file=sys.stderr)
        print("Name a Python that has a CUDA build (GPU_PYTHON=python3), or DEVICE=cpu.")
        return 2
    gpu_checks.DEVICE = torch.device(args.device)
    if args.device == "cpu":
        gpu_checks.CASE = replace(gpu_checks.CASE, width=128, layers=3, seq=16)
    backend = "nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rows = [run(*named) for named in STEPS.items() if named[0].startswith(tuple(args.only))]
    dist.destroy_process_group()
    out = args.out or (RESULTS if args.device == "cuda" else None)
    if out is not None:
        out.write_text(json.dumps({"what": say_what_is_here(), "steps": rows}, indent=1) + "\n")
    return int(any(row["status"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
