from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from echofree.data import noise
from echofree.data.noise import NoisePool
from echofree.data.speech import SpeechPool
from echofree.errors import DataError

RATE = 16000
MAKERS = [noise.colored, noise.hum, noise.music, noise.tones, noise.clicks]


@pytest.mark.parametrize("make", MAKERS)
def test_makers_repeat_vary_and_stay_finite(make: noise.Maker) -> None:
    for length in (RATE, 3 * RATE + 1):
        waves = [make(np.random.default_rng(seed), length, RATE) for seed in range(20)]
        again = make(np.random.default_rng(3), length, RATE)
        assert np.array_equal(waves[3], again)
        assert all(w.dtype == np.float32 and w.shape == (length,) and np.isfinite(w).all() and w.any() for w in waves)
        assert len({w.tobytes() for w in waves}) == 20


@pytest.mark.parametrize("make", [noise.colored, noise.hum, noise.music, noise.tones])
def test_power_is_one(make: noise.Maker, rng: np.random.Generator) -> None:
    for _ in range(5):
        assert np.mean(make(rng, 2 * RATE, RATE).astype(float) ** 2) == pytest.approx(1.0, rel=1e-3)


def test_coloured_noise_has_different_slopes(rng: np.random.Generator) -> None:
    def slope(wave: np.ndarray) -> float:
        power = np.abs(np.fft.rfft(wave)) ** 2
        return 10 * np.log10(power[100:400].mean() / power[8000:16000].mean())

    slopes = [slope(noise.colored(rng, 2 * RATE, RATE)) for _ in range(30)]
    assert np.std(slopes) > 5
    assert np.median(slopes) > 5


def test_hum_is_harmonic() -> None:
    wave = noise.hum(np.random.default_rng(1), 4 * RATE, RATE)
    power = np.abs(np.fft.rfft(wave * np.hanning(len(wave)))) ** 2
    assert np.sort(power)[-60:].sum() / power.sum() > 0.99  # a few lines hold it all


def test_silence_stays_silence() -> None:
    assert not noise.unit(np.zeros(10, np.float32)).any()


def test_own_files_are_shared_out_and_used(write: Callable[..., Path], tmp_path: Path) -> None:
    time = np.arange(RATE) / RATE
    for k in range(8):
        write(f"noise/deep/n{k}.wav", 0.1 * np.sin(2 * np.pi * (1000 + 100 * k) * time))
    speech = SpeechPool("train", RATE)
    root = str(tmp_path / "noise")
    pools = {s: NoisePool(s, RATE, speech, root, file_probability=1.0) for s in ("train", "valid", "test")}
    assert sorted(len(p.paths) for p in pools.values()) == [1, 1, 6]
    assert len({path for p in pools.values() for path in p.paths}) == 8
    heard = set()
    for seed in range(40):
        wave = pools["train"].draw(np.random.default_rng(seed), 2 * RATE)  # longer than the file: repeated
        heard.add(int(np.argmax(np.abs(np.fft.rfft(wave))) / 2))
    assert heard <= {1000 + 100 * k for k in range(8)}
    assert len(heard) == 6


def test_folder_mistakes_name_the_key(tmp_path: Path, write: Callable[..., Path]) -> None:
    speech = SpeechPool("train", RATE)
    with pytest.raises(DataError, match=r"data\.noise_root=.*no such folder"):
        NoisePool("train", RATE, speech, str(tmp_path / "no"))
    write("few/a.wav", np.zeros(10))
    with pytest.raises(DataError, match=r"data\.noise_root=.*few: 1 files"):
        NoisePool("train", RATE, speech, str(tmp_path / "few"))
