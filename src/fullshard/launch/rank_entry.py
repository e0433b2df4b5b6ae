"""The outermost frame of a rank: errors become a report and an exit code, signals become errors.

    python -m fullshard.launch.rank_entry PARENT_PID MODULE [ARGUMENT ...]

starts a rank of our launcher: it runs MODULE as `python -m MODULE` does, or a script if the name
ends in .py; for `--forked` see fork_server. `run_rank(main)` is the same frame for a module's own
`if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fullshard.config.environment import read_launch_environment
from fullshard.config.values import Strategy
from fullshard.errors import ConfigError, FullshardError, HangError, show_log, write_anything
from fullshard.launch import fork_server
from fullshard.launch.exit_codes import (
    SAVE_SIGNALS,
    LaunchFolder,
    RankFailure,
    as_ours,
    die_with_parent,
    end_now,
    handled,
    left_by,
    raise_stopped,
)
from fullshard.observe import watchdog


def run_rank(
    main: Callable[[], None],
    tell: Callable[[RankFailure], None] = lambda _: None,
    *,
    is_users: bool = False,
) -> None:
    """Runs `main` as the program of this rank, and ends the process if it fails.

    An error is reported to our launcher, or printed without one: a FullshardError as its message,
    any other error with its traceback. The process then exits at once with the typed exit code,
    because destroying a process group whose peers wait in a collective can hang.

    Args:
        main: Program of this rank.
        tell: Function that is called with the failure before the process ends.
        is_users: `main` is a user's script, which may save in `except Exception` when a signal
            stops it.

    Raises:
        SystemExit: The user's script exited with code 0.
    """
    launch = read_launch_environment()
    rank = 0 if launch is None else launch.rank
    folder = LaunchFolder.of(launch)
    show_log(f"rank {rank}: " if rank else "")
    if rank != 0 and folder is None:  # the ranks share one output: only rank 0 warns
        warnings.simplefilter("ignore")
        logging.getLogger("fullshard").setLevel(logging.ERROR)
    watchdog.on_hang(partial(_blame, folder, rank, tell))
    try:
        with handled(SAVE_SIGNALS, partial(_on_signal, folder, plain=is_users)):
            main()
    except BaseException as caught:
        error = left_by(caught) if isinstance(caught, SystemExit) and not is_users else caught
        failure = RankFailure.of(error, rank)
        if failure.exit_code == 0:
            raise  # sys.exit() or sys.exit(0)
        _report(failure, folder)
        watchdog.explain(as_ours(error))  # ends all ranks if another one is to blame
        tell(failure)
        end_now(failure.exit_code)


def _blame(
    folder: LaunchFolder | None, rank: int, tell: Callable[[RankFailure], None], verdict: HangError
) -> None:
    """Reports the watchdog's verdict, which ends all ranks."""
    failure = RankFailure.of(verdict, rank)
    tell(failure)
    if folder is not None:
        with contextlib.suppress(OSError):
            replace(failure, rank=verdict.rank).write(folder.hang)


def _on_signal(folder: LaunchFolder | None, _: Any, number: int, __: Any, *, plain: bool) -> None:
    if folder is not None and folder.ending.exists():
        os._exit(128 + number)  # another rank failed; this one has nothing to report
    raise_stopped(number, plain=plain)


def _report(failure: RankFailure, folder: LaunchFolder | None) -> None:
    if folder is None:
        sys.stderr.write(failure.text + "\n")
        return
    # The launcher and its folder may be gone, or the disk may be full.
    with contextlib.suppress(OSError):
        failure.write(folder.failure(failure.rank))
    with contextlib.suppress(OSError), folder.open_log(failure.rank) as log:
        log.write(failure.text + "\n")


def _main() -> None:
    parent, module, *arguments = int(sys.argv[1]), *sys.argv[2:]
    die_with_parent(parent)
    if module == fork_server.WORD:
        module, *arguments = fork_server.become_rank(arguments)
        die_with_parent(parent)
    write_anything()
    launch = read_launch_environment()
    folder = LaunchFolder.of(launch)
    if launch is not None and folder is not None:
        with contextlib.suppress(OSError):  # the log was removed
            dump = folder.open_log(launch.rank)  # stays open
            faulthandler.register(watchdog.STACKS_SIGNAL, file=dump, all_threads=True)
        watchdog.start(launch)
    sys.argv = [module, *arguments]
    run_rank(lambda: _run_module(module), is_users=not module.startswith("fullshard."))
    if launch is not None and launch.rank == 0 and launch.config_file and not watchdog.WATCHED:
        _say_unsharded(launch.config_file)


def _say_unsharded(file: Path) -> None:
    """Says that the launcher's file had no effect."""
    from fullshard.config.load import load_config

    try:
        strategy = load_config(file, needs_model=False).config.sharding.strategy
    except (FullshardError, OSError):  # it was changed or removed since the launcher read it
        return
    if strategy is not Strategy.NO_SHARD:
        logging.getLogger("fullshard").warning(
            f"--config_file {file.name}: asks for {strategy}, but the script did not shard a "
            "model. Call fs.shard, or import the Trainer or Accelerator of fullshard.integrations."
        )


def _run_module(module: str) -> None:
    # With -P Python does not import a `random.py` of the working folder in the place of its own;
    # the code of a model (trust_remote_code) may import modules that are only there.
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).resolve().parent))
        runpy.run_path(module, run_name="__main__")
        return
    sys.path.insert(len(sys.path) * module.startswith("fullshard."), str(Path.cwd()))
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ImportError as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        if where not in (runpy.__file__, "<frozen runpy>"):
            raise  # of an import inside the module
        raise ConfigError(f"-m: expected a module to run, got '{module}': {error}") from None


if __name__ == "__main__":
    _main()
