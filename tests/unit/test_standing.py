"""Which clips are worst, and what one system gains over another clip by clip."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from echofree.standing import badness, gains, worst


def row(name: str, system: str = "a", scenario: str = "double_talk", problems: tuple[str, ...] = (), **scores) -> dict:
    return {"name": name, "system": system, "scenario": scenario, "rtf": None, "problems": list(problems), **scores}


def test_badness_by_hand():
    assert badness(row("x", scenario="far_end", erle=40.0, speech_survival=None)) == 0
    assert badness(row("x", scenario="far_end", erle=10.0, speech_survival=None)) == pytest.approx(0.75)
    assert badness(row("x", aecmos_echo=5.0, speech_survival=0.4)) == pytest.approx(0.3)  # no echo, but muted
    assert badness(row("x", aecmos_echo=1.0, aecmos_deg=5.0)) == pytest.approx(0.5)
    assert badness(row("x", scenario="near_end", near_gain=-10.0)) == pytest.approx(0.5)
    noisy = {"near_gain": 9.0, "sdr": 0.0, "pesq": 1.0}  # the recording's own noise: nothing was done to it
    assert badness(row("x", scenario="near_end", level_change=0.0, **noisy)) == 0
    assert badness(row("x", scenario="double_talk", **noisy)) == 1
    assert badness(row("x", erle=math.nan, problems=("silent",))) == 1
    assert badness(row("x")) == 0


def test_the_worst_clips_come_first_and_are_plain_json():
    rows = [row(f"clip {i}", scenario="far_end", erle=float(i)) for i in range(20)]
    rows += [row("broken", erle=math.nan, problems=("the output is silent",)), row("other", system="b", erle=-9.0)]
    found = worst(rows, "a")
    assert [r["name"] for r in found] == ["broken", *(f"clip {i}" for i in range(9))]
    assert found[0]["erle"] is None
    assert "NaN" not in json.dumps(found)


def test_gains_pair_the_clips(rng):
    hard = 20 * rng.standard_normal(30)  # clips differ far more than systems do
    rows = [row(f"clip {i}", "a", erle=float(h)) for i, h in enumerate(hard)]
    rows += [row(f"clip {i}", "b", erle=float(h + 1 + 0.1 * rng.standard_normal())) for i, h in enumerate(hard)]
    rows += [row("only b has it", "b", erle=100.0), row("clip 3", "b", scenario="near_end", erle=50.0)]
    numbers = gains(rows, "b", "a", ["erle", "pesq"])
    assert list(numbers) == ["double_talk"]
    assert list(numbers["double_talk"]) == ["erle"]
    erle = numbers["double_talk"]["erle"]
    assert erle["count"] == 30
    assert 0.85 < erle["low"] < erle["mean"] < erle["high"] < 1.15
    spread = np.std(hard) / np.sqrt(30)
    assert erle["high"] - erle["low"] < 0.1 * spread


def test_an_invalid_clip_is_no_gain():
    rows = [row("x", "a", erle=1.0), row("x", "b", erle=math.nan), row("y", "a", erle=1.0), row("y", "b", erle=4.0)]
    assert gains(rows, "b", "a", ["erle"])["double_talk"]["erle"] == {
        "mean": 3.0, "low": None, "high": None, "count": 1, "invalid": 1
    }  # fmt: skip
