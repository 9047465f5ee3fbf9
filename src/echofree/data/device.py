"""What a device does to sound: equalisers, loudspeaker distortion, gain control.

Every function takes and gives float32 [T]. Distortions expect a signal with peak 1 and keep no particular level: the
scene scales the echo afterwards.

Legend: T samples, F bins.
"""

from __future__ import annotations

import numpy as np

FIR_TAPS = 1024  # long enough for a high-pass at 80 Hz at 16 kHz
DISTORTIONS = (
    "hard_clip",
    "soft_clip",
    "sef",
    "sigmoid",
    "one_sided",
    "saturation",
    "hammerstein",
    "wiener_hammerstein",
    "volterra",
    "memory",
)


def fast_length(at_least: int) -> int:
    """The next length without prime factors beyond 5: an FFT of it is fast."""
    best = 1 << (at_least - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            length = three * (1 << max(0, (-(-at_least // three) - 1).bit_length()))
            if at_least <= length < best:
                best = length
            three *= 3
        five *= 5
    return best


def convolve(wave: np.ndarray, *taps: np.ndarray) -> list[np.ndarray]:
    """Causal filters [K] applied to one wave [T] -> one [T] each, cut at the end."""
    size = fast_length(len(wave) + max(len(t) for t in taps) - 1)
    spectrum = np.fft.rfft(wave, size)
    return [np.fft.irfft(spectrum * np.fft.rfft(t, size), size)[: len(wave)] for t in taps]


def chain(*taps: np.ndarray) -> np.ndarray:
    """Filters in a row as one: [K1], [K2], ... -> float32 [K1 + K2 + ... - count + 1]."""
    if len(taps) == 1:
        return taps[0]
    length = sum(len(t) for t in taps) - len(taps) + 1
    size = fast_length(length)
    spectrum = np.fft.rfft(taps[0], size)
    for more in taps[1:]:
        spectrum = spectrum * np.fft.rfft(more, size)
    return np.fft.irfft(spectrum, size)[:length].astype(np.float32)


def biquad(kind: str, corner_hz: float, rate_hz: int, q: float = 0.707, gain_db: float = 0.0) -> np.ndarray:
    """Frequency response complex128 [FIR_TAPS / 2 + 1] of one second-order section (Bristow-Johnson's cookbook).

    Args:
        kind: high_pass, low_pass or peak.
    """
    omega = 2 * np.pi * min(corner_hz, 0.49 * rate_hz) / rate_hz
    alpha, cosine = np.sin(omega) / (2 * q), np.cos(omega)
    if kind == "peak":
        amplitude = 10 ** (gain_db / 40)
        b = (1 + alpha * amplitude, -2 * cosine, 1 - alpha * amplitude)
        a = (1 + alpha / amplitude, -2 * cosine, 1 - alpha / amplitude)
    else:
        sign = -1 if kind == "high_pass" else 1
        b = ((1 - sign * cosine) / 2, sign * (1 - sign * cosine), (1 - sign * cosine) / 2)
        a = (1 + alpha, -2 * cosine, 1 - alpha)
    z = np.exp(-2j * np.pi * np.arange(FIR_TAPS // 2 + 1) / FIR_TAPS)
    return (b[0] + z * (b[1] + z * b[2])) / (a[0] + z * (a[1] + z * a[2]))


def impulse(response: np.ndarray) -> np.ndarray:
    """A causal response [F] -> float32 [FIR_TAPS]. The sections above are minimum-phase, so no delay is added."""
    return np.fft.irfft(response, FIR_TAPS).astype(np.float32)


def loudspeaker_eq(
    rng: np.random.Generator,
    rate_hz: int,
    gain_db: float,
    high_pass_hz: tuple[float, float],
    low_pass_hz: tuple[float, float],
) -> np.ndarray:
    """A small loudspeaker: 2 to 4 peaks of +-gain_db, a high-pass and a low-pass -> float32 [FIR_TAPS]."""
    response = biquad("high_pass", rng.uniform(*high_pass_hz), rate_hz)
    response = response * biquad("low_pass", rng.uniform(*low_pass_hz), rate_hz)
    return impulse(response * _peaks(rng, rate_hz, int(rng.integers(2, 5)), gain_db))


def microphone_eq(rng: np.random.Generator, rate_hz: int, gain_db: float) -> np.ndarray:
    """1 or 2 peaks of +-gain_db and a high-pass at 30 to 120 Hz -> float32 [FIR_TAPS]."""
    response = biquad("high_pass", rng.uniform(30.0, 120.0), rate_hz)
    return impulse(response * _peaks(rng, rate_hz, int(rng.integers(1, 3)), gain_db))


def telephone_band(rate_hz: int) -> np.ndarray:
    """300 to 3400 Hz, as a telephone or a radio passes it -> float32 [FIR_TAPS]."""
    return impulse(biquad("high_pass", 300.0, rate_hz) * biquad("low_pass", 3400.0, rate_hz) ** 2)


def structure_path(rng: np.random.Generator, rate_hz: int, level_db: float, direct: int) -> np.ndarray:
    """Sound through the case: a noise-like response of 1 to 4 ms, `level_db` relative to a direct path of 1 that
    arrives at sample `direct`. It is faster in the solid, so it starts at 0 -> float32 [K]."""
    num_taps = max(4, round(rng.uniform(0.001, 0.004) * rate_hz))
    taps = rng.standard_normal(num_taps) * np.exp(-np.arange(num_taps) * (4.0 / num_taps))
    taps *= 10 ** (level_db / 20) / np.sqrt(np.sum(taps**2))
    return taps.astype(np.float32)


def distort(rng: np.random.Generator, wave: np.ndarray, kind: str, rate_hz: int) -> np.ndarray:
    """One of `DISTORTIONS` with random parameters: float32 [T] with peak 1 -> [T]."""
    if kind == "hard_clip":
        limit = np.float32(rng.uniform(0.4, 0.95))
        return np.clip(wave, -limit, limit)
    if kind == "soft_clip":
        limit = np.float32(rng.uniform(0.3, 0.95))
        return limit * wave / np.sqrt(np.square(limit) + np.square(wave))
    if kind == "sef":
        return scaled_error_function(wave, float(rng.choice((0.1, 1.0, 10.0))))
    if kind == "sigmoid":
        return asymmetric_sigmoid(wave)
    if kind == "one_sided":
        return np.where(wave < 0, np.float32(10 ** (rng.uniform(-12.0, 0.0) / 20)) * wave, wave)
    if kind == "saturation":
        n = np.float32(rng.uniform(0.5, 4.0))
        return np.arctan(n * wave) / n if rng.random() < 0.5 else erf(n * wave) / n
    if kind == "hammerstein":
        return convolve(_polynomial(rng, wave), _short_fir(rng))[0]
    if kind == "wiener_hammerstein":
        inner = convolve(wave, _short_fir(rng))[0]
        return convolve(_polynomial(rng, inner / max(float(np.abs(inner).max()), 1e-6)), _short_fir(rng))[0]
    if kind == "volterra":
        return _volterra(rng, wave)
    if kind == "memory":
        return _memory(rng, wave, rate_hz)
    raise ValueError(f"{kind!r} is none of {', '.join(DISTORTIONS)}")


def scaled_error_function(wave: np.ndarray, v: float) -> np.ndarray:
    """int_0^x exp(-z^2 / (2 v)) dz = sqrt(pi v / 2) erf(x / sqrt(2 v)), in closed form."""
    return np.float32(np.sqrt(np.pi * v / 2)) * erf(wave * np.float32(1 / np.sqrt(2 * v)))


def asymmetric_sigmoid(wave: np.ndarray) -> np.ndarray:
    """b = 1.5 x - 0.3 x^2, f = 2 / (1 + exp(-k b)) - 1 with k = 4 for b > 0, else 0.5."""
    b = 1.5 * wave - 0.3 * np.square(wave)
    return np.tanh(0.5 * np.where(b > 0, np.float32(4.0), np.float32(0.5)) * b)  # the same function


def erf(x: np.ndarray) -> np.ndarray:
    """The error function to 4e-7 (Abramowitz & Stegun 7.1.26); spares the start-up time of scipy."""
    t = 1.0 / (1.0 + 0.3275911 * np.abs(x))
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return (np.sign(x) * (1.0 - poly * np.exp(-np.square(x)))).astype(x.dtype)


def gain_control(
    wave: np.ndarray, rate_hz: int, target_db: float, max_gain_db: float, attack_s: float, release_s: float
) -> np.ndarray:
    """A compressor's gain curve for `wave`: float32 [T], to be multiplied in.

    The level is followed per 10 ms, fast upwards and slowly downwards; where it exceeds `target_db` dBFS it is pulled
    there, below it is raised by at most `max_gain_db`.
    """
    frame = max(1, rate_hz // 100)
    count = -(-len(wave) // frame)
    padded = np.zeros(count * frame, dtype=np.float32)
    padded[: len(wave)] = wave
    level_db = 10 * np.log10(np.square(padded).reshape(count, frame).mean(axis=1) + 1e-10)
    up, down = np.exp(-0.01 / attack_s), np.exp(-0.01 / release_s)
    smooth = np.empty(count)
    state = target_db
    for i, value in enumerate(level_db.tolist()):
        state = value + (up if value > state else down) * (state - value)
        smooth[i] = state
    gain_db = np.clip(target_db - smooth, -40.0, max_gain_db)
    centers = (np.arange(count) + 0.5) * frame
    return (10 ** (np.interp(np.arange(len(wave)), centers, gain_db) / 20)).astype(np.float32)


def _peaks(rng: np.random.Generator, rate_hz: int, count: int, gain_db: float) -> np.ndarray:
    response = np.ones(FIR_TAPS // 2 + 1, dtype=np.complex128)
    for _ in range(count):
        corner_hz = np.exp(rng.uniform(np.log(150.0), np.log(0.4 * rate_hz)))
        response *= biquad("peak", corner_hz, rate_hz, rng.uniform(0.5, 3.0), rng.uniform(-gain_db, gain_db))
    return response


def _short_fir(rng: np.random.Generator) -> np.ndarray:
    """A mild colouring of 32 taps whose first tap dominates."""
    taps = 0.3 * rng.standard_normal(32) * np.exp(-np.arange(32) / 6.0)
    taps[0] = 1.0
    return taps.astype(np.float32)


def _polynomial(rng: np.random.Generator, wave: np.ndarray) -> np.ndarray:
    """sum_p c_p x^p, p = 1..5, c_1 = 1."""
    c2, c3, c4, c5 = (float(v) for v in rng.uniform(-1.0, 1.0, 4) * (0.25, 0.35, 0.1, 0.15))
    return wave * (1.0 + wave * (c2 + wave * (c3 + wave * (c4 + wave * c5))))


def _volterra(rng: np.random.Generator, wave: np.ndarray) -> np.ndarray:
    """Second order, low rank: y = h * x + sum_r (f_r * x)(g_r * x), with sparse short f and g."""
    out = convolve(wave, _short_fir(rng))[0]
    for _ in range(int(rng.integers(2, 5))):
        out = out + np.float32(rng.uniform(-0.4, 0.4)) * _sparse(rng, wave) * _sparse(rng, wave)
    return out


def _sparse(rng: np.random.Generator, wave: np.ndarray) -> np.ndarray:
    """A FIR with three taps within 24 samples."""
    out = np.zeros_like(wave)
    for lag in rng.integers(0, 24, 3):
        out[lag:] += np.float32(rng.uniform(-0.6, 0.6)) * wave[: len(wave) - lag]
    return out


def _memory(rng: np.random.Generator, wave: np.ndarray, rate_hz: int) -> np.ndarray:
    """The cone's displacement d (low-pass at 300 Hz) lowers the gain, y = x (1 - k d^2), and beyond a threshold
    something rattles."""
    d = convolve(wave, impulse(biquad("low_pass", 300.0, rate_hz)))[0]
    d = d / max(float(np.abs(d).max()), 1e-6)
    out = wave * (1.0 - np.float32(rng.uniform(0.2, 0.8)) * np.square(d))
    if rng.random() < 0.5:
        over = np.abs(d) > rng.uniform(0.5, 0.9)
        out = out + np.float32(rng.uniform(0.01, 0.1)) * over * rng.standard_normal(len(wave), dtype=np.float32)
    return out.astype(np.float32)
