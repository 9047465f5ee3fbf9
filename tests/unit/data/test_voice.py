from __future__ import annotations

import numpy as np
import pytest

from echofree.data import voice

RATE = 16000


def peak_hz(wave: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave)), 1 << 18))
    return float(np.argmax(spectrum)) * RATE / (1 << 18)


def tone(hz: float, seconds: float) -> np.ndarray:
    return np.sin(2 * np.pi * hz / RATE * np.arange(round(seconds * RATE))).astype(np.float32)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 16001])
def test_istft_undoes_stft(length: int, rng: np.random.Generator) -> None:
    wave = rng.standard_normal(length).astype(np.float32)
    assert voice.istft(voice.stft(wave), length) == pytest.approx(wave, abs=2e-6)


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_pitch_moves_every_frequency(factor: float) -> None:
    out = voice.vary(tone(500.0, 3.0), voice.Variation(pitch=factor), RATE, RATE)
    assert len(out) == RATE
    assert peak_hz(out[1000:-1000]) == pytest.approx(500.0 * factor, rel=2e-3)


@pytest.mark.parametrize("tempo", [0.85, 1.2])
def test_tempo_keeps_the_pitch_and_changes_the_length(tempo: float) -> None:
    out = voice.change_tempo(tone(200.0, 4.0), tempo, RATE)
    assert len(out) == pytest.approx(4.0 * RATE / tempo, rel=0.02)
    middle = out[2000:-4000]
    assert peak_hz(middle) == pytest.approx(200.0, abs=1.0)
    assert np.abs(middle).max() == pytest.approx(1.0, abs=0.05)  # frames add up in phase


@pytest.mark.parametrize("factor", [0.88, 1.14])
def test_formants_move_and_the_pitch_stays(factor: float) -> None:
    time = np.arange(2 * RATE) / RATE
    harmonics = np.arange(1, 60) * 120.0
    envelope = np.exp(-0.5 * ((harmonics - 1500.0) / 450.0) ** 2) + 1e-3
    wave = (envelope[:, None] * np.cos(2 * np.pi * harmonics[:, None] * time + harmonics[:, None])).sum(0)
    wave = (wave / np.abs(wave).max()).astype(np.float32)
    out = voice.shift_formants(wave, factor, 0.0, RATE)
    spectrum = np.abs(np.fft.rfft(out[:RATE] * np.hanning(RATE)))  # 1 Hz a bin
    lines = spectrum[harmonics.astype(int)]
    center = np.sum(lines**2 * harmonics) / np.sum(lines**2)
    # The envelope is smoothed over 360 Hz, so a narrow one moves a little less than asked.
    assert center / 1500.0 - 1.0 == pytest.approx(factor - 1.0, rel=0.25)
    between = spectrum[(harmonics + 60.0).astype(int)]
    assert between.max() < 0.05 * lines.max()  # still harmonics of 120 Hz


def test_tilt_is_in_db_per_octave() -> None:
    low, high = (voice.shift_formants(tone(hz, 1.0), 1.0, 3.0, RATE)[2000:-2000].std() for hz in (1000.0, 2000.0))
    assert 20 * np.log10(high / low) == pytest.approx(3.0, abs=0.2)


def test_made_up_speech_has_pitch_pauses_and_level(rng: np.random.Generator) -> None:
    wave = voice.speak(rng, 6 * RATE, RATE)
    assert wave.dtype == np.float32
    frames = wave.reshape(-1, 160)
    level_db = 10 * np.log10(np.mean(frames.astype(float) ** 2, axis=1) + 1e-12)
    assert -40 < np.percentile(level_db, 80) < -15
    assert np.percentile(level_db, 5) < -60  # pauses
    # Loud stretches are voiced: the normalised correlation with one period before is high in many of them.
    clear = []
    for start in range(0, len(wave) - 1600, 1600):
        part = wave[start : start + 1600].astype(float)
        if part.std() > 0.02:
            lags = np.correlate(part, part, "full")[1599:]
            clear.append(lags[50:220].max() / lags[0])
    assert np.mean(np.array(clear) > 0.5) > 0.5


def test_two_voices_differ_and_one_repeats() -> None:
    first, again, other = (voice.speak(np.random.default_rng(s), RATE, RATE) for s in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_drawn_variations_stay_in_range(rng: np.random.Generator) -> None:
    drawn = [voice.draw_variation(rng) for _ in range(300)]
    assert all(0.78 <= v.pitch <= 1.28 and 0.88 <= v.formant <= 1.14 and 0.85 <= v.tempo <= 1.2 for v in drawn)
    assert len({v.pitch for v in drawn}) == 300
    assert 0.3 < np.mean([v.formant != 1.0 for v in drawn]) < 0.7


def test_suppression_lowers_steady_noise_and_spares_what_stands_out(rng: np.random.Generator) -> None:
    noise = 0.01 * rng.standard_normal(2 * RATE).astype(np.float32)
    burst = np.zeros(2 * RATE, np.float32)
    burst[RATE : RATE + 4000] = tone(1000.0, 0.25)
    gain = voice.suppression_gain(voice.stft(noise + burst), 0.2)
    assert gain.min() >= 0.2 - 1e-6
    assert gain.max() <= 1.0
    left = voice.istft(voice.stft(noise) * gain, 2 * RATE)
    assert left[: RATE // 2].std() < 0.75 * noise.std()
    kept = voice.istft(voice.stft(burst) * gain, 2 * RATE)
    assert kept[RATE + 1000 : RATE + 3000].std() == pytest.approx(np.sqrt(0.5), rel=0.05)
