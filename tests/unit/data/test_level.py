from __future__ import annotations

import numpy as np
import pytest

from echofree.data.level import active_mask, frame_energy, ratio_gain, snr_gain

RATE = 16000


def test_frame_energy_includes_the_last_partial_frame() -> None:
    wave = np.full(400, 0.5, dtype=np.float32)
    assert frame_energy(wave, RATE) == pytest.approx([40.0, 40.0, 20.0])


def test_active_is_above_minus_50_db_of_the_loudest() -> None:
    assert active_mask(np.array([1.0, 1.1e-5, 0.9e-5, 0.0])).tolist() == [True, True, False, False]
    assert not active_mask(np.zeros(3)).any()


def test_ratio_is_of_energies_where_both_talk(rng: np.random.Generator) -> None:
    near, echo = rng.standard_normal((2, RATE)).astype(np.float32)
    near[: RATE // 2] = 0
    echo[: RATE // 2] *= 100  # loud, but alone
    gain = ratio_gain(near, echo, 15.0, RATE)
    both = slice(RATE // 2, None)
    ratio = np.sum(near[both].astype(float) ** 2) / np.sum((gain * echo[both].astype(float)) ** 2)
    assert 10 * np.log10(ratio) == pytest.approx(15.0, abs=0.01)


def test_ratio_without_overlap_uses_each_ones_own_frames(rng: np.random.Generator) -> None:
    near, echo = rng.standard_normal((2, RATE)).astype(np.float32)
    near[: RATE // 2] = 0
    echo[RATE // 2 :] = 0
    gain = ratio_gain(near, echo, -10.0, RATE)
    ratio = np.sum(near.astype(float) ** 2) / np.sum((gain * echo.astype(float)) ** 2)
    assert 10 * np.log10(ratio) == pytest.approx(-10.0, abs=0.01)


def test_snr_counts_where_the_signal_is_active(rng: np.random.Generator) -> None:
    signal, noise = rng.standard_normal((2, RATE)).astype(np.float32)
    signal[: RATE // 2] = 0
    noise[: RATE // 2] *= 30
    gain = snr_gain(signal, noise, 6.0, RATE)
    late = slice(RATE // 2, None)
    ratio = np.sum(signal[late].astype(float) ** 2) / np.sum((gain * noise[late].astype(float)) ** 2)
    assert 10 * np.log10(ratio) == pytest.approx(6.0, abs=0.01)


def test_silence_gives_a_gain_of_one() -> None:
    zeros, ones = np.zeros(RATE, np.float32), np.ones(RATE, np.float32)
    for first, second in ((zeros, ones), (ones, zeros), (zeros, zeros)):
        assert ratio_gain(first, second, 5.0, RATE) == 1.0
        assert snr_gain(first, second, 5.0, RATE) == 1.0
