// Plays the signals of a take in step; switching between them keeps the place.

export class Player {
  constructor(box, button, clock) {
    Object.assign(this, { box, button, clock, at: 0, chosen: 1, playing: false, waves: null, texts: ["", ""] });
    this.tracks = [...box.querySelectorAll(".track")];
    button.onclick = () => (this.playing ? this.stop() : this.play());
    this.tracks.forEach((track, i) => {
      track.querySelector("button").onclick = () => this.choose(i);
      const picture = track.querySelector(".picture");
      picture.onclick = (event) => {
        if (!this.waves) return;
        const { left, width } = picture.getBoundingClientRect();
        this.choose(i);
        this.seek(((event.clientX - left) / width) * this.seconds);
      };
    });
    this.choose(1);
  }

  label(play, pause) {
    this.texts = [play, pause];
    this.button.textContent = this.playing ? pause : play;
  }

  // waves: of one length, or null for nothing
  load(waves, rateHz) {
    const empty = !waves || !waves[0].length;
    Object.assign(this, { waves: empty ? null : waves, rateHz, at: 0, seconds: empty ? 0 : waves[0].length / rateHz, buffers: null });
    this.button.disabled = empty;
    this.box.classList.toggle("ready", !empty);
    this.tell();
  }

  choose(i) {
    this.chosen = i;
    this.tracks.forEach((track, k) => {
      track.classList.toggle("on", k === i);
      track.querySelector("button").setAttribute("aria-pressed", String(k === i));
    });
    this.gains?.forEach((gain, k) => gain.gain.setTargetAtTime(k === i ? 1 : 0, this.context.currentTime, 0.008));
  }

  async play() {
    this.context ??= new AudioContext();
    await this.context.resume();
    const { context } = this;
    this.buffers ??= this.waves.map((wave) => {
      const buffer = new AudioBuffer({ length: wave.length, sampleRate: this.rateHz, numberOfChannels: 1 });
      buffer.copyToChannel(wave, 0);
      return buffer;
    });
    if (this.at >= this.seconds - 0.05) this.at = 0;
    this.begun = context.currentTime + 0.03 - this.at;
    this.gains = this.buffers.map((_, k) => new GainNode(context, { gain: k === this.chosen ? 1 : 0 }));
    this.sources = this.buffers.map((buffer, k) => {
      const source = new AudioBufferSourceNode(context, { buffer });
      source.connect(this.gains[k]).connect(context.destination);
      source.start(context.currentTime + 0.03, this.at);
      return source;
    });
    this.playing = true;
    this.button.textContent = this.texts[1];
    this.run();
  }

  run() {
    if (!this.playing) return;
    this.at = Math.max(0, Math.min(this.seconds, this.context.currentTime - this.begun));
    this.tell();
    if (this.at >= this.seconds) this.stop();
    else requestAnimationFrame(() => this.run());
  }

  stop() {
    if (!this.playing) return;
    this.playing = false;
    this.sources.forEach((source) => source.stop());
    this.gains = null;
    this.button.textContent = this.texts[0];
  }

  seek(seconds) {
    this.stop();
    this.at = seconds;
    this.tell();
    return this.play();
  }

  tell() {
    this.clock.textContent = `${this.at.toFixed(1)} / ${(this.seconds ?? 0).toFixed(1)} s`;
    for (const track of this.tracks) track.querySelector(".head").style.left = `${this.seconds ? (100 * this.at) / this.seconds : 0}%`;
  }
}
