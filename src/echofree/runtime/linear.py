"""The linear stage of one stream: DC blocker, delay, drift, Kalman filter; `echofree.model.frontend` in numpy, a hop
at a time, where the reasons stand. Its numbers come from the contract, so an artifact keeps those it was trained with.

Legend: L partitions, F bins, M hop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from echofree.runtime.delay import Delay
from echofree.runtime.design import BlockIir, dc_blocker, frequency_response, high_pass, rfft
from echofree.runtime.farline import FarLine
from echofree.runtime.kalman import Kalman
from echofree.runtime.shadow import Shadow


class LinearStage:
    """Feed it hops with `step`, read the signals `mic`, `echo`, `error`, `far` (float32 [M], valid until the next hop).

    Args:
        numbers: `front_end` of a contract.
        rate_hz: Hz.
        hop_samples: M.
    """

    def __init__(self, numbers: Mapping[str, Any], rate_hz: int, hop_samples: int):
        hop, n = hop_samples, numbers
        self.hop, self.count, self.rate_hz = hop, int(n["num_partitions"]), rate_hz
        self.max_samples, self.hop_s, self.n = int(n["max_samples"]), hop / rate_hz, n
        high = high_pass(n["high_pass_hz"], rate_hz)
        self._dc = BlockIir(*dc_blocker(n["dc_cutoff_hz"], rate_hz), hop, 2)
        self._high = BlockIir(*high, hop, 3)  # mic, error, far
        posterior, response = n["output"] == "posterior", frequency_response(*high, hop + 1)
        self.kalman = Kalman(hop, self.count, n["transition"], posterior, n["psd_smoothing"], response)
        self.delay = Delay(rate_hz, hop, n["delay"])
        self.line = FarLine(hop, self.max_samples, self.count, n["farrow"])
        self.shadow = Shadow(hop, self.delay.factor, self.delay.taps, self.hop_s, n["shadow"])
        self._profile = np.asarray(n["start_profile"], np.float32)[:, None]  # [L, 1]
        self._floor = np.zeros_like(self._profile)
        bins = hop + 1
        # a ring whose rows stand twice, L rows apart, so that the filter's span is always one piece
        self._spectra = np.zeros((2 * self.count, bins), np.complex64)
        self._conj = np.zeros((2 * self.count, bins), np.complex64)
        self._power = np.zeros((2 * self.count, bins), np.float32)
        self._mean = np.zeros(2 * self.count)  # mean square of the block
        self._pair = np.zeros(2 * hop, np.float32)  # aligned far end: last hop, this hop
        self._fresh = np.zeros(bins, np.complex64)
        self.mic = self._dc.y[0]
        self.echo, self.error, self.far = (np.zeros(hop, np.float32) for _ in range(3))
        self._clip_share = np.float32(n["clip_share"])
        self.reset()

    def reset(self) -> None:
        """As if nothing was heard yet."""
        for part in (self._dc, self._high, self.kalman, self.delay, self.line, self.shadow):
            part.reset()
        for array in (self._spectra, self._conj, self._power, self._mean, self._pair, self.echo, self.error, self.far):
            array[:] = 0
        self.slot = self.phase = self.negative = 0
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
        raw, far = self._dc.y[1], self.far
        self.line.advance(raw, far)
        here = self._history(far)
        adapt, floor, start = self._levels(here)
        errors, high = self.kalman.errors, self._high
        np.subtract(self.mic, self.kalman.predict(self._spectra[here]), out=errors[0])
        for row, wave in enumerate((self.mic, errors[0], far)):
            high.x[row] = wave
        errors[1] = high.run()[1]
        learn = adapt and not clipped
        np.multiply(self._profile, np.float32(floor), out=self._floor)
        after = self.kalman.correct(self._conj[here], self._power[here], learn, self._floor)
        np.subtract(self.mic, after, out=self.echo)
        quick = max(floor, self.shadow.floor * start)
        alarm, spoilt = self.shadow.step(high.y[0], high.y[2], high.y[1], adapt, learn, quick)
        if alarm:
            self.kalman.doubt(self.n["doubt"], spoilt)
        self._judge(high.y, adapt)
        self.echo *= np.float32(self.trust)
        np.subtract(self.mic, self.echo, out=self.error)
        self._align(self.mic, raw)

    def _history(self, far: np.ndarray) -> slice:
        """Writes a hop of the aligned far end into the ring. -> the rows that the filter sees, oldest first"""
        pair, hop = self._pair, self.hop
        pair[:hop] = pair[hop:]
        pair[hop:] = far
        self._write(self.slot)
        self.slot = (self.slot + 1) % self.count
        return slice(self.slot, self.slot + self.count)

    def _write(self, slot: int) -> None:
        """The spectrum of the pair of hops, into a row of the ring."""
        rfft(self._pair, out=self._fresh)
        for row in (slot, slot + self.count):
            self._spectra[row] = self._fresh
            np.conjugate(self._fresh, out=self._conj[row])
        power = self._power[slot]
        np.multiply(self._fresh.real, self._fresh.real, out=power)
        power += self._fresh.imag * self._fresh.imag
        self._power[slot + self.count] = power
        self._mean[slot] = self._mean[slot + self.count] = power.mean()

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

    def _levels(self, here: slice) -> tuple[bool, float, float]:
        """-> (whether the far end is active, the floor of the variance, the variance of a start)"""
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
        ratio, gain = self._ratio(), self.path_gain
        if adapt and ratio > 0 and age * self.hop_s <= n["start_s"]:
            gain = max(gain, 2.0 ** math.floor(math.log2(ratio + 1e-20)))
        rises, self.path_gain = gain > self.path_gain, gain
        return adapt, gain * (n["start_variance"] if rises else n["variance_floor"]), gain * n["start_variance"]

    def _ratio(self) -> float:
        """The power gain that the echo path may have at most."""
        most = self.n["max_path_gain"] * (self.n["int16"] ** 2 if self.mic_peak > 4.0 else 1.0)
        return min(self.mic_level / (self.far_level + 1e-20), most)

    def _judge(self, passed: np.ndarray, adapt: bool) -> None:
        """passed [3, M], mic and error first, high-passed. Moves `trust`, the share of the echo that is used."""
        n = self.n
        if adapt:
            for state, seconds in ((self.slow, n["judge_s"] / 2), (self.quick, n["quick_s"])):
                rate = min(1.0, self.hop_s / seconds)
                for i in range(2):
                    state[i] += rate * (float(np.dot(passed[i], passed[i])) / self.hop - state[i])
        reduced = self.slow[0] > self.slow[1] * 10 ** (n["min_gain_db"] / 10)
        reduced = reduced and self.active * self.hop_s > n["start_s"]
        aligned = self.delay.confidence > n["sure_confidence"] and self.delay.agree >= self.delay.num_agree
        evident = reduced or aligned
        doubt = 0 if evident else self.doubt + adapt
        self.doubt = min(doubt, 1_000_000)
        self.explained = self.explained or evident
        lost = doubt > (n["patience_s"] if self.explained else n["judge_s"]) / self.hop_s
        self.doubtful = min(self.doubtful + (lost and adapt), 1_000_000)
        worse = not self.explained and self.quick[0] < self.quick[1] * 10 ** (-n["worse_db"] / 10)
        self.trust += min(1.0, self.hop_s / n["quick_s"]) * ((not (lost or worse)) - self.trust)

    def _align(self, mic: np.ndarray, far: np.ndarray) -> None:
        if self.max_samples == 0:
            return
        delay, line, n = self.delay, self.line, self.n
        delay.observe(mic, far, self.phase)
        self.phase = (self.phase + 1) % delay.period
        if self.phase:
            return
        delay.update()
        line.rate = np.float32(delay.rate)
        if delay.jolt:
            self.kalman.doubt(n["doubt"], spoilt=False)
        lag = delay.lag * delay.factor
        inside = lag - line.whole - float(line.fraction)
        headroom = n["headroom_s"] * self.rate_hz
        # between samples the line needs a few beyond the one that it reads
        least = (line.taps // 2 if line.rate else 0) - line.whole
        shift = max(least, 0)
        if delay.found and (inside < 0.5 * headroom or inside > n["latest_s"] * self.rate_hz):
            wished = max(min(int(np.rint(inside - headroom)), self.max_samples - line.whole), least)
            shift = wished if abs(wished) >= 0.5 * headroom else shift
        if shift:
            self._move(shift)
        ahead = delay.found and lag < -0.001 * self.rate_hz and delay.agree >= delay.num_agree
        stays = ahead or self.negative >= n["negative_updates"]
        self.negative = min(self.negative + 1, 1000) if stays else 0

    def _move(self, shift: int) -> None:
        """Delays the far end by so many samples more, its past included."""
        self.path_gain = max(self.path_gain, self._ratio())
        self.kalman.shift(shift, np.float32(self.n["start_variance"] * self.path_gain) * self._profile)
        self.line.whole += shift
        hops = self.line.reread()  # [L, M]
        self._pair[self.hop :] = hops[0]
        for i, wave in enumerate(hops[1:]):
            self._pair[: self.hop] = self._pair[self.hop :]
            self._pair[self.hop :] = wave
            self._write((self.slot + 1 + i) % self.count)

    def flags(self) -> dict[str, float | bool]:
        """What a person should know about the stream so far; the keys of `FrontEnd.flags`."""
        drift = self.delay.drift_ppm()
        return {
            "delay_samples": self.delay.lag * self.delay.factor if self.delay.found else 0.0,
            "delay_confidence": self.delay.confidence,
            "drift_ppm": drift,
            "drift": abs(drift) > 1e6 * self.delay.max_drift,
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
            "line.whole": np.array([self.line.whole], np.float32),
            "trust": np.array([self.trust], np.float32),
            "path_gain": np.array([self.path_gain], np.float32),
        }
