"""Coefficients and matrices of the linear stage, designed in float64 when a canceller is loaded.

The same formulas as in `echofree.dsp`, which needs torch; a test compares them.

Legend: M hop, N window, F bins, R rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# Single precision in, single precision out, into a given array: numpy does it, its annotations don't know.
rfft: Any = np.fft.rfft
irfft: Any = np.fft.irfft


def vorbis_window(window_samples: int) -> np.ndarray:
    """sin(pi/2 sin^2(pi (n + 1/2) / N)), float32 [N]."""
    n = np.arange(window_samples)
    return np.sin(np.pi / 2 * np.sin(np.pi * (n + 0.5) / window_samples) ** 2).astype(np.float32)


def dc_blocker(cutoff_hz: float, rate_hz: int) -> tuple[np.ndarray, np.ndarray]:
    """(b, a) of a first-order high-pass by the bilinear transform."""
    t = math.tan(math.pi * cutoff_hz / rate_hz)
    return np.array([1.0, -1.0]) / (1 + t), np.array([1.0, (t - 1) / (1 + t)])


def high_pass(cutoff_hz: float, rate_hz: int) -> tuple[np.ndarray, np.ndarray]:
    """(b, a) of a second-order Butterworth high-pass by the bilinear transform."""
    t = math.tan(math.pi * cutoff_hz / rate_hz)
    norm = 1 + math.sqrt(2) * t + t * t
    return (
        np.array([1.0, -2.0, 1.0]) / norm,
        np.array([1.0, 2 * (t * t - 1) / norm, (1 - math.sqrt(2) * t + t * t) / norm]),
    )


def frequency_response(b: np.ndarray, a: np.ndarray, num_bins: int) -> np.ndarray:
    """Complex response at the bins of a real FFT, [F] from DC to Nyquist."""
    z = np.exp(-1j * np.pi * np.arange(num_bins) / (num_bins - 1))
    return np.asarray(np.polynomial.polynomial.polyval(z, b) / np.polynomial.polynomial.polyval(z, a))


def decimation_matrix(factor: int, hop_samples: int, taps: int) -> np.ndarray:
    """float32 [taps - 1 + M, M / factor]: low-pass and decimation of (the last taps - 1 samples, the new hop)."""
    n = np.arange(taps) - (taps - 1) / 2
    h = np.sinc(n * 0.9 / factor) * np.kaiser(taps, 5.0)
    h /= h.sum()
    matrix = np.zeros((taps - 1 + hop_samples, hop_samples // factor))
    for j in range(hop_samples // factor):
        end = taps - 1 + (j + 1) * factor
        matrix[end - taps : end, j] = h[::-1]
    return matrix.astype(np.float32)


class BlockIir:
    """A recursive filter, a hop at a time, on several rows: one matrix product on (hop, state).

    Args:
        b, a: coefficients, a[0] = 1.
        hop_samples: M.
        rows: R.
    """

    def __init__(self, b: np.ndarray, a: np.ndarray, hop_samples: int, rows: int):
        self.hop, self.order = hop_samples, len(a) - 1
        unit = np.eye(hop_samples + self.order)
        x, s = unit[:, :hop_samples], unit[:, hop_samples:].copy()
        y = np.zeros_like(x)
        for n in range(hop_samples):
            y[:, n] = b[0] * x[:, n] + s[:, 0]
            shifted = np.concatenate([s[:, 1:], np.zeros((len(s), 1))], axis=1)
            s = shifted + np.outer(x[:, n], b[1:]) - np.outer(y[:, n], a[1:])
        self._matrix = np.ascontiguousarray(np.concatenate([y, s], axis=1), dtype=np.float32)
        self._in = np.zeros((rows, hop_samples + self.order), np.float32)
        self._out = np.zeros_like(self._in)
        self.x = self._in[:, :hop_samples]  # [R, M] to be filled before `run`
        self.y = self._out[:, :hop_samples]  # [R, M] valid until the next `run`
        self.state = self._in[:, hop_samples:]  # [R, order]

    def run(self) -> np.ndarray:
        """Filters `x` into `y` and goes on with the state."""
        np.matmul(self._in, self._matrix, out=self._out)
        self.state[:] = self._out[:, self.hop :]
        return self.y

    def reset(self) -> None:
        self._in[:] = 0
