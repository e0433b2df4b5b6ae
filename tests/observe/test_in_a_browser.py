"""The pages in a real browser: layout, readability, mouse and keyboard, live updates.

Needs chromium (Debian: apt-get install chromium), or is skipped.
"""

import html
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from fullshard.cli.app import invoke
from fullshard.observe.metrics import EvalRow, MetricsWriter, SampleRow, StepRow
from fullshard.observe.report import page_of, page_server, write_report

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
window.onload = () => setTimeout(() => {
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
}, 500);
"""
# User actions on the first chart, and the text of the page after each.
PROBE = """
<script>
const wait = () => new Promise((done) => setTimeout(done, 100));
const first = (selector) => document.querySelector(selector);
function mouse(kind, share) {
  const over = first("#charts .drawing"), box = over.getBoundingClientRect();
  const at = { clientX: box.left + share * box.width, clientY: box.top + 50 };
  over.dispatchEvent(new PointerEvent(kind, { bubbles: true, button: 0, ...at }));
}
function key(name) {
  first(".plot").dispatchEvent(new KeyboardEvent("keydown", { key: name, cancelable: true }));
}
const legend = () => [...first("#charts .legend").children]
  .map((one) => one.innerText.trim()).join(" ");
const zoomed = () => [...document.querySelectorAll("#charts header")]
  .filter((one) => !one.querySelector("button").hidden).length;
addEventListener("load", async () => {
  const said = {};
  await wait();
  said.idle = legend();
  said.note = first(".note").textContent;
  said.label = first(".plot").getAttribute("aria-label");
  const ticks = () => [...first(".drawing").querySelectorAll(".tick")]
    .map((one) => one.textContent);
  const hide = [...document.querySelectorAll(".legend button")]
    .find((one) => one.innerText.startsWith("interpolated"));
  said.ticks = ticks();
  hide.click(); said.hidden = ticks();
  hide.click(); said.back = ticks();
  mouse("pointermove", 0.5); await wait();
  said.hovered = legend();
  mouse("pointerdown", 0.25); mouse("pointermove", 0.75); mouse("pointerup", 0.75); await wait();
  said.zoomed = zoomed();
  mouse("pointermove", 0.001); await wait();
  said.left = legend();
  mouse("dblclick", 0.5); await wait();
  said.reset = zoomed();
  key("+"); await wait();
  said.key_zoomed = zoomed();
  key("Escape"); await wait();
  key("ArrowRight"); key("ArrowLeft"); await wait();
  said.key = first("#said").textContent;
  first("#outliers").click(); await wait();
  said.all = first(".note").textContent;
  const log = [...document.querySelectorAll("#charts header button")]
    .find((one) => one.textContent === "log");
  log.click(); await wait();
  said.log = log.getAttribute("aria-pressed");
  first("#smoothing").value = 0.9;
  first("#smoothing").dispatchEvent(new Event("input")); await wait();
  said.smoothed = legend();
  document.body.innerHTML = "<pre></pre>";
  first("pre").textContent = JSON.stringify(said);
});
</script></body>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium"),
]


def plan_page(folder: Path) -> Path:
    page = folder / "plan.html"
    small = ("model.config.num_hidden_layers=4", "per_device_train_batch_size=4")
    words = ("plan", str(ROOT / "examples/plan_llama_405b.yaml"), *small)
    invoke([*words, "--gpus", "8xA100-40GB", "--out", str(page)])
    return page


def report_page(folder: Path, num_steps: int = 20) -> Path:
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
    for step in range(1, num_steps + 1):
        loss = {"loss": 1e6 if step == 15 else 6 - step / num_steps, "grad_norm": 1.5}
        writer.write(StepRow(step=step, epoch=step / 10, **loss, **rates, **shares, **sizes))
    if num_steps:
        writer.write(EvalRow(num_steps, 4.5))
        writer.write(SampleRow(num_steps, "Once <b>", "upon a time " * 30))
    writer.close()
    seconds = {"time": 1e9, "cpu_percent": 50.0, "memory_bytes": 2**31, "gpu0_percent": 80.0}
    rows = (json.dumps({**seconds, "time": 1e9 + i}) for i in range(num_steps))
    (folder / "machine-0.jsonl").write_text("\n".join(rows))
    config = "training:\n  run_name: <b>tiny</b> and long  # command line\nseed: 0  # default\n"
    (folder / "config.yaml").write_text(config)
    return write_report(folder)


def comparison_page(folder: Path) -> Path:
    runs = [folder / name for name in ("a", "b" * 50)]
    for run, num_steps in zip(runs, (20, 7), strict=True):
        run.mkdir()
        report_page(run, num_steps)
    return write_report(*runs, target=folder / "comparison.html")


def opened(address: str | Path, scheme: str = "light", budget_ms: int = 5000) -> str:
    """Returns the page's elements after its scripts ran; the console must stay empty."""
    assert CHROMIUM is not None
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    done = subprocess.run(
        [
            CHROMIUM,
            *options,
            f"--virtual-time-budget={budget_ms}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            "--dump-dom",
            address if isinstance(address, str) else f"file://{address}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


def told(dom: str) -> dict:
    """Returns the output of our script."""
    return json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)[1]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("make", [plan_page, report_page, comparison_page])
def test_no_element_overflows_and_all_text_is_readable(tmp_path, make, scheme):
    text = html.escape(make(tmp_path).read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{text}"></iframe>' for width in (390, 1400)
    )
    sheet = tmp_path / "sheet.html"
    sheet.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}<script>{MEASURE}</script>")
    found = told(opened(sheet, scheme))
    assert set(found) == {"390", "1400"}
    for width, page in found.items():
        assert page["dark"] is (scheme == "dark")
        assert page["beyond"] == 0, (width, "pixels stand out of the page")
        assert page["weakest"][0] >= 4.5, (width, page["weakest"])
        assert page["smallest"][0] >= 9, (width, page["smallest"])
    assert found["1400"]["scrolled"] == 0


def test_charts_answer_mouse_keyboard_and_options(tmp_path):
    page = report_page(tmp_path)
    page.write_text(page.read_text().replace("</body>", PROBE))
    said = told(opened(page, budget_ms=20_000))
    assert said["idle"].startswith("step: last training: 5 nats per token held out: 4.5 nats")
    assert said["note"] == "1 outlier outside of the axis (up to 1,000,000)"
    assert "Loss over step: last training 5 nats per token" in said["label"]
    # The level at 3 is on the axis unless its line is hidden.
    assert "3" in said["ticks"]
    assert "3" not in said["hidden"]
    assert said["back"] == said["ticks"]
    assert re.match(r"step: 1[01] training: 5\.\d+ nats per token", said["hovered"])
    assert said["zoomed"] >= 6  # all charts over steps
    assert re.match(r"step: [56] training", said["left"])
    assert said["reset"] == 0
    assert said["key_zoomed"] >= 6
    assert said["key"] == (
        "step 19: training 5.05 nats per token, held out \u2013, "
        "interpolated bigram, held out 3 nats per token"
    )
    assert said["all"] == ""
    assert said["log"] == "true"
    assert "training, every point: 5.05 nats" in said["smoothed"]


@pytest.mark.parametrize("num_steps", [0, 1, 12_000])
def test_pages_of_any_length_draw_without_console_messages(tmp_path, num_steps):
    dom = opened(report_page(tmp_path, num_steps))
    assert dom.count('class="drawing"') == (9 if num_steps else 0)
    assert "OutOfMemoryError" in dom
    assert "<b>tiny" not in dom


def test_a_served_page_follows_the_run_without_reloading(tmp_path):
    report_page(tmp_path, 3)
    asked = []

    def render() -> str:
        asked.append(1)
        if len(asked) > 1:
            report_page(tmp_path, 3)  # appends its rows again
        return page_of([tmp_path], live=True)

    with page_server(render) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        dom = opened(f"http://127.0.0.1:{server.server_port}/", budget_ms=9000)
        server.shutdown()
        thread.join()
    assert len(asked) >= 2
    assert re.search(r'id="live">live, read at', dom)  # the first page was not replaced
    assert dom.count("<h3>step 3</h3>") >= 2  # the text of a later answer
