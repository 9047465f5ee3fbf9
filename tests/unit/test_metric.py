"""Metrics: hand-worked values, invalid outputs that are never scored well, one bad clip that spoils nothing else."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from echofree.audio import resample
from echofree.contracts import Batch, Clip, Scenario
from echofree.data.collate import collate
from echofree.errors import ConfigError, MissingExtra
from echofree.metric import CORE, EXTRA, default_metrics
from echofree.metric.aecmos import AecmosModel, cut_span, features, mel_matrix
from echofree.metric.core import erle, lag_samples, sdr, si_sdr

RATE_HZ = 16000
SHARED_AUDIO = Path(os.environ.get("ECHOFREE_SHARED_AUDIO", Path(__file__).parents[3] / "shared" / "audio"))


def clip(scenario: Scenario, num_samples: int = 16000, seed: int = 0, noise: float = 0.0) -> Clip:
    rng = np.random.default_rng(seed)
    far, near, echo = (rng.normal(0, 0.05, num_samples).astype(np.float32) for _ in range(3))
    if scenario == Scenario.FAR_END:
        near = np.zeros_like(near)
    if scenario == Scenario.NEAR_END:
        far, echo = np.zeros_like(far), np.zeros_like(echo)
    hiss = (noise * rng.normal(0, 1, num_samples)).astype(np.float32)
    return Clip(near + echo + hiss, far, near, echo, hiss, scenario, name=f"{scenario.name.lower()} {seed}")


def batch_of(*scenarios: Scenario) -> Batch:
    return collate([clip(s, 16000 + 400 * i, seed=i) for i, s in enumerate(scenarios)], RATE_HZ)


def values(name: str, est: torch.Tensor, batch: Batch) -> list[float | None]:
    result, weights = default_metrics([name], RATE_HZ)[0](est, batch)
    assert result.dtype == weights.dtype == torch.float64
    return [float(v) if w > 0 else None for v, w in zip(result, weights)]


def test_si_sdr_by_hand():
    near = np.array([1.0, 0.0, -1.0, 0.0] * 100)
    error = np.array([0.0, 0.1, 0.0, -0.1] * 100)  # orthogonal, 20 dB below
    assert si_sdr(near + error, near) == pytest.approx(20.0, abs=1e-9)
    assert si_sdr(0.25 * (near + error), near) == pytest.approx(20.0, abs=1e-9)
    assert si_sdr(near, near) == 100.0
    assert si_sdr(error, near) == -100.0


def test_si_sdr_of_a_late_output_is_hopeless_and_the_delay_is_named():
    batch = batch_of(Scenario.DOUBLE_TALK, Scenario.NEAR_END)
    late = torch.zeros_like(batch.near)
    late[:, 64:] = batch.near[:, :-64]
    assert all(v < -30 for v in values("si_sdr", late, batch))
    assert values("delay_ms", late, batch) == [4.0, 4.0]
    assert values("delay_ms", batch.near, batch) == [0.0, 0.0]
    near = batch.near[0].double().numpy()
    assert lag_samples(np.roll(near, 5), near, 100) == 5
    assert lag_samples(np.roll(near, -5), near, 100) == -5


def test_si_sdr_improvement_counts_from_the_microphone_and_in_double_talk_only():
    batch = batch_of(Scenario.DOUBLE_TALK, Scenario.NEAR_END, Scenario.FAR_END)
    est = batch.near + 0.1 * batch.echo
    gain = values("si_sdr_improvement", est, batch)
    assert gain[0] == pytest.approx(20.0, abs=0.2)
    assert gain[1:] == [None, None]
    assert values("si_sdr", est, batch)[2] is None


def test_sdr_forgives_a_filter_and_nothing_else():
    rng = np.random.default_rng(0)
    near, other = rng.normal(size=32000), rng.normal(size=32000)
    filtered = np.convolve(near, [0.5, 0, -0.4, 0.2])[:32000]
    assert sdr(filtered, near) > 35
    assert si_sdr(filtered, near) < 5
    noisy = sdr(filtered + 0.1 * np.linalg.norm(filtered) / np.linalg.norm(other) * other, near)
    assert noisy == pytest.approx(20.0, abs=0.3)


def test_erle_by_hand_where_the_far_end_is_active():
    rng = np.random.default_rng(1)
    far, mic = rng.normal(0, 0.1, 48000), rng.normal(0, 0.1, 48000)
    far[16000:32000] = 0.0
    est = 0.1 * mic
    assert erle(mic, est, far, RATE_HZ) == pytest.approx(20.0, abs=0.01)
    est[16000 + 4800 + 160 : 32000] = mic[
        16000 + 4800 + 160 : 32000
    ]  # more than 0.3 s after the far end: doesn't count
    assert erle(mic, est, far, RATE_HZ) == pytest.approx(20.0, abs=0.1)
    est[:16000] = mic[:16000]
    assert erle(mic, est, far, RATE_HZ, start_s=1.5) == pytest.approx(20.0, abs=0.01)
    assert erle(mic, est, far, RATE_HZ) < 4
    assert erle(mic, est, np.zeros(48000), RATE_HZ) is None
    assert erle(mic, 1e-9 * mic, far, RATE_HZ) == 60.0


def test_erle_ignores_what_lies_below_100_hz():
    rng = np.random.default_rng(2)
    far, mic = rng.normal(0, 0.1, 48000), rng.normal(0, 0.01, 48000)
    hum = 0.1 * np.sin(2 * np.pi * 3 * np.arange(48000) / RATE_HZ)
    assert erle(mic + hum, 0.1 * mic, far, RATE_HZ, start_s=1.0) == pytest.approx(20.0, abs=0.5)


def test_each_metric_speaks_only_of_its_scenarios():
    batch = batch_of(Scenario.DOUBLE_TALK, Scenario.FAR_END, Scenario.NEAR_END)
    est = batch.near + 0.1 * batch.echo
    assert [v is not None for v in values("erle", est, batch)] == [False, True, False]
    assert values("erle", est, batch)[1] == pytest.approx(20.0, abs=0.01)
    assert values("true_erle", est, batch)[:2] == [pytest.approx(20.0, abs=0.01)] * 2
    assert values("true_erle", est, batch)[2] is None
    assert [v is not None for v in values("speech_survival", est, batch)] == [True, False, True]


def test_near_gain_and_survival_by_hand():
    batch = batch_of(Scenario.NEAR_END)
    assert values("near_gain", 0.5 * batch.near, batch) == [pytest.approx(-6.02, abs=0.01)]
    half = batch.near.clone()
    half[:, 8000:] *= 0.05  # 26 dB down in the second half
    assert values("speech_survival", half, batch) == [pytest.approx(0.5, abs=0.01)]
    half[:, 8000:] *= 4  # 14 dB down
    assert values("speech_survival", half, batch) == [1.0]


def test_near_end_recordings_without_a_target_are_held_against_the_microphone():
    recording = replace(clip(Scenario.NEAR_END), near=None, echo=None, noise=None)
    batch = collate([recording], RATE_HZ)
    assert values("near_gain", 0.5 * batch.mic, batch) == [pytest.approx(-6.02, abs=0.01)]
    assert values("speech_survival", 0.01 * batch.mic, batch) == [0.0]
    assert values("si_sdr", batch.mic, batch) == [None]
    unlabelled = collate([replace(recording, scenario=Scenario.UNKNOWN)], RATE_HZ)
    assert values("near_gain", unlabelled.mic, unlabelled) == [None]


def test_level_change_and_talk_level_by_hand():
    batch = batch_of(Scenario.NEAR_END, Scenario.DOUBLE_TALK)
    low = torch.sin(2 * torch.pi * 10 / RATE_HZ * torch.arange(batch.mic.shape[1]))  # below hearing: doesn't count
    assert values("level_change", 0.5 * batch.mic + 0.05 * low, batch) == [pytest.approx(-6.02, abs=0.05), None]
    assert values("talk_level", 0.5 * batch.mic, batch) == [None, None]  # a target says more
    recording = replace(clip(Scenario.DOUBLE_TALK), near=None, echo=None, noise=None)
    recorded = collate([recording], RATE_HZ)
    assert values("talk_level", 0.1 * recorded.mic, recorded) == [pytest.approx(-20.0, abs=1e-3)]
    half = recorded.mic.clone()
    half[:, 8000:] *= 1e-6  # there is still half of it
    assert values("talk_level", half, recorded) == [pytest.approx(0, abs=0.5)]


@pytest.mark.parametrize("name", CORE)
def test_padding_and_fillers_never_count(name):
    batch = batch_of(Scenario.DOUBLE_TALK, Scenario.FAR_END, Scenario.NEAR_END)
    est = batch.near + 0.1 * batch.echo + 0.001
    alone = []
    for i, n in enumerate(batch.num_samples.tolist()):
        one = replace(batch.map(lambda t, i=i: t[i : i + 1]), name=[batch.name[i]])
        waves = {k: getattr(one, k)[:, :n] for k in ("mic", "far", "near", "echo", "noise")}
        alone += values(name, est[i : i + 1, :n], replace(one, **waves))
    assert values(name, est, batch) == alone
    batch.weight[1] = 0.0
    metric = default_metrics([name], RATE_HZ)[0]
    result, weights = metric(torch.where(torch.tensor([[False], [True], [False]]), torch.nan, est), batch)
    assert (result[1], weights[1]) == (0.0, 0.0)
    assert metric.failures == []


@pytest.mark.parametrize("name", CORE)
@pytest.mark.parametrize("fault", ["silent", "nan", "muted"])
def test_a_worthless_output_is_invalid_never_good(name, fault):
    kinds = (Scenario.DOUBLE_TALK, Scenario.FAR_END, Scenario.NEAR_END)
    clips = [clip(s, 64000, seed=i) for i, s in enumerate(kinds)]
    if name == "talk_level":  # for recordings without a target
        clips = [replace(c, near=None, echo=None, noise=None) for c in clips]
    batch = collate(clips, RATE_HZ)
    est = {"silent": 0.0, "nan": torch.nan, "muted": 1e-4}[fault] * batch.mic
    metric = default_metrics([name], RATE_HZ)[0]
    result, weights = metric(est, batch)
    expected = [0, 2] if fault == "muted" else [0, 1, 2]  # in far-end single talk 80 dB down is a good answer
    counted = [i for i in expected if weights[i] > 0]
    assert counted or (fault == "muted" and result[1] == 60.0)
    assert all(np.isnan(result[i]) for i in counted)
    assert len(metric.failures) == len(counted)
    assert all(batch.name[i] in text and name in text for i, text in zip(counted, metric.failures))


def test_a_silent_microphone_may_stay_silent():
    quiet = clip(Scenario.SILENCE)
    batch = collate(
        [replace(quiet, **{k: np.zeros_like(quiet.mic) for k in ("mic", "near", "echo", "noise")})], RATE_HZ
    )
    for name in CORE:
        assert values(name, batch.mic, batch) == [None], name


def test_one_bad_clip_of_32_leaves_31():
    batch = batch_of(*[Scenario.DOUBLE_TALK] * 32)
    est = batch.near + 0.1 * batch.echo
    est[7] = 0.0
    for name in ("si_sdr", "true_erle", "speech_survival"):
        metric = default_metrics([name], RATE_HZ)[0]
        result, weights = metric(est, batch)
        assert weights.sum() == 32
        assert torch.isnan(result).nonzero().flatten().tolist() == [7]
        assert metric.failures == [f"double_talk 7: {name}: the output is silent"]


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean si_sdr") as caught:
        default_metrics(["sisdr", "erle", "peksel"], RATE_HZ)
    assert len(caught.value.problems) == 2


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"echofree\[metrics\]"):
        default_metrics(["aecmos_echo"], RATE_HZ)
    monkeypatch.setitem(__import__("sys").modules, "pesq", None)
    with pytest.raises(MissingExtra, match="pesq"):
        default_metrics(["pesq"], RATE_HZ)


def test_challenge_cut():
    seconds = lambda span: tuple(x / RATE_HZ for x in span)  # noqa: E731
    assert seconds(cut_span(10 * RATE_HZ, RATE_HZ, Scenario.FAR_END, "challenge")) == (5, 10)
    assert seconds(cut_span(35 * RATE_HZ, RATE_HZ, Scenario.DOUBLE_TALK, "challenge")) == (25, 35)
    assert seconds(cut_span(12 * RATE_HZ, RATE_HZ, Scenario.DOUBLE_TALK, "challenge")) == (0, 12)
    assert seconds(cut_span(30 * RATE_HZ, RATE_HZ, Scenario.NEAR_END, "challenge")) == (0, 20)
    assert seconds(cut_span(30 * RATE_HZ, RATE_HZ, Scenario.FAR_END, "whole")) == (0, 20)


def test_mel_front_end_by_hand_and_for_length_and_level():
    mel = mel_matrix()
    assert mel.shape == (160, 257)
    hz = np.fft.rfftfreq(513, 1 / RATE_HZ)
    wide = mel[-40:]  # far above 1 kHz: triangles over several bins whose area in Hz is 1
    assert (wide * (hz[1] - hz[0])).sum(1).mean() == pytest.approx(1.0, abs=0.02)
    rng = np.random.default_rng(0)
    wave = rng.normal(0, 0.1, 16000)
    plane = features(wave, mel)
    assert plane.shape == (1 + 16000 // 256, 160)
    assert plane.max() == 1.0
    assert plane.min() >= -1.0
    np.testing.assert_allclose(features(0.1 * wave, mel), plane, atol=1e-9)


@pytest.mark.skipif(importlib.util.find_spec("librosa") is None, reason="librosa isn't installed (no dependency)")
def test_mel_front_end_equals_librosa():
    import librosa

    wave = np.random.default_rng(3).normal(0, 0.1, 20000)
    power = librosa.feature.melspectrogram(y=wave, sr=RATE_HZ, n_fft=513, hop_length=256, n_mels=160)
    expected = (librosa.power_to_db(power, ref=np.max) + 40) / 40
    np.testing.assert_allclose(features(wave, mel_matrix()), expected.T, atol=1e-5)


def speech(name: str, count: int) -> np.ndarray:
    from echofree.audio import fit, read

    path = SHARED_AUDIO / "synthetic" / name
    if not path.is_file():
        pytest.skip(f"no shared audio at {SHARED_AUDIO}; set ECHOFREE_SHARED_AUDIO")
    return fit(read(path, RATE_HZ)[0], count)


@pytest.mark.skipif(importlib.util.find_spec("speechmos") is None, reason="the extra metrics isn't installed")
def test_aecmos_orders_outputs_and_shows_why_it_never_stands_alone():
    count = 10 * RATE_HZ
    mic, far, near = (speech(f"syn00_dt_{kind}.flac", count) for kind in ("mic", "ref", "near"))
    batch = collate([Clip(mic, far, near, scenario=Scenario.DOUBLE_TALK, name="syn00")], RATE_HZ)
    untouched, perfect = values("aecmos_echo", batch.mic, batch)[0], values("aecmos_echo", batch.near, batch)[0]
    assert untouched < 3.2 < 4.3 < perfect < 5
    assert values("aecmos_deg", batch.near, batch)[0] > 3.5
    assert values("aecmos_echo", 0.3 * batch.near, batch)[0] == pytest.approx(perfect, abs=1e-3)  # blind to level
    silent = values("aecmos_echo", 0 * batch.mic, batch)
    assert np.isnan(silent[0])  # the network itself would say 4.7
    model = default_metrics(["aecmos_echo"], RATE_HZ)[0]
    assert values("aecmos_echo", batch.near, replace(batch, scenario=torch.tensor([2]))) == [None]
    assert model.failures == []


@pytest.mark.skipif(importlib.util.find_spec("speechmos") is None, reason="the extra metrics isn't installed")
def test_both_aecmos_scores_share_one_run_of_the_network():
    echo, deg = default_metrics(["aecmos_echo", "aecmos_deg"], RATE_HZ)
    batch = batch_of(Scenario.DOUBLE_TALK)
    echo(batch.near, batch)
    model = next(c.cell_contents for c in deg._score.__closure__ if hasattr(c.cell_contents, "protocol"))
    first = model._last
    deg(batch.near, batch)
    assert model._last is first
    assert model.protocol["far_end"] == "as captured, not aligned"


@pytest.mark.skipif(importlib.util.find_spec("speechmos") is None, reason="the extra metrics isn't installed")
def test_aecmos_of_a_48_khz_copy_is_that_of_the_16_khz_recording():
    waves = [speech(f"syn00_dt_{kind}.flac", 4 * RATE_HZ) for kind in ("ref", "mic", "near")]
    low, high = AecmosModel(RATE_HZ), AecmosModel(48000)
    expected = low.score(*waves, Scenario.DOUBLE_TALK)
    found = high.score(*(resample(wave, RATE_HZ, 48000) for wave in waves), Scenario.DOUBLE_TALK)
    assert found == pytest.approx(expected, abs=0.05)
    assert (low.protocol["resampling"], high.protocol["resampling"]) == ("none", "soxr HQ")


@pytest.mark.skipif(importlib.util.find_spec("pesq") is None, reason="the extra metrics isn't installed")
def test_pesq_and_stoi_order_outputs_and_fail_per_clip():
    count = 6 * RATE_HZ
    near, far = speech("syn00_dt_near.flac", 2 * count)[count:], speech("syn00_dt_ref.flac", count)
    echo = (0.5 * far).astype(np.float32)
    clips = [
        Clip(near + echo, far, near, scenario=Scenario.DOUBLE_TALK, name="talk"),
        Clip(echo, far, np.zeros_like(near), scenario=Scenario.FAR_END, name="far only"),
        Clip(near + echo, far, near, scenario=Scenario.DOUBLE_TALK, name="muted"),
        Clip(near[:1600], far[:1600], near[:1600], scenario=Scenario.NEAR_END, name="too short"),
    ]
    batch = collate(clips, RATE_HZ)
    good = batch.near + 0.05 * batch.far
    good[2] = 0
    bad = batch.mic
    for name in ("pesq", "stoi", "estoi"):
        metric = default_metrics([name], RATE_HZ)[0]
        result, weights = metric(good, batch)
        assert weights.tolist() == [1, 0, 1, 0]
        assert result[0] > values(name, bad, batch)[0]
        assert np.isnan(result[2])
        assert len(metric.failures) == 1
        assert "muted" in metric.failures[0]


def test_all_extras_have_a_builder():
    assert {m.name for m in default_metrics(CORE, RATE_HZ)} == set(CORE)
    if (
        importlib.util.find_spec("speechmos")
        and importlib.util.find_spec("pesq")
        and importlib.util.find_spec("pystoi")
    ):
        assert {m.name for m in default_metrics(EXTRA, RATE_HZ)} == set(EXTRA)
