"""The linear front end: DC blocker, delay estimation, Kalman filter. It has nothing to train.

What it returns is aligned with the microphone sample by sample and causal without look-ahead. Positive delay means that
the microphone lags the far end. Conditions under which a Kalman filter alone fails silently are handled or flagged here:
DC or rumble, another scale on one side, a bulk delay, a silent or unrelated far end, clipping, a clock that drifts, a
microphone that is ahead of its far end.

Legend: B batch, T samples, L partitions, F bins, M hop, R blocks of the far-end ring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import BlockIir, dc_blocker, frequency_response, high_pass
from echofree.errors import ConfigError
from echofree.model.adaptive import KalmanFilter
from echofree.model.delay import LOW_RATE_HZ, MAX_DRIFT_PPM, MIN_CONFIDENCE, DelayEstimator

DC_CUTOFF_HZ = 5.0  # turns 100 Hz by 3 degrees
HIGH_PASS_HZ = 80.0
FAR_ACTIVE = 1e-8  # mean square of the far end: -80 dB below full scale
START_VARIANCE = 1.0  # variance of a new partition, in units of mean |mic|^2 / mean |far|^2
MAX_PATH_GAIN = 4.0  # upper limit of that ratio, beyond which the microphone surely hears more than echo
VARIANCE_FLOOR = 1e-7
INT16 = 32768.0
HEADROOM_S = 0.006  # the direct path is placed this far inside the filter, or up to a hop further
LATEST_S = 0.064  # a direct path inside the filter up to here needs no new alignment
START_S = 1.0  # of active far end, during which the start variance follows the level
JUDGE_S = 3.0  # of active far end before a far end may be called unexplained
TINY_LEVEL = 1e-20
MIN_GAIN_DB = 1.0  # smoothed echo reduction below which the far end explains nothing


class FrontEnd(nn.Module):
    """Linear echo cancellation for a batch of streams.

    Args:
        sample_rate: Hz, a multiple of 4000.
        hop_samples: M, samples per step.
        num_partitions: L; the filter spans L M samples behind the estimated delay.
        transition: A of the Kalman filter.
        output: "posterior" or "prior", see `KalmanFilter`.
        psd_smoothing: of the near-end estimate, per hop.
        max_delay_ms: bulk delays up to here are found and taken out; 0 turns the alignment off.
        dtype: float32; float64 for comparisons.
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        hop_samples: int = 256,
        num_partitions: int = 10,
        transition: float = 0.999,
        output: str = "posterior",
        psd_smoothing: float = 0.5,
        max_delay_ms: float = 1000.0,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        problems = []
        if output not in ("posterior", "prior"):
            problems.append(f"output={output!r} must be posterior or prior")
        if not 0 < transition <= 1:
            problems.append(f"transition={transition} must lie in (0, 1]")
        if num_partitions < 1:
            problems.append(f"num_partitions={num_partitions} must be at least 1")
        if not 0 <= max_delay_ms <= 1000:
            problems.append(f"max_delay_ms={max_delay_ms} must lie between 0 and 1000")
        if problems:
            raise ConfigError(problems)
        self.sample_rate, self.hop_samples, self.num_partitions = sample_rate, hop_samples, num_partitions
        self.dtype = dtype
        self.delay = DelayEstimator(sample_rate, hop_samples, dtype=dtype)
        self.dc = BlockIir(*dc_blocker(DC_CUTOFF_HZ, sample_rate), hop_samples, dtype)
        high = high_pass(HIGH_PASS_HZ, sample_rate)
        self.high = BlockIir(*high, hop_samples, dtype)
        self.filter = KalmanFilter(
            hop_samples,
            num_partitions,
            transition,
            output,
            psd_smoothing,
            frequency_response(*high, hop_samples + 1),
            dtype,
        )
        self.max_blocks = int(max_delay_ms * 1e-3 * sample_rate / hop_samples)
        period = self.delay.period
        self.ring = -(-(num_partitions + self.max_blocks + 1) // period) * period  # R, a multiple of the period
        self.hop_s = hop_samples / sample_rate

    def init_state(self, batch: int) -> State:
        """A fresh set of streams: tensors by name, first axis batch."""
        zeros = self.dc.matrix.new_zeros
        bins = self.hop_samples + 1
        state = {
            "slot": zeros(batch, 1),  # where the ring is written next
            "spectra": zeros(batch, self.ring, bins, 2),
            "power": zeros(batch, self.ring, bins),
            "far_last": zeros(batch, self.hop_samples),
            "dc": zeros(batch, 2, self.dc.order),
            "high": zeros(batch, 3, self.high.order),  # mic, aligned far, error
            "blocks": zeros(batch, 1),  # alignment in hops
            "far_level": zeros(batch, 1),  # smoothed mean squares while the far end is active
            "mic_level": zeros(batch, 1),
            "path_gain": zeros(batch, 1),  # level ratio at which the variance was last started
            "active": zeros(batch, 1),  # hops with an active far end, capped
            "mic_peak": zeros(batch, 1),
            "clipped": zeros(batch, 1),  # share of recent hops in which the microphone clipped
            "ever_clipped": zeros(batch, 1),
            "reduction": zeros(batch, 2),  # smoothed mean squares of (mic, error) while active
            "trust": zeros(batch, 1) + 1,
            "drift": zeros(batch, 1),  # the largest drift seen, ppm
            "negative": zeros(batch, 1),  # 1 once the microphone was found ahead
        }
        return {
            **state,
            **{f"kalman.{k}": v for k, v in self.filter.init_state(batch).items()},
            **{f"delay.{k}": v for k, v in self.delay.init_state(batch).items()},
        }

    @torch.no_grad()
    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> dict[str, Any]:
        """Whole clips: the loop over `step`.

        Args:
            mic, far: [B, T], as captured.
            details: adds "flags".

        Returns:
            Tensors [B, T] in the dtype of the front end: "mic" (DC blocked), "far" (DC blocked, aligned), "mic_hp" and
            "far_hp" (the same through the 80 Hz high-pass), "echo" (estimate of the echo in mic), "error" = mic - echo.
            "flags": see `flags`.
        """
        batch, num_samples = mic.shape
        hop = self.hop_samples
        count = -(-num_samples // hop)
        pad = count * hop - num_samples
        pair = torch.nn.functional.pad(torch.stack([mic, far], dim=1).to(self.dtype), (0, pad))  # [B, 2, L M]
        state = self.init_state(batch)
        keys = ("mic", "far", "mic_hp", "far_hp", "echo", "error")
        out = {key: pair.new_empty(batch, count * hop) for key in keys}
        with torch.autocast(mic.device.type, enabled=False):
            for t in range(count):
                here = slice(t * hop, (t + 1) * hop)
                due = (t + 1) % self.delay.period == 0
                hops = self._advance(pair[:, :, here], state, due)
                for key, value in hops.items():
                    out[key][:, here] = value
        out = {key: value[:, :num_samples] for key, value in out.items()}
        return {**out, "flags": self.flags(state)} if details else out

    @torch.no_grad()
    def step(self, mic: Tensor, far: Tensor, state: State) -> tuple[State, State]:
        """mic, far [B, M] -> (the tensors of `forward` without flags, each [B, M]; the new state)."""
        state = {key: value.clone() for key, value in state.items()}
        due = bool((state["slot"] % self.delay.period == self.delay.period - 1).any())
        with torch.autocast(mic.device.type, enabled=False):
            return self._advance(torch.stack([mic, far], dim=1).to(self.dtype), state, due), state

    def flags(self, state: State) -> dict[str, Tensor]:
        """What a person should know about the streams so far, each [B]: "delay_samples" (0 until found),
        "delay_confidence" (peak / rms), "drift_ppm" (largest seen, signed), and bools: "drift" (beyond 30 ppm),
        "negative_delay" (the microphone is ahead of the far end, which no causal filter can mend), "unexplained" (the
        far end was active for seconds and explains nothing of the microphone), "saturated" (the microphone clips)."""
        confidence = state["delay.confidence"][:, 0]
        return {
            "delay_samples": self.delay.delay_samples({k[6:]: v for k, v in state.items() if k.startswith("delay.")}),
            "delay_confidence": confidence,
            "drift_ppm": state["drift"][:, 0],
            "drift": state["drift"][:, 0].abs() > MAX_DRIFT_PPM,
            "negative_delay": state["negative"][:, 0] > 0,
            "unexplained": self._unexplained(state)[:, 0],
            "saturated": state["ever_clipped"][:, 0] > 0,
        }

    def _advance(self, pair: Tensor, state: State, due: bool) -> State:
        """One hop, in place on `state`. pair [B, 2, M] raw (mic, far); due: some stream must renew its delay."""
        kalman = {k: state["kalman." + k] for k in ("weight", "variance", "psd")}
        slot = state["slot"].long()  # [B, 1]
        clipping = self._clipping(pair[:, 0], state)
        pair, rest = self.dc(pair, state["dc"])  # [B, 2, M]
        state["dc"].copy_(rest)
        mic = pair[:, 0]
        self._remember(pair[:, 1], slot, state)
        self._align(pair, slot, state, kalman, due)

        spectra, power = self._history(slot, state)  # [B, L, F]
        adapt = self._levels(mic, power, clipping, state, kalman)
        error = mic - self.filter.predict(spectra, kalman)
        far = torch.fft.irfft(spectra[:, 0])[:, self.hop_samples :]
        passed, rest = self.high(torch.stack([mic, far, error], dim=1), state["high"])
        state["high"].copy_(rest)
        self._judge(passed, adapt, state)
        floor = VARIANCE_FLOOR * state["path_gain"]
        errors = torch.stack([error, passed[:, 2]], dim=1)
        echo = mic - self.filter.correct(spectra, power, errors, adapt * (1 - clipping), floor, kalman)
        echo = echo * state["trust"]
        state["slot"].copy_((slot + 1) % self.ring)
        return {
            "mic": mic,
            "far": far,
            "mic_hp": passed[:, 0],
            "far_hp": passed[:, 1],
            "echo": echo,
            "error": mic - echo,
        }

    def _remember(self, far: Tensor, slot: Tensor, state: State) -> None:
        """Writes the spectrum of (last hop, this hop) of the far end into the ring."""
        spectrum = torch.view_as_real(torch.fft.rfft(torch.cat([state["far_last"], far], dim=-1)))
        rows = torch.arange(len(far), device=far.device)
        state["spectra"][rows, slot[:, 0]] = spectrum
        state["power"][rows, slot[:, 0]] = spectrum.square().sum(-1)
        state["far_last"].copy_(far)

    def _history(self, slot: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """The L blocks behind the alignment, newest first: complex spectra and their power, [B, L, F]."""
        batch, count = len(slot), self.num_partitions
        steps = torch.arange(count, device=slot.device)
        index = (slot - state["blocks"].long() - steps) % self.ring  # [B, L]
        index = (index + self.ring * torch.arange(batch, device=slot.device).unsqueeze(1)).flatten()
        spectra = state["spectra"].flatten(2).flatten(0, 1).index_select(0, index)
        power = state["power"].flatten(0, 1).index_select(0, index)
        shape = (batch, count, self.hop_samples + 1)
        return torch.view_as_complex(spectra.view(*shape, 2)), power.view(shape)

    def _align(self, pair: Tensor, slot: Tensor, state: State, kalman: State, due: bool) -> None:
        """Feeds the delay estimator and moves the alignment where a new delay was found."""
        if self.max_blocks == 0:
            return
        delay = {k[6:]: v for k, v in state.items() if k.startswith("delay.")}
        phase = slot % self.delay.period
        self.delay.observe(pair, phase[:, 0], delay)
        if not due:
            return
        self.delay.update(phase == self.delay.period - 1, delay)
        lag_s = delay["lag"] / LOW_RATE_HZ  # [B, 1]
        inside_s = lag_s - state["blocks"] * self.hop_s
        move = (delay["found"] > 0) & ((inside_s < 0.5 * HEADROOM_S) | (inside_s > LATEST_S))
        wanted = ((lag_s - HEADROOM_S) / self.hop_s).floor().clamp(0, self.max_blocks)
        blocks = torch.where(move, wanted, state["blocks"])
        start = START_VARIANCE * state["path_gain"]
        self.filter.shift((blocks - state["blocks"])[:, 0], start, kalman)
        state["blocks"].copy_(blocks)
        drift = self.delay.drift_ppm(delay).unsqueeze(1)
        state["drift"].copy_(torch.where(drift.abs() > state["drift"].abs(), drift, state["drift"]))
        ahead = (delay["found"] > 0) & (lag_s < -0.001)
        state["negative"].copy_(torch.maximum(state["negative"], ahead.to(lag_s.dtype)))

    def _clipping(self, mic: Tensor, state: State) -> Tensor:
        """[B, 1], 1 where this hop of the raw microphone is clipped: at least 3 samples stand at its highest peak ever."""
        size = mic.abs()
        peak = torch.maximum(size.amax(-1, keepdim=True), state["mic_peak"])
        state["mic_peak"].copy_(peak)
        count = ((size >= 0.9999 * peak) & (size > 0)).sum(-1, keepdim=True)
        clipped = (count >= 3).to(mic.dtype)
        share = state["clipped"].lerp_(clipped, 0.02)
        state["ever_clipped"].copy_(torch.maximum(state["ever_clipped"], (share > 0.02 * 1.5).to(mic.dtype)))
        return clipped * (share < 0.3).to(mic.dtype)  # clipping all the time: better to adapt than never to

    def _levels(self, mic: Tensor, power: Tensor, clipping: Tensor, state: State, kalman: State) -> Tensor:
        """Tracks the levels while the far end is active and starts the variance from them. -> adapt [B, 1]."""
        window = 2 * self.hop_samples
        far_now = power.mean((1, 2)).unsqueeze(1) * (2.0 / window)  # mean square over the filter's span (Parseval)
        mic_now = mic.square().mean(-1, keepdim=True)
        far_level, mic_level = state["far_level"], state["mic_level"]
        far_full = torch.where(far_now > 4.0, INT16**2, 1.0).to(mic.dtype)
        adapt = ((far_now > FAR_ACTIVE * far_full) & (far_now > 1e-5 * far_level)).to(mic.dtype)
        first = (state["active"] == 0).to(mic.dtype)
        rate = adapt * torch.maximum(first, torch.full_like(first, min(1.0, self.hop_s / 0.25)))
        far_level.lerp_(far_now, rate)
        mic_level.lerp_(mic_now, rate)
        full = torch.where(state["mic_peak"] > 4.0, INT16**2, 1.0).to(mic.dtype)
        ratio = torch.minimum(mic_level / (far_level + TINY_LEVEL), MAX_PATH_GAIN * full)
        starting = (state["active"] * self.hop_s < START_S) & (adapt > 0) & (ratio > 2 * state["path_gain"])
        state["path_gain"].copy_(torch.where(starting, ratio, state["path_gain"]))
        start = (START_VARIANCE * ratio * starting).unsqueeze(-1)
        torch.maximum(kalman["variance"], start, out=kalman["variance"])
        state["active"].add_(adapt).clamp_(max=1e6)
        return adapt

    def _judge(self, passed: Tensor, adapt: Tensor, state: State) -> None:
        """Tracks how much the filter takes away, and fades the echo estimate out while it explains nothing."""
        now = passed[:, (0, 2)].square().mean(-1)  # [B, 2]
        state["reduction"].lerp_(now, adapt * min(1.0, self.hop_s / 1.5))
        target = 1.0 - self._unexplained(state).to(now.dtype)
        state["trust"].lerp_(target, min(1.0, self.hop_s / 0.1))

    def _unexplained(self, state: State) -> Tensor:
        """[B, 1] bool."""
        mic, error = state["reduction"].split(1, dim=1)
        weak = mic < error * 10 ** (MIN_GAIN_DB / 10)
        doubtful = state["delay.confidence"] < MIN_CONFIDENCE
        return (state["active"] * self.hop_s > JUDGE_S) & weak & doubtful
