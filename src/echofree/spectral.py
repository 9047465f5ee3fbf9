"""The distance of compressed spectra, with its own gradient.

Written out in plain operations it is a third of a training step of `tiny` on a CPU: some forty passes over arrays of
[B, L, F], half of them for the gradient, all of them kept, and a complex transform where a real one would do. Here the
gradient is worked out by hand beside the value, clip by clip on a CPU, and only [B, T] is kept.

Legend: B batch, T samples, L frames, F bins.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

FLOOR = 1e-6  # power of a bin at a level of 1: 60 dB down, below which nothing is asked


def frames(x: Tensor, window_samples: int) -> Tensor:
    """[B, T] -> windowed [B, L, window]: Hann, hop a quarter, scaled so that noise of rms 1 has power 1 in a bin.

    Padded by three hops in front and to whole frames behind: L = ceil(T / hop) + 3, and every sample is in 4 frames.
    """
    hop = window_samples // 4
    behind = -x.shape[1] % hop + 3 * hop
    cut = functional.pad(x, (3 * hop, behind)).unfold(1, window_samples, hop)
    return cut * _window(window_samples, x)


def spectrum(x: Tensor, window_samples: int) -> Tensor:
    """[B, T] -> [B, L, F] complex of `frames`."""
    return torch.fft.rfft(frames(x, window_samples))


def distance(est: Tensor, near: Tensor, window_samples: int, exponent: float, share: float, over: float) -> Tensor:
    """The sum over frames of the mean over bins of

        (1 - m) |S^c - E^c|^2 + m (|S|^c - |E|^c)^2 + a max(|S|^c - |E|^c, 0)^2

    with X^c = X p^((c - 1) / 2), |X|^c = p^(c / 2), p = |X|^2 + 1e-6.

    Args:
        est, near: E, S [B, T], both float; there is no gradient with respect to near.
        window_samples: see `frames`.
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
        wanted = ctx.needs_input_grad[0]
        size = 1 if est.device.type == "cpu" else len(est)  # one clip's arrays stay in a core's cache
        values, grads = [], []
        for mine, theirs in zip(est.split(size), near.split(size), strict=True):
            value, grad = _clips(mine, theirs, window, exponent, share, over, wanted)
            values.append(value)
            grads.append(grad)
        if wanted:
            ctx.save_for_backward(torch.cat(grads))
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * outer.unsqueeze(1), None, None, None, None, None


def _clips(
    est: Tensor, near: Tensor, window: int, exponent: float, share: float, over: float, wanted: bool
) -> tuple[Tensor, Tensor]:
    """-> (value [b], its derivative with respect to est [b, T]; nothing where it isn't wanted)"""
    x, s = spectrum(est, window), spectrum(near, window)
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
        return value, est
    # dE^c = p^((c-1)/2) (dE + (c-1)/p Re(E* dE) E) and d|E|^c = c |E|^c / p Re(E* dE): both have a part along E
    along = (u_re * re).addcmul_(u_im, im).mul_(2 * (1 - share) * (exponent - 1)).mul_(scale)
    pull = less.mul_(2 * share)
    if missing is not None:
        pull.add_(missing, alpha=2 * over)
    along.addcmul_(pull, size, value=exponent).div_(power)
    scale.mul_(2 * (1 - share))
    g_re = u_re.mul_(scale).addcmul_(along, re).neg_()
    g_im = u_im.mul_(scale).addcmul_(along, im).neg_()
    return value, _back(torch.complex(g_re, g_im).div_(x.shape[2]), est, window)


def _compressed(re: Tensor, im: Tensor, exponent: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> (p, p^((c - 1) / 2), p^(c / 2))"""
    power = re.square().addcmul_(im, im).add_(FLOOR)
    scale = power ** ((exponent - 1) / 2)
    return power, scale, power.sqrt().mul_(scale)


def _back(grad: Tensor, like: Tensor, window: int) -> Tensor:
    """Derivatives with respect to `spectrum` [b, L, F], d/dRe + i d/dIm -> with respect to its argument [b, T]."""
    hop, (count, num_samples) = window // 4, like.shape
    grad[..., 1:-1] *= 0.5  # irfft counts the bins between DC and Nyquist twice
    cut = torch.fft.irfft(grad, n=window, norm="forward").mul_(_window(window, like)).unflatten(2, (4, hop))
    line = like.new_zeros(count, cut.shape[1] + 3, hop)
    for i in range(4):
        line[:, i : i + cut.shape[1]] += cut[:, :, i]
    return line.flatten(1)[:, 3 * hop : 3 * hop + num_samples]


def _window(window_samples: int, like: Tensor) -> Tensor:
    window = torch.hann_window(window_samples, device=like.device, dtype=like.dtype)
    return window / math.sqrt(0.375 * window_samples)
