from __future__ import annotations

import numpy as np
import pytest
import torch

from echofree.contracts import Clip, Scenario
from echofree.data.collate import collate


def clip(length: int, rng: np.random.Generator, **more: object) -> Clip:
    mic, far, near = rng.standard_normal((3, length)).astype(np.float32)
    return Clip(mic, far, near, **more)  # type: ignore[arg-type]


def test_pads_on_the_right_and_weighs_in_seconds(rng: np.random.Generator) -> None:
    clips = [
        clip(800, rng, scenario=Scenario.DOUBLE_TALK, delay_samples=17, name="a", index=4),
        clip(1600, rng, scenario=Scenario.NEAR_END, name="b", index=2),
    ]
    batch = collate(clips, 8000)
    assert batch.mic.shape == (2, 1600)
    assert np.array_equal(batch.mic[0, :800].numpy(), clips[0].mic)
    assert not batch.mic[0, 800:].any()
    assert not batch.far[0, 800:].any()
    assert np.array_equal(batch.near[1].numpy(), clips[1].near)
    assert batch.weight.tolist() == pytest.approx([0.1, 0.2])
    assert batch.num_samples.tolist() == [800, 1600]
    assert batch.scenario.tolist() == [0, 2]
    assert batch.delay_samples.tolist() == [17, -1]
    assert batch.index.tolist() == [4, 2]
    assert batch.name == ["a", "b"]


def test_a_filler_weighs_nothing_and_keeps_its_samples(rng: np.random.Generator) -> None:
    batch = collate([clip(160, rng), clip(160, rng)], 16000, filler=[False, True])
    assert batch.weight.tolist() == pytest.approx([0.01, 0.0])
    assert batch.mic[1].any()


def test_unknown_parts_are_zeros_and_said_to_be_unknown(rng: np.random.Generator) -> None:
    known, unknown = clip(100, rng), clip(100, rng)
    known.echo = known.noise = np.ones(100, dtype=np.float32)
    unknown.near = None
    batch = collate([known, unknown], 16000)
    assert batch.has_near.tolist() == [True, False]
    assert batch.has_echo.tolist() == [True, False]
    assert not batch.near[1].any()
    assert batch.echo.dtype == torch.float32


def test_refuses_what_does_not_fit(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="at least one"):
        collate([], 16000)
    with pytest.raises(ValueError, match="1 clips but 2"):
        collate([clip(10, rng)], 16000, filler=[True, False])
    bad = clip(10, rng)
    bad.far = bad.far[:9]
    with pytest.raises(ValueError, match="9 samples"):
        collate([bad], 16000)
