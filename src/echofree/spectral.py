"""The distance of compressed spectra, with its own gradient.

Written out in plain operations it is a third of a training step of `tiny` on a CPU: some forty passes over arrays of
[B, L, F], half of them for the gradient, all of them kept, and a complex transform where a real one would do. Here the
gradient is worked out by hand beside the value, some frames at a time on a CPU, and only [B, T] is kept.

Legend: B batch, T samples, L frames, F bins, n frames at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

AT_ONCE = 32  # frames on a CPU: the arrays of 16 clips then stay in a core's cache
FLOOR = 1e-6  # power of a bin at a level of 1: 60 dB down, below which nothing is asked


def spectrum(x: Tensor, window_samples: int) -> Tensor:
    """[B, T] -> [B, L, F] complex: Hann, hop a quarter, scaled so that noise of rms 1 has power 1 in a bin.

    Padded by three hops in front and to whole frames behind: L = ceil(T / hop) + 3, and every sample is in 4 frames.
    """
    return torch.fft.rfft(_frames(x, window_samples) * _window(window_samples, x))


def distance(est: Tensor, near: Tensor, window_samples: int, exponent: float, share: float, over: float) -> Tensor:
    """The sum over frames of the mean over bins of

        (1 - m) |S^c - E^c|^2 + m (|S|^c - |E|^c)^2 + a max(|S|^c - |E|^c, 0)^2

    with X^c = X p^((c - 1) / 2), |X|^c = p^(c / 2), p = |X|^2 + 1e-6.

    Args:
        est, near: E, S [B, T], both float; there is no gradient with respect to near.
        window_samples: see `spectrum`.
        exponent: c.
        share: m.
        over: a.

    Returns:
        [B]
    """
    value: Tensor = _Distance.apply(est, near, window_samples, exponent, share, over)
    return value


class _Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, est: Tensor, near: Tensor, window: int, exponent: float, share: float, over: float) -> Tensor:
        wanted, hop, taper = ctx.needs_input_grad[0], window // 4, _window(window, est)
        mine, theirs = _frames(est, window), _frames(near, window)  # [B, L, window]
        value, count = est.new_zeros(len(est)), mine.shape[1]
        line = est.new_zeros(len(est), count + 3 if wanted else 0, hop)
        size = AT_ONCE if est.device.type == "cpu" else count
        for first in range(0, count, size):
            here = slice(first, first + size)
            x, s = (torch.fft.rfft(wave[:, here] * taper) for wave in (mine, theirs))
            part, grad = _part(x, s, exponent, share, over, wanted)
            value += part
            if grad is not None:
                cut = torch.fft.irfft(grad, n=window, norm="forward").mul_(taper).unflatten(2, (4, hop))
                for i in range(4):
                    line[:, first + i : first + i + cut.shape[1]] += cut[:, :, i]
        if wanted:
            ctx.save_for_backward(line.flatten(1)[:, 3 * hop : 3 * hop + est.shape[1]])
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * outer.unsqueeze(1), None, None, None, None, None


def _part(
    x: Tensor, s: Tensor, exponent: float, share: float, over: float, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """Spectra of est and near [B, n, F] -> (value [B], d/dRe + i d/dIm of it with respect to x, ready for irfft)."""
    re, im = x.real, x.imag
    power, scale, size = _compressed(re, im, exponent)
    near_scale, near_size = _compressed(s.real, s.imag, exponent)[1:]
    u_re = torch.addcmul(s.real * near_scale, re, scale, value=-1)  # S^c - E^c
    u_im = torch.addcmul(s.imag * near_scale, im, scale, value=-1)
    less = near_size.sub_(size)  # |S|^c - |E|^c
    error = u_re.square().addcmul_(u_im, u_im).mul_(1 - share).addcmul_(less, less, value=share)
    missing = less.clamp(min=0) if over > 0 else None
    if missing is not None:
        error.addcmul_(missing, missing, value=over)
    value = error.mean(2).sum(1)
    if not wanted:
        return value, None
    # dE^c = p^((c-1)/2) (dE + (c-1)/p Re(E* dE) E) and d|E|^c = c |E|^c / p Re(E* dE): both have a part along E
    along = (u_re * re).addcmul_(u_im, im).mul_(2 * (1 - share) * (exponent - 1)).mul_(scale)
    pull = less.mul_(2 * share)
    if missing is not None:
        pull.add_(missing, alpha=2 * over)
    along.addcmul_(pull, size, value=exponent).div_(power)
    scale.mul_(2 * (1 - share))
    g_re = u_re.mul_(scale).addcmul_(along, re).neg_()
    g_im = u_im.mul_(scale).addcmul_(along, im).neg_()
    grad = torch.complex(g_re, g_im).div_(x.shape[2])
    grad[..., 1:-1] *= 0.5  # irfft counts the bins between DC and Nyquist twice
    return value, grad


def _compressed(re: Tensor, im: Tensor, exponent: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> (p, p^((c - 1) / 2), p^(c / 2))"""
    power = re.square().addcmul_(im, im).add_(FLOOR)
    scale = power ** ((exponent - 1) / 2)
    return power, scale, power.sqrt().mul_(scale)


def _frames(x: Tensor, window_samples: int) -> Tensor:
    """[B, T] -> a view [B, L, window] of the padded wave, see `spectrum`."""
    hop = window_samples // 4
    behind = -x.shape[1] % hop + 3 * hop
    return functional.pad(x, (3 * hop, behind)).unfold(1, window_samples, hop)


def _window(window_samples: int, like: Tensor) -> Tensor:
    window = torch.hann_window(window_samples, device=like.device, dtype=like.dtype)
    return window / math.sqrt(0.375 * window_samples)
