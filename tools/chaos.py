"""`make chaos`: kill ranks at random moments of training and saving, and see every run go on.

    a run that nobody disturbs           losses of every step
    the same, one rank or all killed     started again: it resumes by itself, with the same losses
    ... and killed, and started again    until it has come to its end

A run is killed by SIGKILL at up to ten random moments between its first step and its last, or while
a checkpoint is being written. What must hold each time: what it has logged until then has the bits
of the undisturbed run; and in the end, that it ends well, with every loss, and that only complete
checkpoints are left.
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
KILLS = 10  # of one run, at most
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
    """One run in a folder of its own.

    Args:
        folder: For the configuration and the run.
    """

    def __init__(self, folder: Path, text: Path) -> None:
        self.run = folder / "run"
        self.config = folder / "config.yaml"
        self.config.write_text(
            CONFIG.format(text=text, output=self.run, steps=STEPS, save_steps=SAVE_STEPS)
        )

    def start(self) -> subprocess.Popen[bytes]:
        """The command, as people type it."""
        command = [sys.executable, "-m", "fullshard", "train", str(self.config)]
        log = self.config.with_name("log").open("ab")
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def losses(self) -> dict[int, float]:
        """By step, from metrics.jsonl."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    def wait_for(self, moment: Moment, process: subprocess.Popen[bytes]) -> None:
        """Return at the moment, or when the run has ended."""
        while process.poll() is None:
            steps = self.losses()
            saving = any(self.run.glob("checkpoints/.step-*.saving-*"))
            if steps and max(steps) >= moment.step and (saving or not moment.saving):
                time.sleep(moment.later_s)
                return
            time.sleep(0.002)

    def diverged(self, wanted: dict[int, float]) -> str:
        """The first step whose loss is another than the undisturbed run's."""
        for step, loss in self.losses().items():
            if loss != wanted.get(step):
                return f"loss of step {step}: {loss}, undisturbed {wanted.get(step)}"
        return ""

    def lost(self, wanted: dict[int, float]) -> str:
        """Steps that were never logged."""
        steps = sorted(wanted.keys() - self.losses().keys())
        return f"no loss of steps {steps}" if steps else ""

    def wrong(self, wanted: dict[int, float]) -> str:
        """What is not as it must be after a run that ended well."""
        if wrong := self.diverged(wanted) or self.lost(wanted):
            return wrong
        left = sorted(path.name for path in (self.run / "checkpoints").iterdir())
        if left != [f"step-{STEPS - SAVE_STEPS:08d}", f"step-{STEPS:08d}"]:
            return f"checkpoints: {left}"
        return ""


class Moment:
    """When a run is killed, and who.

    Args:
        step: Not before this one.
        dice: Random numbers.
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
    """SIGKILL one rank, or the launcher and both; False where there was nobody left."""
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
    """Kill a run so often, then let it end; tells of each time what is wrong then."""
    for step in sorted(dice.sample(range(STEPS), kills)):
        process, moment = victim.start(), Moment(step, dice)
        victim.wait_for(moment, process)
        met = kill(process, moment.whom)
        process.wait(timeout=120)
        wrong = victim.diverged(wanted)
        said = str(moment) if met else f"ended before {moment}"
        print(f"  {said}: {wrong or f'{len(victim.losses())} steps, as undisturbed'}", flush=True)
        yield wrong
    code = victim.start().wait(timeout=300)
    wrong = f"exit code {code}" if code else victim.wrong(wanted)
    print(f"started once more: {wrong or 'the end, as undisturbed'}", flush=True)
    yield wrong


def main() -> None:
    """Parses the command line, disturbs runs, ends with 1 if any went wrong."""
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
