// WAV files in and out. WAV of the model's own rate is read exactly; everything else the browser decodes and resamples.

// -> Float32Array at rateHz, the mean of the channels
export async function readSound(bytes, rateHz) {
  const wav = parse(bytes);
  if (wav && wav.rateHz === rateHz) return wav.wave;
  const decoder = new OfflineAudioContext(1, 1, rateHz);
  const buffer = await decoder.decodeAudioData(bytes.slice(0)); // takes its bytes away
  const sum = new Float32Array(buffer.length);
  for (let c = 0; c < buffer.numberOfChannels; c++) buffer.getChannelData(c).forEach((x, n) => { sum[n] += x / buffer.numberOfChannels; });
  return sum;
}

// -> {rateHz, wave} of a WAV of 16 or 24-bit integers or 32-bit floats, null of anything else
function parse(bytes) {
  const view = new DataView(bytes);
  const tag = (at) => String.fromCharCode(...new Uint8Array(bytes, at, 4));
  if (bytes.byteLength < 44 || tag(0) !== "RIFF" || tag(8) !== "WAVE") return null;
  let form = null;
  for (let at = 12; at + 8 <= bytes.byteLength; ) {
    const name = tag(at), size = view.getUint32(at + 4, true), begin = at + 8;
    if (name === "fmt ") {
      const code = view.getUint16(begin, true), extended = code === 0xfffe && size >= 26;
      form = { code: extended ? view.getUint16(begin + 24, true) : code, channels: view.getUint16(begin + 2, true), rateHz: view.getUint32(begin + 4, true), bits: view.getUint16(begin + 14, true) };
    } else if (name === "data" && form) {
      return samples(view, begin, Math.min(size, bytes.byteLength - begin), form);
    }
    at = begin + size + (size % 2);
  }
  return null;
}

function samples(view, begin, size, { code, channels, rateHz, bits }) {
  const readers = {
    "1/16": (at) => view.getInt16(at, true) / 32768,
    "1/24": (at) => ((view.getInt8(at + 2) << 16) | view.getUint16(at, true)) / 8388608,
    "3/32": (at) => view.getFloat32(at, true),
  };
  const read = readers[`${code}/${bits}`], step = bits / 8;
  if (!read) return null;
  const wave = new Float32Array(Math.floor(size / step / channels));
  for (let n = 0, at = begin; n < wave.length; n++) {
    let sum = 0;
    for (let c = 0; c < channels; c++, at += step) sum += read(at);
    wave[n] = sum / channels;
  }
  return { rateHz, wave };
}

// 16-bit WAV, one channel
export function writeWav(wave, rateHz) {
  const view = new DataView(new ArrayBuffer(44 + 2 * wave.length));
  const text = (at, word) => [...word].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * wave.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rateHz, true);
  view.setUint32(28, 2 * rateHz, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * wave.length, true);
  wave.forEach((x, n) => view.setInt16(44 + 2 * n, Math.min(32767, Math.max(-32768, Math.round(32768 * x))), true));
  return new Blob([view.buffer], { type: "audio/wav" });
}
