// The linear stage of one stream, a hop at a time: echofree.runtime.linear, where and in echofree.model.frontend the reasons
// stand. All numbers come from the contract. M hop, L partitions.

import { Iir, dcBlocker, f32, floats, frequencyResponse, highPass, meanSquare, rint } from "./design.js";
import { Delay } from "./delay.js";
import { FarLine } from "./farline.js";
import { Kalman, Ring } from "./kalman.js";
import { Shadow } from "./shadow.js";

export class LinearStage {
  // n: `front_end` of a contract. Feed it hops with `step`, read the signals `mic`, `echo`, `error`, `far`.
  constructor(n, rateHz, hop) {
    Object.assign(this, { n, rateHz, hop, count: n.num_partitions, maxSamples: n.max_samples, hopS: hop / rateHz });
    const high = highPass(n.high_pass_hz, rateHz), dc = dcBlocker(n.dc_cutoff_hz, rateHz);
    this.dc = [0, 1].map(() => new Iir(...dc));
    this.high = [0, 1, 2].map(() => new Iir(...high));
    this.passed = [0, 1, 2].map(() => floats(hop)); // mic, error, far
    this.kalman = new Kalman(hop, this.count, n.transition, n.output === "posterior", n.psd_smoothing, frequencyResponse(...high, hop + 1));
    this.delay = new Delay(rateHz, hop, n.delay);
    this.line = new FarLine(hop, this.maxSamples, this.count, n.farrow);
    this.shadow = new Shadow(hop, this.delay.factor, this.delay.taps, this.hopS, n.shadow);
    this.profile = Float32Array.from(n.start_profile); // [L]
    this.floor = floats(this.count);
    this.ring = new Ring(this.count, hop);
    for (const name of ["mic", "echo", "error", "far", "raw"]) this[name] = floats(hop);
    this.phase = this.negative = 0;
    this.farLevel = this.micLevel = this.pathGain = 0;
    this.micPeak = this.clipped = 0;
    this.everClipped = false;
    this.slow = [0, 0]; // smoothed mean squares of (mic, error) while active
    this.quick = [0, 0];
    this.active = this.doubt = this.doubtful = 0;
    this.explained = false;
    this.trust = 1;
  }

  // One hop of each, [M].
  step(given, played) {
    const { n, kalman, passed, mic, far, raw } = this;
    const clipped = this.clipping(given);
    this.dc[0].run(given, mic);
    this.dc[1].run(played, raw);
    this.line.advance(raw, far);
    this.ring.push(far);
    const [adapt, floor, start] = this.levels();
    const [error, errorPassed] = kalman.errors, echo = kalman.predict(this.ring);
    for (let i = 0; i < mic.length; i++) error[i] = mic[i] - echo[i];
    [mic, error, far].forEach((wave, row) => this.high[row].run(wave, passed[row]));
    errorPassed.set(passed[1]);
    for (let l = 0; l < this.count; l++) this.floor[l] = this.profile[l] * f32(floor);
    const learn = adapt && !clipped, after = kalman.correct(this.ring, learn, this.floor);
    for (let i = 0; i < mic.length; i++) this.echo[i] = mic[i] - after[i];
    const [alarm, spoilt] = this.shadow.step(passed[0], passed[2], passed[1], adapt, learn, Math.max(floor, this.shadow.floor * start));
    if (alarm) kalman.doubt(n.doubt, spoilt);
    this.judge(adapt);
    const trust = f32(this.trust);
    for (let i = 0; i < mic.length; i++) {
      this.echo[i] *= trust;
      this.error[i] = mic[i] - this.echo[i];
    }
    this.align();
  }

  // Whether 3 samples or more of the raw hop stand at the highest so far, unless it clips all the time.
  clipping(x) {
    let top = -Infinity, bottom = Infinity;
    for (let i = 0; i < x.length; i++) {
      top = Math.max(top, x[i]);
      bottom = Math.min(bottom, x[i]);
    }
    const peak = Math.max(top, -bottom), rate = this.n.clip_rate;
    this.micPeak = Math.max(peak, this.micPeak);
    const level = f32(f32(this.n.clip_share) * f32(this.micPeak));
    let clipped = false;
    if (peak >= level && f32(top - bottom) > 0.5 * this.micPeak) {
      let count = 0;
      for (let i = 0; i < x.length; i++) count += Math.abs(x[i]) >= level ? 1 : 0;
      clipped = count >= 3;
    }
    this.clipped += rate * ((clipped ? 1 : 0) - this.clipped);
    this.everClipped ||= this.clipped > 1.5 * rate;
    return clipped && this.clipped < 0.3;
  }

  // -> [whether the far end is active, the floor of the variance, the variance of a start]
  levels() {
    const { n, hop } = this, farNow = this.ring.mean.reduce((a, b) => a + b, 0) / this.count / hop, micNow = meanSquare(this.mic);
    const counts = n.int16 ** 2, loud = farNow > n.far_active * (farNow > 4 ? counts : 1), adapt = loud && farNow > 1e-5 * this.farLevel;
    if (adapt) {
      const rate = this.farLevel === 0 ? 1 : Math.min(1, this.hopS / n.level_s);
      this.farLevel += rate * (farNow - this.farLevel);
      this.micLevel += rate * (micNow - this.micLevel);
    }
    const age = this.active + (adapt ? 1 : 0);
    this.active = Math.min(age, 1e6);
    const ratio = this.ratio();
    let gain = this.pathGain;
    if (adapt && ratio > 0 && age * this.hopS <= n.start_s) gain = Math.max(gain, 2 ** Math.floor(Math.log2(ratio + 1e-20)));
    const rises = gain > this.pathGain;
    this.pathGain = gain;
    return [adapt, gain * (rises ? n.start_variance : n.variance_floor), gain * n.start_variance];
  }

  // The power gain that the echo path may have at most.
  ratio() {
    const { n } = this, most = n.max_path_gain * (this.micPeak > 4 ? n.int16 ** 2 : 1);
    return Math.min(this.micLevel / (this.farLevel + 1e-20), most);
  }

  // Moves `trust`, the share of the echo that is used.
  judge(adapt) {
    const { n, hopS, slow, quick, delay } = this, one = adapt ? 1 : 0;
    if (adapt)
      for (const [state, seconds] of [[slow, n.judge_s / 2], [quick, n.quick_s]]) {
        const rate = Math.min(1, hopS / seconds);
        for (let i = 0; i < 2; i++) state[i] += rate * (meanSquare(this.passed[i]) - state[i]);
      }
    const reduced = slow[0] > slow[1] * 10 ** (n.min_gain_db / 10) && this.active * hopS > n.start_s;
    const evident = reduced || (delay.confidence > n.sure_confidence && delay.agree >= delay.numAgree);
    const doubt = evident ? 0 : this.doubt + one;
    this.doubt = Math.min(doubt, 1e6);
    this.explained ||= evident;
    const lost = doubt > (this.explained ? n.patience_s : n.judge_s) / hopS;
    this.doubtful = Math.min(this.doubtful + (lost ? one : 0), 1e6);
    const worse = !this.explained && quick[0] < quick[1] * 10 ** (-n.worse_db / 10);
    this.trust += Math.min(1, hopS / n.quick_s) * ((lost || worse ? 0 : 1) - this.trust);
  }

  align() {
    if (this.maxSamples === 0) return;
    const { delay, line, n } = this;
    delay.observe(this.mic, this.raw, this.phase);
    this.phase = (this.phase + 1) % delay.period;
    if (this.phase) return;
    delay.update();
    line.rate = f32(delay.rate);
    if (delay.jolt) this.kalman.doubt(n.doubt, false);
    const lag = delay.lag * delay.factor, inside = lag - line.whole - line.fraction, headroom = n.headroom_s * this.rateHz;
    // between samples the line needs a few beyond the one that it reads
    const least = (line.rate ? line.half : 0) - line.whole;
    let shift = Math.max(least, 0);
    if (delay.found && (inside < 0.5 * headroom || inside > n.latest_s * this.rateHz)) {
      const wished = Math.max(Math.min(rint(inside - headroom), this.maxSamples - line.whole), least);
      if (Math.abs(wished) >= 0.5 * headroom) shift = wished;
    }
    if (shift) this.move(shift);
    const ahead = delay.found && lag < -0.001 * this.rateHz && delay.agree >= delay.numAgree;
    const stays = ahead || this.negative >= n.negative_updates;
    this.negative = stays ? Math.min(this.negative + 1, 1000) : 0;
  }

  // Delays the far end by so many samples more, its past included.
  move(shift) {
    const { ring, line } = this;
    this.pathGain = Math.max(this.pathGain, this.ratio());
    const start = f32(this.n.start_variance * this.pathGain);
    this.kalman.shift(shift, this.profile.map((x) => start * x));
    line.whole += shift;
    const hops = line.reread();
    ring.pair.set(hops[0], this.hop);
    hops.slice(1).forEach((wave, i) => {
      ring.follow(wave);
      ring.write((ring.slot + 1 + i) % ring.count);
    });
  }

  // What a person should know about the stream so far.
  flags() {
    const { delay } = this, drift = delay.driftPpm();
    return {
      delay_samples: delay.found ? delay.lag * delay.factor : 0,
      delay_confidence: delay.confidence,
      drift_ppm: drift,
      drift: Math.abs(drift) > 1e6 * delay.maxDrift,
      negative_delay: this.negative >= this.n.negative_updates,
      unexplained: this.doubtful > 0.3 * this.active && this.doubtful > 0,
      saturated: this.everClipped,
    };
  }
}
