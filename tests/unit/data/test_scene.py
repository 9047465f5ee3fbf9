"""Scenes against slow, independent measures: levels, lags and labels in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echofree.contracts import Clip, Scenario
from echofree.data.recipe import Recipe
from echofree.data.scene import resample_clock
from echofree.data.synthetic import Scenes, Synthetic

RATE = 16000
# What changes levels after the ratios were set, or makes them time-varying.
PLAIN: dict[str, Any] = {"transmit_agc_probability": 0, "dc_probability": 0, "quantise_probability": 0}
PLAIN |= {"mic_clip_probability": 0, "transmit_ns_probability": 0}
DOUBLE, FAR, NEAR, SILENT = ([float(i == k) for i in range(4)] for k in range(4))


def scenes(count: int, split: str = "train", seed: int = 0, segment_s: float = 4.0, **scene: Any) -> Scenes:
    source = Synthetic(
        seed,
        num_train=count,
        num_valid=count,
        num_test=count,
        num_rooms=8,
        segment_s=segment_s,
        test_segment_s=segment_s,
        scene=scene,
    )
    found = source.split(split)
    assert found is not None
    return found


def active(wave: np.ndarray) -> np.ndarray:
    energy = (wave.astype(float)[: len(wave) // 160 * 160].reshape(-1, 160) ** 2).sum(axis=1)
    return energy > 1e-5 * energy.max()


def energy_db(wave: np.ndarray, frames: np.ndarray) -> float:
    energy = (wave.astype(float)[: len(wave) // 160 * 160].reshape(-1, 160) ** 2).sum(axis=1)
    return float(10 * np.log10(energy[frames].sum()))


def lag(first: np.ndarray, second: np.ndarray, whiten: bool = False, reach: int = 20000) -> int:
    """Samples by which `second` lags `first`, by correlation or GCC-PHAT."""
    size = 2 * max(len(first), len(second))
    cross = np.fft.rfft(second.astype(float), size) * np.conj(np.fft.rfft(first.astype(float), size))
    if whiten:
        cross /= np.abs(cross) + 1e-9 * np.abs(cross).max()
    values = np.fft.irfft(cross, size)
    return int(np.argmax(np.concatenate([values[-reach:], values[:reach]]))) - reach


def test_ser_is_as_asked_on_100_mixes() -> None:
    data = scenes(100, scenario_probability=DOUBLE, **PLAIN)
    asked, got = [], []
    for i in range(100):
        clip = data.item(i, 0)
        assert clip.near is not None
        assert clip.echo is not None
        both = active(clip.near) & active(clip.echo)
        if both.sum() < 10:  # hardly ever: no overlap to measure
            continue
        asked.append(data.recipe(i, 0).ser_db)
        got.append(energy_db(clip.near, both) - energy_db(clip.echo, both))
    assert len(asked) >= 95
    assert np.abs(np.array(got) - np.array(asked)).max() < 0.2
    assert max(got) - min(got) > 30  # -25 to 15 dB, not half of that


@pytest.mark.parametrize("who", [DOUBLE, FAR, NEAR])
def test_snr_is_as_asked(who: list[float]) -> None:
    data = scenes(25, scenario_probability=who, noise_probability=1, **PLAIN)
    for i in range(25):
        clip = data.item(i, 0)
        signal = clip.echo if who is FAR else clip.near
        assert signal is not None
        assert clip.noise is not None
        talk = active(signal)
        if (clip.noise.astype(float)[: len(clip.noise) // 160 * 160].reshape(-1, 160)[talk] ** 2).sum() == 0:
            continue  # clicks that all fell into pauses
        got = energy_db(signal, talk) - energy_db(clip.noise, talk)
        assert got == pytest.approx(data.recipe(i, 0).snr_db, abs=0.2)


def test_microphone_is_the_sum_to_the_last_bit() -> None:
    data = scenes(60, quantise_probability=0, mic_clip_probability=0, dc_probability=0.5)
    for i in range(60):
        clip = data.item(i, 0)
        assert clip.near is not None
        assert np.array_equal(clip.mic, clip.near + clip.echo + clip.noise)


def test_clipping_and_rounding_act_on_the_sum() -> None:
    data = scenes(40, scenario_probability=FAR, quantise_probability=1, mic_clip_probability=1, noise_probability=0)
    kinds = set()
    for i in range(40):
        clip, recipe = data.item(i, 0), data.recipe(i, 0)
        kinds.add(recipe.mic_clip)
        steps = clip.mic * 32768
        assert np.array_equal(steps, np.round(steps))
        peak = np.abs(clip.near + clip.echo + clip.noise).max()
        assert np.abs(clip.mic).max() <= recipe.mic_clip_at * 10 ** (recipe.mic_peak_db / 20) + 1 / 32768
        assert np.abs(clip.mic).max() < peak  # the parts stay as they were
    assert kinds == {"hard", "soft"}


def test_scenarios_are_what_they_say() -> None:
    data = scenes(80)
    seen = set()
    for i in range(80):
        clip = data.item(i, 0)
        assert clip.near is not None
        assert clip.echo is not None
        seen.add(clip.scenario)
        near, echo, far = (bool(np.any(w)) for w in (clip.near, clip.echo, clip.far))
        if clip.scenario == Scenario.DOUBLE_TALK:
            assert (near, echo, far) == (True, True, True)
        elif clip.scenario == Scenario.FAR_END:
            assert (near, echo, far) == (False, True, True)
        elif clip.scenario == Scenario.NEAR_END:
            assert (near, echo) == (True, False)
        else:
            assert (near, echo, far) == (False, False, False)
        assert (clip.delay_samples >= 0) == echo
        for wave in (clip.mic, clip.far, clip.near, clip.echo, clip.noise):
            assert wave.dtype == np.float32
            assert wave.shape == (4 * RATE,)
            assert np.isfinite(wave).all()
            assert np.abs(wave).max() < 20
    assert seen == set(Scenario) - {Scenario.UNKNOWN}


def test_peaks_are_as_asked_and_independent() -> None:
    data = scenes(40, scenario_probability=DOUBLE, glitch_probability=0, **PLAIN)
    for i in range(40):
        clip, recipe = data.item(i, 0), data.recipe(i, 0)
        assert 20 * np.log10(np.abs(clip.mic).max()) == pytest.approx(recipe.mic_peak_db, abs=0.01)
        assert 20 * np.log10(np.abs(clip.far).max()) == pytest.approx(recipe.far_peak_db, abs=0.01)


def test_delay_label_is_where_gcc_phat_finds_the_echo() -> None:
    clean: dict[str, Any] = {"distortion_probability": 0, "drift_probability": 0, "delay_jump_probability": 0}
    clean |= {"path_change_probability": 0, "glitch_probability": 0, "far_probability": [1, 0, 0]}
    clean |= {"noise_probability": 0, "far_band_limit_probability": 0, "playback_agc_probability": 0}
    data = scenes(80, scenario_probability=FAR, **clean, **PLAIN)
    errors = []
    for i in range(80):
        clip = data.item(i, 0)
        errors.append(abs(lag(clip.far, clip.mic, whiten=True) - clip.delay_samples))
    assert np.mean(np.array(errors) <= RATE // 1000) >= 0.95


def test_delay_label_holds_in_the_middle_of_a_drift_or_a_jump() -> None:
    data = scenes(
        40,
        scenario_probability=FAR,
        far_probability=[1, 0, 0],
        drift_probability=1,
        large_drift_probability=1,
        delay_jump_probability=1,
        distortion_probability=0,
        noise_probability=0,
        path_change_probability=0,
        delay_ms=[100, 150],
        no_delay_probability=0,
        long_delay_probability=0,
        **PLAIN,
    )
    good = 0
    for i in range(40):
        clip = data.item(i, 0)
        middle = slice(len(clip.mic) // 2 - 6000, len(clip.mic) // 2 + 6000)
        far = clip.far[middle.start - 4000 : middle.stop]
        found = lag(np.concatenate([far, np.zeros(4000)]), np.concatenate([np.zeros(4000), clip.mic[middle]]), True)
        good += abs(found - clip.delay_samples) <= 24
    assert good >= 24  # a jump may fall close to the middle


@pytest.mark.parametrize("target", ["", "reverberant", "early", "dry"])
def test_target_is_aligned_with_the_microphone(target: str) -> None:
    chosen = {"near_target": target} if target else {}  # when nothing is said, what the microphone hears
    target = target or "reverberant"
    clean = {"noise_probability": 0, "mic_eq_probability": 0, **PLAIN}
    data = scenes(25, scenario_probability=NEAR, **chosen, **clean)
    kept = []
    for i in range(25):
        clip = data.item(i, 0)
        assert clip.near is not None
        if not data.recipe(i, 0).near_dry:
            peak = abs(lag(clip.near, clip.mic))
            kept.append(peak == 0 if target == "reverberant" else peak <= 1)
        difference = np.sum((clip.mic - clip.near).astype(float) ** 2) / np.sum(clip.mic.astype(float) ** 2)
        assert difference < 1e-9 if target == "reverberant" or data.recipe(i, 0).near_dry else difference > 1e-9
    assert np.mean(kept) == 1.0 if target == "reverberant" else np.mean(kept) > 0.8


def test_drift_is_the_asked_speed() -> None:
    wave = np.sin(2 * np.pi * 1000 / RATE * np.arange(4 * RATE)).astype(np.float32)
    out = resample_clock(wave, 400.0)
    slow = np.sin(2 * np.pi * 1000 / RATE * (1 + 400e-6) * np.arange(4 * RATE))
    assert len(out) == len(wave)
    assert np.abs(out - slow)[500:-500].max() < 2e-3


def test_delay_jump_and_gain_step_change_the_echo() -> None:
    data = scenes(1, scenario_probability=FAR)
    recipe = Recipe(Scenario.FAR_END, far_active=True, has_echo=True, delay_ms=20.0)

    def render(r: Recipe) -> Clip:
        return data.maker.render(r, np.random.default_rng(3), 4 * RATE)

    plain, jumped, stepped = (
        render(r) for r in (recipe, replace(recipe, delay_jump_ms=16.0), replace(recipe, path_change="gain"))
    )
    assert plain.echo is not None
    assert jumped.echo is not None
    assert lag(plain.echo[: RATE // 2], jumped.echo[: RATE // 2], reach=2000) == 0
    late = slice(int(3.4 * RATE), None)
    assert lag(plain.echo[late], jumped.echo[late], reach=2000) == 256
    assert stepped.echo is not None
    ratio = np.abs(stepped.echo[late]).max() / np.abs(stepped.echo[: RATE // 2]).max()
    assert ratio != pytest.approx(np.abs(plain.echo[late]).max() / np.abs(plain.echo[: RATE // 2]).max(), rel=0.01)


@pytest.mark.parametrize("target", ["reverberant", "dry"])
def test_a_narrow_microphone_limits_all_that_it_hears(target: str) -> None:
    data = scenes(1, near_target=target, noise_probability=1)
    recipe = Recipe(Scenario.DOUBLE_TALK, far_active=True, has_echo=True, near_active=True, noise=True, ser_db=3.0)

    def share_db(wave: np.ndarray, low_hz: int, high_hz: int) -> float:
        power = np.abs(np.fft.rfft(wave.astype(float) * np.hanning(len(wave)))) ** 2  # 4 s: 4 bins a Hz
        return float(10 * np.log10(power[4 * low_hz : 4 * high_hz].sum() / power.sum()))

    wide, narrow = (
        data.maker.render(replace(recipe, mic_band_limited=limited), np.random.default_rng(11), 4 * RATE)
        for limited in (False, True)
    )
    for part in ("mic", "near", "echo", "noise"):
        assert share_db(getattr(narrow, part), 6000, 8000) < min(-30, share_db(getattr(wide, part), 6000, 8000) - 12)
        assert share_db(getattr(narrow, part), 250, 4000) > -1
    assert np.array_equal(narrow.mic, narrow.near + narrow.echo + narrow.noise)
    if target == "reverberant":
        both = active(narrow.near) & active(narrow.echo)
        assert energy_db(narrow.near, both) - energy_db(narrow.echo, both) == pytest.approx(3.0, abs=0.2)


def test_glitches_make_holes_in_one_side_only() -> None:
    data = scenes(1)
    recipe = Recipe(Scenario.DOUBLE_TALK, far_active=True, has_echo=True, near_active=True, noise=True)
    plain, far, mic = (
        data.maker.render(replace(recipe, glitch=g), np.random.default_rng(7), 4 * RATE) for g in ("", "far", "mic")
    )
    assert np.array_equal(far.mic, plain.mic)
    changed = np.flatnonzero(far.far != plain.far)
    assert 0 < len(changed) <= 3 * 160
    assert np.array_equal(mic.far, plain.far)
    assert np.array_equal(mic.mic, mic.near + mic.echo + mic.noise)


def test_two_talkers_are_different_people() -> None:
    data = scenes(1)
    for seed in range(200):
        first, second = data.maker._two_talkers(np.random.default_rng(seed))
        assert data.maker.sources.speech.talkers[first].name != data.maker.sources.speech.talkers[second].name


def test_headset_and_idle_far_ends_make_no_echo() -> None:
    headset = scenes(4, scenario_probability=NEAR, headset_probability=1).item(0, 0)
    idle = scenes(4, scenario_probability=NEAR, headset_probability=0, idle_far_probability=1).item(0, 0)
    muted = scenes(4, scenario_probability=NEAR, headset_probability=0, idle_far_probability=0).item(0, 0)
    assert not headset.echo.any()  # type: ignore[union-attr]
    assert headset.far.any()
    assert 0 < np.abs(idle.far).max() < 10 ** (-49 / 20)
    assert not muted.far.any()
