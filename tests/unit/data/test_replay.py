"""Old data mixed into new: how much, which, and that it depends on nothing but the epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from echofree.data.replay import Mixed, Replay
from echofree.errors import ConfigError
from toy import ToyData


class Source:
    sample_rate = 64

    def __init__(self, num: int, seed: int):
        self.data = ToyData(num, seed=seed)

    def split(self, name: str) -> ToyData | None:
        return self.data if name in ("train", "valid") else None

    def fingerprint(self) -> str:
        return f"{self.data.seed}"

    def survey(self) -> list[tuple[str, str]]:
        return [("clips", str(len(self.data)))]


@pytest.mark.parametrize(("share", "old"), [(0.5, 12), (0.25, 4), (0.9, 108), (0.0, 0)])
def test_share_of_an_epoch(share: float, old: int) -> None:
    mixed = Mixed(ToyData(12, seed=1), ToyData(5, seed=2), share, 0)
    assert len(mixed) == 12 + old
    new, past = mixed.item(3, 7), ToyData(5, seed=2)
    assert new.name == "epoch 7/clip 3"
    assert np.array_equal(new.mic, ToyData(12, seed=1).item(3, 7).mic)
    for index in range(12, 12 + old, 3):
        clip, which = mixed.item(index, 7), int(mixed.chosen(7)[index - 12])
        assert clip.name == f"old: epoch 7/clip {which}"
        assert clip.index == index
        assert np.array_equal(clip.mic, past.item(which, 7).mic)


def test_any_order_of_questions_gets_the_same_answers() -> None:
    forward, back = (Mixed(ToyData(6), ToyData(10), 0.5, 3) for _ in range(2))
    asked = [(i, e) for e in range(4) for i in range(12)]
    first = {key: forward.item(*key).name for key in asked}
    assert first == {key: back.item(*key).name for key in reversed(asked)}
    assert {key: Mixed(ToyData(6), ToyData(10), 0.5, 4).item(*key).name for key in asked} != first


def test_in_the_long_run_each_comes_equally_often(rng: np.random.Generator) -> None:
    for _ in range(5):
        new, old, epochs = (int(n) for n in rng.integers(1, 20, 3))
        mixed = Mixed(ToyData(new), ToyData(old), 0.6, int(rng.integers(99)))
        seen = Counter(int(i) for epoch in range(epochs) for i in mixed.chosen(epoch))
        counts = [seen[i] for i in range(old)]
        assert sum(counts) == mixed.num_old * epochs
        assert max(counts) - min(counts) <= 1


def test_validation_is_that_of_the_new_data() -> None:
    new = Source(8, 1)
    source = Replay(new, Source(6, 2), 0.5, 0)
    train = source.split("train")
    assert source.split("valid") is new.data
    assert train is not None
    assert len(train) == 16
    assert source.split("test") is None
    assert ("replay", "50 % of the training clips are old data") in source.survey()
    assert source.fingerprint() != Replay(Source(8, 1), Source(6, 3), 0.5, 0).fingerprint()


def test_numbers_that_cant_be() -> None:
    with pytest.raises(ConfigError, match=r"data\.replay\.share=1"):
        Replay(Source(8, 1), Source(6, 2), 1.0, 0)
    other = Source(6, 2)
    other.sample_rate = 48
    with pytest.raises(ConfigError, match="48 Hz, the new 64 Hz"):
        Replay(Source(8, 1), other, 0.5, 0)
