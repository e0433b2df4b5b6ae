"""The process of one rank of a standing pool: waits for test bodies and runs them.

    parent                                  rank (this file)
    ------                                  ----------------
    ("call", file, qualname, ...)  ---->    import the file once, call the function
                                   <----    ("value", pickled) or ("error", text)
    closes the pipe, or dies       ---->    exits
    SIGUSR1                        ---->    writes its stacks into its dump file

torch is imported here only, so that collecting the tests stays fast.
"""

import ast
import ctypes
import faulthandler
import gc
import importlib.util
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import types
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, get_cache_dir, rewrite_asserts
from _pytest.config import parse_warning_filter

from support.forked import leave_server

PR_SET_PDEATHSIG = 1
COLLECTIVE_TIMEOUT = timedelta(minutes=20)  # longer than a call's time-out


@dataclass(frozen=True)
class Seat:
    """The rank of a process, and the folder of its pool."""

    rank: int
    world_size: int
    port: int  # address of the store that the first rank serves
    folder: Path
    warning_filters: tuple[str, ...]
    environment: dict[str, str]  # the fork server still uses the one of its start

    @property
    def dump_file(self) -> Path:
        """Path of the file to which the rank writes its stacks on request."""
        return self.folder / f"stacks_{self.rank}.txt"


@dataclass(frozen=True)
class Body:
    """A module-level function of a test file, and its pickled arguments."""

    file: str
    module: str
    qualname: str
    arguments: bytes
    number: int


def serve(seat: Seat, pipe: Connection, listener: socket.socket | None) -> None:
    """Joins the process group, then runs bodies until the pipe closes."""
    _die_with_parent()
    os.environ.clear()
    os.environ.update(seat.environment)
    _let_each_other_work()
    with seat.dump_file.open("w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=True)
        store = _store(seat, listener)
        _join_group(seat, store, "start")
        pipe.send("ready")
        while True:
            try:
                body = pipe.recv()
            except (EOFError, ConnectionResetError):
                break
            if body is None:
                break
            pipe.send(_run(seat, store, body))
    os._exit(0)  # threads of gloo or of a test must not keep an ended pool alive


def _die_with_parent() -> None:
    """Ends with the fork server, which ends when its starter's pipe is closed everywhere."""
    leave_server()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)


def _let_each_other_work() -> None:
    """Halves the ranks' processor time if each pytest worker has a core.

    A waking thread then preempts no other. gloo's thread would spin while the rank that it
    preempted holds a lock. The ranks of a worker wait for each other, so they share its core.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        cores = os.sched_getaffinity(0)
        if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")) >= len(cores):
            worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
            os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
            os.sched_getaffinity = lambda _: cores  # keeps the number of data processes


def _store(seat: Seat, listener: socket.socket | None) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1",
        seat.port,
        seat.world_size,
        is_master=listener is not None,
        timeout=COLLECTIVE_TIMEOUT,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _join_group(seat: Seat, store: Any, name: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),  # pyright: ignore[reportPrivateImportUsage]
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _run(seat: Seat, store: Any, body: Body) -> tuple[str, Any]:
    environment = dict(os.environ)
    try:
        import torch.distributed as dist

        _reset_torch()
        dist.barrier()
        with warnings.catch_warnings():
            for line in seat.warning_filters:
                warnings.filterwarnings(*parse_warning_filter(line, escape=False))
            function = _find(body)
            arguments = pickle.loads(body.arguments)
            result = ("value", pickle.dumps(function(*arguments)))
        _leave_as_found(seat, store, body)
    except BaseException as error:  # noqa: BLE001  SystemExit too: a rank may not leave its seat
        return ("error", "".join(traceback.format_exception(error)))
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return result


def _reset_torch() -> None:
    """Resets torch for every body: seeds, one thread, default modes."""
    import torch
    from torch.utils import _device

    # The first use of `with torch.device(...)` caches a list of constructors. If a body replaced a
    # constructor at that time, the real one would stay missing.
    _device._device_constructors()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _leave_as_found(seat: Seat, store: Any, body: Body) -> None:
    """Destroys subgroups that the body made, and joins the pool's group again if it left."""
    import torch.distributed as dist

    gc.collect()
    gc.freeze()  # later bodies' collections skip the modules that this one imported
    # The test that leaves a sharded model alive fails, not the next test that counts them.
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    assert not hooks, f"{body.qualname} left a sharded model alive"
    if not dist.is_initialized():
        _join_group(seat, store, f"after_{body.number}")
        return
    if "torch.distributed.tensor" in sys.modules:  # caches meshes
        from torch.distributed.tensor import _redistribute, debug

        for module in (debug, _redistribute):  # their names differ between torch versions
            for clear in ("_clear_sharding_prop_cache", "_gen_transform_infos"):
                found = getattr(module, clear, list)
                getattr(found, "cache_clear", found)()
    groups = dist.distributed_c10d._world.pg_map
    for group in list(groups):
        if group is not dist.group.WORLD and group in groups:
            dist.destroy_process_group(group)
    if "fullshard.transport.groups" in sys.modules:
        for made in sys.modules["fullshard.transport.groups"].MADE.values():
            made.groups.clear()


def _find(body: Body) -> Any:
    found: Any = sys.modules.get(body.module)
    if found is None or getattr(found, "__file__", None) != body.file:
        found = _import_by_file(body)
    for name in body.qualname.split("."):
        found = getattr(found, name)
    return getattr(found, "body_on_ranks", found)


def _import_by_file(body: Body) -> types.ModuleType:
    """Imports under the parent's module name, so that classes can be pickled both ways."""
    spec = importlib.util.spec_from_file_location(body.module, body.file)
    if spec is None:
        raise ImportError(f"{body.file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    file = Path(body.file)
    # pytest rewrote the file when it collected it, so `assert a == b` shows a and b here too.
    code = _read_pyc(file, get_cache_dir(file) / f"{file.stem}{PYC_TAIL}")
    if code is None:
        source = file.read_bytes()
        tree = ast.parse(source, filename=body.file)
        rewrite_asserts(tree, source, body.file)
        code = compile(tree, body.file, "exec", dont_inherit=True)
    sys.modules[body.module] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[body.module]
        raise
    return module
