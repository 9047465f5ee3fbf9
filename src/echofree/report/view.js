"use strict";
// The page, section by section, out of the JSON that stands in it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const COLORS = ["var(--c1)", "var(--c2)", "var(--c3)", "var(--c4)", "var(--c5)", "var(--c6)", "var(--c7)", "var(--c8)"];
const color = (i) => (i < COLORS.length ? COLORS[i] : `hsl(${(i * 137.5) % 360} 55% 55%)`);
const MANY = RUNS.length > 1;

// What a reader sees for a metric: its name, unit, digits, whether more is better (0: zero is best).
const METRICS = {
  erle: ["echo reduction", "dB", 1, 1], erle_late: ["echo reduction after 3 s", "dB", 1, 1], true_erle: ["error below the echo", "dB", 1, 1],
  aecmos_echo: ["AECMOS echo", "1–5", 2, 1], aecmos_deg: ["AECMOS other", "1–5", 2, 1], pesq: ["PESQ", "1–4.6", 2, 1], stoi: ["STOI", "0–1", 3, 1], estoi: ["ESTOI", "0–1", 3, 1],
  speech_survival: ["speech that survives", "share", 2, 1], near_gain: ["level of the speech", "dB", 1, 0], level_change: ["level without echo", "dB", 1, 0],
  talk_level: ["level of double talk", "dB", 1, 0], delay_ms: ["delay of the output", "ms", 1, -1], si_sdr: ["SI-SDR", "dB", 1, 1],
  si_sdr_improvement: ["SI-SDR gained", "dB", 1, 1], sdr: ["SDR", "dB", 1, 1], loss: ["loss", "", 4, -1], badness: ["badness", "0–1", 2, -1],
};
const metric = (key) => METRICS[key] || [key.replaceAll("_", " "), "", undefined, 1];
const words = (text) => text.replaceAll("_", " ");
const duration = (s) => (s === null || s === undefined ? "–" : s < 90 ? `${show(s, 0)} s` : s < 5400 ? `${show(s / 60, 1)} min` : `${show(s / 3600, 1)} h`);

function section(id, title, ...children) {
  const kept = children.flat(9).filter((c) => c !== null && c !== undefined);
  if (!kept.length) return null;
  return el("section", { id }, el("h2", {}, title), ...kept);
}

// ---- head ---------------------------------------------------------------------------------------------------------

function theme() {
  const names = ["auto", "light", "dark"];
  const button = el("button", { type: "button", class: "mini", id: "theme", title: "colours: auto, light, dark" }, "◐ auto");
  button.onclick = () => {
    const next = names[(names.indexOf(document.documentElement.dataset.theme || "auto") + 1) % 3];
    if (next === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
    button.textContent = "◐ " + next;
  };
  return button;
}

function head() {
  const counts = {};
  RUNS.forEach((r) => (counts[r.status] = (counts[r.status] || 0) + 1));
  const states = Object.entries(counts).map(([status, n]) => el("span", { class: "pill " + status }, MANY ? `${n} ${status}` : status));
  return el("header", {}, el("div", { class: "top" }, el("div", { class: "brand" }, "EchoFree"), el("nav", { id: "nav" }), theme()),
    el("h1", {}, DATA.title, " ", ...states),
    el("p", { class: "dim sub" }, MANY ? commonFolder() : RUNS[0].folder, el("br"), `EchoFree ${DATA.version}, page made ${DATA.made}`));
}

function commonFolder() {
  const parts = RUNS.map((r) => r.folder.split("/"));
  let n = 0;
  while (parts.every((p) => p[n] !== undefined && p[n] === parts[0][n])) n++;
  return parts[0].slice(0, n).join("/") || RUNS.map((r) => r.folder).join(", ");
}

function tile(name, value, note) {
  return el("div", { class: "tile" }, el("div", { class: "dim" }, name), el("b", {}, value), note ? el("div", { class: "dim" }, note) : null);
}

function tiles() {
  const run = MANY ? bestRun() : RUNS[0];
  if (!run) return null;
  const box = el("div", { class: "tiles" });
  if (run.best !== null) box.append(tile(MANY ? `best ${words(run.metric)}` : `best ${words(run.metric)} (validation)`, show(run.best), MANY ? run.name : null));
  if (!MANY && run.steps) box.append(tile("length", `${show(run.steps)} steps`, duration(run.seconds)));
  for (const [scenario, key] of [["far_end", "erle_late"], ["double_talk", "aecmos_echo"], ["double_talk", "aecmos_deg"], ["double_talk", "sdr"], ["double_talk", "speech_survival"], ["near_end", "level_change"]]) {
    const evaluation = run.evaluations[0];
    const of = (system) => evaluation && evaluation.systems[system] && evaluation.systems[system].scenarios[scenario] && evaluation.systems[system].scenarios[scenario].metrics[key];
    const own = of(evaluation && evaluation.own);
    if (!own) continue;
    const [name, unit, digits] = metric(key), rest = of("linear") || of("mic");
    box.append(tile(`${words(scenario)}: ${name}`, own.mean === null ? "invalid" : `${show(own.mean, digits)} ${unit.includes("–") || unit === "share" ? "" : unit}`,
      rest && rest.mean !== null ? `${of("linear") ? "linear filter" : "microphone"} ${show(rest.mean, digits)}` : null));
    if (box.children.length >= 6) break;
  }
  return box;
}

function bestRun() {
  const scored = RUNS.filter((r) => r.best !== null);
  const sign = RUNS[0].mode === "max" ? -1 : 1;
  return scored.sort((a, b) => sign * (a.best - b.best))[0] || RUNS[0];
}

function warnings() {
  const list = [], seen = new Map();
  for (const run of RUNS) for (const w of run.warnings) {
    const key = w.kind + w.text;
    if (!seen.has(key)) { seen.set(key, { ...w, runs: [] }); list.push(seen.get(key)); }
    seen.get(key).runs.push(run.name);
  }
  const errors = RUNS.filter((r) => r.error).map((r) => el("details", { class: "error", open: !MANY }, el("summary", {}, MANY ? `${r.name}: ` : "",
    r.error.rank === null || r.error.rank === undefined ? "it failed" : `rank ${r.error.rank} failed`, ": ", r.error.text.trim().split("\n").pop()), el("pre", {}, r.error.text)));
  const item = (w) => el("li", {}, el("span", { class: "tag" }, w.kind), w.text, MANY && w.runs.length < RUNS.length ? el("span", { class: "dim" }, ` (${w.runs.length > 3 ? w.runs.length + " runs" : w.runs.join(", ")})`) : null);
  const first = list.slice(0, 8), rest = list.slice(8);
  return [...errors, list.length ? el("ul", { class: "warnings" }, first.map(item)) : null, rest.length ? el("details", {}, el("summary", {}, `${rest.length} more`), el("ul", { class: "warnings" }, rest.map(item))) : null];
}

// ---- scores -------------------------------------------------------------------------------------------------------

function systemsOf(name) {
  // One column per system; in a comparison each run's own system under the run's name, the baselines once.
  const columns = [];
  for (const run of RUNS) for (const e of run.evaluations.filter((e) => e.name === name)) for (const [key, system] of Object.entries(e.systems)) {
    const own = key === e.own, label = own && MANY ? run.name : key;
    if (!columns.some((c) => c.label === label)) columns.push({ label, key, own, system, evaluation: e });
  }
  const order = (c) => (c.key === "mic" ? 0 : c.key === "linear" ? 1 : c.key === "target" ? 4 : c.own ? 3 : 2);
  columns.sort((a, b) => order(a) - order(b));
  let i = 0;
  columns.forEach((c) => (c.color = c.key === "mic" ? "var(--mic)" : c.key === "linear" ? "var(--linear)" : c.key === "target" ? "var(--target)" : color(i++)));
  return columns;
}

function cell(m, digits) {
  if (!m) return el("td", { class: "num dim" }, "–");
  if (m.mean === null) return el("td", { class: "num bad" }, `invalid ×${m.invalid}`);
  const text = [el("b", {}, show(m.mean, digits))];
  if (m.low !== null) text.push(el("span", { class: "ci" }, ` ${show(m.low, digits)} … ${show(m.high, digits)}`));
  if (m.invalid) text.push(el("span", { class: "bad" }, ` ${m.invalid} invalid`));
  return el("td", { class: "num" + (m.valid === false ? " void" : ""), title: m.valid === false ? "doesn't count: the near end is muted" : `${m.count} clips` }, ...text);
}

function strip(columns, scenario, key) {
  const found = columns.map((c) => [c, (c.system.scenarios[scenario] || { metrics: {} }).metrics[key]]).filter(([, m]) => m && m.mean !== null);
  if (!found.length) return el("td");
  const lows = found.map(([, m]) => m.low ?? m.mean), highs = found.map(([, m]) => m.high ?? m.mean);
  let low = Math.min(...lows), high = Math.max(...highs);
  if (high - low < 1e-9) { low -= 1; high += 1; }
  const width = 96, height = 8 * found.length + 4, X = (v) => 5 + ((width - 10) * (v - low)) / (high - low);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  found.forEach(([c, m], i) => {
    const y = 6 + 8 * i;
    if (m.low !== null) node("line", { x1: X(m.low), x2: X(m.high), y1: y, y2: y, stroke: c.color, "stroke-width": 2, opacity: 0.55 }, svg);
    node("circle", { cx: X(m.mean), cy: y, r: 3.4, fill: c.color }, svg);
  });
  return el("td", { class: "strip" }, svg);
}

function gainCell(columns, scenario, key) {
  const own = columns.filter((c) => c.own).pop();
  if (!own || MANY) return null;
  const other = own.system.gains && (own.system.gains.linear ? "linear" : own.system.gains.mic ? "mic" : null);
  const m = other && own.system.gains[other][scenario] && own.system.gains[other][scenario][key];
  const [, , digits, more] = metric(key);
  if (!m) return el("td", { class: "num dim" }, "–");
  const sure = m.low !== null && (m.low > 0 || m.high < 0) && more !== 0;
  const good = more * m.mean > 0;
  return el("td", { class: "num " + (sure ? (good ? "good" : "bad") : "dim") }, (m.mean > 0 ? "+" : "") + show(m.mean, digits), m.low !== null ? el("span", { class: "ci" }, ` ${show(m.low, digits)} … ${show(m.high, digits)}`) : null);
}

function scoreTable(columns, scenario) {
  const keys = [...new Set(columns.flatMap((c) => Object.keys((c.system.scenarios[scenario] || { metrics: {} }).metrics)))];
  const group = (k) => (DATA.groups.echo.includes(k) ? "Echo that is gone" : DATA.groups.speech.includes(k) ? "What happened to the talker" : "Both in one number");
  const useful = keys.filter((k) => !(k === "delay_ms" && columns.every((c) => { const m = (c.system.scenarios[scenario] || { metrics: {} }).metrics[k]; return !m || !m.mean; })));
  const groups = ["Echo that is gone", "What happened to the talker", "Both in one number"];
  const own = columns.filter((c) => c.own).pop();
  const against = !MANY && own && own.system.gains && (own.system.gains.linear ? "linear" : own.system.gains.mic ? "mic" : null);
  const clips = Math.max(...columns.map((c) => (c.system.scenarios[scenario] || { clips: 0 }).clips));
  const table = el("table", { class: "scores" }, el("thead", {}, el("tr", {}, el("th", {}, ""), columns.map((c) => el("th", { class: "num" }, el("i", { style: `background:${c.color}` }), c.label)),
    against ? el("th", { class: "num" }, `gain over ${against}`) : null, el("th", { class: "strip" }, ""))));
  for (const g of groups) {
    const part = useful.filter((k) => group(k) === g);
    if (!part.length) continue;
    table.append(el("tbody", {}, el("tr", { class: "group" }, el("th", { colspan: columns.length + 3 }, g)),
      part.map((k) => { const [name, unit, digits] = metric(k); return el("tr", {}, el("th", { title: k }, name, unit ? el("span", { class: "dim" }, " " + unit) : null), columns.map((c) => cell((c.system.scenarios[scenario] || { metrics: {} }).metrics[k], digits)),
        against ? gainCell(columns, scenario, k) : null, strip(columns, scenario, k)); })));
  }
  return el("div", { class: "card" }, el("h3", {}, words(scenario), el("span", { class: "dim" }, ` ${clips} clip${clips === 1 ? "" : "s"}`)), el("div", { class: "scroll" }, table));
}

function plane(columns) {
  // Echo removed against speech kept: only the upper right corner is good.
  const pick = (c, scenario, key) => { const s = c.system.scenarios[scenario]; const m = s && s.metrics[key]; return m && m.mean !== null ? m : null; };
  const options = [[["double_talk", "aecmos_deg"], ["double_talk", "aecmos_echo"]], [["double_talk", "sdr"], ["far_end", "erle_late"]], [["double_talk", "si_sdr"], ["far_end", "erle"]], [["near_end", "aecmos_deg"], ["far_end", "aecmos_echo"]], [["double_talk", "speech_survival"], ["far_end", "erle"]]];
  const axes = options.find(([x, y]) => columns.filter((c) => c.key !== "target" && pick(c, ...x) && pick(c, ...y)).length > 1);
  if (!axes) return null;
  const points = columns.filter((c) => c.key !== "target").map((c) => [c, pick(c, ...axes[0]), pick(c, ...axes[1])]).filter(([, x, y]) => x && y);
  const span = (i) => { const vs = points.flatMap((p) => [p[i].low ?? p[i].mean, p[i].high ?? p[i].mean]); const lo = Math.min(...vs), hi = Math.max(...vs), pad = (hi - lo || 1) * 0.12; return [lo - pad, hi + pad]; };
  const [x0, x1] = span(1), [y0, y1] = span(2), width = 460, height = 300, L = 48, B = 40;
  const X = (v) => L + ((width - L - 14) * (v - x0)) / (x1 - x0), Y = (v) => height - B - ((height - B - 12) * (v - y0)) / (y1 - y0);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, class: "plane", role: "img", "aria-label": "echo removed against speech kept" });
  const grid = node("g", { class: "grid" }, svg);
  for (const t of ticks(x0, x1, 4)) { node("line", { x1: X(t), x2: X(t), y1: 12, y2: height - B }, grid); node("text", { x: X(t), y: height - B + 15, "text-anchor": "middle" }, grid, show(Number(t.toPrecision(4)))); }
  for (const t of ticks(y0, y1, 4)) { node("line", { x1: L, x2: width - 14, y1: Y(t), y2: Y(t) }, grid); node("text", { x: L - 6, y: Y(t) + 4, "text-anchor": "end" }, grid, show(Number(t.toPrecision(4)))); }
  const label = ([scenario, key]) => `${words(scenario)}: ${metric(key)[0]}${metric(key)[1] ? ", " + metric(key)[1] : ""}`;
  node("text", { x: (L + width) / 2, y: height - 6, "text-anchor": "middle", class: "axisname" }, grid, label(axes[0]) + " →");
  node("text", { x: 12, y: (height - B) / 2, "text-anchor": "middle", class: "axisname", transform: `rotate(-90 12 ${(height - B) / 2})` }, grid, label(axes[1]) + " →");
  for (const [c, x, y] of points) {
    const line = { stroke: c.color, "stroke-width": 2, opacity: 0.55 };
    if (x.low !== null) node("line", { ...line, x1: X(x.low), x2: X(x.high), y1: Y(y.mean), y2: Y(y.mean) }, svg);
    if (y.low !== null) node("line", { ...line, x1: X(x.mean), x2: X(x.mean), y1: Y(y.low), y2: Y(y.high) }, svg);
    node("circle", { cx: X(x.mean), cy: Y(y.mean), r: 5.5, fill: c.color }, svg);
    const right = X(x.mean) > width * 0.7;
    if (points.length <= 12) node("text", { x: X(x.mean) + (right ? -9 : 9), y: Y(y.mean) - 8, "text-anchor": right ? "end" : "start", class: "name" }, svg, c.label);
  }
  return el("div", { class: "card" }, el("h3", {}, "Echo against speech"), el("p", { class: "dim" }, "Means with 95 % intervals. Only up and to the right is better: silence would win the one and lose the other."), svg);
}

function speed(columns) {
  const rows = [["rtf", "real-time factor, clips together", 3], ["rtf_stream", "real-time factor hop by hop in torch, one thread", 3], ["latency_ms", "latency, ms", 0]].filter(([k]) => columns.some((c) => c.system[k] !== null && c.system[k] !== undefined));
  if (!rows.length) return null;
  return el("div", { class: "card" }, el("h3", {}, "Speed and latency"), el("div", { class: "scroll" }, el("table", { class: "scores" }, el("thead", {}, el("tr", {}, el("th"), columns.map((c) => el("th", { class: "num" }, el("i", { style: `background:${c.color}` }), c.label)))),
    el("tbody", {}, rows.map(([k, name, digits]) => el("tr", {}, el("th", {}, name), columns.map((c) => el("td", { class: "num" }, show(c.system[k], digits)))))))));
}

function protocolOf(e) {
  const p = e.protocol;
  const rows = [["data", `${p.data && (p.data.root || p.data._target_)} (${p.split}), fingerprint ${p.data_fingerprint}`], ["scored", `${p.scored}; ${p.clips} clips, stretches ${p.segments || "–"}`], ["rate", `${p.rate_hz} Hz`], ["alignment", p.alignment], ["echo reduction", p.erle], ["AECMOS", p.aecmos ? Object.entries(p.aecmos).map(([k, v]) => `${words(k)} ${v}`).join(", ") : "not scored"],
    ["speed", p.speed], ["intervals", p.confidence ? `${p.confidence.method}, ${100 * p.confidence.level} %, ${p.confidence.draws} draws` : null], ["systems", p.systems ? Object.entries(p.systems).map(([k, v]) => (k === v ? k : `${k} (${v})`)).join(", ") : null], ["weights", p.checkpoint], ["packages", Object.entries(p.versions || {}).map(([k, v]) => `${k} ${v || "–"}`).join(", ")]];
  return el("details", {}, el("summary", {}, "How it was scored"), facts(rows));
}

function facts(rows) {
  return el("div", { class: "scroll card" }, el("table", { class: "facts" }, el("tbody", {}, rows.filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => el("tr", {}, el("th", {}, k), el("td", {}, v))))));
}

function scores() {
  const names = [...new Set(RUNS.flatMap((r) => r.evaluations.map((e) => e.name)))];
  return names.map((name) => {
    const columns = systemsOf(name);
    const runs = RUNS.filter((r) => r.evaluations.some((e) => e.name === name));
    const e = runs[0].evaluations.find((e) => e.name === name);
    const scenarios = ["double_talk", "far_end", "near_end", "silence", "unknown"].filter((s) => columns.some((c) => c.system.scenarios[s] && Object.keys(c.system.scenarios[s].metrics).length));
    return el("div", { class: "evaluation" }, names.length > 1 || name !== "test" ? el("h3", { class: "set" }, name, el("span", { class: "dim" }, ` ${e.when}`)) : null,
      el("div", { class: "legendline" }, columns.map((c) => el("span", {}, el("i", { style: `background:${c.color}` }), c.label))),
      el("div", { class: "cards" }, scenarios.map((s) => scoreTable(columns, s)), plane(columns), speed(columns)), MANY ? null : clipTable(e), protocolOf(e));
  });
}

// ---- clips --------------------------------------------------------------------------------------------------------

function clipTable(e) {
  if (!e.clips.length) return null;
  const keys = Object.keys(e.clips[0]).filter((k) => !["name", "scenario", "start_s", "seconds", "problems", "badness"].includes(k) && e.clips.some((c) => c[k] !== null));
  const columns = ["name", "scenario", "badness", ...keys];
  let sort = "badness", down = true, all = false;
  const body = el("tbody"), more = el("button", { type: "button", class: "mini", onclick: () => { all = !all; draw(); } });
  const heads = columns.map((k) => el("th", { class: k === "name" || k === "scenario" ? "" : "num" }, el("button", { type: "button", class: "sort", title: k, onclick: () => { down = sort === k ? !down : k !== "name"; sort = k; draw(); } }, metric(k)[0])));
  const draw = () => {
    heads.forEach((h, i) => h.setAttribute("aria-sort", columns[i] === sort ? (down ? "descending" : "ascending") : "none"));
    const rows = [...e.clips].sort((a, b) => { const x = a[sort], y = b[sort]; if (x === null || y === null) return (x === null) - (y === null); return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
    body.replaceChildren(...(all ? rows : rows.slice(0, 10)).map((c) => {
      const heard = document.getElementById(`clip-${e.name}-${c.name}`);
      return el("tr", { class: c.problems ? "bad" : "" }, columns.map((k) => (k === "name" ? el("th", { title: c.problems || "" }, heard ? el("a", { href: "#" + heard.id }, "♪ ", c.name) : c.name, c.problems ? el("div", { class: "problem" }, c.problems) : null) : k === "scenario" ? el("td", { class: "word" }, words(c[k])) : el("td", { class: "num" }, show(c[k], metric(k)[2])))));
    }));
    more.textContent = all ? "the first ten only" : `all ${e.clips.length}`;
    more.hidden = e.clips.length <= 10;
  };
  setTimeout(draw);
  return el("div", { class: "card clips" }, el("h3", {}, "Clip by clip", el("span", { class: "dim" }, " the worst first; click a column to sort"), " ", more), el("div", { class: "scroll" }, el("table", { class: "scores" }, el("thead", {}, el("tr", {}, heads)), body)));
}

function listening() {
  const { clips, left_out } = DATA.sounds;
  if (!clips.length && !left_out) return [];
  const cards = clips.map((clip) => {
    const chips = Object.entries(clip.scores[clip.own] || {}).filter(([k]) => METRICS[k] && k !== "delay_ms").map(([k, v]) => {
      const mic = (clip.scores.linear || clip.scores.mic || {})[k];
      return el("span", { class: "chip" }, metric(k)[0], " ", el("b", {}, show(v, metric(k)[2])), mic !== undefined && clip.own !== "linear" ? el("span", { class: "dim" }, ` (${show(mic, metric(k)[2])})`) : null);
    });
    return el("article", { class: "card clip", id: `clip-${clip.evaluation}-${clip.name}` }, el("h3", {}, clip.name, " ", el("span", { class: "tag" }, words(clip.scenario)), el("span", { class: "dim" }, " " + words(clip.why))),
      clip.problems.length ? el("p", { class: "problem" }, clip.problems.join("; ")) : null, chips.length ? el("div", { class: "chips" }, chips) : null, new Player(clip).box);
  });
  const note = [el("p", { class: "dim" }, "Scores are those of ", el("b", {}, clips.length ? clips[0].own : ""), ", in brackets the linear filter's, or the microphone's. All signals of a clip play at once: switching keeps the place.", left_out ? ` ${left_out} clips more are in listen/, left out here for the page's size.` : "")];
  return [...note, ...cards];
}

// ---- curves -------------------------------------------------------------------------------------------------------

const TIMING = { step_s: ["time of a step", "s"], samples_per_s: ["clips per second", ""], audio_s_per_s: ["audio per second", "s/s"], data_wait_share: ["share of time spent waiting for data", ""], peak_mem_mb: ["peak memory", "MB"], save_stall_s: ["stalled by saving", "s"] };

function series(group, key, name) {
  const sweepKey = DATA.kind === "sweep" && DATA.sweep.settings.length ? DATA.sweep.settings[0] : null;
  const kinds = sweepKey ? [...new Set(sweepKey.values.map((v) => JSON.stringify(v)))] : [];
  return RUNS.map((r, i) => {
    const found = r.curves[group] && r.curves[group][key];
    if (!found) return null;
    return { name: MANY ? r.name + (name ? ` ${name}` : "") : name || words(key), x: found[0], y: found[1], color: sweepKey ? color(kinds.indexOf(JSON.stringify(sweepKey.values[i]))) : color(MANY ? i : 0) };
  }).filter(Boolean);
}

function curves() {
  const group = new Group(), box = el("div", { class: "charts" });
  const evals = [...new Set(RUNS.flatMap((r) => Object.keys(r.curves).filter((k) => k !== "train")))];
  const keysOf = (g) => [...new Set(RUNS.flatMap((r) => Object.keys(r.curves[g] || {})))];
  const marks = [];
  if (!MANY && RUNS[0].best !== null) {
    const run = RUNS[0], c = evals.map((g) => run.curves[g] && run.curves[g][run.metric]).find(Boolean);
    if (c) { const i = c[1].findIndex((v) => Math.abs(v - run.best) <= 1e-5 * Math.abs(run.best)); if (i >= 0) marks.push({ x: c[0][i], text: "best" }); }
  }
  const loss = series("train", "loss", MANY ? "" : "training");
  const valid = evals.flatMap((g) => series(g, "loss", g).map((s, i) => ({ ...s, color: MANY ? s.color : color(1 + i), dash: MANY ? "5 3" : "none", exact: true })));
  const charts = [];
  if (loss.length || valid.length) charts.push({ title: "loss", series: [...loss, ...valid], marks });
  for (const g of evals) for (const k of keysOf(g)) if (k !== "loss") { const [name, unit] = metric(k); charts.push({ title: name, unit: `${unit ? unit + ", " : ""}${g}`, series: series(g, k).map((s) => ({ ...s, exact: true, color: MANY ? s.color : color(1) })), marks }); }
  for (const k of keysOf("train")) if (k.startsWith("loss_")) charts.push({ title: words(k), unit: "training", series: series("train", k) });
  for (const k of ["lr", "grad_norm"]) if (keysOf("train").includes(k)) charts.push({ title: { lr: "learning rate", grad_norm: "norm of the gradient" }[k], series: series("train", k).map((s) => ({ ...s, exact: k === "lr" })), log: k === "grad_norm" });
  for (const k of keysOf("train")) if (!TIMING[k] && !["loss", "lr", "grad_norm", "skipped_steps"].includes(k) && !k.startsWith("loss_")) charts.push({ title: words(k), series: series("train", k) });
  charts.filter((c) => c.series.length).forEach((c) => new Chart(box, c, group));
  const sweepKey = DATA.kind === "sweep" && DATA.sweep.settings[0];
  const note = sweepKey ? `Coloured by ${sweepKey.key}: ` : "";
  const kinds = sweepKey ? [...new Set(sweepKey.values.map((v) => JSON.stringify(v)))] : [];
  return box.children.length ? [el("p", { class: "dim" }, note, ...kinds.map((k, i) => el("span", { class: "keyed" }, el("i", { style: `background:${color(i)}` }), k)), " Drag to zoom, double click to go back; thin lines are the values, thick ones a running mean."), box] : [];
}

function timing() {
  const group = new Group(), box = el("div", { class: "charts" });
  for (const [k, [name, unit]] of Object.entries(TIMING)) {
    const s = series("train", k).map((s) => ({ ...s, name: MANY ? s.name : name }));
    if (s.length) new Chart(box, { title: name, unit, series: s, height: 160 }, group);
  }
  const rows = MANY || !RUNS[0].facts.id ? [] : [["wall clock", duration(RUNS[0].seconds)], ["peak memory by rank", RUNS[0].facts.peak_mem_mb ? RUNS[0].facts.peak_mem_mb.join(", ") + " MB" : null], ["run directory", `${RUNS[0].size_mb} MB`]];
  return box.children.length || rows.length ? [rows.length ? facts(rows) : null, box.children.length ? box : null] : [];
}

// ---- settings -----------------------------------------------------------------------------------------------------

function runTable() {
  if (!MANY) return null;
  const typed = new Set(RUNS.flatMap((r) => Object.keys(r.settings)));
  const varied = DATA.kind === "sweep" ? DATA.sweep.settings.map((s) => s.key) : DATA.differences.map((d) => d.key).filter((k) => typed.has(k)).slice(0, 6);
  const best = bestRun(), columns = ["run", "status", "best", "steps", "time", ...varied];
  const value = (r, k) => ({ run: r.name, status: r.status, best: r.best, steps: r.steps, time: r.seconds })[k] ?? (varied.includes(k) ? r.config[k] ?? null : null);
  let sort = "best", down = RUNS[0].mode === "max";
  const body = el("tbody"), heads = columns.map((k) => el("th", { class: k === "run" || k === "status" ? "" : "num" }, el("button", { type: "button", class: "sort", onclick: () => { down = sort === k ? !down : false; sort = k; draw(); } }, k === "best" ? `best ${words(RUNS[0].metric)}` : k)));
  const draw = () => {
    heads.forEach((h, i) => h.setAttribute("aria-sort", columns[i] === sort ? (down ? "descending" : "ascending") : "none"));
    const rows = [...RUNS].sort((a, b) => { const x = value(a, sort), y = value(b, sort); if (x === null || y === null) return (x === null) - (y === null); return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1); });
    body.replaceChildren(...rows.map((r) => el("tr", { class: r === best ? "best" : "" }, columns.map((k) => (k === "run" ? el("th", {}, DATA.kind === "compare" ? el("i", { style: `background:${color(RUNS.indexOf(r))}` }) : null, r.name) : k === "status" ? el("td", {}, el("span", { class: "pill " + r.status }, r.status)) : k === "time" ? el("td", { class: "num" }, duration(r.seconds)) : el("td", { class: "num" }, typeof value(r, k) === "object" && value(r, k) !== null ? JSON.stringify(value(r, k)) : show(value(r, k))))))));
  };
  draw();
  return el("div", { class: "card" }, el("div", { class: "scroll tall" }, el("table", { class: "scores" }, el("thead", {}, el("tr", {}, heads)), body)));
}

function importance() {
  const { settings, unscored, runs } = DATA.sweep;
  const known = settings.filter((s) => s.share !== null);
  if (!settings.length) return el("p", {}, "The runs have the same settings.");
  const bars = el("div", { class: "bars" });
  for (const s of settings) {
    const sure = s.p !== null && s.p < 0.05;
    bars.append(el("div", { class: "bar" }, el("code", {}, s.key), el("div", { class: "rail" }, el("div", { class: "fill" + (sure ? "" : " weak"), style: `width:${100 * (s.share || 0)}%` }), s.by_chance !== null ? el("div", { class: "chance", style: `left:${100 * s.by_chance}%`, title: "what chance alone would give on average" }) : null),
      el("span", { class: "num" }, s.share === null ? "–" : `${show(100 * s.share, 0)} %`), el("span", { class: "dim" }, s.p === null ? "too few results" : sure ? `p ${s.p < 0.005 ? "< 0.01" : "= " + show(s.p, 2)}` : "may be chance")));
  }
  const top = known[0], sign = DATA.sweep.mode === "max" ? -1 : 1;
  const level = top && [...top.levels].sort((a, b) => sign * (a.mean - b.mean))[0];
  const verdict = top ? el("p", { class: "verdict" }, top.p < 0.05 ? "What matters most: " : "Nothing stands out for sure; the largest share has ", el("code", {}, top.key), `, ${show(100 * top.share, 0)} % of the spread; `, "best on average at ", el("code", {}, JSON.stringify(level.value)), ` (${words(DATA.sweep.metric)} ${show(level.mean)}).`) : null;
  return [verdict, el("div", { class: "card" }, el("h3", {}, "Share of the spread that each setting explains alone"), bars, el("p", { class: "dim" }, `Of ${runs - unscored} results${unscored ? ` (${unscored} runs have none)` : ""}. The tick is what chance alone would give on average; "may be chance" means that shuffled results reach the bar in more than 5 % of draws.`)),
    el("div", { class: "cards small" }, settings.map(effectPlot))];
}

function effectPlot(s) {
  const width = 300, height = 190, L = 50, B = 30;
  const points = RUNS.map((r, i) => [s.values[i], r.best, r.name]).filter(([, y]) => y !== null);
  if (!points.length) return null;
  const ys = points.map((p) => p[1]), y0 = Math.min(...ys), y1 = Math.max(...ys), pad = (y1 - y0 || Math.abs(y1) || 1) * 0.1;
  const Y = (v) => height - B - ((height - B - 10) * (v - y0 + pad)) / (y1 - y0 + 2 * pad);
  const kinds = s.levels.map((l) => JSON.stringify(l.value)), scale = (v) => (s.log ? Math.log10(v) : v);
  const even = !s.numeric || kinds.length <= 6;
  const xs = s.numeric ? points.map((p) => scale(p[0])) : [], x0 = Math.min(...xs), x1 = Math.max(...xs);
  const X = (v) => (even ? L + ((width - L - 12) * (kinds.indexOf(JSON.stringify(v)) + 0.5)) / kinds.length : L + 8 + ((width - L - 28) * (scale(v) - x0)) / (x1 - x0 || 1));
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": s.key }), grid = node("g", { class: "grid" }, svg);
  for (const t of ticks(y0 - pad, y1 + pad, 5)) { node("line", { x1: L, x2: width - 8, y1: Y(t), y2: Y(t) }, grid); node("text", { x: L - 5, y: Y(t) + 4, "text-anchor": "end" }, grid, show(Number(t.toPrecision(4)))); }
  const labels = even ? s.levels.map((l) => l.value) : [Math.min(...points.map((p) => p[0])), Math.max(...points.map((p) => p[0]))];
  for (const v of labels) node("text", { x: X(v), y: height - 10, "text-anchor": "middle" }, grid, (typeof v === "string" ? v : JSON.stringify(v)).slice(0, 16));
  if (even) {
    const path = s.levels.map((l, i) => `${i ? "L" : "M"}${X(l.value)} ${Y(l.mean)}`).join("");
    if (s.numeric) node("path", { d: path, fill: "none", stroke: "var(--c1)", "stroke-width": 1.6, opacity: 0.7 }, svg);
    for (const l of s.levels) node("line", { x1: X(l.value) - 14, x2: X(l.value) + 14, y1: Y(l.mean), y2: Y(l.mean), stroke: "var(--c1)", "stroke-width": 3 }, svg);
  }
  points.forEach(([x, y, name], i) => { const dot = node("circle", { cx: X(x) + (even ? ((i * 7) % 11) - 5 : 0), cy: Y(y), r: 3.6, class: "run" }, svg); node("title", {}, dot, `${name}: ${show(y)}`); });
  return el("div", { class: "card" }, el("h3", {}, el("code", {}, s.key)), svg);
}

function settings() {
  if (!MANY) {
    const run = RUNS[0], rows = Object.entries(run.settings);
    if (!run.facts.id) return [];
    return [rows.length ? el("div", { class: "scroll card" }, el("table", { class: "facts" }, el("tbody", {}, rows.map(([k, v]) => el("tr", {}, el("th", {}, el("code", {}, k)), el("td", {}, el("code", {}, JSON.stringify(v)))))))) : el("p", { class: "dim" }, "Nothing: every setting has its default."), ...run.notes.map((n) => el("p", { class: "dim" }, n)), whole(run)];
  }
  const list = DATA.differences;
  const table = el("div", { class: "scroll tall card" }, el("table", { class: "scores" }, el("thead", {}, el("tr", {}, el("th", {}, "setting"), RUNS.map((r) => el("th", {}, r.name)))), el("tbody", {}, list.map((d) => el("tr", {}, el("th", {}, el("code", {}, d.key)), d.values.map((v) => el("td", {}, el("code", {}, v === null || v === undefined ? "–" : JSON.stringify(v)))))))));
  if (DATA.kind === "sweep" && RUNS.length > 8) return [whole(bestRun(), "The best run's whole configuration")];
  return [list.length ? table : el("p", { class: "dim" }, "None: the runs have the same settings."), whole(bestRun(), "The best run's whole configuration")];
}

function whole(run, title) {
  const box = el("pre", { class: "config" }), changed = new Set(Object.keys(run.settings));
  const draw = (text) => box.replaceChildren(...Object.entries(run.config).filter(([k]) => k.includes(text)).map(([k, v]) => el("div", { class: changed.has(k) ? "changed" : "" }, `${k}: ${JSON.stringify(v)}`)));
  draw("");
  return el("details", {}, el("summary", {}, title || "The whole configuration"), el("input", { type: "search", placeholder: "part of a key", "aria-label": "part of a key", oninput: (e) => draw(e.target.value) }), box);
}

function world() {
  return RUNS.filter((r) => r.facts.id).slice(0, MANY && DATA.kind === "sweep" ? 1 : 12).map((r) => {
    const f = r.facts, w = f.world || {}, m = f.machine || {};
    const rows = [["command", el("code", {}, f.command || "–")], ["id", f.id], ["model", r.model], ["ranks", w.size ? `${w.size} on ${[...new Set(w.hosts || [])].join(", ")}; back end ${w.backend}; found from: ${w.source}` : null], ["device", w.device ? `${w.device}, ${w.threads} thread(s) per rank` : null],
      ["step", f.step_size ? `${f.step_size.batch_size} clips × ${f.step_size.data_size} × ${f.step_size.accumulation} = ${f.step_size.global_batch} clips` : null], ["machine", m.host ? `${m.host}: ${m.cpu}, ${m.cpus} cores, ${Math.round((m.memory_mb || 0) / 1024)} GB${m.driver ? ", " + m.driver : ""}` : null], ["system", f.platform ? `${f.platform}, Python ${f.python}` : null],
      ["code", f.git_commit ? `${f.git_commit.slice(0, 12)}${f.patch ? " with uncommitted changes" : ""}, digest ${f.code_digest}` : f.code_digest ? `digest ${f.code_digest}` : null], ["packages", Object.entries(f.packages || {}).map(([k, v]) => `${k} ${v}`).join(", ")], ["seed", f.seed], ["data", f.data_fingerprint ? `fingerprint ${f.data_fingerprint}` : null],
      ["environment", Object.entries(f.environment || {}).map(([k, v]) => `${k}=${v}`).join(" ")], ["start", f.start ? new Date(1000 * f.start).toLocaleString() : null], ["parent run", f.parent_run]];
    const table = facts(rows);
    const exports = r.exports.length ? el("div", { class: "scroll card narrow" }, el("table", { class: "scores" }, el("thead", {}, el("tr", {}, ["export", "verdict", "MB", "largest difference"].map((h, i) => el("th", { class: i > 1 ? "num" : "" }, h)))), el("tbody", {}, r.exports.map((x) => el("tr", {}, el("th", {}, x.target), el("td", { class: x.verdict === "agrees" ? "good" : "bad" }, x.verdict), el("td", { class: "num" }, show(x.size_mb)), el("td", { class: "num" }, show(x.max))))))) : null;
    return MANY ? el("details", {}, el("summary", {}, r.name), table, exports) : [table, exports];
  });
}

// ---- together -----------------------------------------------------------------------------------------------------

function main() {
  const heard = listening();
  const parts = DATA.kind === "sweep"
    ? [section("summary", "At a glance", tiles(), warnings()), section("settings-effect", "Which setting matters", importance()), section("runs", "Runs", runTable()), section("curves", "Curves", curves()), section("listen", `Listen to ${bestRun().name}`, heard), section("scores", "Scores", scores()), section("timing", "Time and memory", timing()), section("settings", "Settings", settings()), section("world", "World", world())]
    : [section("summary", "At a glance", tiles(), warnings()), MANY ? section("runs", "Runs", runTable()) : null, section("scores", "Scores", scores()), section("listen", "Listen: the worst clips first", heard), section("curves", "Curves", curves()), section("timing", "Time and memory", timing()), section("settings", MANY ? "Settings that differ" : "Settings that were changed", settings()), section("world", "World", world())];
  const page = document.getElementById("page");
  page.append(head(), el("main", {}, parts.filter(Boolean)));
  const names = { summary: "Summary", "settings-effect": "Settings", runs: "Runs", scores: "Scores", listen: "Listen", curves: "Curves", timing: "Time", settings: DATA.kind === "sweep" ? "Config" : "Settings", world: "World" };
  document.getElementById("nav").append(...parts.filter(Boolean).map((s) => el("a", { href: "#" + s.id }, names[s.id])));
  document.documentElement.dataset.ready = "true";
}

main();
