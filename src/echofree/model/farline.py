"""The far end's past, read with the delay taken out: any number of samples, fractions and a steady drift included.

Reading sample m of a hop gives far[m - D(m)] with D(m) = whole + fraction + rate (m + 1), so that a far end whose clock
is off by `rate` fits the microphone's clock again: a resampler, by a Farrow structure. Where nothing drifts the delay
is whole, and reading is copying.

Legend: B batch, M hop, n hops, H samples of the past.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import fractional_delay

TAPS = 15
ORDER = 4
HALF = TAPS // 2


class FarLine(nn.Module):
    """Delay line for a batch of streams; works in place on its state.

    Args:
        hop_samples: M.
        max_samples: the longest delay to be read.
        num_partitions: hops that `reread` gives.
        dtype: of the arithmetic.
    """

    farrow: Tensor

    def __init__(self, hop_samples: int, max_samples: int, num_partitions: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.hop_samples, self.num_partitions = hop_samples, num_partitions
        self.most = max_samples + hop_samples  # where a drifting delay stops
        self.past = self.most + (num_partitions + 1) * hop_samples + TAPS  # H
        self.register_buffer("farrow", torch.tensor(fractional_delay(TAPS, ORDER), dtype=dtype), persistent=False)

    def init_state(self, batch: int) -> State:
        """All float, first axis batch: the delay is whole + fraction, |fraction| <= 1/2."""
        zeros = self.farrow.new_zeros
        return {
            "past": zeros(batch, self.past),
            "whole": zeros(batch, 1),
            "fraction": zeros(batch, 1),
            "rate": zeros(batch, 1),  # samples per sample by which the delay grows
        }

    def advance(self, far: Tensor, state: State) -> Tensor:
        """Takes in n hops [B, n M] and reads as many, the delay taken out: [B, n M]."""
        hop, num = self.hop_samples, far.shape[-1] // self.hop_samples
        line = torch.cat([state["past"], far], dim=-1)
        state["past"].copy_(line[:, -self.past :])
        whole, fraction, rate = state["whole"], state["fraction"], state["rate"]
        if far.device.type == "cpu" and not bool(rate.any() | fraction.any()):
            return self._read(line, whole.expand(-1, num), None, rate)
        bases, starts = [], []
        for _ in range(num):
            middle = (fraction + rate * (0.5 * hop)).round()
            bases.append(whole + middle)
            starts.append(fraction - middle)
            end = fraction + rate * hop
            carry = end.round()
            whole, fraction = whole + carry, end - carry
            stuck = (rate != 0) & ((whole + fraction < HALF) | (whole + fraction > self.most))
            whole = torch.where(stuck, whole.clamp(HALF, self.most), whole)
            fraction = torch.where(stuck, torch.zeros_like(fraction), fraction)
        state["whole"].copy_(whole)
        state["fraction"].copy_(fraction)
        return self._read(line, torch.cat(bases, 1), torch.cat(starts, 1), rate)

    def reread(self, state: State) -> Tensor:
        """The last num_partitions hops once more, as if the present delay and rate had held all the while."""
        hop, count = self.hop_samples, self.num_partitions
        back = torch.arange(-count, 0, device=state["past"].device) * hop  # [n]
        begin = state["fraction"] + state["rate"] * back  # [B, n]
        middle = (begin + state["rate"] * (0.5 * hop)).round()
        return self._read(state["past"], (state["whole"] + middle).clamp(min=0), begin - middle, state["rate"])

    def _read(self, line: Tensor, bases: Tensor, starts: Tensor | None, rate: Tensor) -> Tensor:
        """line [B, X], ending now; bases [B, n] whole delays of its last n hops; starts [B, n] what D is above that
        before the first sample; None: nothing, and no rate. -> [B, n M]"""
        hop, num = self.hop_samples, bases.shape[1]
        width = hop if starts is None else hop + TAPS - 1
        first = line.shape[-1] - torch.arange(num, 0, -1, device=line.device) * hop - bases.long()  # [B, n]
        if starts is not None:
            line = torch.nn.functional.pad(line, (HALF, HALF))  # what is yet to come counts as silence
        index = first.unsqueeze(-1) + torch.arange(width, device=line.device)  # [B, n, width]
        x = line.gather(1, index.flatten(1))
        if starts is None:
            return x
        parts = x.view(*index.shape).unfold(-1, TAPS, 1) @ self.farrow  # [B, n, M, order + 1]
        ramp = torch.arange(1, hop + 1, device=line.device, dtype=rate.dtype)
        late = starts.unsqueeze(-1) + rate.unsqueeze(-1) * ramp  # [B, n, M]
        out = parts[..., ORDER]
        for k in range(ORDER - 1, -1, -1):
            out = torch.addcmul(parts[..., k], out, late)
        return out.flatten(1)
