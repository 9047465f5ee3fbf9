"""Streaming estimation of the drift between the clocks of far end and microphone.

Double cross-correlation (Chinaev, Thuene & Enzner, "Double-cross-correlation processing for blind sampling-rate and
time-offset estimation", 2021): the cross-correlation of far end and microphone looks the same a few seconds later, only
moved by the drift; room and pitch are in both and cancel. Here each cross-correlation is cut to the 128 ms around the
delay, compared with those of 1, 2 and 4 seconds ago for every drift of a grid, and the agreement is averaged.

Legend: B batch, G window, K its bins, H updates kept, J spans, E drifts of the grid.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from echofree.contracts import State

WINDOW = 512  # G, at the low rate
BEFORE = 128  # of it lie at shorter lags than the delay
EDGE = 64  # where the window fades
SPANS = (4, 8, 16)  # updates between the two correlations
FORGET = 0.92  # of the agreement, per update
MAX_PPM = 1200.0
STEP_PPM = 20.0
MIN_AGREEMENT = 0.15  # mean correlation coefficient
MIN_COUNT = 8.0  # comparisons
MAX_MOVE = 128  # low-rate samples between two windows that are still compared


def window() -> np.ndarray:
    """float64 [G]: flat, with raised-cosine edges."""
    ramp = 0.5 - 0.5 * np.cos(np.pi * (np.arange(EDGE) + 0.5) / EDGE)
    return np.concatenate([ramp, np.ones(WINDOW - 2 * EDGE), ramp[::-1]])


class DriftEstimator(nn.Module):
    """Finds by how much the microphone's clock lags behind the far end's.

    Args:
        step_samples: low-rate samples between two updates.
        low_rate_hz: Hz.
        band_hz: frequencies that take part.
        dtype: of the arithmetic.
    """

    fade: Tensor
    omega: Tensor
    grid: Tensor
    table: Tensor

    def __init__(self, step_samples: int, low_rate_hz: int, band_hz: tuple[float, float], dtype: torch.dtype):
        super().__init__()
        hz = np.fft.rfftfreq(WINDOW, 1 / low_rate_hz)
        self.first, self.last = int((hz < band_hz[0]).sum()), int((hz <= band_hz[1]).sum())
        omega = 2 * np.pi * np.arange(self.first, self.last) / WINDOW
        grid = np.arange(-MAX_PPM, MAX_PPM + 1, STEP_PPM) * 1e-6
        angle = np.array(SPANS)[:, None, None] * step_samples * omega[:, None] * grid  # [J, K, E]
        table = np.stack([np.cos(angle), np.sin(angle)], axis=2)  # [J, K, 2, E]
        for name, value in (("fade", window()), ("omega", omega), ("grid", grid), ("table", table)):
            self.register_buffer(name, torch.tensor(value, dtype=dtype), persistent=False)

    def init_state(self, batch: int) -> State:
        """Float, first axis batch."""
        zeros, history = self.fade.new_zeros, max(SPANS)
        return {
            "seen": zeros(batch, history, self.last - self.first, 2),  # spectra of the correlations, newest last
            "seen_at": zeros(batch, history),  # the delays around which they were cut
            "seen_ok": zeros(batch, history),  # 1 where there was one
            "agreement": zeros(batch, len(self.grid)),
            "count": zeros(batch, 1),
        }

    def update(self, cut: Tensor, at: Tensor, valid: Tensor, due: Tensor, state: State) -> None:
        """Takes in a correlation, in place.

        Args:
            cut: [B, G], growing delay from BEFORE samples before `at` on.
            at: [B, 1] whole low-rate samples.
            valid: [B, 1] bool, whether this one says anything.
            due: [B, 1] bool, whether the stream has an update at all.
            state: see `init_state`.
        """
        spectrum = torch.fft.rfft(cut * self.fade)[:, self.first : self.last]  # [B, K]
        norm = torch.view_as_real(spectrum).square().sum((1, 2)).sqrt()
        spectrum = spectrum / (norm + 1e-20).unsqueeze(1)
        then = -torch.tensor(SPANS, device=cut.device)
        seen = torch.view_as_complex(state["seen"])[:, then]  # [B, J, K]
        moved = at - state["seen_at"][:, then]  # [B, J]
        turn = moved.unsqueeze(-1) * self.omega
        product = spectrum.conj().unsqueeze(1) * seen * torch.polar(torch.ones_like(turn), turn)
        usable = (state["seen_ok"][:, then] * valid) * (moved.abs() < MAX_MOVE)  # [B, J]
        product = torch.view_as_real(product * usable.unsqueeze(-1))  # [B, J, K, 2]
        score = product.flatten(1) @ self.table.flatten(0, 2)  # [B, E]
        keep = torch.where(due & valid, FORGET, 1.0)
        state["agreement"].mul_(keep).add_(score * due)
        state["count"].mul_(keep).add_(usable.sum(1, keepdim=True) * due)
        for name, value in (
            ("seen", torch.view_as_real(spectrum).unsqueeze(1)),
            ("seen_at", at),
            ("seen_ok", valid.to(at.dtype)),
        ):
            old = state[name]
            mask = due.view(-1, *[1] * (old.ndim - 1))
            old.copy_(torch.where(mask, torch.cat([old[:, 1:], value], dim=1), old))

    def drift(self, state: State) -> tuple[Tensor, Tensor]:
        """-> (drift [B, 1], samples per sample, positive when the microphone falls behind; told [B, 1] bool, whether it
        is to be believed)."""
        values = state["agreement"]
        best = values.argmax(-1, keepdim=True)
        inner = best.clamp(1, len(self.grid) - 2)
        left, mid, right = (values.gather(1, inner + i) for i in (-1, 0, 1))
        curve = left - 2 * mid + right
        offset = torch.where(
            (curve < 0) & (inner == best), 0.5 * (left - right) / (curve - 1e-20), torch.zeros_like(mid)
        )
        told = (state["count"] >= MIN_COUNT) & (mid > MIN_AGREEMENT * state["count"]) & (inner == best)
        return self.grid[inner] + offset * (STEP_PPM * 1e-6), told
