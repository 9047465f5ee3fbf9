"""Scores agree with those of an independent scorer, where one lies beside the shared recordings: same stretches, same
metrics, other code."""

from __future__ import annotations

import csv
import importlib.util
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from echofree import audio
from echofree.data.folder import Folder
from echofree.metric import default_metrics
from echofree.score import score

SAME = {"erle": "erle", "erle_late": "erle_late", "gain": "level_change", "sisdr": "si_sdr", "sdr": "sdr"}
CASES = {"real": 21, "synthetic": 12}  # of the first; AECMOS is held against its own package in test_metric


@pytest.fixture(scope="module")
def bench(shared_audio: Any) -> ModuleType:
    path = shared_audio.parent / "bench" / "aec_baselines.py"
    if not path.is_file():
        pytest.skip(f"no second scorer: {path} isn't there")
    spec = importlib.util.spec_from_file_location("aec_baselines", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.aecmos = lambda *_: (None, None)
    return module


def worse(mic: Any, far: Any) -> Any:
    """A poor canceller: a part of the far end is taken away, and all of it comes 10 ms late."""
    late = (mic - 0.2 * far).roll(160, dims=1)
    late[:, :160] = 0
    return late


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_scores_agree_with_another_scorer(name, bench, shared_audio, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pesq", None)
    monkeypatch.setitem(__import__("sys").modules, "pystoi", None)
    root, count = shared_audio / name, CASES[name]
    with open(root / "cases.csv", encoding="utf-8", newline="") as file:
        cases = {case["id"]: case for case in csv.DictReader(file)}
    data = Folder(str(root), test_fraction=1.0, valid_fraction=0.0).split("test")
    assert data is not None
    metrics = default_metrics(list(SAME.values()), 16000, align=True)
    rows = score({"worse": worse}, data, metrics, count)
    compared = 0
    for row in rows:
        case = cases[row["name"]]
        mic, far = (audio.read(root / case[key])[0].astype(np.float64) for key in ("mic", "ref"))
        far = bench.fit(far, len(mic))
        near = bench.fit(audio.read(root / case["near"])[0].astype(np.float64), len(mic)) if case["near"] else None
        out = np.concatenate([np.zeros(160), (mic - 0.2 * far)[:-160]]).astype(np.float32).astype(np.float64)
        theirs = bench.score(case, mic, far, out, near)
        assert row["seconds"] == pytest.approx(
            min(float(case["end_s"]), len(mic) / 16000) - float(case["start_s"]), abs=1e-3
        )
        for key, ours in SAME.items():
            assert (theirs.get(key) is None) == (row[ours] is None), (row["name"], key)
            if row[ours] is not None:
                # SI-SDR there takes the mean off first
                assert row[ours] == pytest.approx(theirs[key], abs=0.01 if key == "sisdr" else 1e-3), (row["name"], key)
                compared += 1
    assert compared >= 19
