"""Signal processing that models, losses and metrics share: windows, the STFT, Bark bands, block filters, GCC-PHAT.

Everything here is a fixed linear map or a plain function of arrays. Design work (coefficients, matrices) happens in
float64 numpy when an object is built; what runs per hop is torch.

Legend: B batch, T samples, L frames, F bins, K bands, M hop, N window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from echofree.errors import ConfigError

_TINY = 1e-20


def vorbis_window(window_samples: int) -> np.ndarray:
    """The Vorbis power-complementary window, float64 [N]: w[n]^2 + w[n + N/2]^2 = 1.

    w[n] = sin(pi/2 sin^2(pi (n + 1/2) / N)) (Vorbis I specification, section 4.3.1).
    """
    n = np.arange(window_samples)
    return np.sin(np.pi / 2 * np.sin(np.pi * (n + 0.5) / window_samples) ** 2)


class Stft(nn.Module):
    """Analysis and synthesis with one window and half overlap; perfect reconstruction, no scaling needed.

    Frame t covers the samples (t - 1) M ... (t + 1) M - 1 of the signal: M zeros stand before its start, so that frame
    t is complete as soon as hop t has arrived, and its overlap-add finishes hop t - 1. A frame-wise user is late by M.

    Args:
        window_samples: N, even.
        hop_samples: M = N / 2.
    """

    window: Tensor

    def __init__(self, window_samples: int = 512, hop_samples: int = 256):
        super().__init__()
        if window_samples != 2 * hop_samples:
            raise ConfigError(f"window_samples={window_samples} must be twice hop_samples={hop_samples}")
        self.window_samples, self.hop_samples = window_samples, hop_samples
        self.num_bins = hop_samples + 1
        self.register_buffer(
            "window", torch.tensor(vorbis_window(window_samples), dtype=torch.float32), persistent=False
        )

    def num_frames(self, num_samples: int) -> int:
        """Frames that `analyse` makes of T samples: ceil(T / M) + 1; the last one only completes the last hop."""
        return -(-num_samples // self.hop_samples) + 1

    def analyse(self, x: Tensor) -> Tensor:
        """[B, T] -> complex [B, L, F], L = ceil(T / M) + 1."""
        hop = self.hop_samples
        count = self.num_frames(x.shape[-1])
        padded = torch.nn.functional.pad(x, (hop, count * hop - x.shape[-1]))  # [B, (L + 1) M]
        return self.analyse_frame(padded.unfold(-1, 2 * hop, hop))  # [B, L, F]

    def synthesise(self, spectra: Tensor, num_samples: int) -> Tensor:
        """complex [B, L, F] -> [B, T]: the inverse of `analyse` for T = num_samples."""
        hop = self.hop_samples
        frames = self.synthesise_frame(spectra)  # [B, L, N]
        hops = frames[:, :-1, hop:] + frames[:, 1:, :hop]  # [B, L - 1, M]
        return hops.flatten(1)[:, :num_samples]

    def analyse_frame(self, frame: Tensor) -> Tensor:
        """[..., N] (previous hop, new hop) -> complex [..., F]."""
        return torch.fft.rfft(frame * self.window.to(frame.dtype))

    def synthesise_frame(self, spectrum: Tensor) -> Tensor:
        """complex [..., F] -> windowed [..., N]; its first half is to be added to the last half of the one before."""
        frame = torch.fft.irfft(spectrum, n=self.window_samples)
        return frame * self.window.to(frame.dtype)


_CENTRES_512_16K = (
    *range(47),
    *range(48, 99, 2),
    102,
    104,
    *range(108, 141, 4),
    *range(146, 201, 6),
    *range(208, 241, 8),
    256,
)


def band_centres(window_samples: int = 512, sample_rate: int = 16000) -> np.ndarray:
    """Band centres in FFT bins, strictly rising int64 [K], from 0 to N/2.

    For 512 at 16 kHz the 100-band table of EchoFree (arXiv 2508.06271, released code): one band per bin below 1.4 kHz,
    steps of 2, 4, 6, 8 bins above. Other sizes keep the centre frequencies, rounded to bins, each bin once; above 8 kHz
    steps of 250 Hz follow.
    """
    table_hz = np.array(_CENTRES_512_16K, dtype=np.float64) * 16000 / 512
    if sample_rate > 16000:
        table_hz = np.concatenate([table_hz, np.arange(8250.0, sample_rate / 2 + 1, 250.0)])
    bins = np.unique(np.round(table_hz * window_samples / sample_rate).astype(np.int64))
    top = window_samples // 2
    return np.unique(np.concatenate([bins[bins < top], [0, top]]))


def band_matrices(centres: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Triangular bands over FFT bins -> (analysis [K, F], synthesis [K, F]), float64.

    power @ analysis.T collects energy: a bin between two centres is shared linearly. gains @ synthesis interpolates
    band gains to bins: every column sums to exactly 1, DC and Nyquist included, so that unit gains change nothing.
    Both are the same hat functions here; they are two matrices because only the second has to sum to 1.
    """
    centres = np.asarray(centres, dtype=np.int64)
    num_bins = int(centres[-1]) + 1
    synthesis = np.zeros((len(centres), num_bins))
    for band, (low, high) in enumerate(itertools.pairwise(centres)):
        share = (np.arange(low, high) - low) / (high - low)
        synthesis[band, low:high] = 1 - share
        synthesis[band + 1, low:high] = share
    synthesis[-1, -1] = 1.0
    return synthesis.copy(), synthesis


def dc_blocker(cutoff_hz: float, sample_rate: int) -> tuple[np.ndarray, np.ndarray]:
    """First-order high-pass (b, a) with a zero at DC and unit gain at Nyquist, by the bilinear transform."""
    t = math.tan(math.pi * cutoff_hz / sample_rate)
    return np.array([1.0, -1.0]) / (1 + t), np.array([1.0, (t - 1) / (1 + t)])


def high_pass(cutoff_hz: float, sample_rate: int) -> tuple[np.ndarray, np.ndarray]:
    """Second-order Butterworth high-pass (b, a) by the bilinear transform."""
    t = math.tan(math.pi * cutoff_hz / sample_rate)
    norm = 1 + math.sqrt(2) * t + t * t
    return np.array([1.0, -2.0, 1.0]) / norm, np.array(
        [1.0, 2 * (t * t - 1) / norm, (1 - math.sqrt(2) * t + t * t) / norm]
    )


def frequency_response(b: np.ndarray, a: np.ndarray, num_bins: int) -> np.ndarray:
    """Complex response of a rational filter at the bins of a real FFT, [F] from DC to Nyquist."""
    z = np.exp(-1j * np.pi * np.arange(num_bins) / (num_bins - 1))
    top = sum(c * z**i for i, c in enumerate(b))
    bottom = sum(c * z**i for i, c in enumerate(a))
    return np.asarray(top / bottom)


class BlockIir(nn.Module):
    """A recursive filter applied a hop at a time as one matrix product; exact, no loop over samples.

    [x, s] @ matrix = [y, s'] where s is the transposed direct form II state, order values.

    Args:
        b, a: coefficients, a[0] = 1.
        hop_samples: M.
        dtype: of the arithmetic; the matrix is designed in float64 whatever it is.
    """

    matrix: Tensor

    def __init__(self, b: np.ndarray, a: np.ndarray, hop_samples: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.hop_samples = hop_samples
        self.order = max(len(a), len(b)) - 1
        b = np.pad(b, (0, self.order + 1 - len(b)))
        a = np.pad(a, (0, self.order + 1 - len(a)))
        unit = np.eye(hop_samples + self.order)  # each row: one unit sample or one unit state
        x, s = unit[:, :hop_samples], unit[:, hop_samples:].copy()
        y = np.zeros_like(x)
        for n in range(hop_samples):
            y[:, n] = b[0] * x[:, n] + s[:, 0]
            shifted = np.concatenate([s[:, 1:], np.zeros((len(s), 1))], axis=1)
            s = shifted + np.outer(x[:, n], b[1:]) - np.outer(y[:, n], a[1:])
        matrix = np.concatenate([y, s], axis=1)  # [M + order, M + order]
        self.register_buffer("matrix", torch.tensor(matrix, dtype=dtype), persistent=False)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., n M] (any n >= 1), state [..., order] -> (y [..., n M], new state [..., order])."""
        hop = self.hop_samples
        if x.shape[-1] == hop:
            out = torch.cat([x, state], dim=-1) @ self.matrix
            return out[..., :hop], out[..., hop:]
        out = x.unflatten(-1, (-1, hop)) @ self.matrix[:hop]  # [..., n, M + order], as if each hop began at rest
        states, passed = [], self.matrix[hop:, hop:]
        for rest in out[..., hop:].unbind(-2):
            states.append(state)
            state = rest + state @ passed
        y = out[..., :hop] + torch.stack(states, dim=-2) @ self.matrix[hop:, :hop]
        return y.flatten(-2), state


def decimation_matrix(factor: int, hop_samples: int, taps: int) -> np.ndarray:
    """[taps - 1 + M, M / factor]: a Kaiser-windowed low-pass at 0.45 of the new rate, then every factor-th sample, as a
    matrix on (the last taps - 1 samples, the new hop)."""
    n = np.arange(taps) - (taps - 1) / 2
    h = np.sinc(n * 0.9 / factor) * np.kaiser(taps, 5.0)
    h /= h.sum()
    matrix = np.zeros((taps - 1 + hop_samples, hop_samples // factor))
    for j in range(hop_samples // factor):
        end = taps - 1 + (j + 1) * factor  # one past the newest sample that output j sees
        matrix[end - taps : end, j] = h[::-1]
    return matrix


def fractional_delay(taps: int, order: int) -> np.ndarray:
    """Farrow structure (Farrow 1988) of a fractional delay d around 0: float64 [taps, order + 1], taps odd.

    sum_k d^k sum_j x[n + j - taps // 2] c[j, k] is x[n - d]: per tap a polynomial in d, fitted for |d| <= 0.6 to a
    Kaiser-windowed sinc, flat to 0.8 of Nyquist. c[:, 0] is a unit pulse, so that d = 0 changes nothing.
    """
    half = taps // 2
    d = np.linspace(-0.6, 0.6, 61)
    u = np.arange(-half, half + 1)[:, None] + d  # [taps, 61]
    pulse = (np.arange(taps) == half).astype(np.float64)
    wanted = np.sinc(u) * np.i0(6.0 * np.sqrt(1 - (u / (half + 0.65)) ** 2)) / np.i0(6.0)
    powers = d[:, None] ** np.arange(1, order + 1)  # [61, order]
    fitted = np.linalg.lstsq(powers, (wanted - pulse[:, None]).T, rcond=None)[0]  # [order, taps]
    return np.concatenate([pulse[:, None], fitted.T], axis=1)


def gcc_phat(
    mic: np.ndarray,
    far: np.ndarray,
    sample_rate: int,
    max_delay_s: float = 1.0,
    min_delay_s: float = -0.05,
    band_hz: tuple[float, float] = (300.0, 4000.0),
) -> tuple[float, float]:
    """Delay of `mic` behind `far` over whole signals, by generalised cross-correlation with phase transform
    (Knapp & Carter 1976).

    Args:
        mic, far: [T]; the shorter one counts as continued by zeros.
        sample_rate: Hz.
        max_delay_s, min_delay_s: the lags searched.
        band_hz: frequencies that take part.

    Returns:
        (delay in samples, positive when the mic lags, with parabolic interpolation; confidence = peak / rms over the
        lags searched: above 7 trustworthy, about 4 for unrelated signals). Silence gives (0.0, 0.0).
    """
    mic, far = np.asarray(mic, np.float64), np.asarray(far, np.float64)
    if not (len(mic) and len(far)) or not (mic.any() and far.any()):
        return 0.0, 0.0
    low, high = round(min_delay_s * sample_rate), round(max_delay_s * sample_rate)
    size = 1 << (max(len(mic), len(far)) + max(high, -low) - 1).bit_length()
    cross = np.fft.rfft(mic, size) * np.conj(np.fft.rfft(far, size))
    hz = np.fft.rfftfreq(size, 1 / sample_rate)
    magnitude = np.abs(cross)
    cross = np.where((hz >= band_hz[0]) & (hz <= band_hz[1]), cross / (magnitude + _TINY + 1e-9 * magnitude.max()), 0)
    lags = np.arange(low, high + 1)
    values = np.abs(np.fft.irfft(cross, size)[lags % size])
    best = int(values.argmax())
    confidence = float(values[best] / (np.sqrt(np.mean(values**2)) + _TINY))
    offset = 0.0
    if 0 < best < len(values) - 1:
        left, mid, right = values[best - 1 : best + 2]
        curve = left - 2 * mid + right
        offset = float((left - right) / (2 * curve)) if curve < 0 else 0.0
    return float(lags[best]) + offset, confidence
