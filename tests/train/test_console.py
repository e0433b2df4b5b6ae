"""The console output of a run, with and without a terminal."""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import torch
from rich.console import Console

from fullshard.config.schema import RunConfig
from fullshard.data.dataset import DatasetFacts
from fullshard.models.generate import Sample
from fullshard.observe.metrics import EvalRow, StepRow, read_rows
from fullshard.run.console import RunConsole, RunWatcher, conclude, run_lines
from fullshard.run.folder import RunFolder
from fullshard.run.optim import plan_steps

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def row(step, loss):
    return StepRow(
        step=step,
        epoch=0.1,
        loss=loss,
        grad_norm=1.25,
        learning_rate=1e-3,
        tokens_per_s=1000.0 * step,
        samples_per_s=10.0,
        step_time_s=1.0,
        data_s=0.1,
        compute_s=0.7,
        comm_s=0.2,
        memory_bytes=2**20,
        memory_peak_bytes=2**21,
    )


def shown(*, terminal):
    file = io.StringIO()
    console = RunConsole(
        4, 2, Console(file=file, force_terminal=terminal, soft_wrap=True, width=60, highlight=False)
    )
    console.print_banner("fullshard train", [("mesh", "word " * 20), ("plan", "7 units")])
    console.start()
    for step in range(1, 5):
        console.print_row(row(step, 5.0 - step))
    console.print_row(EvalRow(4, 1.5))
    console.stop()
    return file.getvalue()


def test_a_batch_that_does_not_fill_all_ranks_names_the_empty_slots():
    model, training = {"config": {"model_type": "llama"}}, {"max_steps": 1}
    config = RunConfig.model_validate({"model": model, "training": training})
    facts = DatasetFacts("text", 8, 100, 0, 800, 0, 0, 50, None, "")
    steps = plan_steps(config.training, facts, 3, 4)  # a resumed run keeps its 4 samples
    (_, line) = run_lines(config, facts, steps)[1]
    assert line.startswith("2 per rank x 1 micro-batch(es) x 3 rank(s) - 2 empty = 4 sequences")


def test_lines_show_means_since_the_last_line():
    lines = shown(terminal=False).splitlines()
    steps = [line for line in lines if "  loss " in line]
    assert [line.split("loss ")[1].split()[0] for line in steps] == ["4.0000", "3.0000", "1.5000"]
    speeds = [re.search(r"([\d,]+) tokens/s", line)[1] for line in steps]
    assert speeds == ["1,000", "2,000", "3,500"]
    assert steps[-1].startswith("step 4/4  loss 1.5000  grad norm 1.25  lr 1.0e-03")
    assert steps[-1].endswith("2.0 MiB  data 10% compute 70% comm 20%")
    assert lines[-1] == "step 4/4  held-out loss 1.5000"


def test_without_a_terminal_there_is_no_bar_and_no_line_is_broken():
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert "\r" not in text
    assert "left" not in text
    assert "  mesh      " + "word " * 20 in text


def test_on_a_terminal_there_is_a_bar_with_the_time_left_and_the_banner_is_wrapped():
    text = ESCAPES.sub("", shown(terminal=True))
    assert re.search(r"4/4 0:00:0\d left", text)
    banner = text.splitlines()[1:4]
    assert max(map(len, banner)) <= 60
    assert banner[1].startswith(" " * 8 + "word")


def test_a_repeated_evaluation_has_one_row(tmp_path, capsys):
    """The checkpoint lacked the evaluation, but the rows had it."""
    folder = RunFolder(tmp_path)
    for losses in ({4: 2.0}, {4: 2.5, 8: 1.5}):  # one session each
        console = RunConsole(num_steps=8, log_every=1)
        with RunWatcher(console, folder, 4, RunConfig(model="x")) as watcher:
            for step, loss in losses.items():
                watcher.tell(EvalRow(step, loss))
    rows = [(row["step"], row["eval_loss"]) for row in read_rows(folder.metrics)]
    assert rows == [(4, 2.0), (8, 1.5)]
    said = capsys.readouterr().out
    assert "1.5000" in said
    assert "2.5000" not in said


def test_workspaces_of_a_gpus_libraries_are_distinguished_from_tensors(tmp_path, capsys):
    """Torch's allocator counts both, but only tensors are known."""
    folder = RunFolder(tmp_path)
    planned = {"expected_peak_bytes": 5 << 30, "library_bytes": 1 << 30, "num_steps": 1}
    folder.record.write_text(json.dumps({"planned": planned}))
    session = SimpleNamespace(
        folder=folder,
        dataset=SimpleNamespace(facts=SimpleNamespace(baseline=None)),
        seat=SimpleNamespace(device=torch.device("cpu")),
    )
    last = replace(row(1, 2.0), memory_peak_bytes=3 << 30)
    watcher = SimpleNamespace(
        step=last, evaluation=None, num_tokens=1, console=RunConsole(1, 1, Console(soft_wrap=True))
    )
    conclude(session, watcher, Sample("", "", 0), 1.0, None)
    assert (
        "planned 4.0 GiB of tensors + 1.0 GiB of libraries (an estimate from large runs); "
        "measured 3.0 GiB per rank"
    ) in capsys.readouterr().out
