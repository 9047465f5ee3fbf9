"""A small, quick filter beside the long one, which notices that the echo path has changed.

A converged Kalman filter trusts its echo path, so after a change it takes an error for a talker and learns slowly. The
shadow filter (after Ochiai, Araseki & Ogihara, "Echo canceler with two echo path models", 1977) never gets that sure:
it sees the first 160 ms at 4 kHz, with a large process noise. Where it leaves clearly less than the long filter does,
the far end explains what that one takes for a talker. Its echo estimate itself is never heard, so it works on blocks of
two hops at once, which halves its cost.

Legend: B batch, M hop, Q block at the low rate, J partitions, F bins, n hops, k blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from echofree.contracts import State
from echofree.dsp import decimation_matrix
from echofree.model.adaptive import STATES, KalmanFilter
from echofree.model.delay import LOW_RATE_HZ, TAPS

HOPS = 2  # of a block
SPAN_S = 0.16  # with 96 ms it missed 4 of 20 changes of room
TRANSITION = 0.96  # per block, as the next one
PSD_SMOOTHING = 0.5
LEVEL_S = 0.1  # time constant of the levels that are compared
BETTER = 0.8  # 1 dB: the shadow filter's error, of the long filter's and of the microphone's
HOLD_S = 0.05  # and so long in a row
WAIT_S = 0.25  # of active far end between two alarms
FIRST_S = 1.0  # and before the first one
FLOOR = 1e-3  # least variance, in units of the start variance


@dataclass
class Heard:
    """What n hops bring the shadow filter.

    Attributes:
        first: hops from the start until the first block is complete: 0 or 1.
        mic: [B, k, Q], the microphone's blocks.
        far: spectra of the far end's blocks [B, J - 1 + k, F] as they are, their real and negative imaginary parts, and
            their power.
        due: [B, 1] bool, the streams whose block is complete; None: all of them.
    """

    first: int
    mic: Tensor
    far: tuple[Tensor, ...]
    due: Tensor | None


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
        self.hop_samples, self.low_block = hop_samples, HOPS * hop_samples // factor
        self.block_s = HOPS * hop_samples / sample_rate
        self.num_partitions = math.ceil(SPAN_S / self.block_s - 1e-9)
        matrix = decimation_matrix(factor, hop_samples, TAPS)
        self.register_buffer("decimator", torch.tensor(matrix, dtype=dtype), persistent=False)
        flat = np.ones(self.low_block + 1, complex)
        self.filter = KalmanFilter(self.low_block, self.num_partitions, TRANSITION, "prior", PSD_SMOOTHING, flat, dtype)

    def init_state(self, batch: int) -> State:
        """Float tensors, first axis batch."""
        zeros = self.decimator.new_zeros
        return {
            "phase": zeros(batch, 1),  # hops of a block that were heard
            "tail": zeros(batch, 3, TAPS - 1),  # newest samples of (mic, far, error) at the full rate
            "held": zeros(batch, 2, self.low_block // HOPS),  # first half of a block of (mic, far)
            "held_error": zeros(batch, self.hop_samples),  # the same, at the full rate
            "held_learn": zeros(batch, 1),
            "far_last": zeros(batch, self.low_block),
            "spectra": zeros(batch, self.num_partitions - 1, self.low_block + 1, 2),
            "levels": zeros(batch, 3),  # mean squares of (mic, error of the long filter, own error)
            "since": zeros(batch, 1),  # active blocks in a row in which the shadow filter did better
            "wait": zeros(batch, 1) + math.ceil(FIRST_S / self.block_s),  # blocks until an alarm may be given
            **self.filter.init_state(batch),
        }

    def hear(self, passed: Tensor, state: State) -> Heard:
        """Takes in n hops of (mic, far) [B, 2, n M]; all streams of one phase, or n = 1."""
        num, phase = passed.shape[-1] // self.hop_samples, state["phase"]
        line = torch.cat([state["tail"][:, :2], passed], dim=-1)
        state["tail"][:, :2] = line[..., line.shape[-1] - (TAPS - 1) :]
        low = line.unfold(-1, TAPS - 1 + self.hop_samples, self.hop_samples) @ self.decimator  # [B, 2, n, Q / 2]
        low = torch.cat([state["held"].unsqueeze(2), low], dim=2)
        due = None
        if num == 1:
            due = phase > 0
            first = 0 if bool(due.any()) else 1
            due = None if bool(due.all()) else due
        else:
            first = 1 - int(phase[0, 0])
        count = (num + 1 - first) // HOPS
        blocks = low[:, :, first : first + HOPS * count].unflatten(2, (count, HOPS)).flatten(3)  # [B, 2, k, Q]
        state["held"].copy_(low[:, :, -1])
        phase.copy_((phase + num) % HOPS)
        if count == 0:
            return Heard(first, blocks[:, 0], (), due)
        far = torch.cat([state["far_last"].unsqueeze(1), blocks[:, 1]], dim=1)  # [B, k + 1, Q]
        fresh = torch.fft.rfft(torch.cat([far[:, :-1], far[:, 1:]], dim=-1))  # [B, k, F]
        spectra = torch.cat([torch.view_as_complex(state["spectra"]), fresh], dim=1)
        _keep(state["far_last"], far[:, -1], due)
        latest = torch.view_as_real(spectra[:, spectra.shape[1] - self.num_partitions + 1 :])
        _keep(state["spectra"], latest, due)
        re, im = spectra.real.contiguous(), -spectra.imag
        return Heard(first, blocks[:, 0], (spectra, re, im, re.square().addcmul_(im, im)), due)

    def step(
        self, heard: Heard, hop: int, left: Tensor, adapt: Tensor, learn: Tensor, floor: Tensor, state: State
    ) -> tuple[Tensor, Tensor] | None:
        """One hop, in order.

        Args:
            heard: from `hear`.
            hop: which of its hops.
            left: [B, M], the long filter's error, high-passed.
            adapt: [B, 1], 1 where the far end is active.
            learn: [B, 1], 1 where moreover the microphone doesn't clip.
            floor: [B, 1], least variance.
            state: see `init_state`.

        Returns:
            (alarm [B, 1], 1 where the echo path has changed; spoilt [B, 1], 1 where moreover the long filter does worse
            than none), or None in the middle of a block.
        """
        since_first, due = hop - heard.first, heard.due
        alarms = None
        if since_first >= 0 and since_first % HOPS == 0:
            block, names = since_first // HOPS, (*STATES, "levels", "since", "wait")
            before = {} if due is None else {name: state[name].clone() for name in names}
            far = tuple(x[:, block : block + self.num_partitions] for x in heard.far)
            line = torch.cat([state["tail"][:, 2], state["held_error"], left], dim=-1)
            _keep(state["tail"][:, 2], line[:, -(TAPS - 1) :], due)
            rest = (line.unfold(-1, TAPS - 1 + self.hop_samples, self.hop_samples) @ self.decimator).flatten(1)
            learning = learn * state["held_learn"]
            alarms = self._compare(heard.mic[:, block], far, rest, adapt, learning, floor, state)
            if due is not None:
                for name, value in before.items():
                    _keep(state[name], value, ~due)  # the others stay as they were
                alarms = alarms[0] * due, alarms[1] * due
        state["held_error"].copy_(left)
        state["held_learn"].copy_(learn)
        return alarms

    def _compare(
        self,
        mic: Tensor,
        far: tuple[Tensor, ...],
        rest: Tensor,
        adapt: Tensor,
        learn: Tensor,
        floor: Tensor,
        state: State,
    ) -> tuple[Tensor, Tensor]:
        """One block: filters it, and compares what is left. rest: [B, Q], the long filter's error. -> see `step`"""
        spectra, re, im, power = far
        error = mic - self.filter.predict(spectra, state)
        self.filter.correct((re, im), power, torch.stack([error, error], dim=1), learn, floor, state)
        now = torch.stack([mic, rest, error], dim=1).square().mean(-1)  # [B, 3]
        levels = state["levels"]
        levels.lerp_(now, adapt * min(1.0, self.block_s / LEVEL_S))
        mic_level, main, own = levels.split(1, dim=1)
        wait = (state["wait"] - adapt).clamp_(min=0)
        better = (own < BETTER * torch.minimum(main, mic_level)) & (learn > 0)
        since = torch.where(adapt > 0, (state["since"] + 1) * better, state["since"])
        alarm = ((since > HOLD_S / self.block_s) & (wait == 0)).to(mic.dtype)
        state["since"].copy_(since * (1 - alarm))
        state["wait"].copy_(torch.where(alarm > 0, math.ceil(WAIT_S / self.block_s), wait))
        return alarm, alarm * (main > mic_level)


def _keep(target: Tensor, new: Tensor, due: Tensor | None) -> None:
    """Writes `new` into target where a stream is due; None: everywhere."""
    if due is None:
        target.copy_(new)
    else:
        target.copy_(torch.where(due.view(-1, *[1] * (new.ndim - 1)), new, target))
