// Fills the charts of a page, and keeps a page that is served up to date.
//
//   options (smoothing, outliers)  ─┐
//   zoom, cursor of each kind of x  ├─>  Plot ─> Drawing (plot.js), legend with values
//   <script id="data">: tables     ─┘
//
// Charts over the same x share their zoom and their cursor.
"use strict";
(() => {
const options = { smoothing: 0, ignoresOutliers: true };
const zooms = {};   // by x: [low, high], or nothing
const cursors = {}; // by x: a value, or nothing
const plots = new Map(); // by title
let page = null;    // {tables, charts}

const byId = (id) => document.getElementById(id);
const make = (tag, fields = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...children);
  return node;
};

// ---- numbers ----------------------------------------------------------------------------------

// Exponential mean, corrected for its start; gaps stay gaps.
function smoothed(values, weight) {
  let total = 0, sum = 0;
  return values.map((value) => {
    if (value == null) return value;
    total = weight * total + (1 - weight) * value;
    sum = weight * sum + (1 - weight);
    return total / sum;
  });
}

// The range of most values: a few values far away from all others do not flatten the rest.
function mostOf(values) {
  const sorted = Float64Array.from(values).sort(), n = sorted.length;
  const rest = n < 8 ? 0 : Math.max(Math.min(3, n >> 3), Math.floor(n / 50));
  const low = sorted[rest], high = sorted[n - 1 - rest];
  const spread = high - low || Math.abs(high) / 10 || 1;
  return [
    sorted[0] < low - 3 * spread ? low - spread / 4 : sorted[0],
    sorted[n - 1] > high + 3 * spread ? high + spread / 4 : sorted[n - 1],
  ];
}

// First and last x of all charts over the same x.
function ends(x) {
  let low = Infinity, high = -Infinity;
  for (const chart of page.charts.filter((one) => one.x === x)) {
    for (const line of chart.lines.filter((one) => one.table)) {
      const xs = page.tables[line.table][x];
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs[xs.length - 1]);
    }
  }
  return low < high ? [low, high] : [low - 0.5, high + 0.5];
}

// Columns over one x: all xs, then a column for each [xs, ys]; undefined where one has no such x.
function joined(parts) {
  const all = new Set(parts.flatMap(([xs]) => xs.filter((x) => x != null)));
  const xs = Float64Array.from(all).sort(), at = new Map([...xs].map((x, i) => [x, i]));
  return [[...xs], ...parts.map(([own, ys]) => {
    const column = new Array(xs.length).fill(undefined);
    own.forEach((x, i) => { if (x != null) column[at.get(x)] = ys[i]; });
    return column;
  })];
}

// ---- a chart ----------------------------------------------------------------------------------

class Plot {
  constructor(chart) {
    this.chart = chart;
    this.isLog = false;
    this.hidden = new Set(); // names
    this.log = make("button", { type: "button", textContent: "log", title: "Logarithmic y axis" });
    this.log.onclick = () => { this.isLog = !this.isLog; this.show(); };
    this.reset = make("button", { type: "button", textContent: "reset zoom", hidden: true });
    this.reset.onclick = () => zoom(chart.x, null);
    this.note = make("p", { className: "note" });
    this.legend = make("div", { className: "legend" });
    this.box = make("div", { tabIndex: 0, className: "plot" });
    this.box.setAttribute("role", "group");
    this.box.onkeydown = (event) => this.key(event);
    this.drawing = new Drawing(this.box, (x) => point(chart.x, x), (range) => zoom(chart.x, range));
    const unit = make("small", { textContent: chart.unit });
    this.node = make("section", { className: chart.is_wide ? "card wide" : "card" },
      make("header", {}, make("h2", {}, chart.title, " ", unit), this.reset, this.log),
      this.box, this.legend, this.note);
    this.watcher = new ResizeObserver(() => requestAnimationFrame(() => this.resize()));
    this.watcher.observe(this.box);
  }

  // Lines as they are drawn: with smoothing, the values themselves stay behind as faint lines.
  lines() {
    const { chart } = this;
    if (!options.smoothing || chart.is_stacked) return chart.lines;
    return chart.lines.flatMap((line) => line.table && line.style === "line"
      ? [{ ...line, name: `${line.name}, every point`, style: "faint" }, { ...line, smooth: true }]
      : [line]);
  }

  // x, then a column for each line. A line passes over undefined; null is a gap.
  columns() {
    const parts = this.drawn.filter((line) => line.table).map((line) => {
      const table = page.tables[line.table];
      const ys = table[line.y].map((y) => (y == null ? null : y * line.scale));
      return [table[this.chart.x], line.smooth ? smoothed(ys, options.smoothing) : ys];
    });
    const [xs, ...found] = joined(parts);
    return [xs, ...this.drawn.map((line) => (line.table ? found.shift() : xs.map(() => line.level)))];
  }

  isShown(line) { return !this.hidden.has(line.name); }
  ends() { return zooms[this.chart.x] ?? ends(this.chart.x); }

  // The lines that are shown, with stacked ones on each other and no y <= 0 on a log axis.
  visible() {
    const [xs, ...columns] = this.own, found = [];
    let below = xs.map(() => 0);
    this.drawn.forEach((line, at) => {
      if (!this.isShown(line)) return;
      const style = !line.table ? "level" : line.style === "line" && line.color > 7 ? "dashed" : line.style;
      const own = { ...line, at: at + 1, style, xs, ys: columns[at], below: null };
      if (this.chart.is_stacked && line.table) {
        own.below = below;
        below = own.ys = below.map((sum, i) => sum + (columns[at][i] ?? 0));
      } else if (this.isLog) {
        own.ys = own.ys.map((y) => (y > 0 || y === undefined ? y : null));
      }
      found.push(own);
    });
    return found;
  }

  // New lines, or new numbers in them.
  update() {
    this.drawn = this.lines();
    this.own = this.columns();
    const names = this.drawn.map((line) => line.name).join();
    if (names !== this.names) this.fillLegend();
    this.names = names;
    this.show();
  }

  fillLegend() {
    this.values = [make("span"), ...this.drawn.map(() => make("span"))];
    this.legend.replaceChildren(make("span", {}, `${this.chart.x}: `, this.values[0]),
      ...this.drawn.map((line, i) => {
        const key = make("i", { className: "key", style: paint(line.color) });
        const node = make("button", { type: "button", title: "Hide or show this line" },
          key, `${line.name}: `, this.values[i + 1]);
        node.setAttribute("aria-pressed", String(this.isShown(line)));
        node.onclick = () => {
          if (!this.hidden.delete(line.name)) this.hidden.add(line.name);
          node.setAttribute("aria-pressed", String(this.isShown(line)));
          this.show();
        };
        return node;
      }));
  }

  // Draws what there is, after a change of options, zoom or size.
  show() {
    const { chart } = this, [low, high] = this.ends();
    this.reset.hidden = !zooms[chart.x];
    this.log.hidden = chart.is_stacked || !this.own.slice(1).some((c) => c.some((y) => y > 0));
    this.log.setAttribute("aria-pressed", String(this.isLog));
    this.shown = this.visible();
    const [bottom, top] = this.range(low, high);
    this.drawing.draw({
      x: { low, high, base: chart.log2_x ? 2 : 0, isTime: chart.x === "time" },
      y: { low: bottom, high: top, base: this.isLog ? 10 : 0 },
      lines: this.shown,
    });
    this.size = this.box.clientWidth;
    this.point();
  }

  resize() { if (this.own && this.size !== this.box.clientWidth) this.show(); }

  value(at, i) {
    const y = i == null ? null : this.own[at][i];
    return y == null ? "–" : `${numberText(y, 5)} ${this.chart.unit}`;
  }

  x(value) {
    return this.chart.x === "time" ? new Date(1000 * value).toLocaleString() : numberText(value, 9);
  }

  pixel(i) { return this.drawing.x.at(this.own[0][i]); }

  // The visible points' first and last number; none are visible if first > last.
  span() {
    const [low, high] = this.ends(), xs = this.own[0];
    const first = xs.findIndex((x) => x >= low), last = xs.findLastIndex((x) => x <= high);
    return first < 0 ? [1, 0] : [first, last];
  }

  // Number of the visible point that is closest to the cursor; null without one.
  index() {
    const cursor = cursors[this.chart.x], [first, last] = this.span(), xs = this.own[0];
    if (cursor == null || first > last || !this.drawing.x) return null;
    const found = xs.findIndex((x) => x >= cursor), next = found < 0 ? xs.length - 1 : found;
    const from = this.drawing.x.at(cursor);
    const isBefore = next > 0 && from - this.pixel(next - 1) < Math.abs(this.pixel(next) - from);
    return Math.max(first, Math.min(last, isBefore ? next - 1 : next));
  }

  // The closest point of a line that is at most 20 pixels away.
  nearest(at, i) {
    const column = this.own[at], from = this.pixel(i);
    if (column[i] !== undefined) return i;
    for (let by = 1; by < column.length; by++) {
      const near = [i - by, i + by]
        .filter((j) => column.length > j && j >= 0 && Math.abs(this.pixel(j) - from) <= 20);
      const found = near.find((j) => column[j] != null);
      if (found !== undefined || !near.length) return found ?? i;
    }
    return i;
  }

  // The range of y over the visible x, and how many values are outside of it.
  range(low, high) {
    const { isLog } = this, seen = [], levels = [];
    for (const line of this.shown) {
      if (!line.table) levels.push(line.level);
      else line.ys.forEach((y, i) => {
        if (y != null && line.xs[i] >= low && line.xs[i] <= high) seen.push(y);
      });
    }
    this.note.textContent = "";
    if (!seen.length) return isLog ? [0.1, 10] : [0, 1];
    const all = [seen.reduce((a, b) => Math.min(a, b)), seen.reduce((a, b) => Math.max(a, b))];
    const most = options.ignoresOutliers && !isLog ? mostOf(seen) : all;
    const outside = seen.filter((y) => y < most[0] || y > most[1]).length;
    if (outside) {
      const farthest = all[1] > most[1]
        ? `up to ${numberText(all[1], 3)}` : `down to ${numberText(all[0], 3)}`;
      this.note.textContent =
        `${outside} outlier${outside > 1 ? "s" : ""} outside of the axis (${farthest})`;
    }
    const fitting = levels.filter((y) => !isLog || y > 0);
    let bottom = Math.min(most[0], ...fitting), top = Math.max(most[1], ...fitting);
    if (isLog) return [bottom / 1.15, top * 1.15];
    if (this.chart.from_zero) bottom = Math.min(bottom, 0);
    const room = (top - bottom) * 0.06 || Math.abs(top) * 0.1 || 1;
    return [this.chart.from_zero && bottom === 0 ? 0 : bottom - room, top + room];
  }

  // The legend has the values under the cursor; without one, the last.
  point() {
    const i = this.index(), xs = this.own[0];
    const last = this.own.map((column) => column.findLastIndex((y) => y != null));
    const found = this.own.map((_, at) => (i == null ? last[at] : this.nearest(at, i)));
    this.values[0].textContent = i == null ? "last" : this.x(xs[i]);
    this.drawn.forEach((_, at) => {
      this.values[at + 1].textContent = this.value(at + 1, found[at + 1]);
    });
    this.drawing.mark(i == null ? null : xs[i], this.shown
      .filter((line) => line.table && line.ys[found[line.at]] != null)
      .map((line) => ({ x: xs[found[line.at]], y: line.ys[found[line.at]], color: line.color })));
    const told = this.drawn.map((line, at) => `${line.name} ${this.value(at + 1, last[at + 1])}`);
    this.box.setAttribute("aria-label", `${this.chart.title} over ${this.chart.x}: `
      + `last ${told.join(", ")}. Left and right arrows read values, + and - zoom, Escape resets.`);
  }

  // The keyboard moves the cursor over the visible points, and zooms around it.
  key(event) {
    const { x } = this.chart, [low, high] = this.ends(), xs = this.own[0];
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const [first, last] = this.span(), now = this.index(), at = now ?? last;
    if (step && first <= last) {
      const next = Math.min(last, Math.max(first, at + (now == null ? 0 : step)));
      point(x, xs[next]);
      byId("said").textContent = `${x} ${this.x(xs[next])}: ${this.drawn
        .map((line, i) => `${line.name} ${this.value(i + 1, this.nearest(i + 1, next))}`)
        .join(", ")}`;
    } else if (event.key === "+" || event.key === "-") {
      const half = (high - low) * (event.key === "+" ? 0.25 : 1), [from, to] = ends(x);
      const middle = first > last ? (low + high) / 2 : xs[at];
      const found = [Math.max(from, middle - half), Math.min(to, middle + half)];
      zoom(x, found[0] <= from && found[1] >= to ? null : found);
    } else if (event.key === "Escape") {
      point(x, null);
      zoom(x, null);
    } else {
      return;
    }
    event.preventDefault();
  }

  remove() {
    this.watcher.disconnect();
    this.node.remove();
  }
}

function zoom(x, range) {
  zooms[x] = range;
  for (const plot of plots.values()) if (plot.chart.x === x) plot.show();
}

function point(x, value) {
  cursors[x] = value;
  for (const plot of plots.values()) if (plot.chart.x === x) plot.point();
}

// ---- the page ---------------------------------------------------------------------------------

// Draws what the page holds now. A chart with the same lines keeps its place, zoom and cursor.
function draw(found) {
  page = found;
  const charts = byId("charts");
  for (const [title, plot] of plots) {
    const now = page.charts.find((one) => one.title === title);
    if (!now || JSON.stringify(now) !== JSON.stringify(plot.chart)) {
      plot.remove();
      plots.delete(title);
    }
  }
  page.charts.forEach((chart, at) => {
    const old = plots.get(chart.title), plot = old ?? new Plot(chart);
    if (charts.children[at] !== plot.node) charts.insertBefore(plot.node, charts.children[at]);
    plots.set(chart.title, plot);
    plot.update();
  });
}

const read = (from) => JSON.parse(from.getElementById("data").textContent);
const parts = (from) => [...from.querySelectorAll("[data-part]")];
const shown = new Map(parts(document).map((one) => [one.dataset.part, one.innerHTML]));

// Replaces the parts of the page that differ, but not the charts, and opens what was open.
function replaceParts(fresh) {
  for (const part of parts(fresh)) {
    const name = part.dataset.part, old = document.querySelector(`[data-part="${name}"]`);
    if (shown.get(name) === part.innerHTML) continue;
    shown.set(name, part.innerHTML);
    const open = [...old.querySelectorAll("details")].map((one) => one.open);
    old.innerHTML = part.innerHTML;
    old.querySelectorAll("details").forEach((one, at) => { one.open = open[at] ?? one.open; });
  }
  document.title = fresh.title;
}

// Asks for the page again and again: seldom where the answer takes long.
async function watch() {
  const live = byId("live"), began = performance.now();
  try {
    const answer = await fetch(location.pathname, { cache: "no-cache" });
    if (!answer.ok) throw new Error(await answer.text());
    const body = await answer.text();
    if (body !== watch.last) {
      watch.last = body;
      const fresh = new DOMParser().parseFromString(body, "text/html");
      replaceParts(fresh);
      draw(read(fresh));
    }
    live.textContent = `live, read at ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    live.textContent = `not live: ${error.message.trim()}`;
  }
  setTimeout(watch, 2000 + 5 * (performance.now() - began));
}

function main() {
  const slider = byId("smoothing");
  slider.oninput = () => {
    options.smoothing = Number(slider.value);
    byId("smoothing-value").textContent = options.smoothing ? options.smoothing : "off";
    for (const plot of plots.values()) plot.update();
  };
  byId("outliers").onchange = (event) => {
    options.ignoresOutliers = event.target.checked;
    for (const plot of plots.values()) plot.show();
  };
  draw(read(document));
  byId("tools").hidden = !page.charts.length;
  slider.parentElement.hidden = !page.charts.some((chart) => !chart.is_stacked
    && chart.lines.some((line) => line.table && line.style === "line"));
  if (byId("live")) setTimeout(watch, 2000);
}
main();
})();
