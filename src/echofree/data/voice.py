"""Many voices from few: fast changes of pitch, formants, tempo and tone, and a speech-like generator.

The generator is a source-filter model (Fant, "Acoustic Theory of Speech Production", 1960): glottal pulses with a pitch
contour, or noise, shaped by moving formants, in syllables, words and pauses. It says nothing, but it has the pitch,
rhythm and spectra that a canceller meets.

Legend: T samples, L frames, F bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FRAME = 512
HOP = FRAME // 2
# Square-root Hann, analysis and synthesis: overlapping halves add up to 1.
WINDOW = np.sin(np.pi * (np.arange(FRAME) + 0.5) / FRAME).astype(np.float32)

# First four formants in Hz of an adult man's vowels; other sizes of vocal tract scale them.
VOWELS_HZ = np.array(
    [
        (730, 1090, 2440, 3400),
        (530, 1840, 2480, 3500),
        (390, 1990, 2550, 3600),
        (270, 2290, 3010, 3700),
        (570, 840, 2410, 3300),
        (440, 1020, 2240, 3300),
        (300, 870, 2240, 3200),
        (490, 1350, 1690, 3300),
        (640, 1190, 2390, 3400),
    ],
    dtype=np.float32,
)
BANDWIDTHS_HZ = np.array((70, 100, 140, 220), dtype=np.float32)


@dataclass(frozen=True)
class Variation:
    """How one talker differs from the recording.

    Attributes:
        pitch: factor on pitch and formants together (resampling); 1 leaves both.
        formant: further factor on the formants alone.
        tempo: factor on the speaking rate at constant pitch.
        tilt_db: dB per octave around 1 kHz.
    """

    pitch: float = 1.0
    formant: float = 1.0
    tempo: float = 1.0
    tilt_db: float = 0.0

    @property
    def rate(self) -> float:
        """Samples of the recording used up per sample made."""
        return self.pitch * self.tempo


def draw_variation(rng: np.random.Generator) -> Variation:
    """A new talker: pitch always, the rest in part of the cases."""
    pitch = float(np.exp(rng.uniform(np.log(0.78), np.log(1.28))))
    formant = float(rng.uniform(0.88, 1.14)) if rng.random() < 0.5 else 1.0
    tempo = float(rng.uniform(0.85, 1.2)) if rng.random() < 0.25 else 1.0
    return Variation(pitch, formant, tempo, float(rng.uniform(-2.0, 2.0)))


def vary(wave: np.ndarray, variation: Variation, num_samples: int, rate_hz: int) -> np.ndarray:
    """Applies a variation.

    Args:
        wave: float32 [at least num_samples * variation.rate].
        num_samples: length of the result.
    """
    if variation.tempo != 1.0:
        wave = change_tempo(wave, variation.tempo, rate_hz)
    if variation.pitch != 1.0:
        import soxr

        wave = soxr.resample(wave, float(rate_hz) * variation.pitch, float(rate_hz), quality="MQ")
    wave = fit(wave, num_samples)
    if variation.formant != 1.0 or variation.tilt_db != 0.0:
        wave = shift_formants(wave, variation.formant, variation.tilt_db, rate_hz)
    return wave


def fit(wave: np.ndarray, num_samples: int) -> np.ndarray:
    """[T] -> float32 [num_samples], cut or padded with zeros at the end."""
    if len(wave) < num_samples:
        wave = np.concatenate([wave, np.zeros(num_samples - len(wave), dtype=np.float32)])
    return np.ascontiguousarray(wave[:num_samples], dtype=np.float32)


def change_tempo(wave: np.ndarray, tempo: float, rate_hz: int) -> np.ndarray:
    """Waveform-similarity overlap-add (Verhelst & Roelands, ICASSP 1993): float32 [T] -> [about T / tempo]."""
    frame = round(0.032 * rate_hz) // 2 * 2
    hop, reach = frame // 2, round(0.008 * rate_hz)
    window = (0.5 - 0.5 * np.cos(2 * np.pi * (np.arange(frame) + 0.5) / frame)).astype(np.float32)
    padded = np.concatenate([np.zeros(reach, np.float32), wave, np.zeros(2 * frame + reach, np.float32)])
    views = np.lib.stride_tricks.sliding_window_view(padded, hop)[:: max(1, reach // 64)]
    stride = max(1, reach // 64)
    count = max(1, int((len(wave) - frame) / (hop * tempo)))
    out = np.zeros(count * hop + frame, dtype=np.float32)
    last = reach
    for i in range(count):
        wanted = round(i * hop * tempo) + reach
        low = (wanted - reach) // stride
        segment = views[low : low + 2 * reach // stride]
        # The best start is the one most like what would have followed the last frame.
        follow = padded[last + hop : last + 2 * hop]
        start = (low + int(np.argmax(np.einsum("ij,j->i", segment, follow)))) * stride if i else wanted
        out[i * hop : i * hop + frame] += window * padded[start : start + frame]
        last = start
    return out


def shift_formants(wave: np.ndarray, factor: float, tilt_db: float, rate_hz: int) -> np.ndarray:
    """Moves the spectral envelope by `factor` along frequency, leaving the pitch: float32 [T] -> [T]."""
    spectrum = stft(wave)  # [L, F]
    freq_hz = np.arange(spectrum.shape[1], dtype=np.float32) * (rate_hz / FRAME)
    gain = (np.maximum(freq_hz, 60.0) / 1000.0) ** (tilt_db / 6.02)  # [F]
    if factor != 1.0:
        power = np.square(spectrum.real) + np.square(spectrum.imag) + 1e-9
        envelope = _smooth(power, round(180.0 * FRAME / rate_hz))  # [L, F]
        source = np.clip(np.round(freq_hz / (factor * rate_hz / FRAME)), 0, spectrum.shape[1] - 1).astype(np.int64)
        ratio = np.sqrt(envelope[:, source] / envelope)
        spectrum = spectrum * (np.clip(ratio, 0.05, 8.0) * gain)
    else:
        spectrum = spectrum * gain
    return istft(spectrum.astype(np.complex64), len(wave))


def stft(wave: np.ndarray) -> np.ndarray:
    """float32 [T] -> complex64 [L, F]."""
    count = -(-len(wave) // HOP) + 1
    padded = np.zeros((count + 1) * HOP, dtype=np.float32)
    padded[HOP : HOP + len(wave)] = wave
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP]
    return np.fft.rfft(frames * WINDOW, axis=1)


def istft(spectrum: np.ndarray, num_samples: int) -> np.ndarray:
    """complex64 [L, F] -> float32 [num_samples]; undoes `stft`."""
    frames = np.fft.irfft(spectrum, FRAME, axis=1) * WINDOW  # [L, FRAME]
    out = np.zeros((len(frames) + 1, HOP), dtype=np.float32)
    out[:-1] += frames[:, :HOP]
    out[1:] += frames[:, HOP:]
    return out.reshape(-1)[HOP : HOP + num_samples]


def suppression_gain(spectrum: np.ndarray, floor: float) -> np.ndarray:
    """What a plain noise suppressor does to a signal: complex [L, F] -> float32 gain [L, F] in [floor, 1].

    The noise of a bin is the 20th percentile of its power; spectral subtraction (Boll, 1979), then 3 frames averaged.
    """
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    noise = 2.0 * np.percentile(power, 20, axis=0)
    gain = np.sqrt(np.clip(1.0 - noise / np.maximum(power, 1e-12), floor**2, 1.0))
    padded = np.pad(gain, ((1, 1), (0, 0)), mode="edge")
    return ((padded[:-2] + padded[1:-1] + padded[2:]) / 3.0).astype(np.float32)


def _smooth(power: np.ndarray, half: int) -> np.ndarray:
    """Mean over 2 half + 1 neighbouring bins: [L, F] -> [L, F]."""
    padded = np.pad(power, ((0, 0), (half + 1, half)), mode="edge")
    total = np.cumsum(padded, axis=1, dtype=np.float64)
    return ((total[:, 2 * half + 1 :] - total[:, : -2 * half - 1]) / (2 * half + 1)).astype(np.float32)


def speak(rng: np.random.Generator, num_samples: int, rate_hz: int) -> np.ndarray:
    """A speech-like signal of a random talker -> float32 [num_samples], active level about -26 dBFS."""
    count = -(-num_samples // HOP) + 1  # L
    pitch_hz = float(np.exp(rng.uniform(np.log(85.0), np.log(260.0))))
    tract = 1.0 + 0.2 * np.clip((pitch_hz - 110.0) / 120.0, 0, 1) + rng.uniform(-0.06, 0.1)
    f0_hz, voiced, unvoiced, formants_hz, hiss_hz = _syllables(rng, count, pitch_hz, rate_hz)
    freq_hz = np.arange(FRAME // 2 + 1, dtype=np.float32) * (rate_hz / FRAME)

    source = stft(_glottis(rng, np.repeat(f0_hz, HOP)[:num_samples], rate_hz))  # [L, F]
    hiss = rng.standard_normal((count, len(freq_hz), 2), dtype=np.float32).view(np.complex64)[..., 0]
    hiss *= float(np.sqrt(np.mean(np.square(np.abs(source)))))  # as strong as the pulses
    breath = rng.uniform(0.02, 0.1)
    filtered = (source + breath * hiss) * (_formant_gain(freq_hz, formants_hz * tract) * voiced[:, None])
    shape = 1.0 / (1.0 + np.square((freq_hz - hiss_hz[:, None]) / (0.3 * hiss_hz[:, None])))  # [L, F]
    filtered += hiss * (shape * unvoiced[:, None])
    wave = istft(filtered.astype(np.complex64), num_samples)
    active = np.abs(wave) > 0.05 * max(float(np.abs(wave).max()), 1e-9)
    rms = float(np.sqrt(np.mean(np.square(wave[active])))) if active.any() else 0.0
    return wave * np.float32(0.05 / max(rms, 1e-9))


def _syllables(
    rng: np.random.Generator, count: int, pitch_hz: float, rate_hz: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """An utterance per frame: pitch, voiced and unvoiced amplitude [L], formants [L, 4], hiss centre [L]."""
    per_s = rate_hz / HOP
    f0_hz = np.full(count, pitch_hz, dtype=np.float32)
    voiced, unvoiced = np.zeros(count, np.float32), np.zeros(count, np.float32)
    formants = np.tile(VOWELS_HZ[0], (count, 1))
    hiss_hz = np.full(count, 4500.0, dtype=np.float32)
    pace = rng.uniform(0.8, 1.25)
    at = int(rng.uniform(0.0, 0.6) * per_s)
    phrase = 0
    vowel = VOWELS_HZ[rng.integers(len(VOWELS_HZ))]
    while at < count:
        onset = max(1, int(rng.uniform(0.03, 0.12) * pace * per_s))
        if rng.random() < 0.55:  # fricative or burst before the vowel
            hiss_hz[at : at + onset] = rng.uniform(2500.0, 0.42 * rate_hz)
            unvoiced[at : at + onset] = rng.uniform(0.15, 0.8)
        at += onset
        length = max(3, int(rng.uniform(0.08, 0.26) * pace * per_s))
        stop = min(at + length, count)
        if stop <= at:
            break
        ramp = np.linspace(0.0, 1.0, length, dtype=np.float32)[: stop - at]
        follow = VOWELS_HZ[rng.integers(len(VOWELS_HZ))]
        formants[at:stop] = vowel + (follow - vowel) * ramp[:, None]
        formants[stop:] = follow
        vowel = follow
        accent = rng.uniform(-0.12, 0.25)
        fall = 1.08 - 0.03 * phrase
        f0_hz[at:stop] = pitch_hz * fall * (1.0 + accent * np.sin(np.pi * ramp))
        voiced[at:stop] = rng.uniform(0.5, 1.0) * np.minimum(1.0, 4.0 * np.minimum(ramp + 0.15, 1.1 - ramp))
        at, phrase = stop, phrase + 1
        if rng.random() < 0.3 or phrase > 12:  # between words, or the end of a phrase
            long = phrase > rng.integers(4, 13)
            at += int((rng.uniform(0.25, 1.0) if long else rng.uniform(0.02, 0.1)) * per_s)
            phrase = 0 if long else phrase
    return f0_hz, voiced, unvoiced, formants, hiss_hz


def _glottis(rng: np.random.Generator, f0_hz: np.ndarray, rate_hz: int) -> np.ndarray:
    """Pulses [T] of a slowly wavering pitch [T], read from a table of one band-limited period."""
    num_harmonics = max(1, int(0.47 * rate_hz / float(f0_hz.max())))
    harmonics = np.zeros(1025, dtype=np.complex64)
    order = np.arange(1, num_harmonics + 1)
    harmonics[1 : num_harmonics + 1] = order ** -rng.uniform(0.7, 1.1) * np.exp(-0.5j * np.pi * order / num_harmonics)
    table = np.fft.irfft(harmonics, 2048) * 2048  # [2048]
    waver = np.interp(np.arange(len(f0_hz)), np.arange(0, len(f0_hz) + 800, 800), _jitter(rng, len(f0_hz)))
    phase = np.cumsum(f0_hz * waver / rate_hz)
    return table[(phase % 1.0 * 2048).astype(np.int32)].astype(np.float32)


def _jitter(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    return 1.0 + 0.015 * rng.standard_normal(len(np.arange(0, num_samples + 800, 800)))


def _formant_gain(freq_hz: np.ndarray, formants_hz: np.ndarray) -> np.ndarray:
    """Magnitude of four resonances in cascade: [F], [L, 4] -> [L, F]."""
    power = np.ones((len(formants_hz), len(freq_hz)), dtype=np.float32)
    square = np.square(freq_hz)
    for k in range(formants_hz.shape[1]):
        center = np.square(formants_hz[:, k : k + 1])  # [L, 1]
        detuned = square - center
        power *= np.square(center) / (np.square(detuned) + np.square(BANDWIDTHS_HZ[k]) * square + 1.0)
    return power**0.35  # less than the square root: stands for the poles above the fourth formant
