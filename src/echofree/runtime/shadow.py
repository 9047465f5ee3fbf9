"""The quick filter that notices a change of the echo path; `echofree.model.shadow` in numpy, where it's explained.

Legend: M hop, Q block at the low rate, J partitions, F bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from echofree.runtime.design import decimation_matrix, rfft
from echofree.runtime.kalman import Kalman


class Shadow:
    """The shadow filter of one stream.

    Args:
        hop_samples: M.
        factor: full rate / low rate.
        taps: of the decimator.
        hop_s: seconds of a hop.
        numbers: the contract's.
    """

    def __init__(self, hop_samples: int, factor: int, taps: int, hop_s: float, numbers: Mapping[str, Any]):
        n, self.hop, self.hops = numbers, hop_samples, int(numbers["hops"])
        self.low_hop, self.low_block = hop_samples // factor, self.hops * hop_samples // factor
        self.count, self.keep = int(n["num_partitions"]), taps - 1
        bins, block_s = self.low_block + 1, self.hops * hop_s
        flat = np.ones(bins, complex)
        self.filter = Kalman(self.low_block, self.count, n["transition"], False, n["psd_smoothing"], flat)
        self._decimator = decimation_matrix(factor, hop_samples, taps)
        self._line = np.zeros((3, self.keep + hop_samples), np.float32)  # mic, far, error of the long filter
        self._low = np.zeros((3, self.low_block), np.float32)
        self._far = np.zeros(2 * self.low_block, np.float32)
        # a ring whose rows stand twice, J rows apart, so that the filter's span is always one piece
        self._spectra = np.zeros((2 * self.count, bins), np.complex64)
        self._conj, self._power = np.zeros_like(self._spectra), np.zeros((2 * self.count, bins), np.float32)
        self.floor, self.better = n["floor"], n["better"]
        self.rate, self.hold = min(1.0, block_s / n["level_s"]), n["hold_s"] / block_s
        self.pause, self.first = int(np.ceil(n["wait_s"] / block_s)), int(np.ceil(n["first_s"] / block_s))
        self.reset()

    def reset(self) -> None:
        for array in (self._line, self._far, self._spectra, self._conj, self._power):
            array[:] = 0
        self.filter.reset()
        self.levels = [0.0, 0.0, 0.0]  # mean squares of (mic, error of the long filter, own error)
        self.since, self.wait, self.slot, self.phase, self.held_learn = 0, self.first, 0, 0, True

    def step(
        self, mic: np.ndarray, far: np.ndarray, left: np.ndarray, adapt: bool, learn: bool, floor: float
    ) -> tuple[bool, bool]:
        """One hop of each, [M], high-passed; left: the long filter's error. -> (whether the echo path has changed,
        whether moreover the long filter does worse than none)"""
        line, low, keep = self._line, self._low, self.keep
        for row, wave in enumerate((mic, far, left)):
            line[row, keep:] = wave
        np.matmul(line, self._decimator, out=low[:, self.phase * self.low_hop : (self.phase + 1) * self.low_hop])
        line[:, :keep] = line[:, self.hop :]
        self.held_learn = learn and (self.phase == 0 or self.held_learn)  # of all hops of a block
        self.phase = (self.phase + 1) % self.hops
        if self.phase:
            return False, False
        learn = self.held_learn
        self._far[: self.low_block] = self._far[self.low_block :]
        self._far[self.low_block :] = low[1]
        slot, twin = self.slot, self.slot + self.count
        newest, power = self._spectra[slot], self._power[slot]
        rfft(self._far, out=newest)
        np.conjugate(newest, out=self._conj[slot])
        np.multiply(newest.real, newest.real, out=power)
        power += newest.imag * newest.imag
        for array in (self._spectra, self._conj, self._power):
            array[twin] = array[slot]
        self.slot = (slot + 1) % self.count
        here = slice(self.slot, self.slot + self.count)
        errors = self.filter.errors
        np.subtract(low[0], self.filter.predict(self._spectra[here]), out=errors[0])
        errors[1] = errors[0]
        if adapt:
            for i, wave in enumerate((low[0], low[2], errors[0])):
                self.levels[i] += self.rate * (float(np.dot(wave, wave)) / self.low_block - self.levels[i])
        self.filter.correct(self._conj[here], self._power[here], learn, np.float32(floor))
        heard, main, own = self.levels
        self.wait = max(self.wait - adapt, 0)
        if adapt:
            better = own < self.better * main and own < self.better * heard and learn
            self.since = self.since + 1 if better else 0
        alarm = self.since > self.hold and self.wait == 0
        if alarm:
            self.since, self.wait = 0, self.pause
        return alarm, alarm and main > heard
