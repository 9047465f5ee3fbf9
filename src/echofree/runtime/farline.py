"""The far end's past, read with the delay taken out; `echofree.model.farline` in numpy, where it's explained.

Legend: M hop, n hops, H samples of the past.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class FarLine:
    """Delay line of one stream: whole and fractional delays, and a steady drift.

    Args:
        hop_samples: M.
        max_samples: the longest delay to be read.
        num_partitions: hops that `reread` gives.
        farrow: [taps, order + 1], the contract's.
    """

    def __init__(self, hop_samples: int, max_samples: int, num_partitions: int, farrow: Sequence[Sequence[float]]):
        self.hop, self.count, self.most = hop_samples, num_partitions, max_samples + hop_samples
        self.farrow = np.asarray(farrow, np.float32)
        self.taps = len(self.farrow)
        past = self.most + (num_partitions + 1) * hop_samples + self.taps
        # what is yet to come counts as silence: half a kernel of zeros at the end
        self._past = np.zeros(past + self.taps // 2, np.float32)
        self._end = past
        self._ramp = np.arange(1, hop_samples + 1, dtype=np.float32)
        self.reset()

    def reset(self) -> None:
        self._past[:] = 0
        self.whole, self.fraction, self.rate = 0, np.float32(0), np.float32(0)

    def advance(self, far: np.ndarray, out: np.ndarray) -> None:
        """Takes in a hop [M] and writes one into `out`, the delay taken out."""
        past, hop, end = self._past, self.hop, self._end
        past[: end - hop] = past[hop:end]
        past[end - hop : end] = far
        if self.rate == 0 and self.fraction == 0:
            first = end - hop - self.whole
            out[:] = past[first : first + hop]
            return
        middle = np.rint(self.fraction + self.rate * np.float32(0.5 * hop))
        out[:] = self._read(hop, self.whole + int(middle), self.fraction - middle)
        after = self.fraction + self.rate * np.float32(hop)
        carry = np.rint(after)
        self.whole, self.fraction = self.whole + int(carry), after - carry
        if self.rate != 0 and not self.taps // 2 <= self.whole + self.fraction <= self.most:
            self.whole, self.fraction = min(max(self.whole, self.taps // 2), self.most), np.float32(0)

    def reread(self) -> np.ndarray:
        """[L, M]: the last hops once more, as if the present delay and rate had held all the while."""
        hop, rows = self.hop, []
        for back in range(self.count, 0, -1):
            begin = self.fraction - self.rate * np.float32(back * hop)
            middle = np.rint(begin + self.rate * np.float32(0.5 * hop))
            rows.append(self._read(back * hop, max(self.whole + int(middle), 0), begin - middle))
        return np.stack(rows)

    def _read(self, back: int, base: int, start: np.float32) -> np.ndarray:
        """The hop that begins `back` samples ago; base: its whole delay, start: what its delay is above that."""
        first = self._end - back - base - self.taps // 2
        x = self._past[first : first + self.hop + self.taps - 1]
        parts = np.lib.stride_tricks.sliding_window_view(x, self.taps) @ self.farrow  # [M, order + 1]
        late = start + self.rate * self._ramp
        out = parts[:, -1]
        for k in range(parts.shape[1] - 2, -1, -1):
            out = parts[:, k] + out * late
        return np.asarray(out, np.float32)
