"""Echo scenes for the tests of the front end: speech-like signals, rooms, delays. float32 [T] at 16 kHz."""

from __future__ import annotations

import numpy as np
import scipy.signal

RATE = 16000


def speech(rng: np.random.Generator, seconds: float, level: float = 0.06) -> np.ndarray:
    """Pulses and noise through moving resonances, in syllables with pauses; rms `level` where it is loud."""
    num = int(seconds * RATE)
    time = np.arange(num) / RATE
    pitch_hz = 120 + 60 * rng.random() + 25 * np.sin(2 * np.pi * (0.7 + rng.random()) * time)
    phase = np.cumsum(pitch_hz) / RATE
    pulses = (np.diff(np.floor(phase), prepend=0.0) > 0) * 8.0
    excitation = pulses + 0.35 * rng.standard_normal(num)
    out = np.zeros(num)
    syllable = RATE // 5
    for start in range(0, num, syllable):
        piece = excitation[start : start + syllable]
        for hz in (rng.uniform(300, 800), rng.uniform(900, 2200), rng.uniform(2400, 3600)):
            radius = 0.96
            a = [1, -2 * radius * np.cos(2 * np.pi * hz / RATE), radius**2]
            out[start : start + syllable] += scipy.signal.lfilter([1 - radius], a, piece)
        out[start : start + syllable] += 0.02 * piece  # something at every frequency
        out[start : start + syllable] *= np.hanning(len(piece)) * (rng.random() > 0.2)
    out = scipy.signal.sosfilt(scipy.signal.butter(3, 110, "highpass", fs=RATE, output="sos"), out)
    return (level * out / np.sqrt(np.mean(out[np.abs(out) > 0] ** 2))).astype(np.float32)


def room(rng: np.random.Generator, rt60_s: float = 0.3, peak: float = 0.3) -> np.ndarray:
    """An impulse response: a direct path and a decaying tail, 120 ms."""
    num = int(0.12 * RATE)
    h = 0.15 * rng.standard_normal(num) * 10 ** (-3 * np.arange(num) / (rt60_s * RATE))
    h[:40] = 0
    h[40] = 1.0  # 2.5 ms
    return peak * h


def echo_of(far: np.ndarray, h: np.ndarray, delay_ms: float = 0.0) -> np.ndarray:
    """far through h, later by delay_ms (negative: earlier), of the same length."""
    shift = round(delay_ms * RATE / 1000)
    out = scipy.signal.fftconvolve(far, h)
    out = np.concatenate([np.zeros(max(shift, 0)), out[max(-shift, 0) :]])[: len(far)]
    return np.pad(out, (0, len(far) - len(out))).astype(np.float32)


def reduction_db(before: np.ndarray, after: np.ndarray, start_s: float, end_s: float | None = None) -> float:
    """Energy of `before` over energy of `after` between two moments, without DC, in dB."""
    part = slice(int(start_s * RATE), None if end_s is None else int(end_s * RATE))
    a, b = (np.asarray(x, np.float64)[..., part] for x in (before, after))
    a, b = a - a.mean(), b - b.mean()
    return float(10 * np.log10(np.sum(a**2) / (np.sum(b**2) + 1e-20)))


def si_sdr_db(est: np.ndarray, near: np.ndarray) -> float:
    """Scale-invariant signal-to-distortion ratio (Le Roux et al. 2019)."""
    est, near = np.asarray(est, np.float64), np.asarray(near, np.float64)
    target = near * (est @ near) / (near @ near)
    return float(10 * np.log10(np.sum(target**2) / np.sum((est - target) ** 2)))
