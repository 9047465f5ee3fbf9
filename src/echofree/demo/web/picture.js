// Spectrograms that grow while the sound is made, and the bars of the time per hop.

import { realFft } from "./fft.js";

const DEPTH_DB = 75, LIVE_TOP_DB = 22, WIDTH = 900, LIVE_S = 12;
const MAP = [[4, 5, 14], [40, 17, 89], [101, 26, 128], [161, 48, 122], [216, 76, 87], [246, 127, 67], [252, 190, 105], [252, 248, 201]];
const COLOURS = Array.from({ length: 256 }, (_, i) => {
  const at = (i / 255) * (MAP.length - 1.001), low = Math.floor(at), part = at - low;
  return MAP[low].map((c, k) => Math.round(c + part * (MAP[low + 1][k] - c)));
});

export class Sonogram {
  constructor(canvas, rateHz) {
    const size = 2 ** Math.round(Math.log2(0.032 * rateHz));
    Object.assign(this, { canvas, rateHz, size, bins: size / 2, fft: realFft(size) });
    this.hann = Float32Array.from({ length: size }, (_, n) => (0.5 - 0.5 * Math.cos((2 * Math.PI * n) / size)) * (512 / size));
    this.frame = new Float32Array(size);
    this.re = new Float32Array(size / 2 + 1);
    this.im = new Float32Array(size / 2 + 1);
    this.context = canvas.getContext("2d");
  }

  // total: samples that will come; null: nobody knows, the picture runs on
  start(total, top = LIVE_TOP_DB) {
    this.rolls = total === null;
    this.step = this.rolls ? Math.round((LIVE_S * this.rateHz) / WIDTH) : Math.max(this.size / 4, Math.ceil(total / WIDTH));
    this.canvas.width = this.rolls ? WIDTH : Math.max(1, Math.ceil(total / this.step));
    this.canvas.height = this.bins;
    this.context.fillStyle = `rgb(${COLOURS[0]})`;
    this.context.fillRect(0, 0, this.canvas.width, this.bins);
    this.top = top;
    this.column = 0;
  }

  // Paints what can be painted of wave[0 ... size), the columns before having been painted.
  grow(wave, size, ended = false) {
    const first = this.column;
    let last = first;
    while (ended ? last * this.step < size : last * this.step + this.size <= size) last++;
    if (!this.rolls) last = Math.min(last, this.canvas.width);
    const count = Math.min(last - first, this.canvas.width);
    this.column = last;
    if (count <= 0) return;
    const image = this.context.createImageData(count, this.bins);
    for (let i = 0; i < count; i++) this.paint(image, i, wave, (last - count + i) * this.step, size);
    let at = first;
    if (this.rolls) {
      at = this.canvas.width - count;
      this.context.drawImage(this.canvas, -count, 0);
    }
    this.context.putImageData(image, at, 0);
  }

  paint(image, column, wave, start, size) {
    this.levels(wave, start, size);
    for (let k = 0; k < this.bins; k++) {
      const level = Math.round((255 * (this.db(k) - this.top + DEPTH_DB)) / DEPTH_DB);
      const rgb = COLOURS[Math.min(255, Math.max(0, level))], at = 4 * ((this.bins - 1 - k) * image.width + column);
      image.data[at] = rgb[0];
      image.data[at + 1] = rgb[1];
      image.data[at + 2] = rgb[2];
      image.data[at + 3] = 255;
    }
  }

  levels(wave, start, size) {
    for (let n = 0; n < this.size; n++) this.frame[n] = start + n < size ? wave[start + n] * this.hann[n] : 0;
    this.fft.forward(this.frame, 0, this.re, this.im, 0);
  }

  db(k) {
    return 10 * Math.log10(this.re[k] * this.re[k] + this.im[k] * this.im[k] + 1e-12);
  }

  // The loudest point of a sound, dB: the top of a scale.
  loudest(wave) {
    let top = -60;
    for (let start = 0; start < wave.length; start += this.size) {
      this.levels(wave, start, wave.length);
      for (let k = 0; k < this.bins; k++) top = Math.max(top, this.db(k));
    }
    return top;
  }
}

// A bar per hop, the slowest of those that share a pixel; a line at what a hop may take.
export function paintCost(canvas, times, hopMs) {
  const scale = devicePixelRatio || 1, width = Math.max(1, Math.round(canvas.clientWidth * scale)), height = Math.max(1, Math.round(canvas.clientHeight * scale));
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), most = 1.15 * hopMs;
  const bars = Math.min(width, times.length);
  for (let i = 0; i < bars; i++) {
    let slowest = 0;
    for (let n = Math.floor((i * times.length) / bars); n < ((i + 1) * times.length) / bars; n++) slowest = Math.max(slowest, times[n]);
    const tall = Math.max(1, (height * Math.min(slowest, most)) / most);
    context.fillStyle = style.getPropertyValue(slowest > hopMs ? "--bad" : "--bar");
    context.fillRect(Math.floor((i * width) / bars), height - tall, Math.max(1, Math.ceil(width / bars) - (width / bars > 3 ? 1 : 0)), tall);
  }
  context.fillStyle = style.getPropertyValue("--dim");
  context.fillRect(0, Math.round(height * (1 - hopMs / most)), width, Math.max(1, scale));
}
