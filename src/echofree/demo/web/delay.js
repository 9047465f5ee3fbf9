// Delay between far end and microphone of one stream: echofree.runtime.delay, GCC-PHAT at a low rate.
// M hop, N far window (low rate), U hops between updates.

import { Decimator, f32, floats, rint } from "./design.js";
import { Drift, bandOf, highest } from "./drift.js";
import { realFft } from "./fft.js";

export class Delay {
  constructor(rateHz, hop, n) {
    this.n = n;
    this.factor = Math.floor(rateHz / n.low_rate_hz);
    this.lowHop = hop / this.factor;
    this.taps = n.taps;
    this.period = n.period;
    this.numAgree = n.num_agree;
    this.maxDrift = n.max_drift_ppm * 1e-6;
    this.numLags = n.far_samples - n.mic_samples + 1;
    this.zeroLag = n.far_samples - n.mic_samples - n.lead_samples;
    this.decimators = [0, 1].map(() => new Decimator(this.factor, hop, n.taps));
    this.size = this.period * this.lowHop;
    this.fresh = [floats(this.size), floats(this.size)];
    this.mic = floats(n.mic_samples + n.lead_samples);
    this.far = floats(n.far_samples);
    this.segment = floats(n.far_samples);
    this.fft = realFft(n.far_samples);
    [this.first, this.last] = bandOf(n.far_samples, n.low_rate_hz, [n.low_hz, n.high_hz]);
    const bins = n.far_samples / 2 + 1, band = this.last - this.first;
    this.averages = [n.forget_fast, n.forget_slow].map((forget) => ({ forget: f32(forget), rest: f32(1 - f32(forget)), re: floats(band), im: floats(band) }));
    this.micSpectrum = [floats(bins), floats(bins)];
    this.farSpectrum = [floats(bins), floats(bins)];
    this.full = [floats(bins), floats(bins)];
    this.cross = [floats(band), floats(band)];
    this.values = floats(n.far_samples);
    this.drift = new Drift(this.size, n.low_rate_hz, [n.low_hz, n.high_hz], n.drift);
    this.lag = this.confidence = this.candidate = 0;
    this.agree = 0;
    this.found = this.jolt = false;
    this.rate = 0; // of the drift that is taken out
  }

  // Takes in a hop of each; slot: hops since the last update.
  observe(mic, far, slot) {
    this.decimators[0].run(mic, this.fresh[0], slot * this.lowHop);
    this.decimators[1].run(far, this.fresh[1], slot * this.lowHop);
  }

  // Estimates anew; U hops have been taken in.
  update() {
    const { n, mic, far, size, first, last, cross } = this;
    [mic, far].forEach((buffer, row) => {
      buffer.copyWithin(0, size);
      buffer.set(this.fresh[row], buffer.length - size);
    });
    this.segment.set(mic.subarray(0, n.mic_samples));
    this.fft.forward(this.segment, 0, ...this.micSpectrum, 0);
    this.fft.forward(far, 0, ...this.farSpectrum, 0);
    const [mr, mi] = this.micSpectrum, [fr, fi] = this.farSpectrum, [re, im] = cross, band = last - first;
    let level = 0;
    for (let k = 0, b = first; k < band; k++, b++) {
      re[k] = mr[b] * fr[b] + mi[b] * fi[b];
      im[k] = mr[b] * fi[b] - mi[b] * fr[b];
      level += Math.hypot(re[k], im[k]);
    }
    level /= band;
    for (let k = 0; k < band; k++) {
      const size = Math.hypot(re[k], im[k]) + 0.05 * level + 1e-20;
      re[k] /= size;
      im[k] /= size;
    }
    const active = level > 1e-12 && this.steady();
    if (active) this.average(band);
    this.decide(active, ...this.peak(band));
    this.follow(active);
  }

  steady() {
    const length = this.far.length / 16, blocks = [];
    for (let b = 0; b < 16; b++) {
      let sum = 0;
      for (let i = b * length; i < (b + 1) * length; i++) sum += this.far[i] * this.far[i];
      blocks.push(sum / length);
    }
    const least = 1e-4 * Math.max(...blocks) + 1e-14;
    return blocks.filter((x) => x > least).length >= 4;
  }

  average(band) {
    const [re, im] = this.cross;
    for (const { forget, rest, re: ar, im: ai } of this.averages)
      for (let k = 0; k < band; k++) {
        if (this.rate) {
          const turn = ((2 * Math.PI * (this.first + k)) / this.n.far_samples) * this.size * this.rate, c = Math.cos(turn), s = Math.sin(turn);
          const x = ar[k] * c - ai[k] * s;
          ai[k] = ar[k] * s + ai[k] * c;
          ar[k] = x;
        }
        ar[k] = ar[k] * forget + rest * re[k];
        ai[k] = ai[k] * forget + rest * im[k];
      }
  }

  // -> [delay, confidence]
  peak(band) {
    const { n, values, numLags, averages, first, full } = this;
    for (let k = 0; k < band; k++) {
      full[0][first + k] = averages[0].re[k] + averages[1].re[k];
      full[1][first + k] = averages[0].im[k] + averages[1].im[k];
    }
    this.fft.inverse(...full, 0, values, 0);
    let square = 0;
    for (let i = 0; i < numLags; i++) {
      values[i] = Math.abs(values[i]);
      square += values[i] * values[i];
    }
    const top = highest(values, numLags), share = f32(f32(n.early_share) * values[top]);
    // the earliest peak that is nearly as high; the highest one is a peak itself
    let best = top;
    for (let i = top; i <= Math.min(top + n.early_samples, numLags - 1); i++) {
      const later = i === 0 || values[i] >= values[i - 1], earlier = i + 1 >= numLags || values[i] >= values[i + 1];
      if (values[i] >= share && later && earlier) best = i;
    }
    let offset = 0;
    if (best >= 1 && best <= numLags - 2) {
      const left = values[best - 1], mid = values[best], right = values[best + 1], curve = left - 2 * mid + right;
      if (curve < 0) offset = Math.min(Math.max((left - right) / (2 * curve - 1e-20), -0.5), 0.5);
    }
    return [this.zeroLag - best - offset, values[top] / (Math.sqrt(square / numLags) + 1e-20)];
  }

  decide(active, lag, confidence) {
    if (!active) return;
    this.confidence = confidence;
    if (confidence <= this.n.min_confidence) {
      this.agree = 0;
      return;
    }
    this.agree = Math.abs(lag - this.candidate) <= this.n.tolerance ? Math.min(this.agree + 1, 100) : 1;
    this.candidate = lag;
    if (this.agree >= this.numAgree) {
      this.lag = lag;
      this.found = true;
    }
  }

  // Estimates the drift, and sets the rate at which it is taken out.
  follow(active) {
    const { full, cross, first, values, drift, n } = this;
    full[0].set(cross[0], first);
    full[1].set(cross[1], first);
    this.fft.inverse(...full, 0, values, 0);
    const at = rint(f32(this.lag));
    for (let i = 0; i < drift.window; i++) {
      const index = (this.zeroLag - at - (i - drift.before)) % n.far_samples;
      drift.cut[i] = values[index < 0 ? index + n.far_samples : index];
    }
    drift.update(at, active && this.found);
    const [found, told] = drift.drift(), before = this.rate;
    if (told && (Math.abs(found) > this.maxDrift || before !== 0)) this.rate = found;
    this.jolt = Math.abs(this.rate - before) > this.maxDrift;
  }

  // Parts per million, 0 where none can be told.
  driftPpm() {
    const [found, told] = this.drift.drift();
    return told ? found * 1e6 : 0;
  }
}
