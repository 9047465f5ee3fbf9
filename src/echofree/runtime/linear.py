"""The linear stage of one stream: DC blocker, delay, Kalman filter; `echofree.model.frontend` in numpy, a hop at a
time, where the reasons stand. Its numbers come from the contract, so an artifact keeps the ones it was trained with.

Legend: L partitions, F bins, M hop, R blocks of the far-end ring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from echofree.runtime.delay import Delay
from echofree.runtime.design import BlockIir, dc_blocker, frequency_response, high_pass, irfft, rfft
from echofree.runtime.kalman import Kalman


class LinearStage:
    """Feed it hops with `step`, read the signals `mic`, `echo`, `error`, `far` (float32 [M], valid until the next hop).

    Args:
        numbers: `front_end` of a contract.
        rate_hz: Hz.
        hop_samples: M.
        with_far: whether the aligned far end is asked for.
    """

    def __init__(self, numbers: Mapping[str, Any], rate_hz: int, hop_samples: int, with_far: bool):
        hop, n = hop_samples, numbers
        self.hop, self.count, self.with_far = hop, int(n["num_partitions"]), with_far
        self.max_blocks, self.hop_s, self.n = int(n["max_blocks"]), hop / rate_hz, n
        high = high_pass(n["high_pass_hz"], rate_hz)
        self._dc = BlockIir(*dc_blocker(n["dc_cutoff_hz"], rate_hz), hop, 2)
        self._high = BlockIir(*high, hop, 2)  # mic, error
        posterior, response = n["output"] == "posterior", frequency_response(*high, hop + 1)
        self.kalman = Kalman(hop, self.count, n["transition"], posterior, n["psd_smoothing"], response)
        self.delay = Delay(rate_hz, hop, n["delay"])
        bins, self.ring = hop + 1, self.count + self.max_blocks + 1
        # each block stands twice, R rows apart, so that the filter's span is always one piece
        self._spectra = np.zeros((2 * self.ring, bins), np.complex64)
        self._conj = np.zeros((2 * self.ring, bins), np.complex64)
        self._power = np.zeros((2 * self.ring, bins), np.float32)
        self._mean = np.zeros(2 * self.ring)  # mean square of the block
        self._line = np.zeros(2 * hop, np.float32)  # far end: last hop, this hop
        self._fresh = np.zeros(bins, np.complex64)
        self._wave = np.zeros(2 * hop, np.float32)
        self.mic = self._dc.y[0]
        self.echo, self.error, self.far = (np.zeros(hop, np.float32) for _ in range(3))
        self._clip_share = np.float32(0.9999)
        self.reset()

    def reset(self) -> None:
        """As if nothing was heard yet."""
        for part in (self._dc, self._high, self.kalman, self.delay):
            part.reset()
        for array in (self._spectra, self._conj, self._power, self._mean, self._line, self.echo, self.error, self.far):
            array[:] = 0
        self.slot = self.phase = self.blocks = self.negative = 0
        self.far_level = self.mic_level = self.path_gain = 0.0
        self.mic_peak, self.clipped, self.ever_clipped = 0.0, 0.0, False
        self.slow, self.quick = [0.0, 0.0], [0.0, 0.0]  # smoothed mean squares of (mic, error) while active
        self.active = self.doubt = self.doubtful = 0
        self.explained, self.trust = False, 1.0

    def step(self, mic: np.ndarray, far: np.ndarray) -> None:
        """One hop of each, [M] float32."""
        clipped = self._clipping(mic)
        self._dc.x[0] = mic
        self._dc.x[1] = far
        self._dc.run()
        far = self._dc.y[1]
        here = self._history(far)
        power = self._power[here]
        adapt, floor = self._levels(here)
        errors, high = self.kalman.errors, self._high
        np.subtract(self.mic, self.kalman.predict(self._spectra[here]), out=errors[0])
        high.x[0] = self.mic
        high.x[1] = errors[0]
        errors[1] = high.run()[1]
        after = self.kalman.correct(self._conj[here], power, adapt and not clipped, floor)
        np.subtract(self.mic, after, out=self.echo)
        self._judge(high.y, adapt)
        self.echo *= np.float32(self.trust)
        np.subtract(self.mic, self.echo, out=self.error)
        if self.with_far:
            irfft(self._spectra[here][-1], out=self._wave)
            self.far[:] = self._wave[self.hop :]
        self._align(self.mic, far)
        self.slot = (self.slot + 1) % self.ring

    def _history(self, far: np.ndarray) -> slice:
        """Writes a hop of the far end into the ring. -> the rows that the filter sees, delay taken out, oldest first"""
        line, hop, slot = self._line, self.hop, self.slot
        line[:hop] = line[hop:]
        line[hop:] = far
        rfft(line, out=self._fresh)
        for row in (slot, slot + self.ring):
            self._spectra[row] = self._fresh
            np.conjugate(self._fresh, out=self._conj[row])
        power = self._power[slot]
        np.multiply(self._fresh.real, self._fresh.real, out=power)
        power += self._fresh.imag * self._fresh.imag
        self._power[slot + self.ring] = power
        self._mean[slot] = self._mean[slot + self.ring] = power.mean()
        start = (slot - self.blocks - self.count + 1) % self.ring
        return slice(start, start + self.count)

    def _clipping(self, mic: np.ndarray) -> bool:
        """Whether 3 samples or more of the raw hop stand at the highest so far, unless it clips all the time."""
        top, bottom = mic.max(), mic.min()
        peak = max(top, -bottom)
        self.mic_peak = max(float(peak), self.mic_peak)
        level = self._clip_share * np.float32(self.mic_peak)
        clipped = False
        if peak >= level and top - bottom > 0.5 * self.mic_peak:
            clipped = int(np.count_nonzero(np.abs(mic) >= level)) >= 3
        rate = self.n["clip_rate"]
        self.clipped += rate * (clipped - self.clipped)
        self.ever_clipped = self.ever_clipped or self.clipped > 1.5 * rate
        return clipped and self.clipped < 0.3

    def _levels(self, here: slice) -> tuple[bool, float]:
        """-> (whether the far end is active, the floor of the variance)"""
        n = self.n
        far_now = float(self._mean[here].mean()) / self.hop
        mic_now = float(np.dot(self.mic, self.mic)) / self.hop
        counts = n["int16"] ** 2
        loud = far_now > n["far_active"] * (counts if far_now > 4.0 else 1.0)
        adapt = loud and far_now > 1e-5 * self.far_level
        if adapt:
            rate = 1.0 if self.far_level == 0 else min(1.0, self.hop_s / n["level_s"])
            self.far_level += rate * (far_now - self.far_level)
            self.mic_level += rate * (mic_now - self.mic_level)
        age = self.active + adapt
        self.active = min(age, 1_000_000)
        most = n["max_path_gain"] * (counts if self.mic_peak > 4.0 else 1.0)
        ratio = min(self.mic_level / (self.far_level + 1e-20), most)
        gain = self.path_gain
        if adapt and ratio > 0 and age * self.hop_s <= n["start_s"]:
            gain = max(gain, 2.0 ** math.floor(math.log2(ratio + 1e-20)))
        rises, self.path_gain = gain > self.path_gain, gain
        return adapt, gain * (n["start_variance"] if rises else n["variance_floor"])

    def _judge(self, passed: np.ndarray, adapt: bool) -> None:
        """passed [2, M], mic and error, high-passed. Moves `trust`, the share of the echo estimate that is used."""
        n = self.n
        if adapt:
            for state, seconds in ((self.slow, n["judge_s"] / 2), (self.quick, n["quick_s"])):
                rate = min(1.0, self.hop_s / seconds)
                for i in range(2):
                    state[i] += rate * (float(np.dot(passed[i], passed[i])) / self.hop - state[i])
        reduced = self.slow[0] > self.slow[1] * 10 ** (n["min_gain_db"] / 10)
        reduced = reduced and self.active * self.hop_s > n["start_s"]
        aligned = self.delay.confidence > self.delay.min_confidence and self.delay.agree >= self.delay.num_agree
        evident = reduced or aligned
        doubt = 0 if evident else self.doubt + adapt
        self.doubt = min(doubt, 1_000_000)
        self.explained = self.explained or evident
        lost = doubt > (n["patience_s"] if self.explained else n["judge_s"]) / self.hop_s
        self.doubtful = min(self.doubtful + (lost and adapt), 1_000_000)
        worse = not self.explained and self.quick[0] < self.quick[1] * 10 ** (-n["worse_db"] / 10)
        self.trust += min(1.0, self.hop_s / n["quick_s"]) * ((not (lost or worse)) - self.trust)

    def _align(self, mic: np.ndarray, far: np.ndarray) -> None:
        if self.max_blocks == 0:
            return
        delay, n = self.delay, self.n
        delay.observe(mic, far, self.phase)
        self.phase = (self.phase + 1) % delay.period
        if self.phase:
            return
        delay.update()
        lag_s = delay.lag / delay.low_rate_hz
        inside_s = lag_s - self.blocks * self.hop_s
        if delay.found and (inside_s < 0.5 * n["headroom_s"] or inside_s > n["latest_s"]):
            wanted = min(max(math.floor((lag_s - n["headroom_s"]) / self.hop_s), 0), self.max_blocks)
            if wanted != self.blocks:
                self.kalman.shift(wanted - self.blocks, n["start_variance"] * self.path_gain)
                self.blocks = wanted
        ahead = delay.found and lag_s < -0.001 and delay.agree >= delay.num_agree
        stays = ahead or self.negative >= n["negative_updates"]
        self.negative = min(self.negative + 1, 1000) if stays else 0

    def flags(self) -> dict[str, float | bool]:
        """What a person should know about the stream so far; the keys of `FrontEnd.flags`."""
        drift = self.delay.drift_ppm()
        return {
            "delay_samples": self.delay.lag * self.delay.factor if self.delay.found else 0.0,
            "delay_confidence": self.delay.confidence,
            "drift_ppm": drift,
            "drift": abs(drift) > self.n["max_drift_ppm"],
            "negative_delay": self.negative >= self.n["negative_updates"],
            "unexplained": self.doubtful > 0.3 * self.active and self.doubtful > 0,
            "saturated": self.ever_clipped,
        }

    def states(self) -> dict[str, np.ndarray]:
        """Names as in the model's state, for comparisons."""
        return {
            "kalman.weight": self.kalman.weight.view(np.float32).reshape(self.count, -1, 2),
            "kalman.variance": self.kalman.variance,
            "kalman.psd": self.kalman.psd,
            "blocks": np.array([self.blocks], np.float32),
            "trust": np.array([self.trust], np.float32),
            "path_gain": np.array([self.path_gain], np.float32),
        }
