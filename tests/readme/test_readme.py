"""The Python and the commands of the README and docs/start.md work as shown."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from support import forked as subprocess

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = README + (ROOT / "docs/start.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?")


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES, re.S | re.M)


def _console():
    """Returns every `$ command` of the pages with the output shown below it."""
    found = []
    for block in _blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command.partition("  #")[0].strip(), output.strip("\n")))
    return found


CONSOLE = _console()


def _shown(start):
    """Returns the only command that starts so, and the output shown below it."""
    (pair,) = [pair for pair in CONSOLE if pair[0].startswith(start)]
    return pair


def _run(command, folder, *, timeout_s=110.0):
    """Runs a command of the README in a folder with this Python."""
    words = shlex.split(command)
    modules = {"torchrun": "torch.distributed.run", "fullshard": "fullshard"}
    if words[0] in modules:
        words = [sys.executable, "-m", modules[words[0]], *words[1:]]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )


def _succeed(command, folder, *, timeout_s=110.0):
    done = _run(command, folder, timeout_s=timeout_s)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _masked(text):
    """Removes what differs from run to run: numbers, and the number of aligning spaces."""
    return [" ".join(NUMBER.sub("N", line).split()) for line in text.splitlines() if line.strip()]


def _assert_in_order(shown, printed):
    """Every shown line was printed, in this order; `...` stands for omitted lines."""
    rest = iter(printed)
    for line in shown:
        assert line == "..." or line in rest, f"not printed: {line!r}\nprinted: {printed}"


@pytest.fixture
def reader(tmp_path):
    """A reader's folder: the files that the README names, and some texts."""
    (configuration,) = _blocks("yaml")
    name = configuration.splitlines()[0].removeprefix("# ")
    (tmp_path / name).write_text(configuration)
    (tmp_path / "texts").mkdir()
    for page in ROOT.glob("docs/**/*.md"):
        shutil.copy(page, tmp_path / "texts" / f"{page.stem}.txt")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


def test_the_python_of_the_readme_trains_under_torchrun_as_shown(tmp_path):
    command, shown = _shown("torchrun")
    (script,) = [block for block in _blocks("python") if "fs.shard(" in block]
    (tmp_path / command.split()[-1]).write_text(script)
    # Two ranks write at once, so their lines may interleave.
    printed = re.sub(r"(?<!^)(?=rank \d+: holds)", "\n", _succeed(command, tmp_path))
    lines = sorted(line for line in printed.splitlines() if line)
    expected = sorted(shown.splitlines())
    assert [NUMBER.sub("N", line) for line in lines] == [NUMBER.sub("N", line) for line in expected]
    numbers, promised = (
        [float(n.replace(",", "")) for line in both for n in NUMBER.findall(line)]
        for both in (lines, expected)
    )
    assert numbers == pytest.approx(promised, rel=1e-2)


def test_the_readme_shards_a_model_in_about_ten_lines():
    (script,) = [block for block in _blocks("python") if "fs.shard(" in block]
    assert len([line for line in script.splitlines() if line.strip()]) <= 18


@pytest.mark.parametrize("command", [c for c, _ in CONSOLE if c.startswith("make ")])
def test_every_make_command_of_the_readme_exists(command):
    assert _succeed(f"{command} --dry-run --no-print-directory", ROOT)


@pytest.mark.long
@pytest.mark.timeout(330)
def test_the_training_commands_of_the_readme_work_one_after_another(reader):
    long = "training.max_steps=300"
    commands = [c for c, shown in CONSOLE if c.startswith("fullshard") and not shown]
    assert [c for c in commands if long in c], commands
    assert [c for c in commands if c.startswith("fullshard generate")], commands
    small = ("hidden_size: 256, intermediate_size: 688", "hidden_size: 64, intermediate_size: 96")
    text = (reader / "mine.yaml").read_text()
    assert small[0] in text
    (reader / "mine.yaml").write_text(text.replace(*small))  # bfloat16 is slow on many CPUs
    for command in commands:
        assert _succeed(command.replace(long, "training.max_steps=2"), reader)


def test_the_mistake_in_the_readme_is_answered_as_shown(reader):
    command, shown = _shown("fullshard train mine.yaml sharding.strategy=")
    done = _run(command, reader)
    assert done.returncode == 2
    assert done.stderr.strip() == shown


@pytest.mark.long
def test_the_plan_in_the_readme_is_the_plan_that_is_printed(reader):
    command, shown = _shown("fullshard plan")
    printed = _succeed(command, reader)
    _assert_in_order(
        [" ".join(line.split()) for line in shown.splitlines() if line.strip()],
        [" ".join(line.split()) for line in printed.splitlines() if line.strip()],
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_main_job_prints_what_the_readme_shows_and_beats_the_bigram(tmp_path):
    _, shown = _shown("make train")
    printed = _succeed("fullshard train", tmp_path, timeout_s=1100)
    head, _, _ = shown.partition("held-out loss  ")  # the sample after it differs each time
    _assert_in_order(_masked(head), _masked(printed))
    losses = [
        float(re.search(r"^held-out loss +([\d.]+) nats", text, re.M)[1])
        for text in (shown, printed)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)
    baseline = float(re.search(r"^bigram baseline +([\d.]+) nats", printed, re.M)[1])
    assert losses[1] < baseline
