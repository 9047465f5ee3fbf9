// The microphone and what the page plays, both at the model's rate and on one clock, as hops on a port.

// What is thrown: {key, values} of texts.js.
const REFUSALS = { NotAllowedError: "refused", SecurityError: "refused", NotFoundError: "no_mic", OverconstrainedError: "no_mic" };

export class Ear {
  constructor(rateHz, hop) {
    Object.assign(this, { rateHz, hop });
  }

  // far: what is played over and over, or null; gone: called when the microphone goes away. -> the port of the hops
  async open(far, gone) {
    if (!navigator.mediaDevices?.getUserMedia) throw { key: "insecure", values: {} };
    try {
      // the browser's own canceller would leave nothing to do
      this.stream = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: false, noiseSuppression: false, autoGainControl: false, channelCount: 1 } });
    } catch (error) {
      throw { key: REFUSALS[error.name] ?? "mic_busy", values: { why: error.message || error.name } };
    }
    this.stream.getAudioTracks()[0].onended = gone;
    try {
      this.context = new AudioContext({ sampleRate: this.rateHz, latencyHint: "interactive" });
      await this.context.audioWorklet.addModule("tap.js");
      await this.context.resume();
      return this.connect(far);
    } catch (error) {
      throw { key: "no_rate", values: { hz: this.rateHz, why: error.message || error.name } };
    }
  }

  connect(far) {
    const { context, hop } = this, channel = new MessageChannel();
    this.tap = new AudioWorkletNode(context, "tap", { numberOfInputs: 2, numberOfOutputs: 1, outputChannelCount: [1], channelCount: 1, channelCountMode: "explicit", processorOptions: { hop } });
    this.tap.port.postMessage({ to: channel.port1 }, [channel.port1]);
    new MediaStreamAudioSourceNode(context, { mediaStream: this.stream }).connect(this.tap, 0, 0);
    this.tap.connect(context.destination); // silence: a node that leads nowhere may sleep
    if (far) {
      const buffer = new AudioBuffer({ length: far.length, sampleRate: this.rateHz, numberOfChannels: 1 });
      buffer.copyToChannel(far, 0);
      const source = new AudioBufferSourceNode(context, { buffer, loop: true });
      source.connect(context.destination);
      source.connect(this.tap, 0, 1);
      source.start();
    }
    return channel.port2;
  }

  async stop() {
    for (const track of this.stream?.getTracks() ?? []) {
      track.onended = null;
      track.stop();
    }
    this.tap?.port.postMessage("end");
    if (!this.context) return;
    await this.context.close();
    await new Promise((ready) => setTimeout(ready, 100)); // the last hops are still on their way
  }
}
