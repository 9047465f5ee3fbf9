"""python -m echofree.evaluate: scores per scenario beside the baselines, in a table, CSV and JSON."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

from echofree import audio, checkpoint
from echofree.evaluate import main
from echofree.scorefile import incomparable
from echofree.scoretable import table
from echofree.verb import composed

RATE_HZ = 16000


class Third(nn.Module):
    """est = mic / 3, a model with one weight."""

    sample_rate, hop_samples, latency_samples = RATE_HZ, 256, 256

    def __init__(self, gain: float = 1 / 3):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, mic, far, details=False):
        return self.gain * mic


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recordings(tmp_path, rng):
    """A folder with a far-end, a near-end and a double-talk recording; the last has its near end."""
    root = tmp_path / "recordings"
    root.mkdir()

    def noise():
        talk = np.repeat(rng.random(30) > 0.3, 1600)  # bursts, so that something is active and something isn't
        return (rng.normal(0, 0.1, 48000) * talk).astype(np.float32)

    far, near = noise(), noise()
    echo = np.convolve(far, rng.normal(0, 0.5, 64) * np.exp(-np.arange(64) / 10))[:48000].astype(np.float32)
    hiss = (1e-4 * rng.normal(size=48000)).astype(np.float32)
    for name, mic, loud in (("a_farend", echo, far), ("b_nearend", near, hiss), ("c_doubletalk", near + echo, far)):
        audio.write(root / f"{name}_mic.wav", mic + hiss, RATE_HZ, "FLOAT")
        audio.write(root / f"{name}_far.wav", loud, RATE_HZ, "FLOAT")
    audio.write(root / "c_doubletalk_near.wav", near, RATE_HZ, "FLOAT")
    return root


def run_evaluate(recordings, out, *words: str) -> dict:
    core = "metrics=si_sdr,erle,near_gain,speech_survival,delay_ms"
    code = main([f"out={out}", core, "data=folder", f"data.root={recordings}", "progress=off", *words])
    assert code == 0
    return json.loads((out / "scores.json").read_text())


def test_linear_beside_the_microphone(recordings, tmp_path, capsys):
    scores = run_evaluate(recordings, tmp_path / "out", "model=linear")
    systems = scores["systems"]
    assert list(systems) == ["mic", "linear"]
    far = {s: systems[s]["scenarios"]["far_end"]["metrics"]["erle"]["mean"] for s in systems}
    assert far["mic"] == pytest.approx(0.0, abs=1e-6)
    assert far["linear"] > 10
    assert systems["linear"]["scenarios"]["near_end"]["metrics"]["near_gain"]["mean"] == pytest.approx(0, abs=0.3)
    talk = {s: systems[s]["scenarios"]["double_talk"]["metrics"]["si_sdr"]["mean"] for s in systems}
    assert talk["linear"] > talk["mic"]
    rows = list(csv.DictReader((tmp_path / "out" / "scores.csv").read_text().splitlines()))
    assert len(rows) == 6
    assert {r["system"] for r in rows} == {"mic", "linear"}
    assert [r["si_sdr"] for r in rows if "farend" in r["name"]] == ["", ""]
    shown = capsys.readouterr().out
    assert "far end (1 clip)" in shown
    assert "real-time factor" in shown


def test_the_protocol_is_stored_with_the_scores(recordings, tmp_path):
    about = run_evaluate(recordings, tmp_path / "out", "model=linear", "split=test")["protocol"]
    assert about["align"] == "output"
    assert len(about["segments"]) == 16
    assert about["rate_hz"] == RATE_HZ
    assert about["clips"] == 3
    assert about["data"]["root"] == str(recordings)
    assert about["data_fingerprint"]
    assert about["confidence"]["seed"] == 0
    assert about["versions"]["torch"] == importlib.metadata.version("torch")
    again = run_evaluate(recordings, tmp_path / "again", "model=linear")["protocol"]
    assert again == about
    other = run_evaluate(recordings, tmp_path / "other", "model=linear", "align=none", "limit=2")["protocol"]
    assert incomparable([about, again]) == []
    assert incomparable([about, other]) == ["clips", "segments", "align"]


def test_the_bare_microphone_and_the_ceiling(recordings, tmp_path):
    systems = run_evaluate(recordings, tmp_path / "out", "system=mic")["systems"]
    assert list(systems) == ["mic", "linear"]
    systems = run_evaluate(recordings, tmp_path / "out", "model=linear", "baselines=mic,target")["systems"]
    assert list(systems) == ["mic", "linear", "target"]
    assert systems["target"]["scenarios"]["double_talk"]["metrics"]["si_sdr"]["mean"] == 100.0


def fake_run(tmp_path, monkeypatch, model: nn.Module):
    """A checkpoint of `model`, trained on nothing, in a run directory."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(checkpoint, "load_model", lambda path: (model, composed([])))
    monkeypatch.setattr(checkpoint, "find", lambda path: run / "checkpoints" / "step-000001")
    monkeypatch.setattr(checkpoint, "run_of", lambda folder: run)
    return run


def test_a_checkpoint_is_scored_into_its_run_directory(recordings, tmp_path, monkeypatch, capsys):
    run = fake_run(tmp_path, monkeypatch, Third())
    words = [f"checkpoint={run}", "metrics=erle,near_gain,speech_survival", "data=folder", f"data.root={recordings}"]
    assert main([*words, "progress=off", "save_audio=true"]) == 0
    folder = run / "evaluate" / "folder-recordings-test"
    systems = json.loads((folder / "scores.json").read_text())["systems"]
    name = list(systems)[-1]
    assert list(systems)[:2] == ["mic", "linear"]
    assert systems[name]["scenarios"]["far_end"]["metrics"]["erle"]["mean"] == pytest.approx(9.54, abs=0.01)
    assert sorted(p.name for p in (folder / "audio").iterdir()) == sorted(systems)
    assert len(list((folder / "audio" / name).iterdir())) == 3
    assert "wrote" in capsys.readouterr().out


def test_a_muted_model_fails_the_evaluation_aloud(recordings, tmp_path, monkeypatch, capsys):
    run = fake_run(tmp_path, monkeypatch, Third(0.0))
    words = [f"checkpoint={run}", "metrics=erle,near_gain,speech_survival", "data=folder", f"data.root={recordings}"]
    assert main([*words, "progress=off"]) == 1
    said = capsys.readouterr()
    assert "mutes the near end" in said.err
    assert "could be scored" in said.err
    systems = json.loads((run / "evaluate" / "folder-recordings-test" / "scores.json").read_text())["systems"]
    muted = systems[list(systems)[-1]]["scenarios"]["far_end"]["metrics"]["erle"]
    assert (muted["mean"], muted["invalid"], muted["valid"]) == (None, 1, False)


def test_rivals_stand_beside_the_model_in_one_command(recordings, tmp_path, capsys):
    script = tmp_path / "half.py"
    script.write_text("import sys, soundfile as sf; x, r = sf.read(sys.argv[1]); sf.write(sys.argv[2], 0.5 * x, r)")
    words = [
        f"system.half.command={sys.executable} {script} {{mic}} {{out}}",
        f"system.same.folder={recordings}",
        "metrics=erle",
    ]
    scores = run_evaluate(recordings, tmp_path / "out", "model=linear", *words, "listen=2")
    systems = scores["systems"]
    assert list(systems) == ["mic", "linear", "half", "same"]
    erle = {s: systems[s]["scenarios"]["far_end"]["metrics"]["erle"]["mean"] for s in systems}
    assert erle["half"] == pytest.approx(6.02, abs=0.01)
    assert erle["same"] == pytest.approx(0, abs=1e-3)
    assert systems["half"]["scenarios"]["near_end"]["metrics"]["near_gain"]["mean"] == pytest.approx(-6.02, abs=0.01)
    assert systems["half"]["gains"]["mic"]["far_end"]["erle"]["mean"] == pytest.approx(6.02, abs=0.01)
    assert systems["linear"]["latency_ms"] > 0
    assert systems["linear"]["rtf_stream"] > 0
    assert systems["half"]["rtf"] >= 0
    assert scores["protocol"]["systems"]["same"] == f"folder: {recordings}"
    assert "scored too" in capsys.readouterr().err
    listed = json.loads((tmp_path / "out" / "listen" / "listen.json").read_text())
    assert len(listed["clips"]) == 2
    assert list(listed["clips"][0]["signals"])[:5] == ["mic", "far", "linear", "half", "same"]
    wave, rate_hz = audio.read(tmp_path / "out" / "listen" / listed["clips"][0]["signals"]["half"])
    assert rate_hz == RATE_HZ
    assert len(wave) == 48000


def test_wrong_words_are_answered_with_exit_2(recordings, tmp_path, capsys):
    data = ["data=folder", f"data.root={recordings}", f"out={tmp_path / 'out'}"]
    cases = [
        (data, "nothing to score"),
        ([*data, "model=tiny"], "has to be trained first"),
        ([*data, "model=linear", "metrics=sisdr"], "did you mean si_sdr"),
        ([*data, "model=linear", "split=exam"], "train, valid or test"),
        ([*data, "model=linear", "baselines=mik"], "mik"),
        ([*data, "model=linear", "limit=none", "save_audio=maybe"], "true or false"),
        ([*data, "model=linear", "data.rooot=x"], "data.root"),
        ([*data, "align=both", "model=linear"], "align=both"),
        ([*data, "system.command=cat {mic}"], "say where the files go"),
        ([*data, "system.wav=x"], "system.NAME.command"),
        ([*data, "system.folder=/no/where"], "no such folder"),
        ([f"out={tmp_path}", "model=linear", "data=folder", "data.root=/no/where"], "/no/where"),
        ([f"checkpoint={tmp_path / 'gone'}"], "gone"),
        (["--checkpoint", "x"], "Type: checkpoint=x"),
    ]
    for words, text in cases:
        assert main(words) == 2, words
        assert text in capsys.readouterr().err, words


def test_cells_of_the_table():
    numbers = {"mean": -0.001, "low": -1.0, "high": 2.0, "count": 3, "invalid": 0, "valid": True}
    scenario = {"clips": 4, "metrics": {"a": numbers, "b": {**numbers, "mean": None, "invalid": 4}}}
    scenario["metrics"]["c"] = {**numbers, "mean": 12.34, "low": None, "high": None, "invalid": 2, "valid": False}
    text = table({"model": {"scenarios": {"far_end": scenario}, "rtf": 0.01}}, ["a", "b", "c", "d"])
    assert "0.00 [-1.00, 2.00]" in text
    assert "-0.00" not in text
    assert "invalid x4" in text
    assert "(12.3 2!)" in text
    assert "\n  d" not in text


def test_help(cli):
    shown = cli("evaluate", "--help").check()
    assert all(key in shown.stdout for key in ("checkpoint", "metrics", "baselines", "save_audio", "aecmos_cut"))


def test_two_evaluations_agree_to_the_last_digit(recordings, tmp_path):
    first = run_evaluate(recordings, tmp_path / "a", "model=linear")["systems"]
    second = run_evaluate(recordings, tmp_path / "b", "model=linear")["systems"]
    for system in (*first.values(), *second.values()):
        assert math.isfinite(system.pop("rtf"))
        system.pop("rtf_stream")
    assert first == second
