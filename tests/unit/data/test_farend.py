"""Stretches of echo alone, on signals whose near end is known."""

from __future__ import annotations

import numpy as np
import pytest

from echofree.data.farend import Blocks, blocks, stretches, threshold_db

RATE = 16000


def part(rng: np.random.Generator, near_db: float | None, seconds: float, residue_db: float = -15.0) -> np.ndarray:
    """[3, T]: microphone, echo estimate, what is left, of noise; the filter leaves `residue_db` of the echo."""
    echo, near, hiss = rng.standard_normal((3, round(seconds * RATE))) * 0.1
    left = echo * 10 ** (residue_db / 20) + hiss * 1e-3
    if near_db is not None:
        left = left + near * 10 ** (near_db / 20)
    estimate = echo * (1 - 10 ** (residue_db / 20))
    return np.stack([estimate + left, estimate, left])


def found(waves: list[np.ndarray]) -> list[tuple[float, float]]:
    mic, echo, error = np.concatenate(waves, 1)
    whole = blocks(mic, echo, error, RATE)
    threshold = threshold_db([whole])
    return [] if threshold is None else stretches(whole, threshold)


def test_talk_ends_a_stretch(rng: np.random.Generator) -> None:
    waves = [part(rng, None, 3.0), part(rng, 0.0, 2.0), part(rng, None, 4.0)]
    assert found(waves) == [(0.0, 3.0), (5.0, 9.0)]


@pytest.mark.parametrize(("near_db", "seen"), [(10.0, True), (0.0, True), (-6.0, True), (-25.0, False)])
def test_a_soft_talker_can_be_missed_and_a_loud_one_not(near_db: float, seen: bool, rng: np.random.Generator) -> None:
    kept = found([part(rng, None, 4.0), part(rng, near_db, 2.0)])
    assert kept == ([(0.0, 4.0)] if seen else [(0.0, 6.0)])


def test_short_ones_and_the_start_of_a_filter_are_left_out(rng: np.random.Generator) -> None:
    waves = [part(rng, None, 1.0, -2.0), part(rng, None, 3.0), part(rng, 0.0, 1.0), part(rng, None, 0.75)]
    assert found(waves) == [(1.0, 4.0)]


def test_pauses_of_the_far_end_belong_to_it(rng: np.random.Generator) -> None:
    pause = np.stack([rng.standard_normal(RATE) * 1e-4] * 3) * np.array([[1.0], [1e-3], [1.0]])
    assert found([part(rng, None, 2.0), pause, part(rng, None, 2.0), pause]) == [(0.0, 5.0)]


def test_a_device_on_which_the_filter_fails_gives_nothing(rng: np.random.Generator) -> None:
    assert found([part(rng, None, 5.0, -3.0)]) == []
    assert threshold_db([]) is None
    assert found([np.zeros((3, 4 * RATE))]) == []


def test_threshold_is_the_devices_own() -> None:
    for best, threshold in ((60.0, 12.0), (14.0, 8.0), (6.0, 5.0), (4.0, None)):
        block = Blocks(np.array([best] * 10 + [2.0] * 5), np.ones(15, bool), np.zeros(15, bool))
        assert threshold_db([block]) == threshold
        if threshold is not None:
            assert stretches(block, threshold) == [(0.0, 2.5)]
