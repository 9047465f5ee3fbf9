"""Streams of any chunk size over a model's fixed hop, and the offline loop over `step`.

Legend: B batch, T samples, M hop.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echofree.contracts import Model, State

Audio = np.ndarray | Tensor
FULL_SCALE = 32768.0  # of int16
SHORT_S, MANY_RESETS = 0.2, 5  # so many calls in a row that were shorter: somebody resets at every chunk


class Stream:
    """A live stream: give it chunks as they come, get as many samples back, late by `model.latency_samples`.

    Keep one object for the whole call: its state is what the canceller has learnt. A new object, or `reset`, for every
    chunk would start from nothing each time, and warns. Streams share nothing but the weights.

    Args:
        model: in eval mode; it runs without gradients, on the device of its state.
        batch: parallel streams.
    """

    def __init__(self, model: Model, batch: int = 1):
        self.model, self.batch = model, batch
        self._taken, self._short = 0, 0  # samples since the last reset; resets in a row after next to nothing
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the next sample is the first of a new call. Warns when that happens at every chunk."""
        self._short = self._short + 1 if 0 < self._taken < SHORT_S * self.model.sample_rate else 0
        self._taken = 0
        if self._short == MANY_RESETS:
            warnings.warn(
                f"the stream was reset {MANY_RESETS} times in a row within less than {SHORT_S:g} s of sound each: a "
                "canceller has learnt nothing by then. Keep its state for the whole call",
                stacklevel=2,
            )
        self._state = self.model.init_state(self.batch)
        like = next(iter(self._state.values()), torch.zeros(0))
        self._pending = like.new_zeros(self.batch, 2, 0)  # (mic, far) short of a hop
        # `step` is late by latency - hop; the hop that has to be waited for stands here as zeros
        self._ready = like.new_zeros(self.batch, self.model.hop_samples)

    def process(self, mic: Audio, far: Audio | None) -> Any:
        """mic, far [n] (batch 1) or [B, n], any n, numpy or tensor, float in [-1, 1] or int16 -> the estimate in the
        shape and kind of mic; int16 if mic is.

        far None says that nothing is playing: silence. A far end that plays and isn't given can't be cancelled.
        Output sample i of the stream belongs to input sample i - latency_samples; zeros come before the first.

        Raises:
            TypeError: neither an array nor a tensor, or samples that are neither floats nor int16.
            ValueError: shapes that don't fit.
        """
        mic_in = self._tensor("mic", mic)
        far_in = torch.zeros_like(mic_in) if far is None else self._tensor("far", far)
        if mic_in.shape != far_in.shape:
            raise ValueError(f"mic {tuple(mic_in.shape)} and far {tuple(far_in.shape)} must have the same shape")
        size, hop = mic_in.shape[-1], self.model.hop_samples
        self._taken += size
        self._pending = torch.cat([self._pending, torch.stack([mic_in, far_in], dim=1)], dim=-1)
        parts = [self._ready]
        with torch.no_grad():
            while self._pending.shape[-1] >= hop:
                pair, self._pending = self._pending[..., :hop], self._pending[..., hop:]
                est, self._state = self.model.step(pair[:, 0], pair[:, 1], self._state)
                parts.append(est)
        out = torch.cat(parts, dim=-1)
        out, self._ready = out[:, :size], out[:, size:]
        if mic.dtype in (np.int16, torch.int16):
            out = (out * FULL_SCALE).round().clamp(-FULL_SCALE, FULL_SCALE - 1).to(torch.int16)
        if isinstance(mic, np.ndarray):
            return out.cpu().numpy().reshape(mic.shape)
        return out.reshape(mic.shape).to(mic.device)

    def flush(self) -> Any:
        """-> Tensor [B, latency_samples]: what the stream still owes for the samples it got. Zeros are given in their
        place, after which it may go on."""
        zeros = self._pending.new_zeros(self.batch, self.model.latency_samples)
        return self.process(zeros, zeros)

    @property
    def state(self) -> State:
        """The model's state so far: not to be changed."""
        return self._state

    def _tensor(self, name: str, audio: Audio) -> Tensor:
        if not isinstance(audio, np.ndarray | Tensor):
            raise TypeError(f"{name} is a {type(audio).__name__}: give a numpy array or a tensor")
        x = torch.as_tensor(audio)
        whole = x.dtype == torch.int16
        if not (whole or x.is_floating_point()):
            raise TypeError(f"{name} is {audio.dtype}: give float samples in [-1, 1] or int16")
        x = x.to(dtype=self._pending.dtype, device=self._pending.device)
        x = x / FULL_SCALE if whole else x
        x = x.unsqueeze(0) if x.ndim == 1 else x
        if x.ndim != 2 or len(x) != self.batch:
            raise ValueError(f"expected [n] or [{self.batch}, n], got {tuple(torch.as_tensor(audio).shape)}")
        return x


def offline(model: Model, mic: Tensor, far: Tensor) -> Tensor:
    """The loop over `step` on whole clips: mic, far [B, T] -> estimate [B, T], aligned with mic."""
    batch, num_samples = mic.shape
    hop, late = model.hop_samples, model.latency_samples - model.hop_samples
    count = -(-(num_samples + late) // hop)
    pad = count * hop - num_samples
    mic, far = (torch.nn.functional.pad(x, (0, pad)) for x in (mic, far))
    state = model.init_state(batch)
    parts = []
    for t in range(count):
        here = slice(t * hop, (t + 1) * hop)
        est, state = model.step(mic[:, here], far[:, here], state)
        parts.append(est)
    return torch.cat(parts, dim=-1)[:, late : late + num_samples] if parts else mic
