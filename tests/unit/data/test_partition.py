"""Clients and draws: every clip has one owner, whole labels stay together, quotas are what was asked for."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echofree.contracts import Clip, Scenario
from echofree.data.domain import bins, labels, ser_db
from echofree.data.partition import STREAM, Settings, dealt, dirichlet, partition, report
from echofree.data.rounds import picks
from echofree.data.sampling import Resampled, shares
from echofree.data.sampling import Settings as Sampling
from echofree.data.shaped import Shaped
from echofree.data.synthetic import Synthetic
from echofree.errors import ConfigError

RATE = 16000
PATTERN = r"s(?P<speaker>\d)/r(?P<room>\d)-d(?P<device>\d)"


class Named:
    """Clips "s<speaker>/r<room>-d<device>", device 0 with most of the clips; SER falls with the index."""

    sample_rate = RATE

    def __init__(self, num: int = 40):
        self.num = num

    def __len__(self) -> int:
        return self.num

    def clip_name(self, index: int) -> str:
        return f"s{index % 5}/r{index % 3}-d{0 if index % 4 else 1}"

    def seconds(self, index: int) -> float:
        return 1.0 + index % 2

    def item(self, index: int, epoch: int) -> Clip:
        rng = np.random.default_rng([index, epoch])
        near, echo = rng.standard_normal((2, 3200)).astype(np.float32) * np.float32(0.1)
        echo = echo * np.float32(10 ** (index / 20))
        kind = (Scenario.DOUBLE_TALK, Scenario.FAR_END)[index % 2]
        return Clip(near + echo, echo, near, echo, None, kind, name=self.clip_name(index), index=index)


WAYS = [
    Settings("speaker", pattern=PATTERN),
    Settings("room", 2, pattern=PATTERN),
    Settings("scenario"),
    Settings("ser", 4),
    Settings("dirichlet", 6, alpha=0.2, seed=3),
    Settings("dirichlet", 6, alpha=0.2, classes="speaker", pattern=PATTERN),
]


@pytest.mark.parametrize("settings", WAYS, ids=lambda s: f"{s.by}-{s.num}-{s.classes}")
def test_every_clip_has_one_owner(settings: Settings) -> None:
    found, again = partition(Named(), settings), partition(Named(), settings)
    assert sorted(np.concatenate(found.clients).tolist()) == list(range(40))
    assert all(len(indices) for indices in found.clients)
    assert [list(a) for a in again.clients] == [list(a) for a in found.clients]
    assert len(found.names) == len(found.clients) == (settings.num or len(found.names))


def test_labels_stay_together() -> None:
    found = partition(Named(), Settings("speaker", 2, pattern=PATTERN))
    speakers = [{Named().clip_name(i)[1] for i in indices} for indices in found.clients]
    assert speakers[0].isdisjoint(speakers[1])
    assert found.names == [", ".join(sorted(names)) for names in speakers]


def test_the_heaviest_label_goes_first_and_to_the_emptiest() -> None:
    owner, names = dealt(["a", "b", "c", "d"], np.array([5.0, 4.0, 3.0, 2.5]), 2)
    assert owner.tolist() == [0, 1, 1, 0]  # a: 5, b: 4, then c to b (4 < 5), d to a (5 < 7)
    assert names == ["a, d", "b, c"]


def test_ser_clients_have_their_own_range() -> None:
    found = partition(Named(), Settings("ser", 4))
    values = np.array([ser_db(Named().item(i, 0), RATE) for i in range(40)])
    limits = sorted((values[c].min(), values[c].max()) for c in found.clients)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(limits))
    assert values[7] == pytest.approx(-7.0, abs=0.5)
    assert bins([3.0, float("nan"), 1.0, 2.0], 2).tolist() == [1, 1, 0, 0]  # unknown is easy


def test_dirichlet_follows_its_shares(rng: np.random.Generator) -> None:
    classes, seed = np.array(["a"] * 3000 + ["b"] * 1000), int(rng.integers(1000))
    owner, draw = dirichlet(classes.tolist(), 4, 0.5, seed), np.random.default_rng([seed, STREAM])
    for kind, size in (("a", 3000), ("b", 1000)):
        draw.permutation(size)
        share = np.bincount(owner[classes == kind], minlength=4) / size
        assert share == pytest.approx(draw.dirichlet(np.full(4, 0.5)), abs=3e-3)


def test_alpha_says_how_unlike() -> None:
    classes = np.arange(4000) % 4

    def mix(alpha: float) -> float:
        owner = dirichlet(classes.tolist(), 8, alpha, 1)
        rows = [np.bincount(classes[owner == k], minlength=4) for k in range(8)]
        return float(np.mean([0.5 * np.abs(r / r.sum() - 0.25).sum() for r in rows]))

    assert mix(0.05) > 0.5 > mix(0.5) > mix(100.0)
    assert mix(100.0) < 0.1


def test_report_of_known_clients() -> None:
    found = partition(Named(), Settings("device", pattern=PATTERN))
    rows = report(found, np.ones(40), ["double_talk" if i % 2 == 0 else "far_end" for i in range(40)])
    share, apart = np.array([0.75, 0.25]), (abs(1 / 3 - 1 / 2) + 1 / 2) / 2
    even = np.exp(-(share * np.log(share)).sum()) / 2
    assert rows == [
        ("client 0", "0: 30 clips, 30 s (33 % double_talk, 67 % far_end)"),
        ("client 1", "1: 10 clips, 10 s (100 % double_talk)"),
        ("unevenness", f"largest / smallest 3.0, evenness {even:.2f}, mix {apart:.2f}"),
    ]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"by": "rooms"}, r"data\.partition\.by=rooms: must be one of speaker"),
        ({"by": "ser"}, "needs a number of clients"),
        ({"by": "dirichlet", "num": 3, "alpha": 0.0}, "alpha=0.0: must be greater"),
    ],
)
def test_settings_that_cant_be(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings(**settings)


def test_what_the_data_doesnt_know() -> None:
    with pytest.raises(ConfigError, match=r"this data doesn't know it.*'s0/r0-d1'.*P<room>"):
        partition(Named(), Settings("room"))
    with pytest.raises(ConfigError, match="isn't found in the clip's name"):
        partition(Named(), Settings("room", pattern="x(.)"))
    with pytest.raises(ConfigError, match="there are only 3 labels"):
        partition(Named(), Settings("room", 4, pattern=PATTERN))


# --- which clips an epoch holds ---------------------------------------------------------------------------------------


def test_quotas() -> None:
    """Device 0 has 50 s, device 1 10 s: 33.3 to 6.7 of 40 by seconds, 27.6 to 12.4 by their roots."""
    for how, quota in (("balanced", (20, 20)), ("seconds", (33, 7)), ("sqrt", (28, 12))):
        data = Resampled(Named(), Sampling(how, "device", PATTERN))
        assert len(data) == 40
        assert Counter(data.item(i, 2).name[-2:] for i in range(40)) == dict(zip(("d0", "d1"), quota, strict=True))


def test_shares_add_up(rng: np.random.Generator) -> None:
    for how, power in (("balanced", 0.0), ("seconds", 1.0), ("sqrt", 0.5)):
        total, count = rng.uniform(0.1, 100, 7), int(rng.integers(7, 500))
        found = np.array(shares(how, total.tolist(), count))
        assert found.sum() == count
        assert np.abs(found - count * total**power / (total**power).sum()).max() < 1


def test_in_the_long_run_each_comes_equally_often(rng: np.random.Generator) -> None:
    for _ in range(5):
        num, per_epoch, epochs, key = (int(n) for n in rng.integers(1, 20, 4))
        seen = Counter(int(i) for e in range(epochs) for i in picks(num, per_epoch, e, (key, 5)))
        counts = [seen[i] for i in range(num)]
        assert sum(counts) == per_epoch * epochs
        assert max(counts) - min(counts) <= 1


def test_a_curriculum_begins_with_the_easiest() -> None:
    data = Resampled(Named(), Sampling("curriculum", start=0.25, epochs=3))
    for epoch, known in enumerate((10, 20, 30, 40, 40)):
        counts = Counter(int(i) for i in data.chosen(epoch))
        assert set(counts) == set(range(known))  # SER falls with the index
        assert max(counts.values()) - min(counts.values()) <= 1


def test_draws_depend_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epochs: tuple[int, ...]) -> dict[int, list[int]]:
        data = Resampled(Named(), Sampling("sqrt", "device", PATTERN, seed=seed))
        return {epoch: data.chosen(epoch).tolist() for epoch in epochs}

    assert order(1, (0, 1, 2)) == order(1, (2, 1, 0))
    assert order(1, (0,)) != order(2, (0,))


class Source:
    sample_rate = RATE

    def split(self, name: str) -> Named | None:
        return Named() if name == "train" else Named(4) if name == "valid" else None

    def fingerprint(self) -> str:
        return "x"

    def survey(self) -> list[tuple[str, str]]:
        return []


def test_one_client_of_a_source() -> None:
    settings = Settings("device", pattern=PATTERN, client=1)
    source = Shaped(Source(), settings, None)
    train, valid = source.split("train"), source.split("valid")
    assert train is not None
    assert valid is not None
    assert [train.item(i, 5).name[-2:] for i in range(len(train))] == ["d1"] * 10
    assert np.array_equal(train.item(3, 5).mic, Named().item(12, 0).mic)
    assert train.item(3, 5).index == 3
    assert len(valid) == 4
    assert source.fingerprint() != Shaped(Source(), replace(settings, client=0), None).fingerprint()
    assert [what for what, _ in source.survey()] == ["client 0", "client 1", "unevenness"]
    with pytest.raises(ConfigError, match=r"data\.partition\.client=2: there are 2 clients"):
        Shaped(Source(), replace(settings, client=2), None)


def test_labels_that_synthetic_scenes_know() -> None:
    """Told without making the scene, and true of the scene that is made."""
    data = Synthetic(num_train=6, num_valid=0, num_test=0, num_rooms=8, segment_s=1.0).split("train")
    assert data is not None
    for i in range(6):
        told, clip = data.domain(i), data.item(i, 0)
        assert told["scenario"] == clip.scenario.name.lower()
        assert told["room"].startswith("room ")
        assert (clip.scenario == Scenario.DOUBLE_TALK) == np.isfinite(told["ser"])
    assert labels(data, "device", None, "data.partition") == [data.domain(i)["device"] for i in range(6)]
