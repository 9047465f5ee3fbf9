// The quick filter that notices a change of the echo path: echofree.runtime.shadow. M hop, Q block at the low rate.

import { Decimator, floats, meanSquare } from "./design.js";
import { Kalman, Ring } from "./kalman.js";

export class Shadow {
  constructor(hop, factor, taps, hopS, n) {
    const block = (n.hops * hop) / factor, bins = block + 1, blockS = n.hops * hopS;
    Object.assign(this, { hops: n.hops, lowHop: hop / factor });
    this.decimators = [0, 1, 2].map(() => new Decimator(factor, hop, taps)); // mic, far, error of the long filter
    this.low = [0, 1, 2].map(() => floats(block));
    this.filter = new Kalman(block, n.num_partitions, n.transition, false, n.psd_smoothing, [new Float64Array(bins).fill(1), new Float64Array(bins)]);
    this.ring = new Ring(n.num_partitions, block);
    Object.assign(this, { floor: n.floor, better: n.better, rate: Math.min(1, blockS / n.level_s), hold: n.hold_s / blockS });
    this.least = floats(n.num_partitions);
    this.pause = Math.ceil(n.wait_s / blockS);
    this.levels = [0, 0, 0]; // mean squares of (mic, error of the long filter, own error)
    this.since = this.phase = 0;
    this.wait = Math.ceil(n.first_s / blockS);
    this.learn = true; // in all hops of the block
  }

  // One hop of each, high-passed; left: the long filter's error. -> [whether the echo path has changed, whether moreover the
  // long filter does worse than none]
  step(mic, far, left, adapt, learn, floor) {
    const { low, levels } = this;
    [mic, far, left].forEach((wave, row) => this.decimators[row].run(wave, low[row], this.phase * this.lowHop));
    this.learn = learn && (this.phase === 0 || this.learn);
    this.phase = (this.phase + 1) % this.hops;
    if (this.phase) return [false, false];
    this.hear(adapt, floor);
    const [heard, main, own] = levels;
    this.wait = Math.max(this.wait - (adapt ? 1 : 0), 0);
    if (adapt) this.since = own < this.better * main && own < this.better * heard && this.learn ? this.since + 1 : 0;
    const alarm = this.since > this.hold && this.wait === 0;
    if (alarm) {
      this.since = 0;
      this.wait = this.pause;
    }
    return [alarm, alarm && main > heard];
  }

  // A block is complete: filters it, measures, learns.
  hear(adapt, floor) {
    const { low, ring, filter, levels } = this;
    ring.push(low[1]);
    const [error, passed] = filter.errors, echo = filter.predict(ring);
    for (let i = 0; i < error.length; i++) error[i] = low[0][i] - echo[i];
    passed.set(error);
    if (adapt) [low[0], low[2], error].forEach((wave, i) => { levels[i] += this.rate * (meanSquare(wave) - levels[i]); });
    filter.correct(ring, this.learn, this.least.fill(floor));
  }
}
