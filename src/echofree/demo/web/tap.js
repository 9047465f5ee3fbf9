// Runs on the audio thread: collects microphone and far end, the samples of one moment in one hop, and hands on whole hops.

class Tap extends AudioWorkletProcessor {
  constructor(options) {
    super();
    this.hop = options.processorOptions.hop;
    this.fill = 0;
    this.ended = false;
    this.renew();
    this.port.onmessage = ({ data }) => {
      if (data.to) this.to = data.to;
      else this.ended = true;
    };
  }

  renew() {
    this.mic = new Float32Array(this.hop);
    this.far = new Float32Array(this.hop);
  }

  // inputs: microphone, far end; one that has nothing to say is silent
  process([[mic], [far]], [[silence]]) {
    if (this.ended) return false;
    for (let at = 0; at < silence.length; ) {
      const take = Math.min(silence.length - at, this.hop - this.fill);
      if (mic) this.mic.set(mic.subarray(at, at + take), this.fill);
      if (far) this.far.set(far.subarray(at, at + take), this.fill);
      at += take;
      this.fill += take;
      if (this.fill === this.hop) {
        this.to?.postMessage({ mic: this.mic, far: this.far }, [this.mic.buffer, this.far.buffer]);
        this.fill = 0;
        this.renew();
      }
    }
    return true;
  }
}

registerProcessor("tap", Tap);
