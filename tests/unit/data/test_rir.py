from __future__ import annotations

import logging
import os
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from scipy.signal import resample_poly

from echofree.data import rir
from echofree.data.rir import BankConfig, build_bank, load_bank, shoebox
from echofree.data.room import RoomPool, onset, trim

RATE = 16000
SMALL = BankConfig(num_rooms=6, length_s=0.3)


def room(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size = rng.uniform((3, 3, 2.4), (6, 5, 3))
    return size, rng.uniform(0.5, size - 0.5), rng.uniform(0.5, size - 0.5)


def test_direct_path_arrives_at_distance_over_c(rng: np.random.Generator) -> None:
    for _ in range(10):
        size, source, mic = room(rng)
        taps, direct = shoebox(rng, size, source, mic, 0.3, RATE, 4000)
        assert direct == round(float(np.linalg.norm(source - mic)) / 343.0 * RATE)
        assert taps[direct] == 1.0
        assert np.abs(taps[: max(direct - 9, 0)]).max(initial=0.0) < 1e-6  # nothing before it, no constant latency


def test_first_reflections_are_where_mirrors_put_them(rng: np.random.Generator) -> None:
    size, source, mic = np.array([6.0, 5.0, 3.0]), np.array([1.0, 2.0, 1.2]), np.array([1.3, 2.1, 1.25])
    rt60_s = 0.4
    taps, direct = shoebox(rng, size, source, mic, rt60_s, RATE, 4000)
    first = np.linalg.norm(source - mic)
    surface = 2 * (30 + 18 + 15)
    reflection = np.sqrt(np.exp(-0.161 * 90 / (surface * rt60_s)))  # Eyring: 1 - absorption is its square
    image = source.copy()
    image[2] = -source[2]  # the floor: 2.47 m, with nothing else within 0.2 m but the jitter
    distance = np.linalg.norm(image - mic)
    at = direct + (distance - first) / 343.0 * RATE
    around = taps[round(at) - 4 : round(at) + 5]
    # between samples: the largest sample of a sinc half way between two is only 0.64 of its peak
    fine = resample_poly(taps[round(at) - 32 : round(at) + 33].astype(float), 8, 1)[28 * 8 : 36 * 8 + 1]
    assert np.abs(fine).max() == pytest.approx(first / distance * reflection, rel=0.35)
    # sincs off the grid keep their sum
    assert around.sum() == pytest.approx(first / distance * reflection, rel=0.25)


@pytest.mark.parametrize("rt60_s", [0.2, 0.6, 1.2])
def test_decay_follows_the_asked_time(rt60_s: float, rng: np.random.Generator) -> None:
    size, source, mic = room(rng)
    taps, direct = shoebox(rng, size, source, mic, rt60_s, RATE, round(1.0 * RATE))
    late = taps[direct + 480 : round(min(0.9, 0.8 * rt60_s) * RATE)].astype(float)
    energy = np.cumsum((late**2)[::-1])[::-1]
    decay_db = 10 * np.log10(energy / energy[0])
    first, last = np.argmax(decay_db < -2), np.argmax(decay_db < -15)
    measured_s = (last - first) / RATE * 60 / (decay_db[first] - decay_db[last])
    assert measured_s == pytest.approx(rt60_s, rel=0.25)


def test_very_reverberant_boxes_do_not_sweep(rng: np.random.Generator) -> None:
    """A regular box with images on a grid rings in a rising sweep: its late part has far peaks. Noise has none."""
    size = np.array([3.0, 3.0, 3.0])
    taps, _ = shoebox(rng, size, np.array([1.5, 1.5, 1.0]), np.array([1.5, 1.5, 2.0]), 1.3, RATE, RATE)
    late = taps[2000:9000].astype(float) * np.exp(6.9078 * np.arange(7000) / (1.3 * RATE))
    assert np.abs(late).max() / late.std() < 6.0


def test_bank_is_repeatable_and_splits_are_disjoint() -> None:
    bank, again = build_bank(SMALL), build_bank(SMALL)
    assert np.array_equal(bank.taps, again.taps)
    rooms = [set(bank.rooms(s)) for s in ("train", "valid", "test")]
    assert [len(r) for r in rooms] == [6, 4, 4]
    assert len(set.union(*rooms)) == 14 == len(bank.taps)
    assert len({bank.taps[i, 0].tobytes() for i in range(14)}) == 14
    taps = np.take_along_axis(bank.taps, bank.direct[..., None].astype(np.int64), axis=2)
    assert (taps == 1).all()


def test_default_rooms_follow_the_measured_quantiles() -> None:
    bank = build_bank(BankConfig(num_rooms=96, length_s=0.02, max_order=1))
    for split, tolerance in (("train", 0.12), ("valid", 0.5), ("test", 0.5)):
        times = bank.rt60_s[list(bank.rooms(split))]
        assert np.percentile(times, 50) == pytest.approx(0.28, rel=tolerance)
        assert np.percentile(times, 75) == pytest.approx(0.60, rel=2 * tolerance)
    distance_m = bank.direct[:, 0] / RATE * 343.0
    assert distance_m.min() > 0.005
    assert distance_m.max() < 0.65
    assert 0.08 < np.median(distance_m) < 0.2  # log-uniform from 3 to 60 cm


def test_second_load_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = load_bank(SMALL, tmp_path)
    monkeypatch.setattr(rir, "build_bank", lambda config: pytest.fail("built again"))
    again = load_bank(SMALL, tmp_path)
    assert np.array_equal(bank.taps, again.taps)
    assert np.array_equal(bank.direct, again.direct)
    assert [p.name for p in tmp_path.iterdir()] == [f"rooms-{SMALL.key()}.npz"]


def test_other_settings_have_other_keys() -> None:
    keys = {SMALL.key(), BankConfig(num_rooms=7, length_s=0.3).key(), BankConfig(num_rooms=6, length_s=0.31).key()}
    assert len(keys) == 3


@pytest.mark.parametrize("damage", [b"", b"not a zip", None])
def test_damaged_cache_is_built_again(damage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bank = load_bank(SMALL, tmp_path)
    path = tmp_path / f"rooms-{SMALL.key()}.npz"
    path.write_bytes(path.read_bytes()[:3000] if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        again = load_bank(SMALL, tmp_path)
    assert np.array_equal(bank.taps, again.taps)
    assert "damaged room bank" in caplog.text
    caplog.clear()
    load_bank(SMALL, tmp_path)
    assert not caplog.text  # repaired


def test_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        bank = load_bank(SMALL, blocked / "below")
    assert len(bank.taps) == 14
    assert "can't be cached" in caplog.text


def _load_in_child(folder: str) -> bytes:
    return load_bank(SMALL, Path(folder)).taps.tobytes()


def test_many_processes_may_build_at_once(tmp_path: Path) -> None:
    with get_context("fork").Pool(4) as pool:
        results = pool.map(_load_in_child, [str(tmp_path)] * 8, chunksize=1)
    assert len(set(results)) == 1
    assert os.listdir(tmp_path) == [f"rooms-{SMALL.key()}.npz"]


def test_cache_folder_is_the_variable_or_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECHOFREE_CACHE", str(tmp_path))
    assert rir.cache_folder() == tmp_path
    monkeypatch.delenv("ECHOFREE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert rir.cache_folder() == tmp_path / "home" / ".cache" / "echofree"


def test_both_paths_of_a_draw_are_of_one_room(rng: np.random.Generator) -> None:
    bank = build_bank(SMALL)
    pool = RoomPool("train", bank, RATE)
    for _ in range(20):
        draw = pool.draw(rng)
        echo = {trim(bank.taps[r, p]).tobytes(): r for r in bank.rooms("train") for p in (0, 1)}
        near = {trim(bank.taps[r, p]).tobytes(): r for r in bank.rooms("train") for p in (2, 3)}
        assert echo[draw.echo.tobytes()] == echo[draw.echo_moved.tobytes()] == near[draw.near.tobytes()]
        assert draw.echo[draw.direct] == 1.0
        assert draw.near[draw.near_direct] == 1.0
        assert not np.array_equal(draw.echo, draw.echo_moved)


def test_onset_cuts_the_travel_time(rng: np.random.Generator) -> None:
    wave = np.zeros(4000, np.float32)
    wave[700:] = rng.standard_normal(3300) * np.exp(-np.arange(3300) / 300) * 0.2
    wave[700] = -2.0
    taps, direct = onset(wave)
    assert direct == 8
    assert taps[direct] == -1.0
    assert len(taps) <= 4000 - 692
    silent, at = onset(np.zeros(50, np.float32))
    assert silent.tolist() == [1.0]
    assert at == 0
