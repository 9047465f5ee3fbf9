"""Levels over what is active: the ratios a scene asks for and the gains that reach them.

A frame of 10 ms is active when its power is above -50 dB of the loudest frame's. Ratios are of energies: 10 log10.

Legend: T samples, L frames.
"""

from __future__ import annotations

import numpy as np

FLOOR = 1e-5  # -50 dB
MIN_OVERLAP_S = 0.1


def frame_energy(wave: np.ndarray, rate_hz: int) -> np.ndarray:
    """Energy of frames of 10 ms: float32 [T] -> float64 [L], the last partial frame included."""
    frame = max(1, rate_hz // 100)
    whole = len(wave) // frame * frame
    energy = np.einsum("lt,lt->l", *[wave[:whole].reshape(-1, frame)] * 2).astype(np.float64)
    rest = float(np.sum(np.square(wave[whole:], dtype=np.float64)))
    return np.append(energy, rest) if whole < len(wave) else energy


def active_mask(energy: np.ndarray) -> np.ndarray:
    """[L] -> bool [L]; nothing is active in silence."""
    return energy > max(float(energy.max(initial=0.0)) * FLOOR, 1e-20)


def ratio_gain(near: np.ndarray, echo: np.ndarray, ser_db: float, rate_hz: int) -> np.float32:
    """The factor for `echo` that makes near to echo `ser_db` over the frames where both are active.

    With less than 0.1 s of those, each is measured over its own active frames. Silence gives 1.
    """
    near_energy, echo_energy = frame_energy(near, rate_hz), frame_energy(echo, rate_hz)
    near_on, echo_on = active_mask(near_energy), active_mask(echo_energy)
    both = near_on & echo_on
    if np.count_nonzero(both) >= MIN_OVERLAP_S * 100:
        near_on = echo_on = both
    return _gain(near_energy, near_on, echo_energy, echo_on, ser_db)


def snr_gain(signal: np.ndarray, noise: np.ndarray, snr_db: float, rate_hz: int) -> np.float32:
    """The factor for `noise` that makes signal to noise `snr_db` over the frames where the signal is active."""
    signal_energy, noise_energy = frame_energy(signal, rate_hz), frame_energy(noise, rate_hz)
    active = active_mask(signal_energy)
    heard = active if noise_energy[active].sum() > 0 else active_mask(noise_energy)  # clicks may all fall into pauses
    return _gain(signal_energy, active, noise_energy, heard, snr_db)


def _gain(
    first: np.ndarray, first_on: np.ndarray, second: np.ndarray, second_on: np.ndarray, ratio_db: float
) -> np.float32:
    if not first_on.any() or not second_on.any():
        return np.float32(1.0)
    return np.float32(np.sqrt(first[first_on].mean() / second[second_on].mean() / 10 ** (ratio_db / 10)))
