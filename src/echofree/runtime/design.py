"""Coefficients and matrices of the linear stage, designed in float64 when a canceller is loaded.

The same formulas as in `echofree.dsp`, which needs torch; a test compares them.

Legend: M hop, N window, F bins, R rows, Q block.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

BLOCK = 16  # samples that a recursive filter makes at once, at most

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
    """A recursive filter, a hop at a time, on several rows, by products of small matrices that stay in the cache.

    The hop is cut into n blocks of Q samples. Each is filtered as if nothing came before it, which also says what it
    adds to the state; one product makes all n states of that; each block then gets the response to its state. The
    arithmetic is float64: poles close to 1 would add up what single precision rounds.

    Args:
        b, a: coefficients, a[0] = 1.
        hop_samples: M.
        rows: R.
    """

    def __init__(self, b: np.ndarray, a: np.ndarray, hop_samples: int, rows: int):
        order, size = len(a) - 1, math.gcd(hop_samples, BLOCK)
        count = hop_samples // size
        unit = np.eye(size + order)
        x, s = unit[:, :size], unit[:, size:].copy()
        y = np.zeros_like(x)
        for n in range(size):
            y[:, n] = b[0] * x[:, n] + s[:, 0]
            shifted = np.concatenate([s[:, 1:], np.zeros((len(s), 1))], axis=1)
            s = shifted + np.outer(x[:, n], b[1:]) - np.outer(y[:, n], a[1:])
        self._block = np.concatenate([y, s], axis=1)[:size]  # [Q, Q + order]
        self._response = np.ascontiguousarray(y[size:])  # [order, Q], to a state
        ahead, chain = s[size:], np.zeros((count + 1, order, count + 1, order))  # [order, order]: over a block
        for begin in range(count + 1):  # what came into the state then (the old state at 0), and what is left of it
            left = np.eye(order)
            for after in range(begin, count + 1):
                chain[begin, :, after] = left
                left = left @ ahead
        self._chain = chain.reshape((count + 1) * order, -1)
        self.x = np.zeros((rows, hop_samples), np.float32)  # [R, M] to be filled before `run`
        self.y = np.zeros((rows, hop_samples), np.float32)  # [R, M] valid until the next `run`
        self._wide, self._given = np.zeros((rows * count, size)), self.x.reshape(-1, size)
        self._alone = np.zeros((rows * count, size + order))
        self._added, self._states = (np.zeros((rows, (count + 1) * order)) for _ in range(2))
        self.state = self._added[:, :order]  # [R, order]
        self._y, self._late = self.y.reshape(rows, count, size), np.zeros((rows, count, size))
        self._parts = self._alone.reshape(rows, count, size + order)
        self._steps, self._starts = (z.reshape(rows, count + 1, order) for z in (self._added, self._states))

    def run(self) -> np.ndarray:
        """Filters `x` into `y` and goes on with the state."""
        size = self._y.shape[-1]
        self._wide[:] = self._given
        np.matmul(self._wide, self._block, out=self._alone)
        self._steps[:, 1:] = self._parts[:, :, size:]
        np.matmul(self._added, self._chain, out=self._states)
        np.matmul(self._starts[:, :-1], self._response, out=self._late)
        np.add(self._late, self._parts[:, :, :size], out=self._y, casting="same_kind")
        self.state[:] = self._starts[:, -1]
        return self.y

    def reset(self) -> None:
        for array in (self.x, self.y, self._added, self._states):
            array[:] = 0
