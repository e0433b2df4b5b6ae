"""Jobs that ranks of launch tests run: `python -m support.launch_job WHAT [ARGUMENT ...]`.

Only jobs with collectives import torch; the others start in a fraction of a second.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK = int(
    os.environ.get("FULLSHARD_RANK")
    or os.environ.get("RANK")
    or os.environ.get("OMPI_COMM_WORLD_RANK")
    or os.environ.get("SLURM_PROCID", "0")
)


def meet(folder):
    """All-reduces the ranks' numbers and writes the sum to one file per rank."""
    import torch
    import torch.distributed as dist

    from fullshard.launch import rendezvous

    rendezvous.init_process_group(timeout_s=60)
    total = torch.tensor([RANK + 1.0])
    dist.all_reduce(total)
    words = [dist.get_backend(), os.environ["OMP_NUM_THREADS"], str(total.item())]
    (Path(folder) / f"sum_{RANK}").write_text(" ".join(words))
    rendezvous.shutdown()


def meet_twice(folder):
    """Like `meet`, after another group whose addresses the second group must not find."""
    import torch.distributed as dist

    from fullshard.launch import rendezvous

    rendezvous.init_process_group(timeout_s=60)
    dist.destroy_process_group()
    meet(folder)


def meet_again(folder):
    """All-reduces after each start; one rank of either machine is killed in the first two."""
    import torch
    import torch.distributed as dist

    from fullshard.launch import rendezvous

    rendezvous.init_process_group(timeout_s=30)
    dist.all_reduce(torch.ones(1))
    starts = Path(folder) / f"starts_{RANK}"
    with starts.open("a") as file:
        file.write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\n")
    number = len(starts.read_text().split())
    if number + RANK == 2:  # rank 1 in the first start, rank 0 in the second
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
    rendezvous.shutdown()


def prepare(how):
    """Rank 0 prepares for longer than the time-out, or fails; the others wait for it."""
    import logging

    from fullshard.errors import DataError
    from fullshard.launch import rendezvous
    from fullshard.launch.rank_entry import run_rank

    rendezvous.WAITING_S = 1.0

    def made():
        logging.getLogger("fullshard.data").info("data: 41 % of it")
        time.sleep(8)
        if how == "fail":
            kind = type("Private", (DataError,), {})  # such as ConfigProblems of ConfigError
            raise kind("data.path: expected text, got none.")
        if how in ("kill", "stop"):
            os.kill(os.getpid(), getattr(signal, f"SIG{how.upper()}"))
        return "made"

    def main():
        rendezvous.init_process_group(timeout_s=4)
        print(rendezvous.first_prepares(made))
        rendezvous.shutdown()

    run_rank(main)


def meet_on_gpus(folder):
    """All-reduces on this rank's GPU and on its CPU."""
    import torch
    import torch.distributed as dist

    from fullshard.launch import rendezvous

    rendezvous.init_process_group(timeout_s=60)
    device = torch.device("cuda", torch.cuda.current_device())
    totals = [torch.tensor([RANK + 1.0], device=where) for where in (device, "cpu")]
    for total in totals:
        dist.all_reduce(total)
    sums = " ".join(str(total.item()) for total in totals)
    (Path(folder) / f"sum_{RANK}").write_text(f"{device} {sums}")
    rendezvous.shutdown()


def speak():
    """Prints this rank's number to both streams."""
    print(f"stdout of rank {RANK}")
    print(f"stderr of rank {RANK}", file=sys.stderr)


def imported(module):
    """Reports whether a module was imported before this job, on a stream that knows its file."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(f"rank {RANK}: {module in sys.modules}")


def draw_a_number():
    """Draws from numpy's global generator."""
    import numpy as np

    print(np.random.random())


def draw():
    """Prints a progress bar and the terminal's properties."""
    print(f"terminal {sys.stdout.isatty()} {shutil.get_terminal_size((1, 1)).columns}")
    sys.stdout.write("\x1b[32mstep 1\x1b[0m\rstep 2\r\x1b[2Kstep 3\n")


def raise_on_rank_one(kind):
    """Fails on rank 1 while the others sleep."""
    from fullshard.errors import ConfigError, DataError, EngineError

    kinds = {"value": ValueError, "data": DataError, "engine": EngineError, "config": ConfigError}
    if RANK == 1:
        time.sleep(0.2)
        raise kinds[kind]("rank one says no")
    time.sleep(600)


def end_in_a_collective(how):
    """Fails on rank 1 while rank 0 waits in a barrier, or ends it silently."""
    import torch.distributed as dist

    from fullshard.launch import rendezvous

    rendezvous.init_process_group()
    dist.barrier()
    if RANK == 1 and how == "at once":
        os._exit(0)
    if RANK == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def raise_everywhere():
    """Fails with the same error on every rank."""
    raise ValueError("all say no")


def exit_with(code):
    """Ends rank 1 by sys.exit."""
    if RANK == 1:
        sys.exit(int(code))


def die(name):
    """Has rank 1 killed by a signal."""
    if RANK == 1:
        print("the last words of rank 1")
        os.kill(os.getpid(), signal.Signals[name])
    time.sleep(600)


def die_without_memory(counter):
    """Kills rank 1 like the kernel's OOM killer, and counts it in the group's file."""
    if RANK == 1:
        Path(counter).write_text("low 1\noom_kill 4\n")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def raise_on_a_full_disk():
    """Fails when files of the launch's private folder cannot be written completely."""
    folder = Path(os.environ["FULLSHARD_LAUNCH_DIR"])
    for kind in ("failure_", "events_"):
        (folder / f"{kind}{RANK}").write_bytes(b"")
    (folder / f"failure_{RANK}.partial").mkdir()
    (folder / f"failure_{RANK}.json").write_bytes(b"")
    raise ValueError("what really happened")


def raise_without_the_folder():
    """Fails after the launch's private folder was removed."""
    from fullshard.errors import ConfigError

    shutil.rmtree(os.environ["FULLSHARD_LAUNCH_DIR"], ignore_errors=True)
    if RANK == 0:
        time.sleep(600)
    raise ConfigError("what really happened")


def ignore_sigterm(folder):
    """Fails on rank 1; rank 0 ignores SIGTERM."""
    if RANK == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (Path(folder) / "deaf").touch()
        time.sleep(600)
    while not (Path(folder) / "deaf").exists():
        time.sleep(0.01)
    raise ValueError("rank one says no")


def fork_and_sleep(folder):
    """Writes process ids of this rank and a child to a file, sleeps, and reports its end."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    partial = Path(folder) / f"partial_{RANK}"
    partial.write_text(f"{os.getpid()} {child.pid}")

    def sleep():
        try:
            partial.rename(Path(folder) / f"pids_{RANK}")
            while RANK == 0:
                with contextlib.suppress(Exception):  # as libraries do during import
                    time.sleep(600)
            time.sleep(600)
        except BaseException as error:
            if RANK == 0 or isinstance(error, Exception | KeyboardInterrupt):  # a user's `except`
                (Path(folder) / f"finally_{RANK}").touch()
            raise

    if RANK == 0:  # like our own modules
        from fullshard.launch.rank_entry import run_rank

        run_rank(sleep)
    sleep()


def deaf(folder):
    """Sleeps and ignores every signal that can be ignored; an interrupt leaves a file."""
    signal.signal(signal.SIGINT, lambda *_: (Path(folder) / f"interrupted_{RANK}").touch())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fork_and_sleep(folder)


def sleep_by_a_name_of_its_own():
    """Hangs."""
    time.sleep(600)


def fail_to_save():
    """Fails with a typed error while it is interrupted."""
    from fullshard.errors import CheckpointError

    try:
        Path(os.environ["READY"], os.environ["RANK"]).touch()
        time.sleep(600)
    except KeyboardInterrupt:
        raise CheckpointError("checkpoint: expected a writable folder, got a full disk.") from None


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
