"""The rows of a run that goes on."""

from fullshard.config.schema import RunConfig
from fullshard.observe.metrics import EvalRow, read_rows
from fullshard.run.console import RunConsole
from fullshard.run.folder import RunFolder
from fullshard.run.watcher import RunWatcher


def test_an_evaluation_that_is_made_up_for_once_more_has_one_row(tmp_path, capsys):
    """The patience had lost it, the rows had not."""
    folder = RunFolder(tmp_path)
    for losses in ({4: 2.0}, {4: 2.5, 8: 1.5}):  # a session each
        console = RunConsole(num_steps=8, log_every=1)
        with RunWatcher(console, folder, 4, RunConfig(model="x")) as watcher:
            for step, loss in losses.items():
                watcher.evaluated(EvalRow(step, loss))
    rows = [(row["step"], row["eval_loss"]) for row in read_rows(folder.metrics)]
    assert rows == [(4, 2.0), (8, 1.5)]
    said = capsys.readouterr().out
    assert "1.5000" in said
    assert "2.5000" not in said
