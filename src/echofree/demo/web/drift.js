// Drift between the clocks of far end and microphone: echofree.runtime.drift, double cross-correlation of one stream.
// G window, K its bins, E drifts of the grid.

import { f32, floats } from "./design.js";
import { realFft } from "./fft.js";

export class Drift {
  // step: low-rate samples between two updates; band: [lowest, highest] Hz that take part
  constructor(step, lowRateHz, band, n) {
    Object.assign(this, { window: n.window, before: n.before, spans: n.spans, stepPpm: n.step_ppm });
    Object.assign(this, { minAgreement: n.min_agreement, minCount: n.min_count, maxMove: n.max_move, forget: f32(n.forget) });
    this.fft = realFft(n.window);
    this.fade = Float32Array.from({ length: n.window }, (_, i) => {
      const edge = Math.min(i, n.window - 1 - i);
      return edge < n.edge ? 0.5 - 0.5 * Math.cos((Math.PI * (edge + 0.5)) / n.edge) : 1;
    });
    [this.first, this.last] = bandOf(n.window, lowRateHz, band);
    const bins = (this.bins = this.last - this.first), size = Math.floor((2 * n.max_ppm + 1) / n.step_ppm) + 1;
    this.omega = Float32Array.from({ length: bins }, (_, k) => (2 * Math.PI * (this.first + k)) / n.window);
    this.grid = Float64Array.from({ length: size }, (_, e) => (-n.max_ppm + e * n.step_ppm) * 1e-6);
    this.cos = floats(n.spans.length * bins * size);
    this.sin = floats(n.spans.length * bins * size);
    n.spans.forEach((span, j) => {
      for (let k = 0; k < bins; k++)
        for (let e = 0; e < size; e++) {
          const angle = span * step * ((2 * Math.PI * (this.first + k)) / n.window) * this.grid[e], at = (j * bins + k) * size + e;
          this.cos[at] = Math.cos(angle);
          this.sin[at] = Math.sin(angle);
        }
    });
    this.ring = Math.max(...n.spans);
    this.seenRe = floats(this.ring * bins);
    this.seenIm = floats(this.ring * bins);
    this.at = new Int32Array(this.ring);
    this.ok = new Uint8Array(this.ring);
    this.re = floats(n.window / 2 + 1);
    this.im = floats(n.window / 2 + 1);
    this.cut = floats(n.window);
    this.agreement = floats(size);
    this.fresh = new Float64Array(size);
    this.count = 0;
    this.slot = 0;
  }

  // Takes in a correlation `cut` [G] of growing delay from `before` samples before `at` on.
  update(at, valid) {
    const { cut, fade, re, im, first, bins, ring, slot } = this;
    for (let i = 0; i < cut.length; i++) cut[i] *= fade[i];
    this.fft.forward(cut, 0, re, im, 0);
    let sum = 0;
    for (let k = first; k < this.last; k++) sum += re[k] * re[k] + im[k] * im[k];
    const norm = 1 / (Math.sqrt(sum) + 1e-20);
    for (let k = first; k < this.last; k++) {
      re[k] *= norm;
      im[k] *= norm;
    }
    if (valid) this.agree(at);
    this.seenRe.set(re.subarray(first, this.last), slot * bins);
    this.seenIm.set(im.subarray(first, this.last), slot * bins);
    this.at[slot] = at;
    this.ok[slot] = valid ? 1 : 0;
    this.slot = (slot + 1) % ring;
  }

  agree(at) {
    const { spans, ring, bins, first, re, im, fresh, agreement, omega } = this, size = agreement.length;
    let usable = 0;
    fresh.fill(0);
    spans.forEach((span, j) => {
      const then = (this.slot - span + ring) % ring, moved = at - this.at[then];
      if (!this.ok[then] || Math.abs(moved) >= this.maxMove) return;
      usable++;
      for (let k = 0; k < bins; k++) {
        const seenRe = this.seenRe[then * bins + k], seenIm = this.seenIm[then * bins + k], a = re[first + k], b = im[first + k];
        const turn = f32(moved * omega[k]), c = Math.cos(turn), s = Math.sin(turn);
        const x = a * seenRe + b * seenIm, y = a * seenIm - b * seenRe;
        const real = x * c - y * s, imag = x * s + y * c, row = (j * bins + k) * size;
        for (let e = 0; e < size; e++) fresh[e] += real * this.cos[row + e] + imag * this.sin[row + e];
      }
    });
    for (let e = 0; e < size; e++) agreement[e] = agreement[e] * this.forget + fresh[e];
    this.count = f32(this.count * this.forget + usable);
  }

  // -> [samples per sample, positive when the microphone falls behind; whether it is to be believed]
  drift() {
    const { agreement, grid } = this, best = highest(agreement, agreement.length), inner = Math.min(Math.max(best, 1), grid.length - 2);
    const left = agreement[inner - 1], mid = agreement[inner], right = agreement[inner + 1], curve = left - 2 * mid + right;
    const offset = curve < 0 && inner === best ? (0.5 * (left - right)) / (curve - 1e-20) : 0;
    const told = this.count >= this.minCount && mid > this.minAgreement * this.count && inner === best;
    return [grid[inner] + offset * this.stepPpm * 1e-6, told];
  }
}

// The first of the bins of a window that lie in a band, and the first behind it.
export function bandOf(window, rateHz, [low, high]) {
  let first = 0, last = 0;
  for (let k = 0; k <= window / 2; k++) {
    const hz = (k * rateHz) / window;
    first += hz < low ? 1 : 0;
    last += hz <= high ? 1 : 0;
  }
  return [first, last];
}

// Index of the largest of the first `size` values.
export function highest(values, size) {
  let best = 0;
  for (let i = 1; i < size; i++) if (values[i] > values[best]) best = i;
  return best;
}
