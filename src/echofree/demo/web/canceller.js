// An exported canceller as a live stream, a hop at a time: echofree.runtime.canceller. The graph is run by `makeRunner`'s
// runner, so that this module knows of no engine. S signals, F bins, M hop.

import { floats, vorbisWindow } from "./design.js";
import { realFft } from "./fft.js";
import { LinearStage } from "./linear.js";

export const FORMAT = 3;

// Throws when a contract isn't one that this page can run.
export function checkContract(contract) {
  if (contract.format !== FORMAT) throw new Error(`contract.json has format ${contract.format}, not ${FORMAT}: export the checkpoint again`);
  if (contract.status !== "checked") throw new Error(`the exported model is ${contract.status}: only one that agrees with its model runs here`);
  if (!["onnxruntime", "none"].includes(contract.engine)) throw new Error(`a model for ${contract.engine}: this page runs ONNX`);
}

export class Canceller {
  // runner: {inputs: arrays to fill, in the contract's order; run(): -> promise of the output}, or null with engine none
  constructor(contract, runner) {
    const hop = contract.hop_samples;
    Object.assign(this, { contract, runner, hop, rateHz: contract.sample_rate, latency: contract.latency_samples });
    this.linear = contract.front_end && new LinearStage(contract.front_end, this.rateHz, hop);
    this.out = floats(hop);
    if (contract.kind === "spectra") {
      this.fft = realFft(2 * hop);
      this.window = vorbisWindow(2 * hop);
      this.frames = contract.signals.map(() => floats(2 * hop));
      this.windowed = floats(2 * hop);
      this.re = floats(hop + 1);
      this.im = floats(hop + 1);
      this.overlap = floats(hop);
    }
    this.step = { spectra: this.spectraStep, wave: this.waveStep, linear: this.linearStep }[contract.kind];
  }

  // A hop of each, [M] -> a hop of the estimate, valid until the next call.
  async hopOf(mic, far) {
    await this.step(mic, far);
    return this.out;
  }

  async spectraStep(mic, far) {
    const { hop, frames, windowed, window, re, im, contract, runner, overlap } = this, into = runner.inputs[0];
    this.linear.step(mic, far);
    frames.forEach((frame, row) => {
      frame.copyWithin(0, hop);
      frame.set(this.linear[contract.signals[row]], hop);
      for (let n = 0; n < 2 * hop; n++) windowed[n] = frame[n] * window[n];
      this.fft.forward(windowed, 0, re, im, 0);
      for (let k = 0, at = 2 * row * (hop + 1); k <= hop; k++, at += 2) {
        into[at] = re[k];
        into[at + 1] = im[k];
      }
    });
    const spectrum = await runner.run();
    for (let k = 0; k <= hop; k++) {
      re[k] = spectrum[2 * k];
      im[k] = spectrum[2 * k + 1];
    }
    this.fft.inverse(re, im, 0, windowed, 0);
    for (let n = 0; n < hop; n++) {
      this.out[n] = overlap[n] + windowed[n] * window[n];
      overlap[n] = windowed[hop + n] * window[hop + n];
    }
  }

  async waveStep(mic, far) {
    this.runner.inputs[0].set(mic);
    this.runner.inputs[1].set(far);
    this.out.set(await this.runner.run());
  }

  async linearStep(mic, far) {
    this.linear.step(mic, far);
    this.out.set(this.linear.error);
  }

  flags() {
    return this.linear ? this.linear.flags() : {};
  }
}
