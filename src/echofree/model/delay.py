"""Streaming estimation of the delay between far end and microphone.

GCC-PHAT (Knapp & Carter 1976) on signals decimated to 4 kHz: every `period` hops the last half second of the microphone
is correlated with the last 1.6 s of the far end, and the whitened cross-spectra are averaged recursively while both
are active. A lag counts as found when it was the same in `NUM_AGREE` updates in a row and its peak stands out of the
rms over all lags. The slope on which the lags of the last 16 s lie is the clock drift.

Legend: B batch, M hop, N far window (low rate), U hops between updates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import decimation_matrix
from echofree.errors import ConfigError

LOW_RATE_HZ = 4000
FAR_SAMPLES = 6400  # N: 1.6 s, a size that FFTs like
MIC_SAMPLES = 2000  # 0.5 s
LEAD_SAMPLES = 200  # 50 ms: how far the microphone may be ahead
NUM_LAGS = FAR_SAMPLES - MIC_SAMPLES + 1
BAND_HZ = (300.0, 1800.0)
TAPS = 32
NUM_AGREE = 3  # updates in a row with the same lag
TOLERANCE = 6.0  # low-rate samples (1.5 ms) within which two lags are the same
MIN_CONFIDENCE = 7.0  # for a lag to count
HISTORY = 64  # lags kept for the drift, 16 s
MIN_LAGS = 20
MAX_DRIFT_PPM = 30.0


class DelayEstimator(nn.Module):
    """Finds the delay of every stream of a batch.

    Args:
        sample_rate: Hz, a multiple of 4000.
        hop_samples: M, a multiple of sample_rate / 4000.
        forget: weight of the past in the average of the cross-spectra, per update.
        dtype: of the arithmetic.
    """

    decimator: Tensor

    def __init__(self, sample_rate: int, hop_samples: int, forget: float = 0.7, dtype: torch.dtype = torch.float32):
        super().__init__()
        factor = sample_rate // LOW_RATE_HZ
        if sample_rate % LOW_RATE_HZ or hop_samples % factor:
            raise ConfigError(
                f"sample_rate={sample_rate} must be a multiple of {LOW_RATE_HZ} and hop_samples={hop_samples} one of "
                f"{max(factor, 1)}: the delay is estimated on hops decimated to {LOW_RATE_HZ} Hz"
            )
        self.factor, self.hop_samples, self.forget = factor, hop_samples, forget
        self.low_hop = hop_samples // factor
        self.period = max(1, round(0.256 * LOW_RATE_HZ / self.low_hop))  # U
        matrix = decimation_matrix(factor, hop_samples, TAPS)
        self.register_buffer("decimator", torch.tensor(matrix, dtype=dtype), persistent=False)
        hz = torch.fft.rfftfreq(FAR_SAMPLES, 1 / LOW_RATE_HZ)
        self.first = int((hz < BAND_HZ[0]).sum())
        self.last = int((hz <= BAND_HZ[1]).sum())

    def init_state(self, batch: int) -> State:
        """Float tensors, first axis batch; `lag` and the lags kept count low-rate samples."""
        zeros = self.decimator.new_zeros
        return {
            "tail": zeros(batch, 2, TAPS - 1),  # newest samples of (mic, far) at the full rate
            "fresh": zeros(batch, 2, self.period, self.low_hop),  # low-rate hops since the last update
            "low_mic": zeros(batch, MIC_SAMPLES + LEAD_SAMPLES),
            "low_far": zeros(batch, FAR_SAMPLES),
            "cross": zeros(batch, self.last - self.first, 2),
            "lag": zeros(batch, 1),  # the lag found last
            "confidence": zeros(batch, 1),
            "candidate": zeros(batch, 1),
            "agree": zeros(batch, 1),  # updates in a row that gave the candidate
            "found": zeros(batch, 1),  # 1 once a lag was found
            "ticks": zeros(batch, 1),  # updates so far
            "lags": zeros(batch, HISTORY),  # the newest trustworthy lags, newest last
            "lag_ticks": zeros(batch, HISTORY),  # and when they were seen
            "num_lags": zeros(batch, 1),
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
        blend = torch.lerp(white, state["cross"], self.forget)
        state["cross"].copy_(torch.where(active.unsqueeze(-1), blend, state["cross"]))

        lag, confidence = self._peak(state["cross"])
        self._decide(due, active, lag, confidence, state)

    def _peak(self, cross: Tensor) -> tuple[Tensor, Tensor]:
        """Averaged cross-spectrum [B, bins, 2] -> (lag [B, 1] in low-rate samples, confidence [B, 1])."""
        spectrum = torch.view_as_complex(cross.contiguous())
        full = spectrum.new_zeros(len(spectrum), FAR_SAMPLES // 2 + 1)
        full[:, self.first : self.last] = spectrum
        values = torch.fft.irfft(full, n=FAR_SAMPLES)[:, :NUM_LAGS].abs()  # [B, lags], the longest delay first
        best = values.argmax(-1, keepdim=True)
        peak = values.gather(1, best)
        inner = best.clamp(1, NUM_LAGS - 2)
        left, mid, right = (values.gather(1, inner + i) for i in (-1, 0, 1))
        curve = left - 2 * mid + right
        offset = torch.where((curve < 0) & (inner == best), (left - right) / (2 * curve - 1e-20), torch.zeros_like(mid))
        position = best + offset.clamp(-0.5, 0.5)
        start = FAR_SAMPLES - MIC_SAMPLES - LEAD_SAMPLES  # where the segment begins in the far window
        return start - position, peak / (values.square().mean(-1, keepdim=True).sqrt() + 1e-20)

    def _decide(self, due: Tensor, active: Tensor, lag: Tensor, confidence: Tensor, state: State) -> None:
        good = active & (confidence > MIN_CONFIDENCE)
        same = (lag - state["candidate"]).abs() <= TOLERANCE
        agree = torch.where(same, state["agree"] + 1, torch.ones_like(lag)).clamp(max=100.0)
        state["agree"].copy_(torch.where(good, agree, torch.where(active, 0 * agree, state["agree"])))
        state["candidate"].copy_(torch.where(good, lag, state["candidate"]))
        sure = good & (state["agree"] >= NUM_AGREE)
        state["lag"].copy_(torch.where(sure, lag, state["lag"]))
        state["found"].copy_(torch.where(sure, torch.ones_like(lag), state["found"]))
        state["confidence"].copy_(torch.where(active, confidence, state["confidence"]))

        state["ticks"].add_(due.to(lag.dtype))
        for name, value in (("lags", lag), ("lag_ticks", state["ticks"])):
            state[name].copy_(torch.where(good, torch.cat([state[name][:, 1:], value], dim=-1), state[name]))
        state["num_lags"].add_(good.to(lag.dtype)).clamp_(max=HISTORY)

    def delay_samples(self, state: State) -> Tensor:
        """[B] samples at the full rate by which the microphone lags the far end; 0 until found."""
        return (state["lag"] * state["found"])[:, 0] * self.factor

    def drift_ppm(self, state: State) -> Tensor:
        """[B] clock drift in parts per million, positive when the microphone falls behind; 0 where none can be told.

        Lags jump between reflections, so no line is fitted: every pair of lags votes for the slopes that explain it.
        The slope with the most votes (seconds between the two lags) counts if it clearly beats standing still.
        """
        lags, ticks = state["lags"], state["lag_ticks"] * (self.period * self.low_hop)  # both in low-rate samples
        known = torch.arange(HISTORY, device=lags.device) >= HISTORY - state["num_lags"]  # [B, 64]
        rise = lags.unsqueeze(2) - lags.unsqueeze(1)  # [B, 64, 64]
        run = ticks.unsqueeze(2) - ticks.unsqueeze(1)
        usable = known.unsqueeze(2) & known.unsqueeze(1) & (run >= LOW_RATE_HZ)
        weight = run * usable
        slopes = torch.arange(-1000, 1001, 20, device=lags.device) * 1e-6
        votes = torch.stack([_votes(rise, run, weight, slope).sum((1, 2)) for slope in slopes], dim=1)  # [B, slopes]
        best = votes.max(-1)
        inliers = _votes(rise, run, weight, slopes[best.indices].view(-1, 1, 1))
        slope = (inliers * rise).sum((1, 2)) / (inliers * run).sum((1, 2)).clamp(min=1.0)
        still = votes[:, len(slopes) // 2]
        told = (state["num_lags"][:, 0] >= MIN_LAGS) & (best.values > 5 * still)
        told &= best.values > 0.08 * weight.sum((1, 2))
        return torch.where(told, slope * 1e6, torch.zeros_like(slope))


def _votes(rise: Tensor, run: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    """The weight of the pairs of lags that lie on a line of this slope to a fifth of a millisecond."""
    return weight * ((rise - slope * run).abs() < 0.8)


def _steady(far: Tensor) -> Tensor:
    """[B, 1] whether the far window holds enough sound: not silence, and not only a single click."""
    blocks = far.unflatten(-1, (16, -1)).square().mean(-1)  # [B, 16] of 100 ms
    return (blocks > 1e-4 * blocks.amax(-1, keepdim=True) + 1e-14).sum(-1, keepdim=True) >= 4
