"""Drift between the clocks of far end and microphone; `echofree.model.drift` in numpy, where it's explained.

Legend: G window, K its bins, H updates kept, J spans, E drifts of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from echofree.runtime.design import rfft


class Drift:
    """Double cross-correlation of one stream.

    Args:
        step_samples: low-rate samples between two updates.
        low_rate_hz: Hz.
        band_hz: frequencies that take part.
        numbers: the contract's.
    """

    def __init__(self, step_samples: int, low_rate_hz: int, band_hz: tuple[float, float], numbers: Mapping[str, Any]):
        n = numbers
        self.window, self.before, self.spans = int(n["window"]), int(n["before"]), [int(j) for j in n["spans"]]
        self.forget, self.step = np.float32(n["forget"]), float(n["step_ppm"])
        self.min_agreement, self.min_count, self.max_move = n["min_agreement"], n["min_count"], n["max_move"]
        edge = int(n["edge"])
        ramp = 0.5 - 0.5 * np.cos(np.pi * (np.arange(edge) + 0.5) / edge)
        self.fade = np.concatenate([ramp, np.ones(self.window - 2 * edge), ramp[::-1]]).astype(np.float32)
        hz = np.fft.rfftfreq(self.window, 1 / low_rate_hz)
        self.first, self.last = int((hz < band_hz[0]).sum()), int((hz <= band_hz[1]).sum())
        omega = 2 * np.pi * np.arange(self.first, self.last) / self.window
        self.grid = np.arange(-n["max_ppm"], n["max_ppm"] + 1, self.step) * 1e-6
        angle = np.array(self.spans)[:, None, None] * step_samples * omega[:, None] * self.grid  # [J, K, E]
        self.table = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32).reshape(-1, len(self.grid))
        self.omega = omega.astype(np.float32)
        size = max(self.spans)
        self._seen = np.zeros((size, len(omega)), np.complex64)  # a ring
        self._at, self._ok = np.zeros(size, np.int64), np.zeros(size, bool)
        self._product = np.zeros((len(self.spans), len(omega)), np.complex64)
        self._spectrum = np.zeros(self.window // 2 + 1, np.complex64)
        self.agreement = np.zeros(len(self.grid), np.float32)
        self.reset()

    def reset(self) -> None:
        for array in (self._seen, self._at, self._ok, self.agreement):
            array[:] = 0
        self.count, self.slot = np.float32(0), 0

    def update(self, cut: np.ndarray, at: int, valid: bool) -> None:
        """Takes in a correlation [G] of growing delay from `before` samples before `at` on."""
        rfft(cut * self.fade, out=self._spectrum)
        spectrum = self._spectrum[self.first : self.last]
        spectrum = spectrum / (np.sqrt(np.vdot(spectrum, spectrum).real) + np.float32(1e-20))
        size = len(self._seen)
        if valid:
            self._product[:] = 0
            usable = 0
            for row, span in enumerate(self.spans):
                then = (self.slot - span) % size
                moved = at - int(self._at[then])
                if self._ok[then] and abs(moved) < self.max_move:
                    turn = np.exp(1j * (np.float32(moved) * self.omega)).astype(np.complex64)
                    np.multiply(np.conj(spectrum) * self._seen[then], turn, out=self._product[row])
                    usable += 1
            self.agreement *= self.forget
            self.agreement += self._product.view(np.float32).reshape(-1) @ self.table
            self.count = self.count * self.forget + np.float32(usable)
        self._seen[self.slot], self._at[self.slot], self._ok[self.slot] = spectrum, at, valid
        self.slot = (self.slot + 1) % size

    def drift(self) -> tuple[float, bool]:
        """-> (samples per sample, positive when the microphone falls behind; whether it is to be believed)."""
        best = int(self.agreement.argmax())
        inner = min(max(best, 1), len(self.grid) - 2)
        left, mid, right = (float(self.agreement[inner + i]) for i in (-1, 0, 1))
        curve = left - 2 * mid + right
        offset = 0.5 * (left - right) / (curve - 1e-20) if curve < 0 and inner == best else 0.0
        told = self.count >= self.min_count and mid > self.min_agreement * float(self.count) and inner == best
        return float(self.grid[inner]) + offset * self.step * 1e-6, bool(told)
