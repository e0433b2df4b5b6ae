"""`fullshard report` writes, compares and serves the pages of runs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from fullshard.cli.app import invoke
from fullshard.launch.run_lock import RunLock
from fullshard.observe.metrics import read_machine, sampled
from fullshard.observe.report import page_server


@pytest.fixture
def run(tmp_path):
    record = {"command": "train", "status": "running", "began": "2026", "error": None}
    (tmp_path / "run.json").write_text(json.dumps({**record, "measured": {}, "planned": {}}))
    return tmp_path


def status(run) -> str:
    return json.loads((run / "run.json").read_text())["status"]


def test_the_page_of_a_killed_run_says_that_it_was_killed(run):
    assert invoke(["report", str(run)]).result == {"report": str(run / "report.html")}
    page = (run / "report.html").read_text()
    assert "failed, began 2026" in page
    assert "ended without recording the reason" in page
    assert status(run) == "failed"


def test_the_page_of_a_live_run_does_not_change_its_record(run):
    with RunLock(run):
        assert invoke(["report", str(run)]).exit_code == 0
    assert "running, began 2026" in (run / "report.html").read_text()
    assert status(run) == "running"


def test_several_runs_are_compared_in_a_separate_file(run, monkeypatch):
    monkeypatch.chdir(run)
    assert invoke(["report", str(run), str(run)]).result == {"report": "comparison.html"}
    assert "2 runs of fullshard" in (run / "comparison.html").read_text()
    out = run / "nowhere" / "page.html"
    assert invoke(["report", str(run), "--out", str(out)]).exit_code == 2


def test_a_page_replaces_no_file_with_other_content(run):
    before = (run / "run.json").read_text()
    said = invoke(["report", str(run), "--out", str(run / "run.json")])
    assert said.exit_code == 2
    assert (run / "run.json").read_text() == before
    page, empty = run / "page.html", run / "empty.html"
    empty.touch()
    for out in (page, page, empty):
        assert invoke(["report", str(run), "--out", str(out)]).exit_code == 0


def test_no_file_changes_if_one_of_the_folders_has_no_run(run, tmp_path):
    assert invoke(["report", str(run), str(run / "other")]).exit_code == 2
    assert status(run) == "running"


def test_watched_page_is_served_on_loopback_until_it_is_interrupted(run):
    words = ["env", "--default-signal=INT"]  # a shell's `&` ignores SIGINT
    words += [sys.executable, "-m", "fullshard", "report", str(run), "--watch", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with RunLock(run), subprocess.Popen(words, **pipes) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.match(r"http://127\.0\.0\.1:\d+/", said)
        url = found[0] if found else process.kill() or said
        with urllib.request.urlopen(url, timeout=30) as answer:
            page = answer.read().decode()
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=30)
    assert 'id="live"' in page
    assert process.returncode == 0
    assert json.loads(out) == {"url": url}
    assert rest == ""
    assert not (run / "report.html").exists()


def test_a_port_in_use_is_named(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = invoke(["report", str(run), "--watch", "--port", port])
    assert outcome.exit_code == 2
    assert f"expected a free port, got {port}" in outcome.result["error"]["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--watch", "--out", "page.html"], "--out: expected no --watch"),
        (["--port", "8000"], "--port: expected --watch"),
    ],
)
def test_options_without_effect_on_a_page_are_refused(run, words, said):
    outcome = invoke(["report", str(run), *words])
    assert outcome.exit_code == 2
    assert said in outcome.result["error"]["message"]


def test_other_sites_and_paths_get_no_data(run):
    with page_server(lambda: "the page") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with urllib.request.urlopen(f"{url}/?x=1", timeout=30) as answer:
                assert answer.read() == b"the page"
            for path, host, code in (("/run.json", None, 404), ("/", "evil.example:80", 403)):
                request = urllib.request.Request(url + path, headers={"Host": host} if host else {})
                with pytest.raises(urllib.error.HTTPError) as caught:
                    urllib.request.urlopen(request, timeout=30)
                assert caught.value.code == code
                caught.value.close()
        finally:
            server.shutdown()
            thread.join()


def test_machine_usage_is_sampled_with_its_gpus(tmp_path, monkeypatch):
    """A machine without a GPU has no NVML, so a fake package with two devices replaces it."""
    (tmp_path / "pynvml.py").write_text(
        "class NVMLError(Exception): ...\n"
        "class Use: gpu, used = 40, 7\n"
        "def nvmlInit(): ...\n"
        "def nvmlDeviceGetCount(): return 2\n"
        "def nvmlDeviceGetHandleByIndex(i): return i\n"
        "def nvmlDeviceGetUtilizationRates(h): return Use\n"
        "def nvmlDeviceGetMemoryInfo(h): return Use\n"
        "def nvmlDeviceGetPowerUsage(h):\n"
        "    if h: raise NVMLError\n"
        "    return 300_000\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("fullshard.observe.metrics.SHORTEST_S", 0.02)
    with sampled(tmp_path, node=3):
        while not read_machine(tmp_path).get("3"):
            os.sched_yield()
    (row, *_) = read_machine(tmp_path)["3"]
    assert 0 <= row["cpu_percent"] <= 100
    assert 0 < row["memory_bytes"] < row["memory_total_bytes"]
    assert min(row["disk_write_bytes_per_s"], row["net_sent_bytes_per_s"]) >= 0
    assert (row["gpu0_percent"], row["gpu0_watts"], row["gpu1_memory_bytes"]) == (40, 300, 7)
    assert "gpu1_watts" not in row
