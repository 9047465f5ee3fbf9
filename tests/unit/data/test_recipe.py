from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import yaml

from echofree.contracts import Scenario
from echofree.data.device import DISTORTIONS
from echofree.data.recipe import Recipe, SceneConfig, draw
from echofree.errors import ConfigError

CONF = Path(__file__).resolve().parents[3] / "conf" / "data" / "synthetic.yaml"


def drawn(count: int, rng: np.random.Generator, **scene: object) -> list[Recipe]:
    config = SceneConfig.build(scene)
    return [draw(config, rng) for _ in range(count)]


def test_conf_states_every_key_with_its_default() -> None:
    scene = yaml.safe_load(CONF.read_text())["scene"]
    assert set(scene) == {f.name for f in fields(SceneConfig)}
    assert SceneConfig.build(scene) == SceneConfig()


def test_scenarios_come_in_their_shares(rng: np.random.Generator) -> None:
    count = 4000
    kinds = Counter(r.scenario for r in drawn(count, rng))
    for kind, share in zip(Scenario, (0.55, 0.22, 0.18, 0.05)):
        assert abs(kinds[kind] - share * count) < 4.5 * np.sqrt(count * share * (1 - share))


def test_who_is_active_follows_the_scenario(rng: np.random.Generator) -> None:
    for r in drawn(500, rng):
        assert r.near_active == (r.scenario in (Scenario.DOUBLE_TALK, Scenario.NEAR_END))
        assert r.has_echo == (r.scenario in (Scenario.DOUBLE_TALK, Scenario.FAR_END))
        assert r.far_active or not r.has_echo
        assert not (r.scenario == Scenario.SILENCE and r.far_active)


def test_ranges_and_probabilities_hold(rng: np.random.Generator) -> None:
    recipes = drawn(3000, rng)
    ser_db = np.array([r.ser_db for r in recipes])
    assert -25 <= ser_db.min() < -24
    assert 14 < ser_db.max() <= 15
    assert abs(ser_db.mean() + 5) < 5 * 40 / np.sqrt(12 * 3000)
    delay_ms = np.array([r.delay_ms for r in recipes])
    assert abs(np.mean(delay_ms == 0) - 0.1) < 0.025
    assert abs(np.mean(delay_ms > 500) - 0.05) < 0.02
    usual = delay_ms[(delay_ms > 0) & (delay_ms <= 500)]
    assert usual.min() >= 1
    assert np.median(usual) == pytest.approx(np.sqrt(500), rel=0.2)  # log-uniform
    drift = np.array([r.drift_ppm for r in recipes])
    assert abs(np.mean(drift != 0) - 0.3) < 0.04
    assert np.abs(drift).max() > 100
    shares = Counter(r.distortion for r in recipes)
    assert abs(shares[""] / 3000 - 0.2) < 0.035
    assert set(shares) == {"", *DISTORTIONS}
    assert 0.02 < shares["sigmoid"] / 3000 < 0.1  # rare on purpose
    for name, share in (
        ("mic_clip", 0.1),
        ("path_change", 0.3),
        ("glitch", 0.05),
        ("noise", 0.5),
        ("mic_band_limited", 0.05),
    ):
        assert abs(np.mean([bool(getattr(r, name)) for r in recipes]) - share) < 0.06, name
    jump = np.array([r.delay_jump_ms for r in recipes])
    assert abs(np.mean(jump != 0) - 0.1) < 0.025
    assert np.abs(jump[jump != 0]).min() >= 8
    assert (jump > 0).any()
    assert (jump < 0).any()


def test_own_speech_is_varied_less(rng: np.random.Generator) -> None:
    config = SceneConfig()
    own = [draw(config, rng, embedded=False) for _ in range(400)]
    embedded = [draw(config, rng, embedded=True) for _ in range(400)]
    assert not any(r.near_generated or r.far_generated for r in own)
    assert any(r.near_generated for r in embedded)
    assert np.mean([r.near_varied for r in own]) < 0.45 < np.mean([r.near_varied for r in embedded])
    given = SceneConfig.build({"speech_generated_probability": 1.0})
    assert draw(given, rng, embedded=False).near_generated


def test_all_mistakes_are_told_at_once() -> None:
    bad = {
        "ser_dB": [0, 1],
        "delay_ms": [10, 1],
        "noise_probability": 1.5,
        "snr_db": 3,
        "near_target": "anechoic",
        "distortion_share": {"fuzz": 1},
        "mic_eq_db": "loud",
        "scenario_probability": [1, 1],
        "pause_s": [-1, 0],
    }
    with pytest.raises(ConfigError) as caught:
        SceneConfig.build(bad)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == len(bad)
    assert "data.scene.ser_dB: no such key. Did you mean ser_db?" in text
    for part in ("reverberant, early, dry", "hard_clip", "[low, high]", "from 0 to 1", "list of 2", "list of 4"):
        assert part in text


@pytest.mark.parametrize(
    "scene", [{"delay_ms": [0, 5]}, {"distortion_share": {"sef": 0}}, {"far_probability": [0, 0, 0]}, {"ser_db": "ab"}]
)
def test_values_that_mean_nothing_are_refused(scene: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(scene))):
        SceneConfig.build(scene)
