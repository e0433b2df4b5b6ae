// Draws lines over common axes as SVG: CSS colours it, and it prints as lines.
//
//        +-----------------+     draw({x, y, lines})     axes and lines
//    y   |  grid, lines    |     mark(x, dots)           cursor
//  ticks |     | cursor    |     onCursor(x or null), onZoom([low, high] or null)
//        +-----------------+
//              x ticks           x.at(value) is a pixel, x.value(pixel) a value
//
// An axis is {low, high, base, isTime}: base 10 or 2 makes it logarithmic; time is in seconds.
"use strict";
const HEIGHT = 230, TOP = 10, BOTTOM = 24, RIGHT = 14;
const EDGE = 5; // room for a dot at the end of an axis
const LETTER = 6.4; // pixels of a digit in a tick's font
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200];
const DAY = 86400;

const put = (node, fields) => {
  for (const [name, value] of Object.entries(fields)) node.setAttribute(name, value);
  return node;
};
const shape = (kind, fields = {}) =>
  put(document.createElementNS("http://www.w3.org/2000/svg", kind), fields);
const paint = (color) => `--c: var(--series-${(color - 1) % 7 + 1})`;

// ---- numbers and ticks ------------------------------------------------------------------------

function numberText(value, digits) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) {
    return Number(value.toPrecision(digits)).toExponential();
  }
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

// Labels that differ: as many digits as the distance between ticks needs.
function tickTexts(values, { isTime, base }) {
  const [step, size] = [values[1] - values[0], Math.max(...values.map(Math.abs))];
  if (isTime) return values.map((value) => clockText(new Date(1000 * value), step));
  const needed = base || !(step > 0) ? 6 : Math.ceil(Math.log10(size / step)) + 2;
  const digits = Math.min(17, Math.max(3, needed));
  return values.map((value) => (Math.abs(value) >= 1e6 && Math.abs(value) < 1e15
    ? value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits })
    : numberText(Math.abs(value) < step * 1e-9 ? 0 : value, digits)));
}

function clockText(date, step) {
  if (!(step < DAY) || !(date.getHours() || date.getMinutes() || date.getSeconds())) {
    return date.toLocaleDateString("en", { month: "short", day: "numeric" });
  }
  return date.toTimeString().slice(0, step < 60 ? 8 : 5);
}

// Multiples of a step in [low, high]; never many, whatever the rounding of huge numbers does.
function multiples(low, high, step) {
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.min(100, Math.max(0, last - first + 1)) },
    (_, i) => (first + i) * step);
}

// At most about `count` round values of an axis.
function ticks({ low, high, base, isTime }, count) {
  const rough = (high - low) / count;
  if (isTime) {
    const shift = -60 * new Date(1000 * low).getTimezoneOffset();
    const step = CLOCK.find((one) => one >= rough) ?? DAY * Math.ceil(rough / DAY);
    return multiples(low + shift, high + shift, step).map((value) => value - shift);
  }
  if (base) {
    const from = Math.log(low) / Math.log(base), to = Math.log(high) / Math.log(base);
    const powers = multiples(from, to, Math.max(1, Math.ceil((to - from) / count)))
      .map((power) => base ** power);
    if (powers.length >= 3) return powers;
    const between = multiples(Math.floor(from), to, 1)
      .flatMap((power) => [1, 2, 5].map((digit) => digit * base ** power))
      .filter((value) => value >= low && value <= high);
    if (base === 10 && between.length >= 3) return between;
  }
  const size = 10 ** Math.floor(Math.log10(rough));
  return multiples(low, high, size * [1, 2, 5, 10].find((one) => one * size >= rough * 0.999));
}

function scale({ low, high, base }, begin, end) {
  const to = base ? Math.log : Number, from = base ? Math.exp : Number;
  const first = to(low), share = (end - begin) / (to(high) - first || 1);
  return {
    at: (value) => begin + (to(value) - first) * share,
    value: (pixel) => from(first + (pixel - begin) / share),
  };
}

// ---- lines ------------------------------------------------------------------------------------

// The visible points, and one more at either side, in runs: null ends a run, undefined does not.
function runsOf(xs, ys, { low, high }) {
  const runs = [[]];
  let before = null;
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === undefined) continue;
    if (ys[i] === null) {
      if (runs.at(-1).length) runs.push([]);
      before = null;
    } else if (xs[i] < low) {
      before = [xs[i], ys[i]];
    } else {
      if (before) runs.at(-1).push(before);
      before = null;
      runs.at(-1).push([xs[i], ys[i]]);
      if (xs[i] > high) break;
    }
  }
  return runs.filter((run) => run.length);
}

// Of the points in one column of pixels: the first, the extremes and the last.
function thinned(points) {
  const found = [];
  for (let i = 0, j = 0; i < points.length; i = j) {
    let low = i, high = i;
    for (; j < points.length && Math.floor(points[j][0]) === Math.floor(points[i][0]); j++) {
      if (points[j][1] < points[low][1]) low = j;
      if (points[j][1] > points[high][1]) high = j;
    }
    const kept = new Set([i, Math.min(low, high), Math.max(low, high), j - 1]);
    found.push(...[...kept].map((at) => points[at]));
  }
  return found;
}

const path = (points) => points.map((point) => point.map((v) => v.toFixed(1)).join(" ")).join("L");

// ---- a drawing --------------------------------------------------------------------------------

class Drawing {
  constructor(box, onCursor, onZoom) {
    Object.assign(this, { box, onZoom });
    this.svg = shape("svg", { "aria-hidden": "true", class: "drawing" });
    this.axes = shape("g");
    this.inner = shape("svg", { y: TOP - EDGE, height: HEIGHT - TOP - BOTTOM + 2 * EDGE }); // clips its lines
    this.lines = shape("g");
    this.cursor = shape("g");
    this.band = shape("rect", { class: "band", y: 0, height: HEIGHT, width: 0 });
    this.inner.append(this.lines, this.band, this.cursor);
    this.svg.append(this.axes, this.inner);
    box.append(this.svg);
    this.svg.onpointermove = (event) => this.x && onCursor(this.x.value(this.pixel(event)));
    this.svg.onpointerleave = () => onCursor(null);
    this.svg.onpointerdown = (event) => this.drag(event);
    this.svg.ondblclick = () => onZoom(null);
  }

  // lines: {xs, ys, below, color, style}; one with `below` is filled down to it.
  draw({ x, y, lines }) {
    const width = this.box.clientWidth;
    if (!width) return;
    const yTicks = ticks(y, 5), yTexts = tickTexts(yTicks, y);
    const left = Math.max(40, LETTER * Math.max(0, ...yTexts.map((one) => one.length)) + 10);
    this.left = left;
    this.width = Math.max(10, width - left - RIGHT);
    this.x = scale(x, EDGE, EDGE + this.width);
    this.y = scale(y, HEIGHT - TOP - BOTTOM + EDGE, EDGE);
    put(this.svg, { viewBox: `0 0 ${width} ${HEIGHT}` });
    put(this.inner, { x: left - EDGE, width: this.width + 2 * EDGE });
    this.axes.replaceChildren(
      ...yTicks.flatMap((value, i) => this.tick(left - 6, TOP - EDGE + this.y.at(value), yTexts[i])));
    const xTicks = ticks(x, Math.max(2, this.width / 80));
    tickTexts(xTicks, x).forEach((text, i) => {
      const at = Math.min(left - EDGE + this.x.at(xTicks[i]), width - LETTER * text.length / 2);
      const label = shape("text", { class: "tick", x: at, y: HEIGHT - 6, "text-anchor": "middle" });
      label.textContent = text;
      this.axes.append(label);
    });
    this.lines.replaceChildren(...lines.flatMap((line) => this.line(line, x)));
  }

  tick(x, y, text) {
    const label = shape("text", { class: "tick", x, y: y + 4, "text-anchor": "end" });
    label.textContent = text;
    return [shape("path", { class: "rule", d: `M${this.left} ${y.toFixed(1)}h${this.width}` }), label];
  }

  line({ xs, ys, below, color, style }, axis) {
    const far = (pixel) => Math.max(-1e5, Math.min(1e5, pixel));
    const pixels = (column) => runsOf(xs, column, axis)
      .map((run) => thinned(run.map(([x, y]) => [far(this.x.at(x)), far(this.y.at(y))])));
    const runs = pixels(ys), fields = { style: paint(color) };
    // A point alone is a line of no length, which round ends make a dot.
    const d = runs.map((run) => `M${path(run)}${run.length > 1 ? "" : "h0"}`).join("");
    const shapes = [shape("path", { ...fields, class: `series ${style}`, d })];
    const points = runs.flat();
    if (style !== "faint" && style !== "level" && !below
      && (style === "dots" || points.length * 40 < this.width)) {
      const dots = points.map((point) => `M${path([point])}h0`).join("");
      shapes.push(shape("path", { ...fields, class: "series points", d: dots }));
    }
    if (below) {
      const area = [...runs.flat(), ...pixels(below).flat().reverse()];
      if (area.length) shapes.unshift(shape("path", { ...fields, class: "area", d: `M${path(area)}Z` }));
    }
    return shapes;
  }

  // A vertical line at x and a dot on each line; nothing without x.
  mark(x, dots) {
    this.cursor.replaceChildren();
    if (x == null || !this.x) return;
    this.cursor.append(shape("path", { class: "cross", d: `M${this.x.at(x)} 0V${HEIGHT}` }),
      ...dots.map((dot) => shape("circle", { class: "mark", style: paint(dot.color), r: 4,
        cx: this.x.at(dot.x), cy: this.y.at(dot.y) })));
  }

  pixel(event) {
    const from = this.svg.getBoundingClientRect().left + this.left - EDGE;
    return Math.max(EDGE, Math.min(EDGE + this.width, event.clientX - from));
  }

  // Follows the pointer until it is released, also outside of the drawing.
  drag(down) {
    if (down.button || !this.x) return;
    const from = this.pixel(down), released = new AbortController();
    const show = (event) => {
      const ends = [from, this.pixel(event)].sort((a, b) => a - b);
      put(this.band, { x: ends[0], width: ends[1] - ends[0] });
      return ends;
    };
    const end = (event) => {
      released.abort();
      const ends = show(event);
      put(this.band, { width: 0 });
      if (event.type === "pointerup" && ends[1] - ends[0] >= 5) {
        this.onZoom(ends.map((pixel) => this.x.value(pixel)));
      }
    };
    for (const [kind, act] of [["pointermove", show], ["pointerup", end], ["pointercancel", end]]) {
      addEventListener(kind, act, { signal: released.signal });
    }
  }
}
