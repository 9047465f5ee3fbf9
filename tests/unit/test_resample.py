"""Rates in torch against a sinc sum in float64, and there and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.signal import firwin, lfilter

from echofree.resample import BETA, ROLLOFF, ZEROS, resample

PAIRS = [(16000, 48000), (48000, 16000), (16000, 24000), (24000, 16000), (16000, 8000)]


@pytest.mark.parametrize(("from_hz", "to_hz"), PAIRS)
def test_is_the_windowed_sinc(from_hz: int, to_hz: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((2, 301))
    got = resample(torch.from_numpy(x).float(), from_hz, to_hz).numpy()
    assert got.shape == (2, -(-301 * to_hz // from_hz))
    cutoff = min(1.0, to_hz / from_hz) * ROLLOFF
    half = ZEROS / cutoff
    place = np.arange(-200, 501)
    padded = np.zeros((2, len(place)))
    padded[:, 200:501] = x
    for n in (0, 1, 2, got.shape[1] // 2, got.shape[1] - 1):
        u = place - n * from_hz / to_hz
        taps = np.sinc(cutoff * u) * np.where(
            np.abs(u) < half, np.i0(BETA * np.sqrt(np.clip(1 - (u / half) ** 2, 0, 1))), 0
        )
        want = padded @ (taps / taps.sum())
        assert got[:, n] == pytest.approx(want, abs=2e-5)


@pytest.mark.parametrize("other_hz", [24000, 48000, 32000])
def test_there_and_back_changes_nothing_below_the_transition(other_hz: int, rng: np.random.Generator) -> None:
    wave = lfilter(firwin(301, 6500, fs=16000), 1.0, rng.standard_normal(8000))
    x = torch.from_numpy(wave).float()[None]
    back = resample(resample(x, 16000, other_hz), other_hz, 16000)
    assert back.shape == x.shape
    middle = slice(200, -200)
    error = (back - x)[:, middle].square().mean() / x[:, middle].square().mean()
    assert 10 * torch.log10(error) < -70


def test_equal_rates_are_the_same_tensor() -> None:
    x = torch.ones(1, 5)
    assert resample(x, 16000, 16000) is x
