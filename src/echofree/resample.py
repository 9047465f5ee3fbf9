"""Another sampling rate, in torch: on any device, aligned sample by sample, a pure function of the clip.

Legend: B batch, T samples, P / Q the rates' ratio in lowest terms.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ZEROS = 24  # zero crossings of the sinc on each side
ROLLOFF = 0.94  # of the lower Nyquist frequency: where the transition begins to fall
BETA = 9.0  # Kaiser window: 90 dB


def resample(x: Tensor, from_hz: int, to_hz: int) -> Tensor:
    """[B, T] at `from_hz` -> [B, ceil(T to_hz / from_hz)] at `to_hz`: a Kaiser-windowed sinc without delay. Sample 0
    stays sample 0; what lies outside the clip counts as zeros."""
    if from_hz == to_hz:
        return x
    common = math.gcd(from_hz, to_hz)
    up, down = to_hz // common, from_hz // common
    taps, lead = kernel(up, down)
    weight = torch.from_numpy(taps).to(x)[:, None]  # [P, 1, taps]
    count = -(-x.shape[1] * up // down)
    blocks = -(-count // up)
    behind = max(0, (blocks - 1) * down + taps.shape[1] - lead - x.shape[1])
    padded = torch.nn.functional.pad(x[:, None], (lead, behind))  # [B, 1, lead + T + behind]
    out = torch.nn.functional.conv1d(padded, weight, stride=down)[:, :, :blocks]  # [B, P, blocks]
    return out.transpose(1, 2).flatten(1)[:, :count]


@lru_cache(maxsize=16)
def kernel(up: int, down: int) -> tuple[np.ndarray, int]:
    """-> (float32 [P, taps]: row i makes output i of a block of P outputs out of Q inputs; how many of its samples lie
    before the block)."""
    cutoff = min(1.0, up / down) * ROLLOFF
    half = ZEROS / cutoff
    lead = math.ceil(half)
    place = np.arange(-lead, lead + down)  # input samples, relative to the block's first
    u = place[None, :] - np.arange(up)[:, None] * down / up  # [P, taps], distance to the output
    inside = np.clip(1 - (u / half) ** 2, 0, None)
    taps = cutoff * np.sinc(cutoff * u) * np.where(np.abs(u) < half, np.i0(BETA * np.sqrt(inside)) / np.i0(BETA), 0)
    return (taps / taps.sum(1, keepdims=True)).astype(np.float32), lead
