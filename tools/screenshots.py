"""Draws the pages of a plan and of a run for the docs: `make screenshots RUN=runs/train`.

The README's figure is the loss chart of that run, in the light scheme.

Chromium prints each page on one sheet of the page's size, in the light and the dark scheme.
pdftocairo (poppler-utils) converts the sheet to an SVG whose text is outlines, so that it looks the
same on every machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from fullshard.cli.app import invoke
from fullshard.observe.chart import render
from fullshard.observe.report import Run, gather

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PLAN = ("examples/plan_llama_8b.yaml", "--gpus", "8xH100-80GB", "--nodes", "4")
WIDTH = 1160
MAX_BYTES = 700_000
DARK = "@media (prefers-color-scheme: dark)"  # a printer asks for the light scheme
NEEDS = {"chromium": "chromium", "pdftocairo": "poppler-utils"}  # program: package of Debian
LOSS_ALONE = """
[data-part], .tools, #charts > :not(:first-child) { display: none; } main { padding: 0; }
"""
MEASURE = """<script>onload = () => {
  document.body.innerHTML = `<pre>${document.querySelector("main").offsetHeight}</pre>`;
};</script>"""


def main(run: Path) -> int:
    """Draws both pages in both schemes."""
    missing = [package for program, package in NEEDS.items() if shutil.which(program) is None]
    if missing:
        sys.exit(f"screenshots: expected {', '.join(NEEDS)}; apt-get install {' '.join(missing)}")
    if not (run / "run.json").is_file():
        sys.exit(f"screenshots: expected the folder of a run, got {run}; `make train` makes one")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = folder / "plan.html"
        invoke(["plan", str(ROOT / PLAN[0]), *PLAN[1:], "--out", str(page)])
        pages = {"plan": page.read_text(encoding="utf-8")}
        shown = Run.read(run)
        shown.samples.clear()  # long texts and tables
        shown.settings.clear()
        shown.machine.clear()
        for whose in ("environment", "process", "started_by"):
            shown.record.pop(whose, None)
        facts = gather(shown) | {"sample": "", "live": False}
        pages["report"] = render("report.html.j2", **facts)
        pages["train"] = pages["report"].replace("</style>", f"{LOSS_ALONE}</style>")
        for title, text in pages.items():
            height = measured_height(text, folder)
            for scheme in ("light", "dark") if title != "train" else ("light",):
                picture = compact(drawn(text, scheme, height, folder))
                target = IMAGES / (f"{title}_{scheme}.svg" if title != "train" else "train.svg")
                assert len(picture) < MAX_BYTES, f"{target}: {len(picture):,} bytes"
                target.write_text(picture, encoding="utf-8")
                print(f"{target}: {len(picture):,} bytes")
    return 0


def chromium(page: str, folder: Path, *options: str) -> str:
    """Returns the browser's output for a page."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *options,
        f"file://{file}",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def measured_height(page: str, folder: Path) -> int:
    """Returns the height of a page of width WIDTH, in pixels."""
    size = f"--window-size={WIDTH},900"
    found = chromium(page.replace("</body>", f"{MEASURE}</body>"), folder, size, "--dump-dom")
    return int(found.partition("<pre>")[2].partition("<")[0])


def drawn(page: str, scheme: str, height: int, folder: Path) -> str:
    """Returns a page as SVG."""
    if scheme == "dark":
        page = page.replace(DARK, "@media all")
    sheet = f"@page {{ size: {WIDTH}px {height + 1}px; margin: 0; }}</style>"
    pdf, svg = folder / "page.pdf", folder / "page.svg"
    # A window of the sheet's width: the charts, which are drawn for it, then print as lines.
    printing = (
        f"--window-size={WIDTH},900",
        "--hide-scrollbars",
        "--no-pdf-header-footer",
        f"--print-to-pdf={pdf}",
    )
    chromium(page.replace("</style>", sheet, 1), folder, *printing)
    subprocess.run(["pdftocairo", "-svg", "-f", "1", "-l", "1", pdf, svg], check=True)
    return svg.read_text(encoding="utf-8")


def compact(picture: str) -> str:
    """Returns a smaller SVG: fewer digits, and one class for equal styles."""
    picture = re.sub(r"\d+\.\d{2,}", _short, picture).replace("glyph", "g")
    counts = Counter(re.findall(r'style="([^"]+)"', picture))
    names = {style: f"s{at}" for at, (style, _) in enumerate(counts.most_common())}
    picture = re.sub(r'style="([^"]+)"', lambda m: f'class="{names[m[1]]}"', picture)
    sheet = "".join(f".{name}{{{style}}}" for style, name in names.items())
    picture = re.sub(r"\n\s*", "\n", picture)
    return picture.replace("<defs>", f"<style>{sheet}</style>\n<defs>", 1)


def _short(found: re.Match[str]) -> str:
    value = float(found[0])
    return f"{round(value, 2):g}" if value > 1 else f"{value:.3g}"  # small ones scale others


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
