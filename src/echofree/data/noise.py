"""Noise at the microphone, and far ends that aren't speech: music and tones. All made from a seed, or a user's files.

Legend: T samples. Results are float32 [T], about unit power where not silent; the scene sets the level.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from echofree.data.speech import SpeechPool, WaveCache, choose_split

Maker = Callable[[np.random.Generator, int, int], np.ndarray]


class NoisePool:
    """Background noise of one split.

    Args:
        split: train, valid or test; a user's files are shared out, the built-in noises are endless.
        root: a user's folder, searched recursively; None: built-in noises only.
        speech: for babble.
        file_probability: how often a user's file is taken rather than a built-in noise.

    Raises:
        DataError: the folder is missing, holds fewer than 3 files, or none that can be read.
    """

    def __init__(
        self, split: str, sample_rate: int, speech: SpeechPool, root: str | None = None, file_probability: float = 0.7
    ):
        self.sample_rate, self.speech = sample_rate, speech
        self.paths, self.left_out = choose_split(root, split, "data.noise_root") if root else ([], [])
        self.file_probability = file_probability if root else 0.0
        self._cache = WaveCache(sample_rate)

    def draw(self, rng: np.random.Generator, num_samples: int) -> np.ndarray:
        """One background, unit power."""
        if rng.random() < self.file_probability:
            return unit(_crop(rng, self._cache.wave(self.paths[rng.integers(len(self.paths))]), num_samples))
        kind = rng.random()
        if kind < 0.6:
            wave = colored(rng, num_samples, self.sample_rate)
        elif kind < 0.75:
            wave = colored(rng, num_samples, self.sample_rate)
            wave = wave + np.float32(rng.uniform(0.2, 2.0)) * hum(rng, num_samples, self.sample_rate)
        elif kind < 0.9:
            wave = self._babble(rng, num_samples)
        else:
            wave = 0.1 * colored(rng, num_samples, self.sample_rate) + clicks(rng, num_samples, self.sample_rate)
        return unit(wave)

    def _babble(self, rng: np.random.Generator, num_samples: int) -> np.ndarray:
        """3 to 7 voices at once, far enough away that none can be followed."""
        total = np.zeros(num_samples, dtype=np.float32)
        talkers = self.speech.talkers
        for _ in range(int(rng.integers(3, 8))):
            voice = self.speech.talk(rng, talkers[rng.integers(len(talkers))], num_samples, (0.0, 0.3))
            total += np.roll(voice, int(rng.integers(num_samples))) * np.float32(rng.uniform(0.4, 1.0))
        return total + 0.1 * np.float32(np.std(total)) * colored(rng, num_samples, self.sample_rate)


def unit(wave: np.ndarray) -> np.ndarray:
    """Scales to unit power; silence stays silence."""
    rms = float(np.sqrt(np.mean(np.square(wave))))
    return wave / np.float32(rms) if rms > 1e-8 else wave


def colored(rng: np.random.Generator, num_samples: int, rate_hz: int) -> np.ndarray:
    """Gaussian noise with a random smooth spectrum, falling by 0 to 9 dB per octave, sometimes with a slow swell."""
    bins = num_samples // 2 + 1
    spectrum = rng.standard_normal(2 * bins, dtype=np.float32).view(np.complex64)
    knots_hz = np.array((20.0, 80.0, 250.0, 700.0, 1800.0, 4000.0, 0.5 * rate_hz))
    slope = rng.uniform(0.0, 9.0)
    knots_db = -slope * np.log2(knots_hz / 80.0) + rng.normal(0.0, 4.0, len(knots_hz))
    knots_db[0] -= rng.uniform(0.0, 20.0)
    # The shape is smooth, so a coarse grid repeated over the bins is enough, and 20 times cheaper.
    step = max(1, bins // 2048)
    grid_hz = np.arange(0, bins, step) * (rate_hz / num_samples)
    gain = 10.0 ** (np.interp(np.log(np.maximum(grid_hz, 20.0)), np.log(knots_hz), knots_db) / 20.0)
    spectrum *= np.repeat(gain.astype(np.float32), step)[:bins]
    spectrum[0] = 0.0
    wave = np.fft.irfft(spectrum, num_samples).astype(np.float32)
    if rng.random() < 0.4:
        knots = np.linspace(0, num_samples, max(3, num_samples // rate_hz + 2))
        wave *= np.interp(np.arange(num_samples), knots, 10 ** rng.uniform(-0.5, 0.2, len(knots))).astype(np.float32)
    return unit(wave)


def hum(rng: np.random.Generator, num_samples: int, rate_hz: int) -> np.ndarray:
    """Mains hum or a motor: a fundamental of 50, 60 or 80 to 240 Hz with up to 12 harmonics, unit power."""
    base_hz = float(rng.choice((50.0, 60.0, rng.uniform(80.0, 240.0))))
    time = np.arange(num_samples, dtype=np.float32) * np.float32(2 * np.pi * base_hz / rate_hz)
    wave = np.zeros(num_samples, dtype=np.float32)
    for k in range(1, int(rng.integers(3, 13))):
        if k * base_hz < 0.45 * rate_hz:
            wave += np.float32(rng.uniform(0.2, 1.0) / k) * np.sin(k * time + np.float32(rng.uniform(0, 6.28)))
    return unit(wave)


def clicks(rng: np.random.Generator, num_samples: int, rate_hz: int) -> np.ndarray:
    """Keys, dishes: short bursts with an exponential decay, peak about 10."""
    wave = np.zeros(num_samples, dtype=np.float32)
    for _ in range(int(rng.integers(2, 4 + 6 * num_samples // rate_hz))):
        length = round(rng.uniform(0.003, 0.04) * rate_hz)
        start = int(rng.integers(max(1, num_samples - length)))
        burst = rng.standard_normal(length, dtype=np.float32) * np.exp(-np.arange(length) * (5.0 / length))
        if rng.random() < 0.5:
            burst[1:] = 0.5 * (burst[1:] + burst[:-1])
        wave[start : start + length] += (burst * rng.uniform(1.0, 8.0)).astype(np.float32)[: num_samples - start]
    return wave


def music(rng: np.random.Generator, num_samples: int, rate_hz: int) -> np.ndarray:
    """Chords, a melody and a beat from decaying harmonics and bursts, unit power."""
    wave = np.zeros(num_samples, dtype=np.float32)
    beat = round(60.0 / rng.uniform(70.0, 160.0) * rate_hz)
    scale = np.array((0, 2, 4, 5, 7, 9, 11, 12) if rng.random() < 0.5 else (0, 2, 3, 5, 7, 8, 10, 12))
    root_hz = float(rng.uniform(110.0, 220.0))
    decay_s, num_harmonics = rng.uniform(0.15, 1.0), int(rng.integers(3, 9))
    drum = rng.uniform(0.0, 1.0)
    for i, start in enumerate(range(-int(rng.integers(beat)), num_samples, beat)):
        degrees = [int(rng.integers(8))] + ([0, 2, 4] if i % 4 == 0 else [])
        for k, degree in enumerate(degrees):
            hz = root_hz * 2.0 ** ((scale[degree % 8] + (12 if k == 0 else 0)) / 12.0)
            length = beat * (1 if k == 0 else 3)
            _add(wave, start, _note(rng, hz, length, rate_hz, decay_s, num_harmonics))
        if rng.random() < drum:
            length = round(0.08 * rate_hz)
            hit = rng.standard_normal(length, dtype=np.float32) * np.exp(-np.arange(length) * (6.0 / length))
            _add(wave, start, hit.astype(np.float32))
    return unit(wave)


def tones(rng: np.random.Generator, num_samples: int, rate_hz: int) -> np.ndarray:
    """A steady or stepping tone pair, a sweep, or plain noise, unit power."""
    kind = rng.integers(3)
    if kind == 0:
        return colored(rng, num_samples, rate_hz)
    if kind == 1:
        start, stop = np.exp(rng.uniform(np.log(100.0), np.log(0.45 * rate_hz), 2))
        phase = np.cumsum(np.geomspace(start, stop, num_samples)) * (2 * np.pi / rate_hz)
        return unit(np.sin(phase).astype(np.float32))
    step = round(rng.uniform(0.1, 0.6) * rate_hz)
    steps = -(-num_samples // step)
    hz = np.repeat(np.exp(rng.uniform(np.log(250.0), np.log(2500.0), (steps, 2))), step, axis=0)[:num_samples]
    on = np.repeat(rng.random(steps) < 0.8, step)[:num_samples]
    on[:step] = True
    return unit((np.sin(np.cumsum(hz, axis=0) * (2 * np.pi / rate_hz)).sum(axis=1) * on).astype(np.float32))


def _note(
    rng: np.random.Generator, hz: float, length: int, rate_hz: int, decay_s: float, num_harmonics: int
) -> np.ndarray:
    time = np.arange(length, dtype=np.float32) / np.float32(rate_hz)
    phase = np.float32(2 * np.pi * hz) * time
    wave = np.zeros(length, dtype=np.float32)
    for k in range(1, num_harmonics + 1):
        if k * hz < 0.45 * rate_hz:
            wave += np.float32(rng.uniform(0.3, 1.0) / k) * np.sin(k * phase)
    attack = np.minimum(1.0, time / np.float32(0.008))
    return wave * attack * np.exp(-time / np.float32(decay_s))


def _add(wave: np.ndarray, start: int, part: np.ndarray) -> None:
    """Adds `part` at `start`, which may lie before 0 or run over the end."""
    first, last = max(start, 0), min(start + len(part), len(wave))
    if last > first:
        wave[first:last] += part[first - start : last - start]


def _crop(rng: np.random.Generator, wave: np.ndarray, num_samples: int) -> np.ndarray:
    """A random stretch; a file that is too short is repeated."""
    if len(wave) < num_samples:
        wave = np.tile(wave, -(-num_samples // max(len(wave), 1)))
    start = int(rng.integers(len(wave) - num_samples + 1))
    return wave[start : start + num_samples]
