"use strict";
// Curves as SVG: hover, drag to zoom, double click to reset, legends that switch curves. No library, no network.

const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes, parent, text) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const key in attributes || {}) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), attributes[key]);
    else if (attributes[key] !== null && attributes[key] !== undefined && attributes[key] !== false) made.setAttribute(key, attributes[key]);
  }
  for (const child of children.flat(9)) if (child !== null && child !== undefined) made.append(child);
  return made;
}

function show(value, digits) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (!isFinite(value)) return "–";
  if (digits !== undefined) return (Math.abs(value) < 0.5 * 10 ** -digits ? 0 : value).toFixed(digits);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (Number.isInteger(value) && size < 1e6) return String(value);
  return String(Number(value.toPrecision(4)));
}

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw - 1e-12) || raw;
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9 * step; v += step) found.push(Math.abs(v) < 1e-9 * step ? 0 : v);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let p = Math.floor(low); p <= Math.ceil(high); p++)
    for (const m of high - low > 2.5 ? [1] : [1, 2, 5]) {
      const v = p + Math.log10(m);
      if (v >= low - 1e-9 && v <= high + 1e-9) found.push(v);
    }
  return found.length > 1 ? found : ticks(low, high, 3);
}

// A running mean over the curve's own points, for curves with many of them.
function smoothed(ys) {
  const keep = Math.max(0.6, 1 - 12 / ys.length);
  let mean = 0, weight = 0;
  return ys.map((y) => {
    mean = keep * mean + (1 - keep) * y;
    weight = keep * weight + 1 - keep;
    return mean / weight;
  });
}

// Charts of one group share their x axis: hover and zoom act on all of them.
class Group {
  constructor() { this.charts = []; this.range = null; }
  zoom(range) { this.range = range; this.charts.forEach((c) => c.draw()); }
  hover(x, source) { this.charts.forEach((c) => c.mark(x, c === source)); }
}

class Chart {
  // spec: {title, unit, series: [{name, x, y, color, dash, dots}], log, marks: [{x, text}], xlabel}
  constructor(parent, spec, group) {
    this.spec = spec;
    this.group = group || new Group();
    this.group.charts.push(this);
    this.hidden = new Set();
    this.log = spec.log && spec.series.every((s) => s.y.every((y) => y > 0));
    this.box = el("figure", { class: "chart" });
    const title = el("figcaption", {}, el("b", {}, spec.title), spec.unit ? el("span", { class: "dim" }, " " + spec.unit) : null);
    const buttons = el("span", { class: "tools" });
    if (spec.series.every((s) => s.y.every((y) => y > 0)))
      buttons.append(el("button", { type: "button", class: "mini log", "aria-pressed": String(this.log), title: "logarithmic axis",
        onclick: (e) => { this.log = !this.log; e.target.setAttribute("aria-pressed", String(this.log)); this.draw(); } }, "log"));
    this.reset = el("button", { type: "button", class: "mini reset", title: "show everything (or double click)", onclick: () => this.group.zoom(null) }, "reset zoom");
    buttons.append(this.reset);
    title.append(buttons);
    this.plot = el("div", { class: "plot" });
    this.tip = el("div", { class: "tip", role: "status" });
    this.box.append(title, this.plot, this.legend());
    this.plot.append(this.tip);
    parent.append(this.box);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  legend() {
    const box = el("div", { class: "legend" });
    if (this.spec.series.length < 2) return box;
    for (const s of this.spec.series)
      box.append(el("button", { type: "button", class: "key", "aria-pressed": "true", onclick: (e) => {
        if (this.hidden.has(s)) this.hidden.delete(s); else this.hidden.add(s);
        e.currentTarget.setAttribute("aria-pressed", String(!this.hidden.has(s)));
        this.draw();
      } }, el("i", { style: `background:${s.color}` }), s.name));
    return box;
  }

  shown() { return this.spec.series.filter((s) => !this.hidden.has(s) && s.x.length); }

  draw() {
    const width = this.plot.clientWidth, height = this.spec.height || 210;
    if (!width) return;
    if (this.svg) this.svg.remove();
    const svg = (this.svg = node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": this.spec.title }));
    this.plot.prepend(svg);
    const left = 52, right = 10, top = 8, bottom = 24;
    const series = this.shown();
    const allX = series.flatMap((s) => s.x);
    const full = allX.length ? [Math.min(...allX), Math.max(...allX)] : [0, 1];
    if (full[0] === full[1]) { full[0] -= 0.5; full[1] += 0.5; }
    const range = this.group.range || full;
    this.reset.hidden = !this.group.range;
    const value = (y) => (this.log ? Math.log10(y) : y);
    let low = Infinity, high = -Infinity;
    for (const s of series)
      s.x.forEach((x, i) => {
        if (x >= range[0] && x <= range[1]) { low = Math.min(low, value(s.y[i])); high = Math.max(high, value(s.y[i])); }
      });
    if (!isFinite(low)) { low = 0; high = 1; }
    const pad = (high - low || Math.abs(high) || 1) * 0.07;
    if (high === low || low - pad >= 0 || low < 0 || this.log) low -= pad; else low = 0;
    high += pad;
    const X = (x) => left + ((width - left - right) * (x - range[0])) / (range[1] - range[0]);
    const Y = (y) => height - bottom - ((height - top - bottom) * (value(y) - low)) / (high - low);
    this.scale = { X, Y, left, right, top, bottom, width, height, range, back: (px) => range[0] + ((px - left) / (width - left - right)) * (range[1] - range[0]) };
    const grid = node("g", { class: "grid" }, svg);
    for (const t of this.log ? logTicks(low, high) : ticks(low, high, 4)) {
      const y = height - bottom - ((height - top - bottom) * (t - low)) / (high - low);
      node("line", { x1: left, x2: width - right, y1: y, y2: y }, grid);
      node("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, grid, show(this.log ? Number((10 ** t).toPrecision(3)) : Number(t.toPrecision(6))));
    }
    for (const t of ticks(range[0], range[1], Math.max(3, Math.floor(width / 80))))
      node("text", { x: X(t), y: height - 7, "text-anchor": "middle" }, grid, show(t));
    const clip = "clip" + Chart.count++;
    node("rect", { x: left, y: 0, width: width - left - right, height: height - bottom + 2 }, node("clipPath", { id: clip }, node("defs", {}, svg)));
    const inside = node("g", { "clip-path": `url(#${clip})` }, svg);
    for (const mark of this.spec.marks || []) {
      node("line", { x1: X(mark.x), x2: X(mark.x), y1: top, y2: height - bottom, class: "mark" }, inside);
      node("text", { x: X(mark.x) + (X(mark.x) > width - 60 ? -4 : 4), y: top + 10, class: "marktext", "text-anchor": X(mark.x) > width - 60 ? "end" : "start" }, inside, mark.text);
    }
    for (const s of series) this.curve(inside, s, X, Y);
    this.cursor = node("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" }, svg);
    this.dots = node("g", {}, svg);
    this.brush = node("rect", { y: top, height: height - top - bottom, class: "brush", visibility: "hidden" }, svg);
  }

  curve(parent, s, X, Y) {
    const path = (ys) => ys.map((y, i) => `${i ? "L" : "M"}${X(s.x[i]).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
    const many = s.x.length > 60 && !s.exact;
    const width = this.spec.series.length > 8 ? 1.2 : 1.8;
    const line = { fill: "none", stroke: s.color, "stroke-width": width, "stroke-linejoin": "round", "stroke-dasharray": s.dash || "none" };
    if (many) node("path", { ...line, d: path(s.y), opacity: 0.28, "stroke-width": 1 }, parent);
    node("path", { ...line, d: path(many ? smoothed(s.y) : s.y) }, parent);
    if (s.x.length <= 24) s.x.forEach((x, i) => node("circle", { cx: X(x), cy: Y(s.y[i]), r: 2.6, fill: s.color }, parent));
  }

  // The crosshair at the nearest point of each curve; the tip only where the pointer is.
  mark(x, tipped) {
    if (!this.svg || !this.scale) return;
    this.dots.replaceChildren();
    if (x === null) {
      this.cursor.setAttribute("visibility", "hidden");
      this.tip.classList.remove("on");
      return;
    }
    const rows = [];
    let at = null;
    for (const s of this.shown()) {
      let best = 0;
      for (let i = 1; i < s.x.length; i++) if (Math.abs(s.x[i] - x) < Math.abs(s.x[best] - x)) best = i;
      if (at === null || Math.abs(s.x[best] - x) < Math.abs(at - x)) at = s.x[best];
      rows.push([s, best]);
    }
    if (at === null) return;
    const { X, Y, range, width } = this.scale;
    if (at < range[0] || at > range[1]) return;
    this.cursor.setAttribute("x1", X(at));
    this.cursor.setAttribute("x2", X(at));
    this.cursor.setAttribute("visibility", "visible");
    for (const [s, i] of rows)
      if (s.x[i] >= range[0] && s.x[i] <= range[1]) node("circle", { cx: X(s.x[i]), cy: Y(s.y[i]), r: 4, fill: s.color, class: "dot" }, this.dots);
    this.tip.classList.toggle("on", tipped);
    if (!tipped) return;
    rows.sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]);
    this.tip.replaceChildren(
      el("div", { class: "dim" }, `${this.spec.xlabel || "step"} ${show(at)}`),
      ...rows.slice(0, 12).map(([s, i]) => el("div", {}, el("i", { style: `background:${s.color}` }), el("span", {}, s.name), el("b", {}, show(s.y[i]) + (s.x[i] === at ? "" : ` @${show(s.x[i])}`)))),
    );
    const right = X(at) > width / 2;
    this.tip.style.left = right ? "auto" : X(at) + 12 + "px";
    this.tip.style.right = right ? width - X(at) + 12 + "px" : "auto";
  }

  listen() {
    let from = null;
    const px = (e) => e.clientX - this.plot.getBoundingClientRect().left;
    this.plot.addEventListener("pointerdown", (e) => {
      if (e.button || !this.scale) return;
      from = px(e);
      this.plot.setPointerCapture(e.pointerId);
    });
    this.plot.addEventListener("pointermove", (e) => {
      if (!this.scale) return;
      const at = px(e);
      this.group.hover(this.scale.back(at), this);
      if (from !== null && Math.abs(at - from) > 5) {
        this.brush.setAttribute("visibility", "visible");
        this.brush.setAttribute("x", Math.min(at, from));
        this.brush.setAttribute("width", Math.abs(at - from));
      }
    });
    const end = (e) => {
      if (from === null || !this.scale) return;
      const at = px(e), ends = [this.scale.back(from), this.scale.back(at)].sort((a, b) => a - b);
      if (e.type === "pointerup" && Math.abs(at - from) > 12) {
        const { range } = this.scale;
        this.group.zoom([Math.max(range[0], ends[0]), Math.min(range[1], ends[1])]);
      } else if (this.brush) this.brush.setAttribute("visibility", "hidden");
      from = null;
    };
    this.plot.addEventListener("pointerup", end);
    this.plot.addEventListener("pointercancel", end);
    this.plot.addEventListener("pointerleave", () => this.group.hover(null, this));
    this.plot.addEventListener("dblclick", () => this.group.zoom(null));
  }
}
Chart.count = 0;
