"""Streaming estimation of the delay between far end and microphone.

GCC-PHAT (Knapp & Carter 1976) on signals decimated to 4 kHz: every `period` hops the last half second of the microphone
is correlated with the last 1.6 s of the far end, and the whitened cross-spectra are averaged recursively while both
are active, over one second and over three: the short average follows a jump, the long one outlasts the stretches in
which a voice resembles itself one pitch period later. A lag counts as found when it was the same in `NUM_AGREE` updates
in a row and its peak stands out of the rms over all lags. Where the clocks drift, the averages are turned along.

Legend: B batch, M hop, N far window (low rate), U hops between updates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import decimation_matrix
from echofree.errors import ConfigError
from echofree.model import drift

LOW_RATE_HZ = 4000
FAR_SAMPLES = 6400  # N: 1.6 s, a size that FFTs like
MIC_SAMPLES = 2000  # 0.5 s
LEAD_SAMPLES = 200  # 50 ms: how far the microphone may be ahead
NUM_LAGS = FAR_SAMPLES - MIC_SAMPLES + 1
ZERO_LAG = FAR_SAMPLES - MIC_SAMPLES - LEAD_SAMPLES  # where the microphone's segment begins in the far window
BAND_HZ = (300.0, 1800.0)
TAPS = 32
NUM_AGREE = 3  # updates in a row with the same lag
TOLERANCE = 6.0  # low-rate samples (1.5 ms) within which two lags are the same
EARLY_SAMPLES = 240  # low-rate: 60 ms
EARLY_SHARE = 0.5
MIN_CONFIDENCE = 7.0  # for a lag to count
FORGET_FAST = 0.7  # weight of the past in the averages, per update
FORGET_SLOW = 0.92
MAX_DRIFT_PPM = 30.0  # beyond it the drift is taken out


class DelayEstimator(nn.Module):
    """Finds the delay of every stream of a batch.

    Args:
        sample_rate: Hz, a multiple of 4000.
        hop_samples: M, a multiple of sample_rate / 4000.
        dtype: of the arithmetic.
    """

    decimator: Tensor
    omega: Tensor
    around: Tensor

    def __init__(self, sample_rate: int, hop_samples: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        factor = sample_rate // LOW_RATE_HZ
        if sample_rate % LOW_RATE_HZ or hop_samples % factor:
            raise ConfigError(
                f"sample_rate={sample_rate} must be a multiple of {LOW_RATE_HZ} and hop_samples={hop_samples} one of "
                f"{max(factor, 1)}: the delay is estimated on hops decimated to {LOW_RATE_HZ} Hz"
            )
        self.factor, self.hop_samples = factor, hop_samples
        self.low_hop = hop_samples // factor
        self.period = max(1, round(0.256 * LOW_RATE_HZ / self.low_hop))  # U
        matrix = decimation_matrix(factor, hop_samples, TAPS)
        self.register_buffer("decimator", torch.tensor(matrix, dtype=dtype), persistent=False)
        hz = torch.fft.rfftfreq(FAR_SAMPLES, 1 / LOW_RATE_HZ)
        self.first = int((hz < BAND_HZ[0]).sum())
        self.last = int((hz <= BAND_HZ[1]).sum())
        omega = 2 * torch.pi * torch.arange(self.first, self.last, dtype=torch.float64) / FAR_SAMPLES
        self.register_buffer("around", torch.arange(-1, 2), persistent=False)
        self.register_buffer("omega", (omega * self.period * self.low_hop).to(dtype), persistent=False)
        self.drift = drift.DriftEstimator(self.period * self.low_hop, LOW_RATE_HZ, BAND_HZ, dtype)

    def init_state(self, batch: int) -> State:
        """Float tensors, first axis batch; `lag` and the lags kept count low-rate samples."""
        zeros = self.decimator.new_zeros
        return {
            "tail": zeros(batch, 2, TAPS - 1),  # newest samples of (mic, far) at the full rate
            "fresh": zeros(batch, 2, self.period, self.low_hop),  # low-rate hops since the last update
            "low_mic": zeros(batch, MIC_SAMPLES + LEAD_SAMPLES),
            "low_far": zeros(batch, FAR_SAMPLES),
            "fast": zeros(batch, self.last - self.first, 2),
            "slow": zeros(batch, self.last - self.first, 2),
            "lag": zeros(batch, 1),  # the lag found last
            "confidence": zeros(batch, 1),
            "candidate": zeros(batch, 1),
            "agree": zeros(batch, 1),  # updates in a row that gave the candidate
            "found": zeros(batch, 1),  # 1 once a lag was found
            "rate": zeros(batch, 1),  # of the drift that is taken out, samples per sample
            "jolt": zeros(batch, 1),  # 1 if this update changed the rate
            **{f"drift_{name}": value for name, value in self.drift.init_state(batch).items()},
        }

    def observe(self, pair: Tensor, slot: Tensor, state: State) -> None:
        """Takes in n hops, in place. pair [B, 2, n M] (mic, far); slot [B] int64: hops since the last update; n = 1, or
        n <= U and slot = 0 everywhere."""
        count = pair.shape[-1] // self.hop_samples
        x = torch.cat([state["tail"], pair], dim=-1)
        state["tail"].copy_(x[..., x.shape[-1] - (TAPS - 1) :])
        low = x.unfold(-1, TAPS - 1 + self.hop_samples, self.hop_samples) @ self.decimator  # [B, 2, n, M / factor]
        if count == 1:
            state["fresh"][torch.arange(len(slot), device=slot.device), :, slot] = low[:, :, 0]
        else:
            state["fresh"][:, :, :count] = low

    def update(self, due: Tensor, state: State) -> None:
        """Estimates anew, in place, for the streams where due [B, 1] is True (those whose slot is U - 1)."""
        fresh = state["fresh"].flatten(2)  # [B, 2, U low_hop]
        size = fresh.shape[-1]
        mic = torch.cat([state["low_mic"], fresh[:, 0]], dim=-1)[:, size:]
        far = torch.cat([state["low_far"], fresh[:, 1]], dim=-1)[:, size:]
        state["low_mic"].copy_(torch.where(due, mic, state["low_mic"]))
        state["low_far"].copy_(torch.where(due, far, state["low_far"]))

        segment = mic[:, :MIC_SAMPLES]  # ends LEAD_SAMPLES ago
        cross = torch.fft.rfft(segment, n=FAR_SAMPLES).conj() * torch.fft.rfft(far)
        cross = cross[:, self.first : self.last]
        magnitude = cross.abs()
        level = magnitude.mean(-1, keepdim=True)
        active = due & (level > 1e-12) & _steady(far)
        white = torch.view_as_real(cross / (magnitude + 0.05 * level + 1e-20))
        self._average(white, active, state)

        values = self._correlation(state["fast"] + state["slow"])[:, :NUM_LAGS].abs()
        lag, confidence = self._peak(values)
        self._decide(active, lag, confidence, state)
        self._follow(white, due, active, state)

    def _average(self, white: Tensor, active: Tensor, state: State) -> None:
        if white.device.type != "cpu" or bool(state["rate"].any()):
            turn = torch.view_as_real(torch.polar(torch.ones_like(white[..., 0]), self.omega * state["rate"]))
        else:
            turn = None
        for name, forget in (("fast", FORGET_FAST), ("slow", FORGET_SLOW)):
            past = state[name]
            if turn is not None:
                past = torch.view_as_real(torch.view_as_complex(past) * torch.view_as_complex(turn))
            blend = torch.lerp(white, past, forget)
            state[name].copy_(torch.where(active.unsqueeze(-1), blend, state[name]))

    def _correlation(self, cross: Tensor) -> Tensor:
        """[B, bins, 2] -> [B, N] over lags, the longest delay first."""
        spectrum = torch.view_as_complex(cross.contiguous())
        full = spectrum.new_zeros(len(spectrum), FAR_SAMPLES // 2 + 1)
        full[:, self.first : self.last] = spectrum
        return torch.fft.irfft(full, n=FAR_SAMPLES)

    def _peak(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """values [B, lags] -> (lag [B, 1] in low-rate samples, confidence [B, 1]).

        A dense room holds more in its tail than in the direct path, so the earliest peak that is half as high as the
        highest one counts, of those up to EARLY_SAMPLES before it."""
        highest = values.argmax(-1, keepdim=True)
        peak = values.gather(1, highest)
        near = highest + torch.arange(EARLY_SAMPLES + 1, device=values.device)  # [B, 241], earlier and earlier
        around = values.gather(1, (near.unsqueeze(-1) + self.around).flatten(1).clamp(0, NUM_LAGS - 1))
        left, mid, right = around.unflatten(1, (-1, 3)).unbind(-1)
        strong = (mid >= EARLY_SHARE * peak) & (mid >= left) & (mid >= right) & (near < NUM_LAGS)
        best = highest + (strong * torch.arange(EARLY_SAMPLES + 1, device=values.device)).amax(-1, keepdim=True)
        inner = best.clamp(1, NUM_LAGS - 2)
        left, mid, right = (values.gather(1, inner + i) for i in (-1, 0, 1))
        curve = left - 2 * mid + right
        offset = torch.where((curve < 0) & (inner == best), (left - right) / (2 * curve - 1e-20), torch.zeros_like(mid))
        position = best + offset.clamp(-0.5, 0.5)
        return ZERO_LAG - position, peak / (values.square().mean(-1, keepdim=True).sqrt() + 1e-20)

    def _decide(self, active: Tensor, lag: Tensor, confidence: Tensor, state: State) -> None:
        good = active & (confidence > MIN_CONFIDENCE)
        same = (lag - state["candidate"]).abs() <= TOLERANCE
        agree = torch.where(same, state["agree"] + 1, torch.ones_like(lag)).clamp(max=100.0)
        state["agree"].copy_(torch.where(good, agree, torch.where(active, 0 * agree, state["agree"])))
        state["candidate"].copy_(torch.where(good, lag, state["candidate"]))
        sure = good & (state["agree"] >= NUM_AGREE)
        state["lag"].copy_(torch.where(sure, lag, state["lag"]))
        state["found"].copy_(torch.where(sure, torch.ones_like(lag), state["found"]))
        state["confidence"].copy_(torch.where(active, confidence, state["confidence"]))

    def _follow(self, white: Tensor, due: Tensor, active: Tensor, state: State) -> None:
        """Estimates the drift, and sets the rate at which it is taken out."""
        values = self._correlation(white)
        at = state["lag"].round()
        index = torch.arange(drift.WINDOW, device=at.device) - drift.BEFORE
        cut = values.gather(1, ((ZERO_LAG - at).long() - index) % FAR_SAMPLES)  # [B, G], growing delay
        inner = {k[6:]: v for k, v in state.items() if k.startswith("drift_")}
        self.drift.update(cut, at, active & (state["found"] > 0), due, inner)
        found, told = self.drift.drift(inner)
        old = state["rate"]
        wanted = due & told & ((found.abs() > MAX_DRIFT_PPM * 1e-6) | (old != 0))
        rate = torch.where(wanted, found, old)
        state["jolt"].copy_(((rate - old).abs() > MAX_DRIFT_PPM * 1e-6).to(rate.dtype))
        old.copy_(rate)

    def delay_samples(self, state: State) -> Tensor:
        """[B] samples at the full rate by which the microphone lags the far end; 0 until found."""
        return (state["lag"] * state["found"])[:, 0] * self.factor

    def drift_ppm(self, state: State) -> Tensor:
        """[B] clock drift in parts per million, positive when the microphone falls behind; 0 where none can be told."""
        found, told = self.drift.drift({k[6:]: v for k, v in state.items() if k.startswith("drift_")})
        return (found * told)[:, 0] * 1e6


def _steady(far: Tensor) -> Tensor:
    """[B, 1] whether the far window holds enough sound: not silence, and not only a single click."""
    blocks = far.unflatten(-1, (16, -1)).square().mean(-1)  # [B, 16] of 100 ms
    return (blocks > 1e-4 * blocks.amax(-1, keepdim=True) + 1e-14).sum(-1, keepdim=True) >= 4
