"""A small, quick filter beside the long one, which notices that the echo path has changed.

A converged Kalman filter trusts its echo path, so after a change it takes an error for a talker and learns slowly. The
shadow filter (after Ochiai, Araseki & Ogihara, "Echo canceler with two echo path models", 1977) never gets that sure:
it sees the first 80 ms at 4 kHz, with a large process noise. Where it leaves clearly less than the long filter does,
the far end explains what that one takes for a talker. Its echo estimate itself is never heard.

Legend: B batch, M hop, Q hop at the low rate, J partitions, F bins, n hops.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import decimation_matrix
from echofree.model.adaptive import KalmanFilter
from echofree.model.delay import LOW_RATE_HZ, TAPS

SPAN_S = 0.08
TRANSITION = 0.97
PSD_SMOOTHING = 0.5
LEVEL_S = 0.1  # time constant of the levels that are compared
BETTER = 0.7  # 1.5 dB: the shadow filter's error, of the long filter's and of the microphone's
HOLD_S = 0.05  # and so long in a row
WAIT_S = 0.25  # of active far end between two alarms
FIRST_S = 1.0  # and before the first one
FLOOR = 1e-3  # least variance, in units of the start variance


Far = tuple[Tensor, ...]


class Shadow(nn.Module):
    """The shadow filter of a batch of streams. Works in place on its state.

    Args:
        sample_rate: Hz, a multiple of 4000.
        hop_samples: M.
        dtype: of the arithmetic.
    """

    decimator: Tensor

    def __init__(self, sample_rate: int, hop_samples: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        factor = sample_rate // LOW_RATE_HZ
        self.hop_samples, self.low_hop, self.hop_s = hop_samples, hop_samples // factor, hop_samples / sample_rate
        self.num_partitions = math.ceil(SPAN_S / self.hop_s - 1e-9)
        matrix = decimation_matrix(factor, hop_samples, TAPS)
        self.register_buffer("decimator", torch.tensor(matrix, dtype=dtype), persistent=False)
        flat = np.ones(self.low_hop + 1, complex)
        self.filter = KalmanFilter(self.low_hop, self.num_partitions, TRANSITION, "prior", PSD_SMOOTHING, flat, dtype)

    def init_state(self, batch: int) -> State:
        """Float tensors, first axis batch."""
        zeros = self.decimator.new_zeros
        return {
            "tail": zeros(batch, 3, TAPS - 1),  # newest samples of (mic, far, error) at the full rate
            "far_last": zeros(batch, self.low_hop),
            "spectra": zeros(batch, self.num_partitions - 1, self.low_hop + 1, 2),
            "levels": zeros(batch, 3),  # mean squares of (mic, error of the long filter, own error)
            "since": zeros(batch, 1),  # active hops in a row in which the shadow filter did better
            "wait": zeros(batch, 1) + math.ceil(FIRST_S / self.hop_s),  # hops until an alarm may be given
            **self.filter.init_state(batch),
        }

    def hear(self, passed: Tensor, state: State) -> tuple[Tensor, Far]:
        """Takes in n hops of (mic, far) [B, 2, n M]. -> (mic [B, n, Q], the far end's spectra [B, J - 1 + n, F] as they
        are, their real and negative imaginary parts, and their power)."""
        line = torch.cat([state["tail"][:, :2], passed], dim=-1)
        state["tail"][:, :2] = line[..., line.shape[-1] - (TAPS - 1) :]
        low = line.unfold(-1, TAPS - 1 + self.hop_samples, self.hop_samples) @ self.decimator  # [B, 2, n, Q]
        far = torch.cat([state["far_last"].unsqueeze(1), low[:, 1]], dim=1)  # [B, n + 1, Q]
        state["far_last"].copy_(far[:, -1])
        fresh = torch.fft.rfft(torch.cat([far[:, :-1], far[:, 1:]], dim=-1))  # [B, n, F]
        spectra = torch.cat([torch.view_as_complex(state["spectra"]), fresh], dim=1)
        state["spectra"].copy_(torch.view_as_real(spectra[:, spectra.shape[1] - self.num_partitions + 1 :]))
        re, im = spectra.real.contiguous(), -spectra.imag
        return low[:, 0], (spectra, re, im, re.square().addcmul_(im, im))

    def step(
        self, mic: Tensor, far: Far, left: Tensor, adapt: Tensor, learn: Tensor, floor: Tensor, state: State
    ) -> tuple[Tensor, Tensor]:
        """One hop.

        Args:
            mic: [B, Q].
            far: what `hear` gives of the far end, J rows of it [B, J, F], oldest first.
            left: [B, M], the long filter's error, high-passed.
            adapt: [B, 1], 1 where the far end is active.
            learn: [B, 1], 1 where moreover the microphone doesn't clip.
            floor: [B, 1], least variance.
            state: see `init_state`.

        Returns:
            (alarm [B, 1], 1 where the echo path has changed; spoilt [B, 1], 1 where moreover the long filter does worse
            than none).
        """
        line = torch.cat([state["tail"][:, 2], left], dim=-1)
        state["tail"][:, 2] = line[:, -(TAPS - 1) :]
        spectra, re, im, power = far
        error = mic - self.filter.predict(spectra, state)
        self.filter.correct((re, im), power, torch.stack([error, error], dim=1), learn, floor, state)
        now = torch.stack([mic, line @ self.decimator, error], dim=1).square().mean(-1)  # [B, 3]
        levels = state["levels"]
        levels.lerp_(now, adapt * min(1.0, self.hop_s / LEVEL_S))
        mic_level, main, own = levels.split(1, dim=1)
        wait = (state["wait"] - adapt).clamp_(min=0)
        better = (own < BETTER * torch.minimum(main, mic_level)) & (learn > 0)
        since = torch.where(adapt > 0, (state["since"] + 1) * better, state["since"])
        alarm = ((since > HOLD_S / self.hop_s) & (wait == 0)).to(mic.dtype)
        state["since"].copy_(since * (1 - alarm))
        state["wait"].copy_(torch.where(alarm > 0, math.ceil(WAIT_S / self.hop_s), wait))
        return alarm, alarm * (main > mic_level)
