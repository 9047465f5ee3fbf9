"""Scoring: rows that name every failure, stretches, statistics, and flags that stop a muted canceller from winning."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from echofree.contracts import Clip, Scenario
from echofree.metric import default_metrics
from echofree.score import score, summarise

RATE_HZ = 16000
NAMES = ["si_sdr", "erle", "speech_survival", "delay_ms"]


def scene(i: int, scenario: Scenario) -> Clip:
    rng = np.random.default_rng(i)
    n = 16000 + 1600 * (i % 3)
    near, far, echo = (rng.normal(0, 0.05, n).astype(np.float32) for _ in range(3))
    if scenario == Scenario.FAR_END:
        near = np.zeros_like(near)
    if scenario == Scenario.NEAR_END:
        echo = np.zeros_like(echo)
    return Clip(near + echo, far, near, echo, np.zeros_like(near), scenario, name=f"scene {i}", index=i)


class Scenes:
    sample_rate = RATE_HZ

    def __init__(self, count: int, broken: tuple[int, ...] = ()):
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def item(self, index: int, epoch: int) -> Clip:
        if index in self.broken:
            raise OSError("disk on fire")
        return scene(index, Scenario(index % 3))


def metrics():
    return default_metrics(NAMES, RATE_HZ)


def half(mic, far):
    return 0.5 * mic


def test_rows_have_every_clip_and_system_once_in_order():
    finished: list[int] = []
    rows = score({"mic": lambda m, f: m, "half": half}, Scenes(7), metrics(), done=finished.append)
    assert sum(finished) == 7
    assert sorted((r["system"], r["name"]) for r in rows) == sorted(
        (s, f"scene {i}") for s in ("mic", "half") for i in range(7)
    )
    erle = {r["name"]: r["erle"] for r in rows if r["system"] == "half"}
    assert erle["scene 1"] == pytest.approx(6.02, abs=0.01)
    assert erle["scene 0"] is None
    assert all(r["problems"] == [] for r in rows)
    assert all(r["rtf"] > 0 for r in rows)


def test_batching_doesnt_change_a_score(monkeypatch):
    together = score({"half": half}, Scenes(6), metrics())
    monkeypatch.setattr("echofree.score.BATCH_S", 0.0)
    alone = score({"half": half}, Scenes(6), metrics())
    for a, b in zip(together, alone):
        assert {k: a[k] for k in ("name", *NAMES)} == {k: b[k] for k in ("name", *NAMES)}


def test_a_clip_that_cant_be_read_or_processed_is_a_row_and_no_end():
    def fussy(mic, far):
        if any(torch.equal(row[:16000], torch.from_numpy(scene(4, Scenario.FAR_END).mic[:16000])) for row in mic):
            raise RuntimeError("I don't like this one")
        return mic

    rows = score({"fussy": fussy}, Scenes(6, broken=(2,)), metrics())
    assert len(rows) == 6
    bad = {r["name"]: r["problems"] for r in rows if r["problems"]}
    assert bad == {"clip 2": ["OSError: disk on fire"], "scene 4": ["RuntimeError: I don't like this one"]}
    good = [r for r in rows if not r["problems"]]
    assert all(math.isfinite(r["delay_ms"]) for r in good if r["delay_ms"] is not None)
    assert summarise(rows, NAMES)["fussy"]["failed"] == 2


def test_an_output_of_another_length_is_refused():
    rows = score({"short": lambda m, f: m[:, :-1]}, Scenes(2), metrics())
    assert all("the output has the shape" in r["problems"][0] for r in rows)


def test_only_the_stretch_is_scored_but_all_is_heard():
    class Labelled(Scenes):
        def item(self, index: int, epoch: int) -> Clip:
            clip = scene(1, Scenario.FAR_END)
            return replace(clip, index=index)

        def stretch(self, index: int) -> tuple[int, int]:
            return (8000, 16000) if index == 0 else (20000, 30000)

    def late(mic, far):  # learns for half a second
        assert mic.shape[1] == 17600
        gain = torch.where(torch.arange(mic.shape[1]) < 8000, 1.0, 0.1)
        return gain * mic

    rows = score({"late": late}, Labelled(2), metrics())
    assert rows[0]["erle"] == pytest.approx(20.0, abs=0.05)
    assert rows[0]["seconds"] == 0.5
    assert "outside the recording" in rows[1]["problems"][0]


def test_summary_by_hand():
    values = [1.0, 2.0, 3.0, 4.0, math.nan, None]
    rows = [
        {"system": "a", "scenario": "double_talk", "si_sdr": v, "rtf": 0.1, "problems": ["x"] if v != v else []}
        for v in values
    ]
    part = summarise(rows, ["si_sdr", "erle"])["a"]
    numbers = part["scenarios"]["double_talk"]["metrics"]["si_sdr"]
    assert (numbers["mean"], numbers["count"], numbers["invalid"], numbers["valid"]) == (2.5, 4, 1, True)
    assert 1.0 <= numbers["low"] < 2.0 < 3.0 < numbers["high"] <= 4.0
    assert "erle" not in part["scenarios"]["double_talk"]["metrics"]
    assert part["scenarios"]["double_talk"]["clips"] == 6
    assert part["failed"] == 1
    assert summarise(rows, ["si_sdr"]) == summarise(rows, ["si_sdr"])


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        rows = [
            {"system": "a", "scenario": "s", "m": float(v), "rtf": None, "problems": []} for v in rng.normal(size=30)
        ]
        numbers = summarise(rows, ["m"])["a"]["scenarios"]["s"]["metrics"]["m"]
        hits += numbers["low"] < 0 < numbers["high"]
    assert 0.88 <= hits / 200 <= 0.99


def test_one_clip_has_no_interval():
    rows = [{"system": "a", "scenario": "s", "m": 1.0, "rtf": None, "problems": []}]
    numbers = summarise(rows, ["m"])["a"]["scenarios"]["s"]["metrics"]["m"]
    assert (numbers["mean"], numbers["low"], numbers["high"]) == (1.0, None, None)


def test_a_muting_system_doesnt_win():
    muting = summarise(score({"muting": lambda m, f: 1e-3 * m, "half": half}, Scenes(6), metrics()), NAMES)
    erle = {s: muting[s]["scenarios"]["far_end"]["metrics"]["erle"] for s in muting}
    assert erle["muting"]["mean"] > erle["half"]["mean"]
    assert erle["muting"]["valid"] is False
    assert erle["half"]["valid"] is True
    assert "mutes the near end" in muting["muting"]["flags"][0]
    assert muting["half"]["flags"] == []
    silent = summarise(score({"silent": lambda m, f: 0 * m}, Scenes(6), metrics()), NAMES)["silent"]
    assert silent["failed"] == 6
    assert silent["scenarios"]["double_talk"]["metrics"]["si_sdr"]["mean"] is None
    assert "mutes the near end" in silent["flags"][0]


def test_a_late_system_is_flagged():
    def late(mic, far):
        return torch.nn.functional.pad(mic, (160, 0))[:, : mic.shape[1]]

    flags = summarise(score({"late": late}, Scenes(6), metrics()), NAMES)["late"]["flags"]
    assert len(flags) == 1
    assert "10.0 ms" in flags[0]


def test_a_system_that_mutes_only_double_talk_is_flagged_too():
    rows = []
    for scenario, kept in (("near_end", 1.0), ("double_talk", 0.1)):
        rows += [
            {"system": "a", "scenario": scenario, "erle": 40.0, "speech_survival": kept, "rtf": None, "problems": []}
        ] * 5
    found = summarise(rows, ["erle"])["a"]
    assert "10 % of its speech is left in double talk" in found["flags"][0]
    assert not found["scenarios"]["double_talk"]["metrics"]["erle"]["valid"]


def test_muting_is_seen_in_double_talk_without_a_target():
    class Recorded(Scenes):
        def item(self, index, epoch):
            return replace(scene(index, Scenario.DOUBLE_TALK), near=None, echo=None, noise=None, index=index)

    scored = default_metrics(["speech_survival", "talk_level"], RATE_HZ)
    systems = {"softly": lambda m, f: 0.03 * m, "tenth": lambda m, f: 0.1 * m}
    found = summarise(score(systems, Recorded(4), scored), ["talk_level"])
    level = found["tenth"]["scenarios"]["double_talk"]["metrics"]["talk_level"]["mean"]
    assert level == pytest.approx(-20.0, abs=0.01)
    assert found["tenth"]["flags"] == []
    assert "mutes double talk" in found["softly"]["flags"][0]


def test_alignment_takes_a_delay_out_and_still_tells_it():
    def late(mic, far):
        return torch.nn.functional.pad(mic, (400, 0))[:, : mic.shape[1]]

    names = ["si_sdr", "si_sdr_improvement", "delay_ms"]
    values = {}
    for align in (False, True):
        rows = score({"late": late, "mic": lambda m, f: m}, Scenes(1), default_metrics(names, RATE_HZ, align=align))
        values[align] = {row["system"]: [row[name] for name in names] for row in rows}
    assert values[False]["mic"] == values[True]["mic"]
    assert values[False]["late"][0] < -15
    assert values[True]["late"][0] == pytest.approx(values[True]["mic"][0], abs=0.5)
    assert values[True]["late"][1] == pytest.approx(0, abs=0.5)
    assert values[True]["late"][2] == values[False]["late"][2] == 25.0
