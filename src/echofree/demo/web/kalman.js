// The partitioned-block frequency-domain Kalman filter of one stream: echofree.runtime.kalman.
// L partitions (oldest first), F bins, M hop.

import { f32, floats } from "./design.js";
import { realFft } from "./fft.js";

const TINY = f32(1e-20);

// Spectra of the far end: a ring whose rows stand twice, L rows apart, so that the filter's span is one piece.
export class Ring {
  constructor(count, hop) {
    this.count = count;
    this.hop = hop;
    this.bins = hop + 1;
    this.fft = realFft(2 * hop);
    this.re = floats(2 * count * this.bins);
    this.im = floats(2 * count * this.bins);
    this.power = floats(2 * count * this.bins);
    this.mean = new Float64Array(count); // mean power of the bins
    this.pair = floats(2 * hop); // last hop, this hop
    this.slot = 0; // of the oldest row, the next to be written
  }

  push(wave) {
    this.follow(wave);
    this.write(this.slot);
    this.slot = (this.slot + 1) % this.count;
  }

  follow(wave) {
    this.pair.copyWithin(0, this.hop);
    this.pair.set(wave, this.hop);
  }

  // The spectrum of the pair of hops, into a row.
  write(slot) {
    const { re, im, power, bins, count } = this, at = slot * bins, twin = (slot + count) * bins;
    this.fft.forward(this.pair, 0, re, im, at);
    let sum = 0;
    for (let k = at; k < at + bins; k++) {
      power[k] = re[k] * re[k] + im[k] * im[k];
      sum += power[k];
    }
    for (const array of [re, im, power]) array.copyWithin(twin, at, at + bins);
    this.mean[slot] = sum / bins;
  }
}

export class Kalman {
  // response: [real parts, imaginary parts] at the M + 1 bins
  constructor(hop, count, transition, posterior, psdSmoothing, response) {
    const bins = hop + 1;
    Object.assign(this, { hop, count, bins, posterior });
    this.fft = realFft(2 * hop);
    this.transition = f32(transition);
    this.fresh = f32(1 - psdSmoothing);
    this.gain = f32(transition ** 2);
    this.leak = f32(1 - transition ** 2);
    this.share = f32(2 / count);
    [this.responseRe, this.responseIm] = response.map((part) => Float32Array.from(part));
    this.responsePower = Float32Array.from(response[0], (x, k) => x * x + response[1][k] * response[1][k]);
    this.weightRe = floats(count * bins);
    this.weightIm = floats(count * bins);
    this.variance = floats(count * bins);
    this.psd = floats(bins);
    this.padded = [floats(2 * hop), floats(2 * hop)];
    this.errors = this.padded.map((x) => x.subarray(hop)); // the a-priori error, plain and high-passed
    this.plain = [floats(bins), floats(bins)];
    this.passed = [floats(bins), floats(bins)];
    this.total = floats(bins);
    this.explained = floats(bins);
    this.product = [floats(bins), floats(bins)];
    this.wave = floats(2 * hop);
    this.late = this.wave.subarray(hop);
  }

  // A-priori echo of the new hop, [M], valid until the next call.
  predict(ring) {
    const { bins, weightRe, weightIm } = this, [re, im] = this.product, first = ring.slot * bins;
    re.fill(0);
    im.fill(0);
    for (let l = 0; l < this.count; l++)
      for (let k = 0, w = l * bins, x = first + w; k < bins; k++, w++, x++) {
        re[k] += weightRe[w] * ring.re[x] - weightIm[w] * ring.im[x];
        im[k] += weightRe[w] * ring.im[x] + weightIm[w] * ring.re[x];
      }
    this.fft.inverse(re, im, 0, this.wave, 0);
    return this.late;
  }

  // Learns from `errors`, which the caller has filled; floor: least variance of each partition, [L]. -> the error by which
  // the output is defined, [M]
  correct(ring, adapt, floor) {
    const { bins, count, psd, total, explained, variance, responsePower } = this, first = ring.slot * bins;
    this.fft.forward(this.padded[0], 0, ...this.plain, 0);
    this.fft.forward(this.padded[1], 0, ...this.passed, 0);
    explained.fill(0);
    for (let l = 0; l < count; l++) for (let k = 0, v = l * bins, x = first + v; k < bins; k++, v++, x++) explained[k] += variance[v] * ring.power[x];
    for (let k = 0; k < bins; k++) {
      const power = this.passed[0][k] ** 2 + this.passed[1][k] ** 2;
      psd[k] += (power - psd[k]) * this.fresh;
      explained[k] *= responsePower[k];
      total[k] = psd[k] * this.share + explained[k] + TINY;
    }
    const error = this.posterior ? this.shrunk() : this.errors[0];
    if (adapt) this.learn(ring, first);
    else this.fade();
    const { leak, weightRe, weightIm } = this;
    for (let l = 0, i = 0; l < count; l++) {
      const least = floor[l];
      for (let k = 0; k < bins; k++, i++) variance[i] = Math.max(variance[i] + (weightRe[i] * weightRe[i] + weightIm[i] * weightIm[i]) * leak, least);
    }
    return error;
  }

  shrunk() {
    const [re, im] = this.product;
    for (let k = 0; k < this.bins; k++) {
      const left = 1 - this.explained[k] / this.total[k];
      re[k] = this.plain[0][k] * left;
      im[k] = this.plain[1][k] * left;
    }
    const wave = (this.after ??= floats(2 * this.hop));
    this.fft.inverse(re, im, 0, wave, 0);
    return wave.subarray(this.hop);
  }

  learn(ring, first) {
    const { bins, hop, total, variance, weightRe, weightIm, transition, gain, wave, responsePower } = this;
    const [re, im] = this.product, [passedRe, passedIm] = this.passed;
    const driveRe = (this.driveRe ??= floats(bins)), driveIm = (this.driveIm ??= floats(bins)), shrink = this.explained;
    for (let k = 0; k < bins; k++) {
      const hr = this.responseRe[k], hi = this.responseIm[k];
      driveRe[k] = (passedRe[k] * hr + passedIm[k] * hi) / total[k];
      driveIm[k] = (passedIm[k] * hr - passedRe[k] * hi) / total[k];
      shrink[k] = (responsePower[k] / total[k]) * -0.5 * gain;
    }
    for (let l = 0; l < this.count; l++) {
      const at = l * bins;
      for (let k = 0, v = at, x = first + at; k < bins; k++, v++, x++) {
        re[k] = variance[v] * (ring.re[x] * driveRe[k] + ring.im[x] * driveIm[k]);
        im[k] = variance[v] * (ring.re[x] * driveIm[k] - ring.im[x] * driveRe[k]);
        variance[v] *= variance[v] * ring.power[x] * shrink[k] + gain;
      }
      this.fft.inverse(re, im, 0, wave, 0);
      wave.fill(0, hop);
      this.fft.forward(wave, 0, re, im, 0);
      for (let k = 0, w = at; k < bins; k++, w++) {
        weightRe[w] = (weightRe[w] + re[k]) * transition;
        weightIm[w] = (weightIm[w] + im[k]) * transition;
      }
    }
  }

  fade() {
    for (let i = 0; i < this.variance.length; i++) {
      this.weightRe[i] *= this.transition;
      this.weightIm[i] *= this.transition;
      this.variance[i] *= this.gain;
    }
  }

  // Makes the filter quick again; spoilt: the echo path is forgotten.
  doubt(amount, spoilt) {
    const { bins, weightRe, weightIm, variance } = this;
    for (let l = 0; l < this.count; l++) {
      let sum = 0;
      for (let i = l * bins; i < (l + 1) * bins; i++) sum += weightRe[i] * weightRe[i] + weightIm[i] * weightIm[i];
      const size = f32((amount * sum) / bins);
      for (let i = l * bins; i < (l + 1) * bins; i++) variance[i] = Math.max(variance[i], size);
    }
    if (spoilt) {
      weightRe.fill(0);
      weightIm.fill(0);
    }
  }

  // Moves the echo path: positive when the far end is from now on delayed by as many samples more. What is shifted in starts
  // from zero with variance `start`, [L].
  shift(samples, start) {
    const { count, hop, bins, wave, weightRe, weightIm, variance } = this;
    const taps = new Float64Array(count * hop), moved = new Float64Array(count * hop);
    for (let part = 0; part < count; part++) { // the newest first
      this.fft.inverse(weightRe, weightIm, (count - 1 - part) * bins, wave, 0);
      taps.set(wave.subarray(0, hop), part * hop);
    }
    const size = Math.max(0, taps.length - Math.abs(samples));
    if (samples >= 0) moved.set(taps.subarray(taps.length - size));
    else moved.set(taps.subarray(0, size), taps.length - size);
    for (let part = 0; part < count; part++) {
      wave.fill(0);
      wave.set(moved.subarray(part * hop, (part + 1) * hop));
      this.fft.forward(wave, 0, weightRe, weightIm, (count - 1 - part) * bins);
    }
    // of the two partitions that a new one covers, the less certain one counts
    const before = variance.slice(), blocks = Math.floor(samples / hop), rest = samples - blocks * hop !== 0 ? 1 : 0;
    for (let part = 0; part < count; part++) {
      const here = count - 1 - part;
      const old = (row, k) => (row >= 0 && row < count ? before[(count - 1 - row) * bins + k] : start[here]);
      for (let k = 0; k < bins; k++) variance[here * bins + k] = Math.max(old(part + blocks, k), old(part + blocks + rest, k));
    }
  }
}
