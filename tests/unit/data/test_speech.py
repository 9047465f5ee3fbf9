from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from echofree.data import speech
from echofree.data.speech import EMBEDDED, SpeechPool, group_by_speaker, high_pass, level
from echofree.errors import DataError

RATE = 16000
SPLITS = ("train", "valid", "test")


def files(pool: SpeechPool) -> set[Path]:
    return {path for talker in pool.talkers for path in talker.paths}


def test_embedded_speech_is_what_origin_says_and_small() -> None:
    text = (EMBEDDED / "ORIGIN.md").read_text()
    listed = dict(re.findall(r"\| `(\S+\.flac)` \|.*`([0-9a-f]{64})`", text))
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in EMBEDDED.glob("*.flac")}
    assert found == listed
    assert sum(p.stat().st_size for p in EMBEDDED.iterdir()) < 1_000_000
    splits = {p.name: s for s in SPLITS for p in files(SpeechPool(s, RATE))}
    assert splits == dict(re.findall(r"\| `(\S+\.flac)` \|.*\| (train|valid|test) \|", text))


def test_embedded_splits_share_no_file_and_have_two_speakers() -> None:
    pools = [SpeechPool(s, RATE) for s in SPLITS]
    assert all(len(p.talkers) >= 2 for p in pools)
    assert sum(len(files(p)) for p in pools) == len(set.union(*map(files, pools))) == 13


def test_waves_are_levelled_without_dc_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SpeechPool("train", RATE)
    path = pool.talkers[0].paths[0]
    wave = pool.wave(path)
    assert abs(float(wave.mean())) < 1e-4
    frames = wave[: len(wave) // 320 * 320].reshape(-1, 320).astype(float)
    power = (frames**2).mean(axis=1)
    active_db = 10 * np.log10(power[power > 1e-3 * power.max()].mean())
    assert active_db == pytest.approx(-26, abs=0.01)
    monkeypatch.setattr(speech.audio, "read", lambda *a: pytest.fail("read twice"))
    assert np.array_equal(pool.wave(path), wave)


def test_high_pass_removes_rumble_only() -> None:
    time = np.arange(2 * RATE) / RATE
    high = np.sin(2 * np.pi * 300 * time)
    out = high_pass((0.3 + np.sin(2 * np.pi * 20 * time) + high).astype(np.float32), RATE)
    middle = slice(RATE // 2, -RATE // 2)
    assert np.abs(out - high)[middle].max() < 0.03


def test_level_leaves_silence_and_scraps() -> None:
    assert not level(np.zeros(1000, np.float32), RATE).any()
    assert level(np.ones(3, np.float32), RATE).tolist() == [1, 1, 1]


def test_cache_drops_the_longest_unused(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (write(f"{k}.wav", np.full(1000, 0.1)) for k in "abc")
    cache = speech.WaveCache(RATE)
    monkeypatch.setattr(speech, "CACHE_SAMPLES", 2000)
    for path in (first, second, first, third):
        assert cache.wave(path) == pytest.approx(np.full(1000, 0.1), abs=1e-4)
    assert list(cache._waves) == [first, third]
    monkeypatch.setattr(speech, "CACHE_SAMPLES", 10)
    cache.wave(second)
    assert list(cache._waves) == [second]  # the one just asked for stays, however long


def test_talk_is_one_speaker_with_pauses(rng: np.random.Generator) -> None:
    pool = SpeechPool("train", RATE)
    wave = pool.talk(rng, pool.talkers[0], 10 * RATE, (0.3, 0.5))
    assert wave.shape == (10 * RATE,)
    assert wave.dtype == np.float32
    silent = np.diff(np.flatnonzero(np.concatenate([[1.0], wave, [1.0]])))
    assert silent.max() >= 0.3 * RATE
    assert np.mean(wave != 0) > 0.5
    varied = {pool.talk(np.random.default_rng(s), pool.talkers[0], 2 * RATE, (0.1, 0.5)).tobytes() for s in range(10)}
    assert len(varied) == 10


def make_speakers(write: Callable[..., Path], speakers: int, each: int, rate: int = RATE) -> None:
    noise = np.random.default_rng(1)
    for s in range(speakers):
        for k in range(each):
            write(f"speech/box{s % 3}/s{s:02d}-{k}.wav", 0.1 * noise.standard_normal(rate // 2), rate)


def test_own_folder_is_split_by_speaker(write: Callable[..., Path], tmp_path: Path) -> None:
    make_speakers(write, 20, 2)
    pools = [SpeechPool(s, RATE, tmp_path / "speech") for s in SPLITS]
    names = [{t.name for t in p.talkers} for p in pools]
    assert [len(n) for n in names] == [16, 2, 2]
    assert len(set.union(*names)) == 20
    assert all(len(t.paths) == 2 for p in pools for t in p.talkers)
    again = SpeechPool("test", RATE, tmp_path / "speech")
    assert files(again) == files(pools[2])


def test_few_speakers_are_split_by_file(write: Callable[..., Path], tmp_path: Path) -> None:
    make_speakers(write, 3, 4)
    pools = [SpeechPool(s, RATE, tmp_path / "speech") for s in SPLITS]
    assert [len(p.talkers) for p in pools] == [8, 2, 2]
    assert len(set.union(*map(files, pools))) == 12


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_own_rates_are_resampled(rate: int, write: Callable[..., Path], tmp_path: Path) -> None:
    make_speakers(write, 6, 1, rate)
    pool = SpeechPool("train", RATE, tmp_path / "speech")
    assert len(pool.wave(pool.talkers[0].paths[0])) == RATE // 2


def test_speaker_pattern_is_the_users(write: Callable[..., Path]) -> None:
    paths = [write(f"so-{speaker}{k}.wav", np.ones(10)) for speaker in ("0001", "0002") for k in "ab"]
    assert [t.name for t in group_by_speaker(paths, r"^so-\d{4}")] == ["so-0001", "so-0002"]
    assert [t.name for t in group_by_speaker(paths, speech.SPEAKER_PATTERN)] == ["so"]


def test_folder_mistakes_name_the_key(tmp_path: Path, write: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"data\.speech_root=.*nowhere: no such folder"):
        SpeechPool("train", RATE, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no audio files"):
        SpeechPool("train", RATE, tmp_path / "empty")
    make_speakers(write, 2, 2)
    with pytest.raises(DataError, match="4 files; at least 6"):
        SpeechPool("train", RATE, tmp_path / "speech")


def test_unreadable_files_are_left_out_and_said(write: Callable[..., Path], tmp_path: Path) -> None:
    make_speakers(write, 20, 2)
    pointer = tmp_path / "speech/box0/s00-0.wav"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    pools = [SpeechPool(s, RATE, tmp_path / "speech") for s in SPLITS]
    assert sum(len(files(p)) for p in pools) == 39
    (name, why), *more = [item for p in pools for item in p.left_out]
    assert not more
    assert name == "s00-0.wav"
    assert "git lfs pull" in why
    for path in tmp_path.rglob("*.wav"):
        path.write_text("no audio")
    with pytest.raises(DataError, match="fewer than two speakers can be read"):
        SpeechPool("train", RATE, tmp_path / "speech")


def test_a_file_that_breaks_later_gives_silence_and_a_warning(
    write: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, rng: np.random.Generator
) -> None:
    make_speakers(write, 6, 1)
    pool = SpeechPool("train", RATE, tmp_path / "speech")
    pool.talkers[0].paths[0].unlink()
    assert not pool.talk(rng, pool.talkers[0], RATE, (0.0, 0.0)).any()
    assert caplog.text.count("no such file") == 1
