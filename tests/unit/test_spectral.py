"""The spectral distance: its value and its gradient against plain operations in float64, and by finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from echofree.spectral import distance, spectrum


def plain(est: Tensor, near: Tensor, window: int, exponent: float, share: float, over: float) -> Tensor:
    """The definition, as torch differentiates it."""

    def compressed(x: Tensor) -> tuple[Tensor, Tensor]:
        power = x.real.square() + x.imag.square() + 1e-6
        return x * power ** ((exponent - 1) / 2), power ** (exponent / 2)

    (e_c, e_m), (s_c, s_m) = compressed(spectrum(est, window)), compressed(spectrum(near, window))
    error = (1 - share) * (s_c - e_c).abs().square() + share * (s_m - e_m).square()
    return (error + over * (s_m - e_m).clamp(min=0).square()).mean(2).sum(1)


@pytest.mark.parametrize(("window", "num_samples"), [(512, 1601), (128, 512), (16, 37)])
@pytest.mark.parametrize(("exponent", "share", "over"), [(0.3, 0.7, 0.0), (0.5, 0.0, 0.8), (1.0, 1.0, 0.0)])
def test_value_and_gradient(
    window: int, num_samples: int, exponent: float, share: float, over: float, rng: np.random.Generator
) -> None:
    near = torch.from_numpy(rng.normal(size=(3, num_samples)))
    est = (near + 0.5 * torch.from_numpy(rng.normal(size=near.shape))).requires_grad_()
    factors = torch.from_numpy(rng.normal(size=3))  # what comes back differs from clip to clip
    expected = plain(est, near, window, exponent, share, over)
    (gradient,) = torch.autograd.grad((expected * factors).sum(), est)
    value = distance(est, near, window, exponent, share, over)
    (found,) = torch.autograd.grad((value * factors).sum(), est)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-12)

    single = distance(est.detach().float().requires_grad_(), near.float(), window, exponent, share, over)
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-6)


def test_finite_differences(rng: np.random.Generator) -> None:
    near = torch.from_numpy(rng.normal(size=(2, 21)))
    est = torch.from_numpy(rng.normal(size=(2, 21))).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distance(x, near, 8, 0.3, 0.7, 0.5), est)


def test_silence_has_a_finite_gradient() -> None:
    est = torch.zeros(2, 100, requires_grad=True)
    value = distance(est, torch.zeros(2, 100), 16, 0.3, 0.7, 0.5)
    (gradient,) = torch.autograd.grad(value.sum(), est)
    assert float(value.detach().abs().max()) == 0.0
    assert float(gradient.abs().max()) == 0.0


def test_without_a_gradient_nothing_is_kept(rng: np.random.Generator) -> None:
    est, near = (torch.from_numpy(rng.normal(size=(2, 64))) for _ in range(2))
    value = distance(est, near, 16, 0.3, 0.7, 0.0)
    assert not value.requires_grad
    torch.testing.assert_close(value, plain(est, near, 16, 0.3, 0.7, 0.0))
