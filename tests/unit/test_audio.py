"""Audio files: every encoding read right, every fault named, nothing half written."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from echofree import audio
from echofree.errors import DataError


@pytest.fixture
def wave(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(-0.9, 0.9, 16001).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "subtype", "error"),
    [
        ("a.wav", "PCM_16", 2**-15),
        ("a.wav", "PCM_24", 2**-23),
        ("a.wav", "PCM_32", 2**-23),
        ("a.wav", "FLOAT", 0),
        ("a.wav", "DOUBLE", 0),
        ("a.wav", "PCM_U8", 2**-6),
        ("a.flac", "PCM_16", 2**-15),
        ("a.flac", "PCM_24", 2**-23),
    ],
)
def test_what_is_written_is_read_back_whole(tmp_path, wave, name, subtype, error):
    assert audio.write(tmp_path / name, wave, 16000, subtype) == 0
    back, rate = audio.read(tmp_path / name, rate=16000)
    assert rate == 16000
    assert back.dtype == np.float32
    assert len(back) == 16001
    assert np.abs(back - wave).max() <= error
    assert audio.info(tmp_path / name) == audio.AudioInfo(16001, 16000, 1, subtype)


def test_equal_rates_pass_bit_for_bit_and_others_keep_time_and_level(tmp_path):
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(44100) / 44100)).astype(np.float32)
    audio.write(tmp_path / "a.wav", tone, 44100, "FLOAT")
    np.testing.assert_array_equal(audio.read(tmp_path / "a.wav")[0], tone)
    low, rate = audio.read(tmp_path / "a.wav", rate=16000)
    assert (len(low), rate) == (16000, 44100)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(low - expected)[200:-200].max() < 1e-3


@pytest.mark.parametrize("rate_hz", [8000, 11025, 22050, 44100, 48000])
@pytest.mark.parametrize("num_samples", [1, 255, 257, 16001])
def test_resampling_gives_the_length_that_the_ratio_says(rng, rate_hz, num_samples):
    x = rng.normal(size=num_samples).astype(np.float32)
    y = audio.resample(x, rate_hz, 16000)
    assert len(y) == round(num_samples * 16000 / rate_hz)
    assert y.dtype == np.float32


def test_several_channels_follow_the_stated_policy(tmp_path):
    stereo = np.stack([np.full(100, 0.5), np.full(100, -0.1)], axis=1)
    sf.write(tmp_path / "a.wav", stereo, 16000, subtype="FLOAT")
    for channel, value in (("mean", 0.2), ("first", 0.5), (0, 0.5), (1, -0.1)):
        assert audio.read(tmp_path / "a.wav", channel=channel)[0] == pytest.approx(np.full(100, value)), channel
    with pytest.raises(DataError, match=r"2 channel.*channel=2 doesn't exist.*0 to 1"):
        audio.read(tmp_path / "a.wav", channel=2)
    with pytest.raises(DataError, match="give mean, first"):
        audio.read(tmp_path / "a.wav", channel="left")


def test_a_stretch_is_that_of_the_whole(tmp_path, wave):
    audio.write(tmp_path / "a.flac", wave, 16000, "PCM_16")
    whole, _ = audio.read(tmp_path / "a.flac")
    part, _ = audio.read(tmp_path / "a.flac", start_s=0.25, stop_s=0.5)
    np.testing.assert_array_equal(part, whole[4000:8000])
    with pytest.raises(DataError, match=r"asked for 2 s"):
        audio.read(tmp_path / "a.flac", start_s=2, stop_s=3)


def test_broken_files_are_told_apart(tmp_path, wave):
    audio.write(tmp_path / "good.wav", wave, 16000, "PCM_16")
    audio.write(tmp_path / "good.flac", wave, 16000, "PCM_16")
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "short.wav").write_bytes((tmp_path / "good.wav").read_bytes()[:-1000])
    (tmp_path / "short.flac").write_bytes((tmp_path / "good.flac").read_bytes()[:-3000])
    (tmp_path / "text.wav").write_text("this is no audio at all")
    (tmp_path / "lfs.wav").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n")
    sf.write(tmp_path / "none.wav", np.zeros(0), 16000)
    bad = wave.copy()
    bad[[7, 9]] = np.nan
    sf.write(tmp_path / "nan.wav", bad, 16000, subtype="FLOAT")
    sf.write(tmp_path / "scaled.wav", 32768 * wave, 16000, subtype="FLOAT")
    expected = {
        "gone.wav": "no such file",
        "empty.wav": "is empty",
        "short.wav": "truncated: 1000 bytes fewer",
        "short.flac": "truncated",
        "text.wav": "can't be read as audio",
        "lfs.wav": "git lfs pull",
        "none.wav": "holds no samples",
        "nan.wav": "2 samples are NaN or infinite, the first at sample 7",
        "scaled.wav": "Divide them by 32768",
        "": "is a directory",
    }
    for name, text in expected.items():
        with pytest.raises(DataError) as caught:
            audio.read(tmp_path / name)
        assert text in str(caught.value), name
        assert str(tmp_path / name) in str(caught.value)


def test_a_header_written_into_a_pipe_promises_nothing(tmp_path, wave):
    audio.write(tmp_path / "a.wav", wave, 16000, "PCM_16")
    raw = bytearray((tmp_path / "a.wav").read_bytes())
    at = raw.index(b"data") + 4
    raw[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)
    (tmp_path / "a.wav").write_bytes(raw)
    assert len(audio.read(tmp_path / "a.wav")[0]) == 16001


def test_silence_is_read_as_silence(tmp_path):
    audio.write(tmp_path / "a.wav", np.zeros(1000, np.float32), 16000)
    assert not audio.read(tmp_path / "a.wav", rate=48000)[0].any()


def test_clipping_is_counted_and_floats_keep_what_exceeds(tmp_path):
    wave = np.array([0.0, 1.5, -1.5, 0.5], dtype=np.float32)
    assert audio.write(tmp_path / "a.wav", wave, 16000, "PCM_16") == 2
    assert audio.read(tmp_path / "a.wav")[0] == pytest.approx([0, 1, -1, 0.5], abs=1e-4)
    assert audio.write(tmp_path / "b.wav", wave, 16000, "FLOAT") == 0
    np.testing.assert_array_equal(audio.read(tmp_path / "b.wav")[0], wave)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, wave, monkeypatch):
    audio.write(tmp_path / "a.wav", wave, 16000)
    before = (tmp_path / "a.wav").read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        audio.write(tmp_path / "a.wav", 0 * wave, 16000)
    assert (tmp_path / "a.wav").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.wav"]


def test_what_cant_be_written_is_refused_before_anything_is(tmp_path, wave):
    cases = {
        "no/a.wav": ("PCM_16", "mkdir -p"),
        "a.mp4": ("PCM_16", "no audio format"),
        "a.flac": ("FLOAT", "can't hold FLOAT"),
    }
    for name, (subtype, text) in cases.items():
        with pytest.raises(DataError, match=text):
            audio.write(tmp_path / name, wave, 16000, subtype)
    with pytest.raises(DataError, match="2 samples are NaN"):
        audio.write(tmp_path / "a.wav", np.array([0, np.nan, np.inf]), 16000)
    assert list(tmp_path.iterdir()) == []


def test_nearest_encoding(tmp_path: Path):
    assert audio.writable_subtype("a.wav", "FLOAT") == "FLOAT"
    assert audio.writable_subtype("a.flac", "FLOAT") == "PCM_24"
    assert audio.writable_subtype("a.ogg", "PCM_16") == "VORBIS"
