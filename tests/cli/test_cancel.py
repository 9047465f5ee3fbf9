"""python -m echofree.cancel: any pair of files in, an aligned file of the same length out, or a text that helps."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
from torch import Tensor, nn

from echofree import audio
from echofree import cancel as verb
from echofree.cancel import cancel, main

RATE_HZ = 16000


class Subtract(nn.Module):
    """est = mic - far, late by two hops: what comes out shows whether alignment and lengths are right."""

    sample_rate, hop_samples, latency_samples = RATE_HZ, 128, 256

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor:
        return mic - far

    def init_state(self, batch: int) -> dict[str, Tensor]:
        return {"late": torch.zeros(batch, 128)}

    def step(self, mic: Tensor, far: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return state["late"], {"late": mic - far}


@pytest.fixture
def subtract(monkeypatch):
    """Any model= is `Subtract`."""
    monkeypatch.setattr(verb, "load_model", lambda name, device: Subtract())


@pytest.fixture
def waves(rng):
    smooth = np.hanning(32) / np.hanning(32).sum()
    return tuple(np.convolve(rng.normal(0, 0.3, 16001), smooth, "same").astype(np.float32) for _ in range(2))


def cancel_files(
    folder: Path, *extra: str, mic: str = "mic.wav", out: str = "out.wav", far: str | None = "far.wav"
) -> int:
    words = ["model=any", f"mic={folder / mic}", f"out={folder / out}", *extra]
    return main(words if far is None else [*words, f"far={folder / far}"])


@pytest.mark.parametrize("length", [0, 1, 255, 257, 16001])
def test_output_is_as_long_as_the_microphone_and_aligned(length, waves):
    mic, far = waves[0][:length], waves[1][:length]
    est = cancel(Subtract(), mic, far, RATE_HZ)
    assert len(est) == length
    np.testing.assert_allclose(est, mic - far, atol=1e-6)


def test_pieces_too_short_to_learn_from_are_told(waves, capsys):
    for length, told in ((320, True), (3199, True), (3200, False)):
        cancel(Subtract(), waves[0][:length], waves[1][:length], RATE_HZ)
        said = capsys.readouterr().err
        assert ("belong into one stream: --stream" in said) == told, length
    assert "warning" not in said


@pytest.mark.parametrize("rate_hz", [8000, 44100, 48000])
def test_other_rates_go_there_and_back(rate_hz, rng):
    t = np.arange(2 * rate_hz) / rate_hz
    mic, far = 0.4 * np.sin(2 * np.pi * 500 * t), 0.2 * np.sin(2 * np.pi * 900 * t)
    est = cancel(Subtract(), mic.astype(np.float32), far.astype(np.float32), rate_hz)
    assert len(est) == len(mic)
    inner = slice(rate_hz // 10, -rate_hz // 10)
    assert np.abs(est - (mic - far))[inner].max() < 2e-3


@pytest.mark.parametrize("shift", [-12000, -500, 0, 700, 16000])
def test_a_far_end_of_another_length_is_filled_up_or_cut(tmp_path, subtract, waves, shift, capsys):
    mic, far = waves
    far = far[:shift] if shift < 0 else np.concatenate([far, np.ones(shift, np.float32)])
    audio.write(tmp_path / "mic.wav", mic, RATE_HZ, "FLOAT")
    audio.write(tmp_path / "far.wav", far, RATE_HZ, "FLOAT")
    assert cancel_files(tmp_path) == 0
    est, _ = audio.read(tmp_path / "out.wav")
    np.testing.assert_allclose(est, mic - audio.fit(far, 16001), atol=1e-6)
    said = capsys.readouterr().err
    assert ("shorter than the microphone" in said) == (shift < 0)
    assert ("longer than the microphone" in said) == (shift > 0)
    assert "real-time factor" in said


@pytest.mark.parametrize(("name", "subtype"), [("mic.wav", "PCM_16"), ("mic.wav", "PCM_24"), ("mic.flac", "PCM_16")])
def test_rate_encoding_and_length_are_the_microphones(tmp_path, subtract, waves, name, subtype):
    audio.write(tmp_path / name, waves[0], 44100, subtype)
    audio.write(tmp_path / "far.wav", waves[1][:8000], 22050, "FLOAT")
    assert cancel_files(tmp_path, mic=name, out="out" + Path(name).suffix) == 0
    assert audio.info(tmp_path / ("out" + Path(name).suffix)) == audio.AudioInfo(16001, 44100, 1, subtype)


def test_an_encoding_that_the_output_cant_hold_is_replaced_aloud(tmp_path, subtract, waves, capsys):
    audio.write(tmp_path / "mic.wav", waves[0], RATE_HZ, "FLOAT")
    audio.write(tmp_path / "far.wav", waves[1], RATE_HZ, "FLOAT")
    assert cancel_files(tmp_path, out="out.flac") == 0
    assert audio.info(tmp_path / "out.flac").subtype == "PCM_24"
    assert "can't hold FLOAT" in capsys.readouterr().err


@pytest.mark.parametrize("far", ["none given", "silent"])
def test_without_a_far_end_the_microphone_passes_bit_for_bit_and_that_is_said(tmp_path, subtract, waves, far, capsys):
    audio.write(tmp_path / "mic.wav", waves[0], 48000, "PCM_16")
    audio.write(tmp_path / "far.wav", 0 * waves[1], 48000, "PCM_16")
    assert cancel_files(tmp_path, far="far.wav" if far == "silent" else None) == 0
    assert (tmp_path / "out.wav").read_bytes() == (tmp_path / "mic.wav").read_bytes()
    assert "nothing to cancel: the output equals the microphone" in capsys.readouterr().err


def test_the_same_recording_twice_is_noticed(tmp_path, subtract, waves, capsys):
    audio.write(tmp_path / "mic.wav", waves[0], RATE_HZ, "PCM_16")
    audio.write(tmp_path / "far.wav", 0.5 * waves[0], RATE_HZ, "PCM_16")
    assert cancel_files(tmp_path) == 0
    assert "nearly the same recording" in capsys.readouterr().err
    audio.write(tmp_path / "far.wav", waves[1], RATE_HZ, "PCM_16")
    assert cancel_files(tmp_path) == 0
    assert "nearly the same" not in capsys.readouterr().err


def test_stereo_follows_the_policy_and_says_so(tmp_path, subtract, waves, capsys):
    mic, far = waves
    sf.write(tmp_path / "mic.wav", np.stack([mic, 0 * mic], axis=1), RATE_HZ, subtype="FLOAT")
    audio.write(tmp_path / "far.wav", far, RATE_HZ, "FLOAT")
    for channel, expected in (("mean", mic / 2), ("0", mic), ("first", mic)):
        assert cancel_files(tmp_path, f"channel={channel}") == 0
        np.testing.assert_allclose(audio.read(tmp_path / "out.wav")[0], expected - far, atol=1e-6)
        assert f"has 2 channels: channel={channel} is used" in capsys.readouterr().err


def test_clipped_samples_are_counted(tmp_path, subtract, capsys):
    audio.write(tmp_path / "mic.wav", np.full(1000, 0.9, np.float32), RATE_HZ, "PCM_16")
    audio.write(tmp_path / "far.wav", np.full(1000, -0.9, np.float32), RATE_HZ, "PCM_16")
    assert cancel_files(tmp_path) == 0
    assert "samples of" in (said := capsys.readouterr().err)
    assert "were clipped" in said


def test_wrong_files_are_all_told_at_once_and_nothing_is_written(tmp_path, subtract, waves, capsys):
    (tmp_path / "lfs.wav").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert cancel_files(tmp_path, mic="gone.wav", far="lfs.wav", out="no/out.wav") == 2
    said = capsys.readouterr().err
    for text in ("gone.wav: no such file", "git lfs pull", "mkdir -p"):
        assert text in said
    audio.write(tmp_path / "mic.wav", waves[0], RATE_HZ)
    audio.write(tmp_path / "far.wav", waves[1], RATE_HZ)
    before = (tmp_path / "mic.wav").read_bytes()
    for out, text in (("mic.wav", "same file as mic"), ("x.txt", "no audio format"), ("", "is a directory")):
        assert cancel_files(tmp_path, out=out) == 2, out
        assert text in capsys.readouterr().err
    assert (tmp_path / "mic.wav").read_bytes() == before
    assert cancel_files(tmp_path, "channel=7") == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["far.wav", "lfs.wav", "mic.wav"]


def test_models_that_dont_exist_or_need_training(tmp_path, waves, capsys):
    audio.write(tmp_path / "mic.wav", waves[0], RATE_HZ)
    audio.write(tmp_path / "far.wav", waves[1], RATE_HZ)
    files = [f"mic={tmp_path / 'mic.wav'}", f"far={tmp_path / 'far.wav'}", f"out={tmp_path / 'out.wav'}"]
    cases = {
        "linr": "model=linear",
        "small": "Trained already: tiny",
        "runs/gone": "no such directory",
        str(tmp_path): "",
    }
    for model, text in cases.items():
        assert main([f"model={model}", *files]) == 2, model
        assert text in capsys.readouterr().err
    assert not (tmp_path / "out.wav").exists()


def test_broken_weights_write_nothing(tmp_path, waves, monkeypatch, capsys):
    class Nan(Subtract):
        def step(self, mic, far, state):
            return torch.nan * mic, state

    monkeypatch.setattr(verb, "load_model", lambda name, device: Nan())
    audio.write(tmp_path / "mic.wav", waves[0], RATE_HZ)
    audio.write(tmp_path / "far.wav", waves[1], RATE_HZ)
    assert cancel_files(tmp_path) == 2
    assert "weights are broken" in capsys.readouterr().err
    assert not (tmp_path / "out.wav").exists()


def test_help_and_foreign_flags_need_no_torch(cli):
    shown = cli("cancel", "--help").check()
    assert all(key in shown.stdout for key in ("model", "mic", "far", "out", "channel", "passed through"))
    asked = cli("cancel", "--mic", "a.wav", "--far", "b.wav").check(2)
    assert "Type: mic=a.wav" in asked.stderr
    assert "Type: far=b.wav" in asked.stderr
    assert "out is missing" in asked.stderr
    code = "import sys, echofree.cancel as c; assert c.main(['--help']) == 0; assert 'torch' not in sys.modules"
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(("model", "least_db"), [("linear", 15), ("tiny", 25)])
def test_what_comes_along_takes_the_echo_out_of_a_made_up_call(model, least_db, tmp_path, rng, cli):
    far = np.convolve(rng.normal(0, 0.2, 6 * RATE_HZ), np.hanning(8) / 4, "same")
    path = np.zeros(2000)
    path[800:] = rng.normal(0, 1, 1200) * np.exp(-np.arange(1200) / 150)
    echo = np.convolve(far, 0.3 * path / np.linalg.norm(path))[: len(far)]
    audio.write(tmp_path / "mic.wav", (echo + 1e-4 * rng.normal(size=len(far))).astype(np.float32), RATE_HZ, "PCM_16")
    audio.write(tmp_path / "far.wav", far.astype(np.float32), RATE_HZ, "PCM_16")
    files = [f"mic={tmp_path / 'mic.wav'}", f"far={tmp_path / 'far.wav'}", f"out={tmp_path / 'out.wav'}"]
    cli("cancel", f"model={model}", *files, cwd=tmp_path).check()
    mic, est = (audio.read(tmp_path / name)[0][3 * RATE_HZ :] for name in ("mic.wav", "out.wav"))
    assert 10 * np.log10((mic @ mic) / (est @ est)) > least_db
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far.wav", "mic.wav", "out.wav"]
