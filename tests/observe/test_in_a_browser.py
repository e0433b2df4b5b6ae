"""The pages in a real browser: nothing runs out of them, all text stands out and is large enough.

Needs chromium (Debian: apt-get install chromium); skipped by that name where there is none.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fullshard.cli.app import invoke
from fullshard.observe.metrics import EvalRow, MetricsWriter, StepRow
from fullshard.observe.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).parents[2]
SCHEMES = {"light": 1, "dark": 0}
MEASURE = """
function channel(v) { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }
function light(c) { return .2126 * channel(c[0]) + .7152 * channel(c[1]) + .0722 * channel(c[2]); }
function numbers(text) { return text.match(/[\\d.]+/g).map(Number); }
function ground(win, node) {
  for (; node; node = node.parentElement) {
    const c = numbers(win.getComputedStyle(node).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c;
  }
  return [255, 255, 255];
}
window.onload = () => {
  const out = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const win = frame.contentWindow, doc = frame.contentDocument, root = doc.documentElement;
    const words = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
    let weakest = [99, ""], smallest = [99, ""];
    while (words.nextNode()) {
      const text = words.currentNode.data.trim(), node = words.currentNode.parentElement;
      const box = node.getBoundingClientRect();
      if (!text || node.closest("title, style") || !box.width) continue;
      const style = win.getComputedStyle(node), svg = node.closest("svg");
      const ink = numbers(svg ? style.fill : style.color);
      const [a, b] = [light(ink), light(ground(win, node))].sort((x, y) => y - x);
      const contrast = (a + .05) / (b + .05);
      const zoom = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
      const size = parseFloat(style.fontSize) * zoom;
      if (contrast < weakest[0]) weakest = [contrast, text];
      if (size < smallest[0]) smallest = [size, text];
    }
    const boxes = [...doc.querySelectorAll(".scroll")];
    const scrolled = boxes.filter(one => one.scrollWidth > one.clientWidth).length;
    out[frame.width] = {beyond: root.scrollWidth - root.clientWidth, weakest, smallest, scrolled,
      dark: light(ground(win, doc.body)) < .2};
  }
  document.body.innerHTML = "<pre>" + JSON.stringify(out).replaceAll("<", "&lt;") + "</pre>";
};
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]


def plan_page(folder):
    page = folder / "plan.html"
    small = ("model.config.num_hidden_layers=4", "per_device_train_batch_size=4")
    words = ("plan", str(ROOT / "examples/plan_llama_405b.yaml"), *small)
    invoke([*words, "--gpus", "8xA100-40GB", "--out", str(page)])
    return page


def report_page(folder):
    record = {
        "command": "train",
        "status": "failed",
        "began": "2026-01-01T00:00:00+00:00",
        "error": {"type": "OutOfMemoryError", "message": "memory: expected " + "bytes" * 40},
        "measured": {"eval_loss": 3.25, "baseline_loss": 3.0, "wall_s": 12.0},
        "environment": {"platform": "Linux-1.2.3-a-very-long-name-of-a-kernel-x86_64-with-glibc"},
    }
    (folder / "run.json").write_text(json.dumps(record))
    writer = MetricsWriter(folder / "metrics.jsonl")
    sizes = dict.fromkeys(("memory_bytes", "memory_peak_bytes"), 300 << 20)
    shares = {"data_s": 0.1, "compute_s": 0.3, "comm_s": 0.1, "step_time_s": 0.5}
    rates = {"tokens_per_s": 1000.0, "samples_per_s": 10.0, "learning_rate": 1e-3}
    for step in range(1, 21):
        loss = {"loss": 6 - step / 10, "grad_norm": 1.5}
        writer.write(StepRow(step=step, epoch=step / 10, **loss, **rates, **shares, **sizes))
    writer.write(EvalRow(20, 4.5))
    writer.close()
    write_report(folder)
    return folder / "report.html"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", [plan_page, report_page])
def test_nothing_runs_out_and_all_text_can_be_read(tmp_path, make, scheme):
    text = html.escape(make(tmp_path).read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{text}"></iframe>' for width in (390, 1400)
    )
    sheet = tmp_path / "sheet.html"
    sheet.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}<script>{MEASURE}</script>")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000")
    colours = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *options, colours, "--dump-dom", f"file://{sheet}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)[1]))
    assert set(found) == {"390", "1400"}
    for width, page in found.items():
        assert page["dark"] is (scheme == "dark")
        assert page["beyond"] == 0, (width, "pixels stand out of the page")
        assert page["weakest"][0] >= 4.5, (width, page["weakest"])
        assert page["smallest"][0] >= 9, (width, page["smallest"])
    assert found["1400"]["scrolled"] == 0
