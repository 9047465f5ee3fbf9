"""Delay between far end and microphone of one stream; `echofree.model.delay` in numpy, where it's explained.

Legend: M hop, N far window (low rate), U hops between updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from echofree.runtime.design import decimation_matrix, irfft, rfft
from echofree.runtime.drift import Drift


class Delay:
    """GCC-PHAT at a low rate, an update every U hops.

    Args:
        rate_hz: Hz.
        hop_samples: M.
        numbers: the contract's, see `echofree.export.contract.delay_numbers`.
    """

    def __init__(self, rate_hz: int, hop_samples: int, numbers: Mapping[str, Any]):
        self.low_rate_hz = int(numbers["low_rate_hz"])
        self.far_samples, self.mic_samples = int(numbers["far_samples"]), int(numbers["mic_samples"])
        self.lead_samples, self.taps = int(numbers["lead_samples"]), int(numbers["taps"])
        self.num_lags = self.far_samples - self.mic_samples + 1
        self.early, self.early_share = int(numbers["early_samples"]), np.float32(numbers["early_share"])
        self.num_agree, self.tolerance = int(numbers["num_agree"]), numbers["tolerance"]
        self.min_confidence, self.max_drift = numbers["min_confidence"], numbers["max_drift_ppm"] * 1e-6
        self.forgets = (np.float32(numbers["forget_fast"]), np.float32(numbers["forget_slow"]))
        self.factor = rate_hz // self.low_rate_hz
        self.hop, self.low_hop = hop_samples, hop_samples // self.factor
        self.period = int(numbers["period"])
        self._decimator = decimation_matrix(self.factor, hop_samples, self.taps)
        hz = np.fft.rfftfreq(self.far_samples, 1 / self.low_rate_hz)
        self.first, self.last = int((hz < numbers["low_hz"]).sum()), int((hz <= numbers["high_hz"]).sum())
        bins = self.far_samples // 2 + 1
        self._line = np.zeros((2, self.taps - 1 + hop_samples), np.float32)
        self._low = np.zeros((2, self.low_hop), np.float32)
        self._fresh = np.zeros((2, self.period * self.low_hop), np.float32)
        self._mic = np.zeros(self.mic_samples + self.lead_samples, np.float32)
        self._far = np.zeros(self.far_samples, np.float32)
        self._segment = np.zeros(self.far_samples, np.float32)
        self.cross = np.zeros((2, self.last - self.first), np.complex64)  # the short average and the long one
        band_hz, step = (numbers["low_hz"], numbers["high_hz"]), self.period * self.low_hop
        self._omega = 2 * np.pi * np.arange(self.first, self.last) / self.far_samples * step
        self._drift = Drift(step, self.low_rate_hz, band_hz, numbers["drift"])
        self.zero_lag = self.far_samples - self.mic_samples - self.lead_samples
        self._full, self._spectrum = np.zeros(bins, np.complex64), np.zeros(bins, np.complex64)
        self._values = np.zeros(self.far_samples, np.float32)
        self.reset()

    def reset(self) -> None:
        for array in (self._line, self._fresh, self._mic, self._far, self.cross):
            array[:] = 0
        self.lag = self.confidence = self.candidate = 0.0
        self.agree = 0
        self.found = self.jolt = False
        self.rate = 0.0  # of the drift that is taken out
        self._drift.reset()

    def observe(self, mic: np.ndarray, far: np.ndarray, slot: int) -> None:
        """Takes in a hop [M] of each; slot: hops since the last update."""
        line, keep = self._line, self.taps - 1
        line[0, keep:] = mic
        line[1, keep:] = far
        np.matmul(line, self._decimator, out=self._low)
        self._fresh[:, slot * self.low_hop : (slot + 1) * self.low_hop] = self._low
        line[:, :keep] = line[:, self.hop :]

    def update(self) -> None:
        """Estimates anew; U hops have been taken in."""
        size = self._fresh.shape[1]
        for buffer, row in ((self._mic, 0), (self._far, 1)):
            buffer[:-size] = buffer[size:].copy()
            buffer[-size:] = self._fresh[row]
        self._segment[: self.mic_samples] = self._mic[: self.mic_samples]
        band = slice(self.first, self.last)
        rfft(self._segment, out=self._spectrum)
        mic = np.conj(self._spectrum[band])
        rfft(self._far, out=self._spectrum)
        cross = mic * self._spectrum[band]
        magnitude = np.abs(cross)
        level = magnitude.mean()
        active = bool(level > 1e-12) and self._steady()
        cross /= magnitude + np.float32(0.05) * level + np.float32(1e-20)
        if active:
            if self.rate:
                self.cross *= np.exp(1j * (self._omega * self.rate)).astype(np.complex64)
            for average, forget in zip(self.cross, self.forgets):
                average *= forget
                average += (1 - forget) * cross
        self._decide(active, *self._peak())
        self._follow(cross, active)

    def _steady(self) -> bool:
        blocks = np.square(self._far.reshape(16, -1)).mean(-1)
        return bool((blocks > 1e-4 * blocks.max() + 1e-14).sum() >= 4)

    def _peak(self) -> tuple[float, float]:
        np.add(self.cross[0], self.cross[1], out=self._full[self.first : self.last])
        irfft(self._full, n=self.far_samples, out=self._values)
        values = np.abs(self._values[: self.num_lags])
        highest = int(values.argmax())
        # the earliest peak that is nearly as high; the highest one is a peak itself
        near = values[highest : highest + self.early + 1]
        later, earlier = values[max(highest - 1, 0) :][: len(near)], values[highest + 1 :][: len(near)]
        strong = (near >= self.early_share * near[0]) & (near >= (later if highest else near))
        strong[: len(earlier)] &= near[: len(earlier)] >= earlier
        best = highest + int(np.flatnonzero(strong)[-1])
        offset = 0.0
        if 1 <= best <= self.num_lags - 2:
            left, mid, right = (float(values[best + i]) for i in (-1, 0, 1))
            curve = left - 2 * mid + right
            if curve < 0:
                offset = min(max((left - right) / (2 * curve - 1e-20), -0.5), 0.5)
        rms = float(np.sqrt(np.square(values).mean()))
        return self.zero_lag - best - offset, float(values[highest]) / (rms + 1e-20)

    def _decide(self, active: bool, lag: float, confidence: float) -> None:
        if not active:
            return
        self.confidence = confidence
        if confidence <= self.min_confidence:
            self.agree = 0
            return
        self.agree = min(self.agree + 1, 100) if abs(lag - self.candidate) <= self.tolerance else 1
        self.candidate = lag
        if self.agree >= self.num_agree:
            self.lag, self.found = lag, True

    def _follow(self, cross: np.ndarray, active: bool) -> None:
        """Estimates the drift, and sets the rate at which it is taken out."""
        self._full[self.first : self.last] = cross
        irfft(self._full, n=self.far_samples, out=self._values)
        at = int(np.rint(np.float32(self.lag)))
        index = np.arange(self._drift.window) - self._drift.before
        self._drift.update(self._values[(self.zero_lag - at - index) % self.far_samples], at, active and self.found)
        found, told = self._drift.drift()
        before = self.rate
        if told and (abs(found) > self.max_drift or before != 0):
            self.rate = found
        self.jolt = abs(self.rate - before) > self.max_drift

    def drift_ppm(self) -> float:
        """Clock drift in parts per million, 0 where none can be told."""
        found, told = self._drift.drift()
        return found * told * 1e6
