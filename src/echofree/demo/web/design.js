// Coefficients and filters of the linear stage: echofree.runtime.design, with the recursive filters as recursions.

export const f32 = Math.fround;

// Half to even, as numpy rounds.
export function rint(x) {
  const down = Math.floor(x), rest = x - down;
  if (rest !== 0.5) return rest < 0.5 ? down : down + 1;
  return down % 2 === 0 ? down : down + 1;
}

export const floats = (size) => new Float32Array(size);

// sin(pi/2 sin^2(pi (n + 1/2) / N)), [N]
export function vorbisWindow(size) {
  return Float32Array.from({ length: size }, (_, n) => Math.sin((Math.PI / 2) * Math.sin((Math.PI * (n + 0.5)) / size) ** 2));
}

// (b, a) of a first-order high-pass
export function dcBlocker(cutoffHz, rateHz) {
  const t = Math.tan((Math.PI * cutoffHz) / rateHz);
  return [[1 / (1 + t), -1 / (1 + t)], [1, (t - 1) / (1 + t)]];
}

// (b, a) of a second-order Butterworth high-pass
export function highPass(cutoffHz, rateHz) {
  const t = Math.tan((Math.PI * cutoffHz) / rateHz), norm = 1 + Math.SQRT2 * t + t * t;
  return [[1 / norm, -2 / norm, 1 / norm], [1, (2 * (t * t - 1)) / norm, (1 - Math.SQRT2 * t + t * t) / norm]];
}

// Response at the bins of a real FFT, from DC to Nyquist. -> [real parts, imaginary parts]
export function frequencyResponse(b, a, bins) {
  const re = new Float64Array(bins), im = new Float64Array(bins);
  for (let k = 0; k < bins; k++) {
    const at = (c) => c.reduce((sum, x, n) => [sum[0] + x * Math.cos((Math.PI * k * n) / (bins - 1)), sum[1] - x * Math.sin((Math.PI * k * n) / (bins - 1))], [0, 0]);
    const [br, bi] = at(b), [ar, ai] = at(a), size = ar * ar + ai * ai;
    re[k] = (br * ar + bi * ai) / size;
    im[k] = (bi * ar - br * ai) / size;
  }
  return [re, im];
}

// A recursive filter on a hop, direct form II transposed.
export class Iir {
  constructor(b, a) {
    this.b = b;
    this.a = a;
    this.state = new Float64Array(a.length - 1);
  }

  run(x, y) {
    const { b, a, state } = this;
    if (state.length === 1) {
      let s = state[0];
      for (let n = 0; n < x.length; n++) {
        const out = b[0] * x[n] + s;
        s = b[1] * x[n] - a[1] * out;
        y[n] = out;
      }
      state[0] = s;
      return;
    }
    let [s, t] = state;
    for (let n = 0; n < x.length; n++) {
      const out = b[0] * x[n] + s;
      s = b[1] * x[n] - a[1] * out + t;
      t = b[2] * x[n] - a[2] * out;
      y[n] = out;
    }
    state[0] = s;
    state[1] = t;
  }
}

// I0, by its power series
function bessel(x) {
  let sum = 1, term = 1;
  for (let k = 1; term > 1e-17 * sum; k++) {
    term *= (x / (2 * k)) ** 2;
    sum += term;
  }
  return sum;
}

// Low-pass and decimation of a stream, a hop at a time.
export class Decimator {
  constructor(factor, hop, taps) {
    this.factor = factor;
    this.hop = hop;
    this.keep = taps - 1;
    const h = Float64Array.from({ length: taps }, (_, i) => {
      const n = i - (taps - 1) / 2, x = (n * 0.9) / factor, u = (2 * i) / (taps - 1) - 1;
      return (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x)) * (bessel(5 * Math.sqrt(Math.max(0, 1 - u * u))) / bessel(5));
    });
    const sum = h.reduce((a, b) => a + b, 0);
    this.taps = Float32Array.from(h, (x) => x / sum);
    this.line = floats(this.keep + hop);
  }

  // a hop -> hop / factor samples, from out[at] on
  run(x, out, at) {
    const { line, taps, keep, hop, factor } = this, count = hop / factor;
    line.set(x, keep);
    for (let j = 0; j < count; j++) {
      const begin = (j + 1) * factor - 1; // the newest tap stands at keep + begin
      let sum = 0;
      for (let i = 0; i <= keep; i++) sum += line[begin + i] * taps[keep - i];
      out[at + j] = sum;
    }
    line.copyWithin(0, hop);
  }
}

export function meanSquare(x) {
  let sum = 0;
  for (let n = 0; n < x.length; n++) sum += x[n] * x[n];
  return sum / x.length;
}
