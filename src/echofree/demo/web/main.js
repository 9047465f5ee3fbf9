// The page: files or the microphone go to the worker, what comes back is drawn, played and saved.

import { Ear } from "./live.js";
import { Sonogram, paintCost } from "./picture.js";
import { Player } from "./player.js";
import { TEXTS } from "./texts.js";
import { readSound, writeWav } from "./wav.js";

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const SIGNALS = ["mic", "out", "far"];
const LIVE_S = 120; // a live take ends by itself
let language = localStorage.getItem("echofree-language") || (navigator.language.startsWith("zh") ? "zh" : "en");
let model = null, take = null, ear = null, faultText = null;

function say(key, values = {}) {
  return TEXTS[language][key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

// ---- texts and colours

function label() {
  root.lang = language === "zh" ? "zh-CN" : "en";
  document.querySelectorAll("[data-text]").forEach((node) => { node.textContent = say(node.dataset.text); });
  $("language").textContent = language === "zh" ? "English" : "中文";
  $("language").lang = language === "zh" ? "en" : "zh";
  $("theme").textContent = say(`theme_${root.dataset.theme}`);
  $("live").textContent = say(ear ? "stop" : "start");
  document.querySelectorAll(".track").forEach((track) => {
    track.querySelector("button").textContent = say(track.dataset.signal);
    track.querySelector("canvas").setAttribute("aria-label", say(track.dataset.signal));
  });
  if (faultText) $("fault").textContent = say(...faultText);
  else if (!model) $("model").textContent = say("loading");
  if (model) describe();
  player.label(say("play"), say("pause"));
  if (take) show();
}

function describe() {
  const { contract, size } = model, rate = contract.sample_rate;
  $("model").textContent = say("model", {
    file: contract.file || say("linear_only"), rate: rate / 1000, hop: (1000 * contract.hop_samples) / rate,
    latency: (1000 * contract.latency_samples) / rate, size: (size / 1e6).toFixed(1), source: contract.source,
  });
  $("hint").textContent = say("hint", { khz: rate / 2000 });
  $("cost_how").textContent = say("cost_how", { ms: hopMs() });
}

const hopMs = () => (1000 * model.contract.hop_samples) / model.contract.sample_rate;

function fault(key, values) {
  faultText = key ? [key, values] : null;
  $("fault").hidden = !key;
  if (key) $("fault").textContent = say(key, values);
}

// ---- a take: what was heard, what came out, what it cost

class Take {
  constructor(live, mic, far) {
    Object.assign(this, { live, times: [], ended: false, flags: {}, notes: [] });
    this.waves = live ? { mic: new Float32Array(0), far: new Float32Array(0) } : { mic, far };
    this.waves.out = new Float32Array(live ? 0 : mic.length);
    this.size = { mic: live ? 0 : mic.length, far: live ? 0 : far.length, out: 0 };
  }

  add(name, wave) {
    const at = this.size[name];
    if (this.live && at + wave.length > this.waves[name].length) {
      const more = new Float32Array(2 * (at + wave.length));
      more.set(this.waves[name].subarray(0, at));
      this.waves[name] = more;
    }
    this.waves[name].set(wave.subarray(0, this.waves[name].length - at), at);
    this.size[name] = Math.min(at + wave.length, this.waves[name].length);
  }

  // All signals are as long as the microphone has been heard and has come out.
  end(flags) {
    const size = Math.min(this.size.mic, this.size.out);
    for (const name of SIGNALS) this.waves[name] = this.waves[name].slice(0, size);
    Object.assign(this, { ended: true, flags });
  }
}

const pictures = {};
const player = new Player($("player"), $("play"), $("clock"));

function begin(live, mic, far) {
  player.stop();
  player.load(null);
  take = new Take(live, mic, far);
  const top = live ? undefined : pictures.mic.loudest(mic);
  for (const name of SIGNALS) pictures[name].start(live ? null : mic.length, live || name !== "far" ? top : Math.max(top - 40, pictures.far.loudest(far)));
  if (!live) for (const name of ["mic", "far"]) pictures[name].grow(take.waves[name], mic.length, true);
  $("result").hidden = false;
  $("save").hidden = true;
  $("findings").hidden = true;
  busy(true);
  show();
}

function part({ out, times, mic, far }) {
  if (!take || take.ended) return;
  take.times.push(...times);
  take.add("out", out);
  if (take.live) {
    take.add("mic", mic);
    take.add("far", far);
  }
  for (const name of take.live ? SIGNALS : ["out"]) pictures[name].grow(take.waves[name], take.size[name]);
  show();
  if (ear && take.size.mic > LIVE_S * model.contract.sample_rate) toggle();
}

function done(flags) {
  take.end(flags);
  const { waves } = take, size = waves.mic.length, rate = model.contract.sample_rate;
  if (!waves.out.every(Number.isFinite)) fault("nonfinite", {});
  if (take.live && size) {
    const top = pictures.mic.loudest(waves.mic);
    for (const name of SIGNALS) {
      pictures[name].start(size, name === "far" ? Math.max(top - 40, pictures.far.loudest(waves.far)) : top);
      pictures[name].grow(waves[name], size, true);
    }
  } else pictures.out.grow(waves.out, size, true);
  player.load(SIGNALS.map((name) => waves[name]), rate);
  if ($("save").href) URL.revokeObjectURL($("save").href);
  $("save").href = URL.createObjectURL(writeWav(waves.out, rate));
  $("save").download = "echofree.wav";
  $("save").hidden = false;
  busy(false);
  show();
  root.dataset.state = "done";
}

// ---- what is said about a take

function show() {
  const rate = model.contract.sample_rate, seconds = (samples) => (samples / rate).toFixed(1);
  const all = take.waves.mic.length, at = take.size.out;
  $("status").textContent = take.ended ? say("done", { all: seconds(all) }) : take.live ? say("listening", { at: seconds(at) }) : say("working", { at: seconds(at), all: seconds(all) });
  tiles();
  paintCost($("cost"), take.times, hopMs());
  const texts = [...take.notes.map((note) => say(...note)), ...(take.ended ? findings(take.flags) : [])];
  $("findings").hidden = !texts.length;
  $("findings").replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}

function tiles() {
  const { times } = take, rate = model.contract.sample_rate, sorted = [...times].sort((a, b) => a - b);
  if (!times.length) return $("tiles").replaceChildren();
  const mean = times.reduce((a, b) => a + b, 0) / times.length, slow = sorted[Math.floor(0.99 * (times.length - 1))];
  const power = (name) => take.waves[name].reduce((sum, x, n) => (n < take.size.out ? sum + x * x : sum), 1e-12);
  const rows = [
    ["mean", `${mean.toFixed(2)} ms`], ["slow", `${slow.toFixed(1)} ms`], ["real", `${((100 * mean) / hopMs()).toFixed(1)} %`],
    ["late", `${((1000 * model.contract.latency_samples) / rate).toFixed(0)} ms`],
  ];
  if (take.ended) rows.push(["level", `${(10 * Math.log10(power("mic") / power("out"))).toFixed(1)} dB`]);
  if (take.flags.delay_samples) rows.push(["delay", `${((1000 * take.flags.delay_samples) / rate).toFixed(0)} ms`]);
  $("tiles").replaceChildren(...rows.map(([name, value]) => {
    const tile = document.createElement("div"), figure = document.createElement("b");
    tile.className = "tile";
    tile.dataset.figure = name;
    figure.textContent = value;
    tile.append(figure, say(`tile_${name}`));
    return tile;
  }));
}

function findings(flags) {
  const found = ["negative_delay", "drift", "unexplained", "saturated"].filter((name) => flags[name]);
  return found.map((name) => say(name, { ppm: Math.round(flags.drift_ppm) }));
}

// ---- two files

async function soundOf(file) {
  let wave;
  try {
    wave = await readSound(await file.arrayBuffer(), model.contract.sample_rate);
  } catch (error) {
    throw { key: "unreadable", values: { name: file.name, why: error.message } };
  }
  if (!wave.length) throw { key: "empty", values: { name: file.name } };
  return wave;
}

async function sampleSound(name) {
  const answer = await fetch(`sample/${name}.wav`);
  return readSound(await answer.arrayBuffer(), model.contract.sample_rate);
}

async function pair(get) {
  fault(null);
  root.dataset.state = "busy";
  busy(true);
  try {
    const [mic, given] = await get(), far = new Float32Array(mic.length);
    far.set(given.subarray(0, mic.length));
    begin(false, mic, far);
    const gap = given.length - mic.length, rate = model.contract.sample_rate;
    if (Math.abs(gap) > rate / 100) take.notes.push(["lengths", { s: (Math.abs(gap) / rate).toFixed(2), what: say(gap > 0 ? "longer" : "shorter"), done: say(gap > 0 ? "cut" : "filled") }]);
    worker.postMessage({ kind: "files", mic, far });
  } catch (error) {
    busy(false);
    if (!error.key) throw error;
    fault(error.key, error.values);
  }
}

function chosen() {
  const mic = $("mic").files[0], far = $("far").files[0];
  if (!mic || !far) return fault("no_sound", {});
  return pair(() => Promise.all([soundOf(mic), soundOf(far)]));
}

// ---- live

async function toggle() {
  if (ear) {
    const old = ear;
    ear = null;
    $("live").disabled = true;
    await old.stop();
    return worker.postMessage({ kind: "end" });
  }
  fault(null);
  const choice = $("plays").value, file = $("far").files[0], { contract } = model;
  if (choice === "file" && !file) return fault("no_far_file", {});
  $("live").disabled = true;
  const opened = new Ear(contract.sample_rate, contract.hop_samples);
  try {
    const far = choice === "nothing" ? null : choice === "file" ? await soundOf(file) : await sampleSound("far");
    const port = await opened.open(far, () => { if (ear === opened) { take.notes.push(["mic_end", {}]); toggle(); } });
    ear = opened;
    root.dataset.state = "busy";
    begin(true);
    worker.postMessage({ kind: "live", port }, [port]);
  } catch (error) {
    await opened.stop();
    if (!error.key) throw error;
    fault(error.key, error.values);
  }
  busy(Boolean(ear));
}

function busy(on) {
  for (const id of ["run", "sample"]) $(id).disabled = on || !model;
  $("live").disabled = !model || (on && !ear);
  $("live").textContent = say(ear ? "stop" : "start");
  $("live").classList.toggle("stop", Boolean(ear));
}

// ---- the beginning

const worker = new Worker("worker.js", { type: "module" });
worker.onerror = (event) => fault("broken", { why: event.message || "worker.js" });
worker.onmessage = ({ data }) => {
  if (data.kind === "loaded") {
    model = data;
    for (const name of SIGNALS) pictures[name] = new Sonogram(document.querySelector(`[data-signal=${name}] canvas`), data.contract.sample_rate);
    busy(false);
    label();
    root.dataset.ready = "true";
  } else if (data.kind === "part") part(data);
  else if (data.kind === "done") done(data.flags);
  else if (data.kind === "slow") {
    take.notes.push(["slow", { s: data.seconds.toFixed(1) }]);
    show();
  } else {
    fault(data.kind, { why: data.why });
    ear?.stop();
    ear = null;
    busy(false);
  }
};

$("run").onclick = chosen;
$("sample").onclick = () => pair(() => Promise.all([sampleSound("mic"), sampleSound("far")]));
$("live").onclick = toggle;
$("language").onclick = () => {
  language = language === "zh" ? "en" : "zh";
  localStorage.setItem("echofree-language", language);
  label();
};
$("theme").onclick = () => {
  const order = ["auto", "light", "dark"];
  root.dataset.theme = order[(order.indexOf(root.dataset.theme) + 1) % 3];
  localStorage.setItem("echofree-theme", root.dataset.theme);
  label();
};
addEventListener("resize", () => { if (take) paintCost($("cost"), take.times, hopMs()); });
label();
worker.postMessage({ kind: "load" });
