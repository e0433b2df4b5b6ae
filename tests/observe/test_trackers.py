"""A tracker that fails does not end the run or the other trackers."""

import sys
import types

from fullshard.config.schema import RunConfig
from fullshard.observe.metrics import EvalRow
from fullshard.observe.trackers import Trackers


def test_a_failing_tracker_is_reported_once_and_the_others_get_all_rows(
    tmp_path, monkeypatch, caplog
):
    shown, ended = [], []

    def fail(values, step):
        raise RuntimeError("no disk")

    def log(values, step):
        shown.append((step, values))

    bad = types.SimpleNamespace(log=fail, finish=lambda exit_code: ended.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: bad))
    good = types.SimpleNamespace(
        init=lambda **_: None, log=log, finish=lambda: ended.append("finished")
    )
    monkeypatch.setitem(sys.modules, "trackio", good)
    config = RunConfig(model="m", training={"report_to": ["wandb", "trackio"]})
    trackers = Trackers(config, tmp_path, 0)
    for step in (1, 2, 3):
        trackers.write(EvalRow(step, 0.5))
    trackers.close(is_good=False)
    assert shown == [(step, {"eval/loss": 0.5}) for step in (1, 2, 3)]
    assert ended == ["finished"]
    assert caplog.text.count("wandb failed and is disabled (RuntimeError: no disk)") == 1
