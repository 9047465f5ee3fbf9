// The far end's past, read with the delay taken out: echofree.runtime.farline. M hop.

import { f32, floats, rint } from "./design.js";

export class FarLine {
  // farrow: [taps][order + 1]
  constructor(hop, maxSamples, count, farrow) {
    Object.assign(this, { hop, count, most: maxSamples + hop, taps: farrow.length });
    this.farrow = farrow.map((row) => Float32Array.from(row));
    this.end = this.most + (count + 1) * hop + this.taps;
    this.half = Math.floor(this.taps / 2);
    // what is yet to come counts as silence: half a kernel of zeros at the end
    this.past = floats(this.end + this.half);
    this.whole = 0;
    this.fraction = 0;
    this.rate = 0;
  }

  // Takes in a hop and writes one into `out`, the delay taken out.
  advance(far, out) {
    const { past, hop, end } = this;
    past.copyWithin(0, hop, end);
    past.set(far, end - hop);
    if (this.rate === 0 && this.fraction === 0) {
      const first = end - hop - this.whole;
      out.set(past.subarray(first, first + hop));
      return;
    }
    const middle = rint(f32(this.fraction + f32(this.rate * f32(0.5 * hop))));
    this.read(hop, this.whole + middle, f32(this.fraction - middle), out);
    const after = f32(this.fraction + f32(this.rate * hop)), carry = rint(after);
    this.whole += carry;
    this.fraction = f32(after - carry);
    const place = this.whole + this.fraction;
    if (this.rate !== 0 && !(this.half <= place && place <= this.most)) {
      this.whole = Math.min(Math.max(this.whole, this.half), this.most);
      this.fraction = 0;
    }
  }

  // The last L hops once more, oldest first, as if the present delay and rate had held all the while.
  reread() {
    const { hop, count } = this, hops = [];
    for (let back = count; back > 0; back--) {
      const begin = f32(this.fraction - f32(this.rate * (back * hop))), middle = rint(f32(begin + f32(this.rate * f32(0.5 * hop))));
      const out = floats(hop);
      this.read(back * hop, Math.max(this.whole + middle, 0), f32(begin - middle), out);
      hops.push(out);
    }
    return hops;
  }

  // The hop that begins `back` samples ago; base: its whole delay, start: what its delay is above that.
  read(back, base, start, out) {
    const { past, farrow, taps, hop, rate } = this, first = this.end - back - base - this.half, order = farrow[0].length - 1;
    for (let n = 0; n < hop; n++) {
      const late = f32(start + f32(rate * (n + 1)));
      let sum = 0;
      for (let k = order; k >= 0; k--) {
        let part = 0;
        for (let i = 0; i < taps; i++) part += past[first + n + i] * farrow[i][k];
        sum = part + sum * late;
      }
      out[n] = sum;
    }
  }
}
