"""`make chaos`: kills ranks at random moments of training and saving; every run must resume.

    an undisturbed run                   losses of every step
    the same, one rank or all killed     started again: it resumes, with the same losses
    ... killed and started again         until it ends

A run is killed by SIGKILL at up to ten random moments between its first step and its last, or while
a checkpoint is being written. After each kill, the losses that it has logged must be bit-identical
to the undisturbed run's. At its end, it must have exit code 0, every loss, and only complete
checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

STEPS = 120
KILLS = 10  # most kills of one run
SAVE_STEPS = 3
CONFIG = """\
model:
  config: {{model_type: llama, vocab_size: 300, hidden_size: 32, intermediate_size: 64,
            num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2,
            max_position_embeddings: 64}}
data: {{path: {text}, validation_fraction: 0}}
training: {{output_dir: {output}, max_steps: {steps}, per_device_train_batch_size: 2,
            max_seq_length: 32, learning_rate: 1e-3, save_steps: {save_steps}, save_total_limit: 2}}
launch: {{num_processes: 2}}
"""


class Victim:
    """A run in a separate folder.

    Args:
        folder: Folder of the configuration and the run.
        text: The data.
    """

    def __init__(self, folder: Path, text: Path) -> None:
        self.run = folder / "run"
        self.config = folder / "config.yaml"
        self.config.write_text(
            CONFIG.format(text=text, output=self.run, steps=STEPS, save_steps=SAVE_STEPS)
        )

    def start(self) -> subprocess.Popen[bytes]:
        """Starts `fullshard train`."""
        command = [sys.executable, "-m", "fullshard", "train", str(self.config)]
        log = self.config.with_name("log").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def losses(self) -> dict[int, float]:
        """Returns the losses in metrics.jsonl, by step."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def wait_for(self, moment: Moment, process: subprocess.Popen[bytes]) -> None:
        """Waits for the moment, or for the end of the run."""
        while process.poll() is None:
            steps = self.losses()
            saving = any(self.run.glob("checkpoints/.step-*.saving-*"))
            if steps and max(steps) >= moment.step and (saving or not moment.saving):
                time.sleep(moment.later_s)
                return
            time.sleep(0.002)

    def diverged(self, wanted: dict[int, float]) -> str:
        """Names the first step whose loss differs from the undisturbed run's; "" if none does."""
        for step, loss in self.losses().items():
            if loss != wanted.get(step):
                return f"loss of step {step}: {loss}, expected {wanted.get(step)}"
        return ""

    def lost(self, wanted: dict[int, float]) -> str:
        """Names the steps without a loss; "" if there are none."""
        steps = sorted(wanted.keys() - self.losses().keys())
        return f"no loss of steps {steps}" if steps else ""

    def wrong(self, wanted: dict[int, float]) -> str:
        """Describes what is wrong after a run that ended with exit code 0; "" if nothing is."""
        if wrong := self.diverged(wanted) or self.lost(wanted):
            return wrong
        left = sorted(path.name for path in (self.run / "checkpoints").iterdir())
        if left != [f"step-{STEPS - SAVE_STEPS:08d}", f"step-{STEPS:08d}"]:
            return f"checkpoints: {left}"
        return ""


class Moment:
    """When to kill a run, and which of its processes.

    Args:
        step: Earliest step.
        dice: Source of random numbers.
    """

    def __init__(self, step: int, dice: random.Random) -> None:
        self.step = step
        self.saving = dice.random() < 0.5  # as soon as a checkpoint is being written
        self.later_s = dice.random() * 0.05
        self.whom = dice.choice(("rank 0", "rank 1", "all"))

    def __str__(self) -> str:
        while_saving = "while saving " if self.saving else ""
        return f"{self.whom} killed {while_saving}after step {self.step}"


def kill(process: subprocess.Popen[bytes], whom: str) -> bool:
    """Kills one rank, or the launcher and both ranks; returns False if none was left."""
    try:
        ranks = psutil.Process(process.pid).children()
        ranks = sorted(ranks, key=lambda rank: rank.create_time())[-2:]
        chosen = [rank.pid for rank in ranks]
        if whom != "all":
            chosen = [chosen[int(whom[-1])]]
        else:
            chosen.append(process.pid)
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError, IndexError):
        return False
    return True


def disturb(
    victim: Victim, wanted: dict[int, float], kills: int, dice: random.Random
) -> Iterator[str]:
    """Kills a run `kills` times, then lets it end; yields what is wrong after each start."""
    for step in sorted(dice.sample(range(STEPS), kills)):
        process, moment = victim.start(), Moment(step, dice)
        victim.wait_for(moment, process)
        met = kill(process, moment.whom)
        process.wait(timeout=120)
        wrong = victim.diverged(wanted)
        said = str(moment) if met else f"ended before {moment}"
        print(
            f"  {said}: {wrong or f'{len(victim.losses())} steps with the expected losses'}",
            flush=True,
        )
        yield wrong
    code = victim.start().wait(timeout=300)
    wrong = f"exit code {code}" if code else victim.wrong(wanted)
    print(f"started again: {wrong or 'ended with the expected losses'}", flush=True)
    yield wrong


def main() -> None:
    """Kills the runs that the command line asks for; exits with 1 if any was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="fullshard-chaos-") as name:
        root = Path(name)
        text = root / "text.txt"
        text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(900)))
        calm = Victim(_made(root / "calm"), text)
        if calm.start().wait(timeout=300) != 0:
            sys.exit((root / "calm" / "log").read_text())
        wanted, bad, left = calm.losses(), 0, options.times
        while left:
            folder, kills = _made(root / str(left)), min(left, KILLS)
            bad += sum(map(bool, disturb(Victim(folder, text), wanted, kills, dice)))
            shutil.rmtree(folder)
            left -= kills
    print(f"killed {options.times} times; {bad} times not as it must be")
    sys.exit(bool(bad))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
