// Real FFT of any even size, mixed radix, float64 inside: echofree.runtime.design's rfft and irfft.
// X[k] = sum x[n] exp(-2 pi i k n / N), k = 0 ... N/2; the inverse divides by N and ignores the imaginary parts of X[0] and
// X[N/2]. Spectra are two arrays, real and imaginary part. A table is made once per size.

const tables = new Map();

export function realFft(size) {
  if (!tables.has(size)) tables.set(size, new RealFft(size));
  return tables.get(size);
}

class RealFft {
  constructor(size) {
    if (!Number.isInteger(size) || size < 2 || size % 2) throw new RangeError(`a real FFT of ${size} samples: the size must be even`);
    this.size = size;
    this.half = size / 2;
    this.factors = factorise(this.half);
    // twiddles of the half-size transform, then of the step from it to the real one
    this.cos = Float64Array.from({ length: this.half }, (_, k) => Math.cos((2 * Math.PI * k) / this.half));
    this.sin = Float64Array.from({ length: this.half }, (_, k) => Math.sin((2 * Math.PI * k) / this.half));
    this.turnRe = Float64Array.from({ length: this.half + 1 }, (_, k) => Math.cos((2 * Math.PI * k) / size));
    this.turnIm = Float64Array.from({ length: this.half + 1 }, (_, k) => -Math.sin((2 * Math.PI * k) / size));
    this.work = [0, 1].map(() => [new Float64Array(this.half), new Float64Array(this.half)]);
  }

  // x[xAt ... xAt + N) -> re, im [at ... at + N/2]
  forward(x, xAt, re, im, at) {
    const { half, work, turnRe, turnIm } = this;
    const [zr, zi] = work[0];
    for (let n = 0; n < half; n++) {
      zr[n] = x[xAt + 2 * n];
      zi[n] = x[xAt + 2 * n + 1];
    }
    const [fr, fi] = this.transform();
    for (let k = 0; k <= half; k++) {
      const a = k === half ? 0 : k, b = k === 0 ? 0 : half - k;
      const evenRe = 0.5 * (fr[a] + fr[b]), evenIm = 0.5 * (fi[a] - fi[b]);
      const oddRe = 0.5 * (fi[a] + fi[b]), oddIm = -0.5 * (fr[a] - fr[b]);
      re[at + k] = evenRe + turnRe[k] * oddRe - turnIm[k] * oddIm;
      im[at + k] = evenIm + turnRe[k] * oddIm + turnIm[k] * oddRe;
    }
  }

  // re, im [at ... at + N/2] -> x[xAt ... xAt + N)
  inverse(re, im, at, x, xAt) {
    const { half, work, turnRe, turnIm } = this;
    const [zr, zi] = work[0], scale = 0.5 / half;
    for (let k = 0; k < half; k++) {
      const a = at + k, b = at + half - k;
      const aIm = k === 0 ? 0 : im[a], bIm = k === 0 ? 0 : -im[b];
      const evenRe = re[a] + re[b], evenIm = aIm + bIm;
      const spanRe = re[a] - re[b], spanIm = aIm - bIm;
      const oddRe = spanRe * turnRe[k] + spanIm * turnIm[k], oddIm = spanIm * turnRe[k] - spanRe * turnIm[k];
      zr[k] = scale * (evenRe - oddIm);
      zi[k] = -scale * (evenIm + oddRe); // conjugate in, conjugate out: the same transform serves both ways
    }
    const [fr, fi] = this.transform();
    for (let n = 0; n < half; n++) {
      x[xAt + 2 * n] = fr[n];
      x[xAt + 2 * n + 1] = -fi[n];
    }
  }

  // Stockham's autosort: the complex transform of work[0]. -> its real and imaginary part
  transform() {
    let from = 0, stride = 1, length = this.half; // `stride` transforms of `length` points each stand interleaved
    for (const radix of this.factors) {
      const [xr, xi] = this.work[from], [yr, yi] = this.work[1 - from];
      length /= radix;
      if (radix === 4) this.fours(xr, xi, yr, yi, length, stride);
      else this.any(radix, xr, xi, yr, yi, length, stride);
      from = 1 - from;
      stride *= radix;
    }
    return this.work[from];
  }

  fours(xr, xi, yr, yi, part, stride) {
    const { cos, sin } = this, jump = stride * part;
    for (let p = 0, at = 0, a = 0, to = 0; p < part; p++, at += stride, to += 3 * stride) {
      const c1 = cos[at], s1 = -sin[at], c2 = cos[2 * at], s2 = -sin[2 * at], c3 = cos[3 * at], s3 = -sin[3 * at];
      for (let q = 0; q < stride; q++, a++, to++) {
        const b = a + jump, c = b + jump, d = c + jump;
        const sr = xr[a] + xr[c], si = xi[a] + xi[c], dr = xr[a] - xr[c], di = xi[a] - xi[c];
        const tr = xr[b] + xr[d], ti = xi[b] + xi[d], er = xr[b] - xr[d], ei = xi[b] - xi[d];
        const r1 = dr + ei, i1 = di - er, r2 = sr - tr, i2 = si - ti, r3 = dr - ei, i3 = di + er;
        yr[to] = sr + tr;
        yi[to] = si + ti;
        yr[to + stride] = r1 * c1 - i1 * s1;
        yi[to + stride] = r1 * s1 + i1 * c1;
        yr[to + 2 * stride] = r2 * c2 - i2 * s2;
        yi[to + 2 * stride] = r2 * s2 + i2 * c2;
        yr[to + 3 * stride] = r3 * c3 - i3 * s3;
        yi[to + 3 * stride] = r3 * s3 + i3 * c3;
      }
    }
  }

  any(radix, xr, xi, yr, yi, part, stride) {
    const { cos, sin, half } = this, step = half / radix, jump = stride * part;
    for (let p = 0, from = 0; p < part; p++)
      for (let q = 0; q < stride; q++, from++)
        for (let j = 0, to = q + stride * radix * p; j < radix; j++, to += stride) {
          let re = 0, im = 0;
          for (let m = 0, a = from, at = 0; m < radix; m++, a += jump) {
            re += xr[a] * cos[at] + xi[a] * sin[at];
            im += xi[a] * cos[at] - xr[a] * sin[at];
            at += j * step;
            if (at >= half) at -= half;
          }
          const turn = p * j * stride;
          yr[to] = re * cos[turn] + im * sin[turn];
          yi[to] = im * cos[turn] - re * sin[turn];
        }
  }
}

function factorise(size) {
  const found = [];
  let rest = size;
  while (rest % 4 === 0) { found.push(4); rest /= 4; }
  for (let radix = 2; rest > 1; radix++) while (rest % radix === 0) { found.push(radix); rest /= radix; }
  return found;
}
