"""The partitioned-block frequency-domain Kalman filter of one stream; `echofree.model.adaptive` in numpy, where the
equations and their sources stand. All buffers are made once.

Legend: L partitions, F bins, M hop.
"""

from __future__ import annotations

import numpy as np

from echofree.runtime.design import irfft, rfft

TINY = np.float32(1e-20)


class Kalman:
    """One hop at a time.

    Args:
        hop_samples: M.
        num_partitions: L.
        transition: A.
        posterior: whether the echo estimate after the update is the output, or the one before it.
        psd_smoothing: b.
        response: H at the M + 1 bins, complex.
    """

    def __init__(
        self,
        hop_samples: int,
        num_partitions: int,
        transition: float,
        posterior: bool,
        psd_smoothing: float,
        response: np.ndarray,
    ):
        hop, count, bins = hop_samples, num_partitions, hop_samples + 1
        self.hop, self.count, self.posterior = hop, count, posterior
        self.transition, self.fresh = np.float32(transition), np.float32(1 - psd_smoothing)
        self.gain = np.float32(transition**2)
        self.leak = np.float32(1 - transition**2)
        self.share = np.float32(2.0 / count)
        self.response_conj = np.conj(response).astype(np.complex64)
        self.response_power = (np.abs(response) ** 2).astype(np.float32)
        self.weight = np.zeros((count, bins), np.complex64)
        self.variance = np.zeros((count, bins), np.float32)
        self.psd = np.zeros(bins, np.float32)
        self._product = np.zeros((count, bins), np.complex64)
        self._product_parts = self._product.view(np.float32)  # [L, 2 F]
        self._twice = np.zeros((count, 2 * bins), np.float32)  # variance, for real and imaginary part
        self._taps = np.zeros((count, 2 * hop), np.float32)
        self._expected, self._square = (np.zeros((count, bins), np.float32) for _ in range(2))
        self._sum, self._drive, self._shrunk = (np.zeros(bins, np.complex64) for _ in range(3))
        self._padded = np.zeros((2, 2 * hop), np.float32)
        self.errors = self._padded[:, hop:]  # [2, M]: the a-priori error, plain and high-passed
        self._errors = np.zeros((2, bins), np.complex64)
        self._total, self._explained, self._row = (np.zeros(bins, np.float32) for _ in range(3))
        self._wave = np.zeros(2 * hop, np.float32)

    def reset(self) -> None:
        for array in (self.weight, self.variance, self.psd):
            array[:] = 0

    def predict(self, spectra: np.ndarray) -> np.ndarray:
        """A-priori echo of the new hop. spectra [L, F], oldest first -> [M], valid until the next call."""
        np.multiply(self.weight, spectra, out=self._product)
        np.add.reduce(self._product, axis=0, out=self._sum)
        irfft(self._sum, out=self._wave)
        return self._wave[self.hop :]

    def correct(self, conj: np.ndarray, power: np.ndarray, adapt: bool, floor: np.ndarray | np.float32) -> np.ndarray:
        """Learns from `errors`, which the caller has filled.

        Args:
            conj: complex conjugate of the spectra, [L, F], oldest first.
            power: |spectra|^2.
            adapt: whether to learn from this hop.
            floor: least variance, of all partitions or [L, 1].

        Returns:
            The error by which the output is defined, [M], valid until the next call.
        """
        hop, total, explained, row = self.hop, self._total, self._explained, self._row
        rfft(self._padded, out=self._errors)
        plain, passed = self._errors
        np.multiply(passed.real, passed.real, out=row)
        row += passed.imag * passed.imag
        row -= self.psd
        row *= self.fresh
        self.psd += row
        np.multiply(self.variance, power, out=self._expected)
        np.add.reduce(self._expected, axis=0, out=explained)
        explained *= self.response_power
        np.multiply(self.psd, self.share, out=total)
        total += explained
        total += TINY
        error = self.errors[0]
        if self.posterior:
            np.divide(explained, total, out=row)
            np.subtract(1, row, out=row)
            np.multiply(plain, row, out=self._shrunk)
            irfft(self._shrunk, out=self._wave)
            error = self._wave[hop:]
        if adapt:
            self._learn(conj, passed, total)
            np.divide(self.response_power, total, out=row)
            row *= np.float32(-0.5) * self.gain
            self._expected *= row
            self._expected += self.gain
            self.variance *= self._expected
        else:
            self.weight *= self.transition
            self.variance *= self.gain
        real, imag = self.weight.real, self.weight.imag
        np.multiply(real, real, out=self._square)
        np.multiply(imag, imag, out=self._expected)
        self._square += self._expected
        self._square *= self.leak
        self.variance += self._square
        np.maximum(self.variance, floor, out=self.variance)
        return error

    def _learn(self, conj: np.ndarray, passed: np.ndarray, total: np.ndarray) -> None:
        drive, product = self._drive, self._product
        np.multiply(passed, self.response_conj, out=drive)
        np.divide(drive, total, out=drive)
        np.multiply(conj, drive, out=product)  # [L, F]
        self._twice[:, 0::2] = self.variance
        self._twice[:, 1::2] = self.variance
        self._product_parts *= self._twice
        irfft(product, out=self._taps)
        self._taps[:, self.hop :] = 0
        rfft(self._taps, out=product)
        self.weight += product
        self.weight *= self.transition

    def doubt(self, amount: float, spoilt: bool) -> None:
        """Makes the filter quick again: the error of each partition is taken to be `amount` times the partition itself.
        spoilt: the echo path is forgotten."""
        np.multiply(self.weight.real, self.weight.real, out=self._square)
        self._square += self.weight.imag * self.weight.imag
        size = np.float32(amount) * self._square.mean(-1, keepdims=True)
        np.maximum(self.variance, size, out=self.variance)
        if spoilt:
            self.weight[:] = 0

    def shift(self, samples: int, start: np.ndarray) -> None:
        """Moves the echo path by `samples`: positive when the far end is from now on delayed by as many more. What is
        shifted in starts from zero with variance `start` [L, 1]."""
        count, hop = self.count, self.hop
        taps = np.fft.irfft(self.weight)[::-1, :hop].reshape(-1)  # [L M], in time
        moved = np.zeros_like(taps)
        size = max(0, len(taps) - abs(samples))
        if samples >= 0:
            moved[:size] = taps[len(taps) - size :]
        else:
            moved[len(taps) - size :] = taps[:size]
        self._taps[:] = 0
        self._taps[:, :hop] = moved.reshape(count, hop)[::-1]
        rfft(self._taps, out=self.weight)
        # of the two partitions that a new one covers, the less certain one counts
        before = self.variance.copy()
        blocks, rest = divmod(samples, hop)
        for part in range(count):  # the newest first
            rows = [part + blocks, part + blocks + (rest != 0)]
            here = count - 1 - part
            one, two = (before[count - 1 - row] if 0 <= row < count else start[here] for row in rows)
            self.variance[here] = np.maximum(one, two)
