"""Adaptation: what is re-estimated and trained, who judges, and that what got worse is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import torch
from torch import Tensor, nn

from echofree.adapt import judge, main
from echofree.adapt.listen import held_out
from echofree.adapt.method import adapters, re_estimate
from echofree.checkpoint import load_model
from echofree.contracts import Clip
from echofree.data.remix import Stretch
from echofree.data.synthetic import Synthetic
from echofree.model.bark import BarkNet
from echofree.model.crn import ConvRecurrentNet
from parent import TINY, make_run

RATE = 16000
FRONT = {"num_partitions": 2, "max_delay_ms": 100.0}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm: Any = nn.BatchNorm1d(2, momentum=0.1)
        self.drop = nn.Dropout(0.9)

    def forward(self, mic: Tensor, far: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(torch.stack([mic, far], 1)))[:, 0]
        return out


class Clips:
    sample_rate = RATE

    def __init__(self, rng: np.random.Generator):
        scale, shift = np.array([[1.0], [3.0]]), np.array([[0.5], [-2.0]])
        self.waves = (rng.standard_normal((6, 2, 50)) * scale + shift).astype(np.float32)

    def __len__(self) -> int:
        return 6

    def item(self, index: int, epoch: int) -> Clip:
        return Clip(self.waves[index, 0], self.waves[index, 1], None)


def test_statistics_become_the_average_of_the_batches(rng: np.random.Generator) -> None:
    model, clips = Normed(), Clips(rng)
    model.norm.running_mean.fill_(99.0)
    weight = model.norm.weight.detach().clone()
    assert re_estimate(model, clips, 6, 2) == 1
    batches = [clips.waves[i : i + 2].transpose(1, 0, 2).reshape(2, -1).astype(np.float64) for i in (0, 2, 4)]
    assert model.norm.running_mean.numpy() == pytest.approx(np.mean([b.mean(1) for b in batches], 0), abs=1e-5)
    assert model.norm.running_var.numpy() == pytest.approx(np.mean([b.var(1, ddof=1) for b in batches], 0), rel=1e-4)
    assert torch.equal(model.norm.weight, weight)
    assert model.norm.momentum == 0.1
    assert not model.training
    assert re_estimate(nn.Linear(2, 2), clips, 6, 2) == 0


def test_adapters_are_norms_and_the_last_layer() -> None:
    bark = adapters(BarkNet(hidden_size=12, front_end=FRONT))
    crn = adapters(ConvRecurrentNet(channels=[4, 4], hidden_size=8, front_end=FRONT))
    assert bark[-1] == "network.gain.*"
    assert "network.encoders.0.norm.weight" in bark
    assert len(bark) == 2 * 9 + 1
    assert crn[-1] == "network.decoders.1.up.*"
    assert "network.encoders.1.norm.bias" in crn


def test_every_fourth_piece_judges() -> None:
    pieces = held_out([Stretch("a", "b", 0.0, 30.0), Stretch("c", "d", 1.0, 3.0)])
    assert [(p.mic, p.start_s, p.stop_s, p.split) for p in pieces] == [
        ("a", 0.0, 7.5, "train"),
        ("a", 7.5, 15.0, "train"),
        ("a", 15.0, 22.5, "train"),
        ("a", 22.5, 30.0, "valid"),
        ("c", 1.0, 3.0, "train"),
    ]
    assert [p.split for p in held_out([Stretch("a", "b", 0.0, 4.0)])] == ["train", "valid"]
    assert held_out([]) == []


BEFORE = {"device_erle": 20.0, "device_si_sdr": 8.0, "device_survival": 0.95, "elsewhere_si_sdr": 9.0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device_erle": 22.0}, []),
        ({"device_erle": 22.0, "elsewhere_si_sdr": 8.9, "device_si_sdr": 7.9}, []),
        ({"device_erle": 20.4}, ["+0.40 dB of the device's echo"]),
        ({"device_erle": math.nan}, ["of the device's echo"]),
        ({"device_erle": 25.0, "elsewhere_si_sdr": 8.5}, ["elsewhere falls by 0.50 dB"]),
        ({"device_erle": 25.0, "device_si_sdr": 7.0}, ["double talk on the device falls by 1.00 dB"]),
        ({"device_erle": 25.0, "device_survival": 0.90}, ["5.0 % more of the talker's frames"]),
        ({"device_erle": 60.0, "device_si_sdr": math.nan, "device_survival": 0.0}, ["double talk", "frames are lost"]),
    ],
)
def test_what_is_refused(change: dict[str, float], words: list[str]) -> None:
    found = judge.problems(BEFORE, {**BEFORE, **change}, 0.5, 0.2)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_a_muting_model_has_no_mean() -> None:
    assert math.isnan(judge.mean([{"erle": 10.0}, {"erle": math.nan}], "erle"))
    assert judge.mean([{"erle": 10.0}, {"erle": None}, {"erle": 14.0}], "erle") == 12.0


def test_too_little_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_run(tmp_path / "run", TINY)
    wave = np.zeros(RATE, np.float32)
    wave[::100] = 0.1
    for kind in ("mic", "far"):
        (tmp_path / "device" / kind).mkdir(parents=True)
        sf.write(tmp_path / "device" / kind / "1.wav", wave, RATE)
    words = [f"checkpoint={folder}", f"data.root={tmp_path / 'device'}", f"out={tmp_path / 'out'}"]
    assert main(words) == 2
    assert "let the device play speech" in capsys.readouterr().err
    assert main([*words, "methods=all"]) == 2
    assert "methods=all: there are bn, affine" in capsys.readouterr().err
    assert main(["checkpoint=x"]) == 2


SCENE = {
    "scenario_probability": [0.0, 1.0, 0.0, 0.0],
    "far_probability": [1.0, 0.0, 0.0],
    "delay_ms": [20, 21],
    "mic_peak_db": [-9, -6],
    "far_peak_db": [-9, -6],
    **dict.fromkeys(
        (
            "distortion_probability", "delay_jump_probability", "glitch_probability", "drift_probability",
            "path_change_probability", "noise_probability", "no_delay_probability", "long_delay_probability",
            "playback_agc_probability", "transmit_agc_probability", "transmit_ns_probability", "mic_clip_probability",
        ),
        0.0,
    ),
}  # fmt: skip


def device(folder: Path, num: int = 3) -> Path:
    """Recordings of echo alone."""
    data = Synthetic(seed=4, num_train=num, num_rooms=8, segment_s=8.0, scene=SCENE).split("train")
    assert data is not None
    for kind in ("mic", "far"):
        (folder / kind).mkdir(parents=True)
    for i in range(num):
        clip = data.item(i, 0)
        sf.write(folder / "mic" / f"{i}.wav", clip.mic, RATE, subtype="FLOAT")
        sf.write(folder / "far" / f"{i}.wav", clip.far, RATE, subtype="FLOAT")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("accepts", [True, False])
def test_the_verb(accepts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An untrained model and three steps: what is asked for decides."""
    torch.set_num_threads(1)
    folder, parent = make_run(tmp_path / "run", TINY)
    root, out = device(tmp_path / "device"), tmp_path / "out"
    limits = ["min_gain=0", "max_drop=60"] if accepts else ["min_gain=50", "max_drop=0"]
    words = [f"checkpoint={folder}", f"data.root={root}", f"out={out}", "steps=3", "batch_size=2", "clips=2", "min_s=3"]
    code = main([*words, *limits])
    said = capsys.readouterr()
    about: dict[str, Any] = json.loads((out / "adapt.json").read_text())
    assert "device, echo alone: ERLE, dB" in said.out
    assert set(about["tried"]) == {"bn", "affine"}
    if not accepts:
        assert code == 1
        assert "is refused" in said.err
        assert "no adapted checkpoint was written: keep" in said.err
        assert not (out / "adapted").exists()
        return
    assert code == 0, about
    model, _ = load_model(out / "adapted")
    facts = json.loads((out / "adapted" / "run.json").read_text())
    assert facts["parent"]["run_id"] == "parent-5"
    assert facts["status"] == "done"
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, parent.state_dict()[n])}
    assert changed
    assert all("norm" in n or n.startswith("network.gain.") for n in changed)
