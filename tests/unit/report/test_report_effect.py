"""Which setting of a sweep matters, against planted effects and none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from echofree.report.effect import effects, explained, spans_decades


def sweep(rng: np.random.Generator, noise: float = 0.02) -> list[dict]:
    """lr decides, width helps a little, seed and the name do nothing."""
    runs = []
    for lr, width, seed in itertools.product((1e-4, 1e-3, 1e-2), (32, 64), (0, 1, 2)):
        best = {1e-4: 0.5, 1e-3: 0.3, 1e-2: 0.9}[lr] - 0.05 * (width == 64) + noise * rng.standard_normal()
        settings = {"optim.lr": lr, "model.hidden_size": width, "seed": seed}
        runs.append({"best": float(best), "metric": "loss", "mode": "min", "settings": settings, "config": settings})
    return runs


def test_the_planted_effect_comes_first(rng):
    found = effects(sweep(rng))
    lr, *rest = found["settings"]
    assert lr["key"] == "optim.lr"
    assert lr["share"] > 0.9
    assert lr["p"] < 0.01
    assert [round(level["mean"], 1) for level in lr["levels"]] == [0.5, 0.3, 0.9]
    assert lr["log"]
    seed = next(s for s in rest if s["key"] == "seed")
    assert seed["p"] > 0.05
    assert seed["share"] < 0.1
    assert found["unscored"] == 0


def test_share_by_hand():
    share, chance, _ = explained(["a", "a", "b", "b"], np.array([1.0, 3.0, 5.0, 7.0]))
    assert share == pytest.approx(16 / 20)  # between 16, within 4
    assert chance == pytest.approx(1 / 3, abs=0.1)  # one degree of freedom of three


def test_a_number_with_many_values_is_a_curve(rng):
    lr = 10 ** rng.uniform(-5, -1, 40)
    y = (np.log10(lr) + 3) ** 2
    share, chance, p = explained(list(lr), y)
    assert share == pytest.approx(1)
    assert chance < 0.15
    assert p == 0


def test_chance_alone_is_called_chance(rng):
    ps = [explained(["a", "b", "c"] * 4, rng.standard_normal(12), seed)[2] for seed in range(60)]
    assert np.mean(np.array(ps) < 0.05) < 0.2


def test_too_little_to_tell():
    assert explained(["a", "b"], np.array([1.0, 2.0])) == (None, None, None)
    assert explained(["a", "b", "b"], np.array([1.0, 1.0, 1.0])) == (None, None, None)
    failed = [
        {"best": None, "metric": "loss", "mode": "min", "settings": {"seed": i}, "config": {"seed": i}} for i in (0, 1)
    ]
    found = effects(failed)
    assert found["unscored"] == 2
    assert found["settings"][0]["share"] is None
    assert found["settings"][0]["levels"] == []


def test_logarithms_where_they_help():
    assert spans_decades([1e-4, 1e-2])
    assert not spans_decades([16, 32])
    assert not spans_decades([0, 10])
    assert not spans_decades(["a", "b"])
