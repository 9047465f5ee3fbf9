"use strict";
// Spectrograms and players in sync: all signals of a clip run at once, switching between them keeps the place.

const BINS = 256, WINDOW = 512, DEPTH_DB = 75;
const MAP = [[4, 5, 14], [40, 17, 89], [101, 26, 128], [161, 48, 122], [216, 76, 87], [246, 127, 67], [252, 190, 105], [252, 248, 201]];

function colour(level) {
  const at = Math.min(0.9999, Math.max(0, level)) * (MAP.length - 1), i = Math.floor(at), part = at - i;
  return MAP[i].map((c, k) => Math.round(c + part * (MAP[i + 1][k] - c)));
}

// Power of the bins 0 to BINS - 1 of one windowed frame, by a radix-2 FFT in place.
const fft = (() => {
  const n = WINDOW, re = new Float32Array(n), im = new Float32Array(n), power = new Float32Array(BINS);
  const cos = Float32Array.from({ length: n / 2 }, (_, i) => Math.cos((2 * Math.PI * i) / n));
  const sin = Float32Array.from({ length: n / 2 }, (_, i) => Math.sin((2 * Math.PI * i) / n));
  const hann = Float32Array.from({ length: n }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / n));
  const order = Uint16Array.from({ length: n }, (_, i) => { let r = 0; for (let b = 1, k = i; b < n; b <<= 1, k >>= 1) r = (r << 1) | (k & 1); return r; });
  return (wave, start) => {
    for (let i = 0; i < n; i++) { const at = start + order[i]; re[i] = (at < wave.length ? wave[at] : 0) * hann[order[i]]; im[i] = 0; }
    for (let size = 2; size <= n; size <<= 1) {
      const half = size >> 1, stride = n / size;
      for (let at = 0; at < n; at += size)
        for (let k = 0; k < half; k++) {
          const a = at + k, b = a + half, c = cos[k * stride], s = -sin[k * stride];
          const x = re[b] * c - im[b] * s, y = re[b] * s + im[b] * c;
          re[b] = re[a] - x; im[b] = im[a] - y; re[a] += x; im[a] += y;
        }
    }
    for (let k = 0; k < BINS; k++) power[k] = re[k] * re[k] + im[k] * im[k];
    return power;
  };
})();

function spectrogram(wave) {
  const hop = Math.max(128, Math.ceil(wave.length / 900)), frames = Math.max(1, Math.floor((wave.length - WINDOW) / hop) + 1);
  const levels = new Float32Array(frames * BINS);
  let top = -200;
  for (let f = 0; f < frames; f++) {
    const power = fft(wave, f * hop);
    for (let k = 0; k < BINS; k++) {
      const db = 10 * Math.log10(power[k] + 1e-12);
      levels[f * BINS + k] = db;
      if (db > top) top = db;
    }
  }
  return { frames, levels, top };
}

function paint(canvas, found, top) {
  canvas.width = found.frames;
  canvas.height = BINS;
  const context = canvas.getContext("2d"), image = context.createImageData(found.frames, BINS);
  const table = Array.from({ length: 256 }, (_, i) => colour(i / 255));
  for (let f = 0; f < found.frames; f++)
    for (let k = 0; k < BINS; k++) {
      const level = Math.round((255 * (found.levels[f * BINS + k] - top + DEPTH_DB)) / DEPTH_DB);
      const rgb = table[Math.min(255, Math.max(0, level))], at = 4 * ((BINS - 1 - k) * found.frames + f);
      image.data[at] = rgb[0]; image.data[at + 1] = rgb[1]; image.data[at + 2] = rgb[2]; image.data[at + 3] = 255;
    }
  context.putImageData(image, 0, 0);
}

function bytesOf(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

class Player {
  constructor(clip) {
    this.clip = clip;
    this.at = 0;
    this.playing = false;
    this.buffers = null;
    this.box = el("div", { class: "player", tabindex: "0", role: "group", "aria-label": "player of " + clip.name });
    this.button = el("button", { type: "button", class: "play", onclick: () => this.toggle() }, "▶ play");
    this.clock = el("span", { class: "clock" }, `0.0 / ${clip.seconds.toFixed(1)} s`);
    this.state = el("span", { class: "dim" }, "");
    this.rows = clip.signals.map((signal, i) => this.row(signal, i));
    const own = clip.signals.findIndex((s) => s.role === "own");
    this.box.append(el("div", { class: "transport" }, this.button, this.clock, el("span", { class: "dim hint" }, "click a picture to hear it from there · space, ← →, 1–9"), this.state), ...this.rows.map((r) => r.box),
      el("div", { class: "axis dim" }, el("span", {}, "0 s"), el("span", {}, (clip.length || clip.seconds).toFixed(1) + " s")));
    this.choose(own < 0 ? 0 : own);
    this.box.addEventListener("keydown", (e) => this.key(e));
    Player.all.push(this);
    new IntersectionObserver((seen, watcher) => { if (seen.some((s) => s.isIntersecting)) { watcher.disconnect(); this.load(); } }, { rootMargin: "400px" }).observe(this.box);
  }

  row(signal, i) {
    const canvas = el("canvas", { width: 10, height: BINS });
    const head = el("div", { class: "head" });
    const picture = el("div", { class: "picture" }, canvas, head, el("span", { class: "hz" }, "8 kHz"));
    picture.addEventListener("click", (e) => {
      const box = picture.getBoundingClientRect();
      this.choose(i);
      this.seek(((e.clientX - box.left) / box.width) * this.seconds(), true);
    });
    const label = el("button", { type: "button", class: "signal", onclick: () => this.choose(i) }, el("kbd", {}, String(i + 1)), signal.label);
    const save = el("a", { class: "save", title: "save as flac", download: `${this.clip.name.replace(/\W+/g, "_")}_${signal.label.replace(/\W+/g, "_")}.flac` }, "↓");
    save.addEventListener("click", () => { if (!save.href) save.href = URL.createObjectURL(new Blob([bytesOf(signal.data)], { type: "audio/flac" })); });
    return { box: el("div", { class: "track " + signal.role }, el("div", { class: "name" }, label, save), picture), canvas, head, label };
  }

  seconds() { return this.buffers ? this.buffers[0].duration : this.clip.seconds; }

  async load() {
    if (this.loading) return this.loading;
    this.loading = (async () => {
      try {
        const decoder = new OfflineAudioContext(1, 1, this.clip.rate_hz);
        this.buffers = await Promise.all(this.clip.signals.map((s) => decoder.decodeAudioData(bytesOf(s.data).buffer)));
      } catch (error) {
        this.state.textContent = "this browser can't decode the sound: " + error.message;
        return;
      }
      const found = this.buffers.map((b) => spectrogram(b.getChannelData(0)));
      const top = Math.max(...found.filter((_, i) => this.clip.signals[i].role !== "far").map((f) => f.top));
      // the far end has a level of its own; silence stays dark
      found.forEach((f, i) => paint(this.rows[i].canvas, f, this.clip.signals[i].role === "far" ? Math.max(f.top, top - 40) : top));
      this.box.classList.add("loaded");
      this.clock.textContent = `0.0 / ${this.seconds().toFixed(1)} s`;
      this.box.querySelector(".axis").lastChild.textContent = this.seconds().toFixed(1) + " s";
    })();
    return this.loading;
  }

  choose(i) {
    this.chosen = i;
    this.rows.forEach((r, k) => { r.box.classList.toggle("on", k === i); r.label.setAttribute("aria-pressed", String(k === i)); });
    if (this.gains) this.gains.forEach((g, k) => g.gain.setTargetAtTime(k === i ? 1 : 0, this.context.currentTime, 0.008));
  }

  async toggle() { if (this.playing) this.stop(); else await this.play(); }

  async play() {
    await this.load();
    if (!this.buffers) return;
    Player.all.forEach((p) => p !== this && p.playing && p.stop());
    if (!Player.context) Player.context = new AudioContext();
    const context = (this.context = Player.context);
    await context.resume();
    if (this.at >= this.seconds() - 0.05) this.at = 0;
    const when = context.currentTime + 0.03;
    this.gains = this.buffers.map((_, k) => new GainNode(context, { gain: k === this.chosen ? 1 : 0 }));
    this.sources = this.buffers.map((buffer, k) => {
      const source = new AudioBufferSourceNode(context, { buffer });
      source.connect(this.gains[k]).connect(context.destination);
      source.start(when, this.at);
      return source;
    });
    this.started = when - this.at;
    this.playing = true;
    this.button.textContent = "❚❚ pause";
    this.tick();
  }

  stop() {
    if (!this.playing) return;
    this.at = Math.max(0, Math.min(this.seconds(), this.context.currentTime - this.started));
    this.sources.forEach((s) => s.stop());
    this.playing = false;
    this.gains = null;
    this.button.textContent = "▶ play";
    this.place();
  }

  seek(seconds, go) {
    const was = this.playing;
    if (was) this.stop();
    this.at = Math.max(0, Math.min(this.seconds(), seconds));
    this.place();
    if (was || go) this.play();
  }

  tick() {
    if (!this.playing) return;
    this.at = Math.max(0, this.context.currentTime - this.started);
    if (this.at >= this.seconds()) { this.stop(); this.at = 0; }
    this.place();
    if (this.playing) requestAnimationFrame(() => this.tick());
  }

  place() {
    this.clock.textContent = `${this.at.toFixed(1)} / ${this.seconds().toFixed(1)} s`;
    this.rows.forEach((r) => (r.head.style.left = (100 * this.at) / this.seconds() + "%"));
  }

  key(e) {
    if (e.target.tagName === "A") return;
    if (e.key === " ") this.toggle();
    else if (e.key === "ArrowLeft") this.seek(this.at - 1);
    else if (e.key === "ArrowRight") this.seek(this.at + 1);
    else if (/^[1-9]$/.test(e.key) && this.rows[e.key - 1]) this.choose(e.key - 1);
    else return;
    e.preventDefault();
  }
}
Player.all = [];
Player.context = null;
