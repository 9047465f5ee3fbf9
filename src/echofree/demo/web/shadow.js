// The quick filter that notices a change of the echo path: echofree.runtime.shadow. M hop, Q hop at the low rate.

import { Decimator, floats, meanSquare } from "./design.js";
import { Kalman, Ring } from "./kalman.js";

export class Shadow {
  constructor(hop, factor, taps, hopS, n) {
    const lowHop = hop / factor, bins = lowHop + 1;
    this.decimators = [0, 1, 2].map(() => new Decimator(factor, hop, taps)); // mic, far, error of the long filter
    this.low = [0, 1, 2].map(() => floats(lowHop));
    this.filter = new Kalman(lowHop, n.num_partitions, n.transition, false, n.psd_smoothing, [new Float64Array(bins).fill(1), new Float64Array(bins)]);
    this.ring = new Ring(n.num_partitions, lowHop);
    Object.assign(this, { floor: n.floor, better: n.better, rate: Math.min(1, hopS / n.level_s), hold: n.hold_s / hopS });
    this.pause = Math.ceil(n.wait_s / hopS);
    this.levels = [0, 0, 0]; // mean squares of (mic, error of the long filter, own error)
    this.since = 0;
    this.wait = Math.ceil(n.first_s / hopS);
  }

  // One hop of each, high-passed; left: the long filter's error. -> [whether the echo path has changed, whether moreover the
  // long filter does worse than none]
  step(mic, far, left, adapt, learn, floor) {
    const { low, ring, filter, levels } = this, one = adapt ? 1 : 0;
    [mic, far, left].forEach((wave, row) => this.decimators[row].run(wave, low[row], 0));
    ring.push(low[1]);
    const [error, passed] = filter.errors, echo = filter.predict(ring);
    for (let i = 0; i < error.length; i++) error[i] = low[0][i] - echo[i];
    passed.set(error);
    if (adapt) [low[0], low[2], error].forEach((wave, i) => { levels[i] += this.rate * (meanSquare(wave) - levels[i]); });
    filter.correct(ring, learn, floor);
    const [heard, main, own] = levels;
    this.wait = Math.max(this.wait - one, 0);
    if (adapt) this.since = own < this.better * main && own < this.better * heard && learn ? this.since + 1 : 0;
    const alarm = this.since > this.hold && this.wait === 0;
    if (alarm) {
      this.since = 0;
      this.wait = this.pause;
    }
    return [alarm, alarm && main > heard];
  }
}
