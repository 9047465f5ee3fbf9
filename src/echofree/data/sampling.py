"""Which clips an epoch holds, when not simply all of them once: `data.sampling`.

balanced   every domain gives equally many clips
seconds    as many as its share of the seconds
sqrt       as many as its share of the square roots of the seconds: between the two
curriculum the clips with the least echo first; the harder ones come in as epochs go by

An epoch is as long as before, and what it holds depends on (seed, epoch) alone: any number of ranks sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echofree.contracts import Clip, Dataset
from echofree.data.domain import labels, seconds
from echofree.data.rounds import picks
from echofree.errors import ConfigError

KEY = "data.sampling"
STREAM = 0x5A3
WAYS = ("balanced", "seconds", "sqrt", "curriculum")


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        how: out of `WAYS`.
        by: what a domain is, see `domain.KINDS`; for curriculum always the ratio of near end to echo.
        pattern: see `domain.labels`.
        start: share of the clips, the easiest, with which a curriculum begins.
        epochs: after so many it has all.
        seed: of the picks.
    """

    how: str
    by: str = "device"
    pattern: str | None = None
    start: float = 0.3
    epochs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        found = []
        if self.how not in WAYS:
            found.append(f"{KEY}.how={self.how}: must be null or one of {', '.join(WAYS)}")
        if not 0 < self.start <= 1 or self.epochs < 1:
            found.append(f"{KEY}.start={self.start}, {KEY}.epochs={self.epochs}: give a share above 0, and 1 or more")
        if self.by == "ser" and self.how in WAYS[:3]:
            found.append(f"{KEY}.by=ser is a number, and {self.how} wants domains. Type: {KEY}.how=curriculum")
        if found:
            raise ConfigError(found)


class Resampled:
    """A dataset of the same length with other clips in it.

    Args:
        dataset: items of which epoch 0 tells the domain.
        settings: how.
    """

    def __init__(self, dataset: Dataset, settings: Settings):
        self.dataset, self.settings, self.sample_rate = dataset, settings, dataset.sample_rate
        if (longest := getattr(dataset, "longest_samples", None)) is not None:
            self.longest_samples = longest
        self._chosen: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))
        if settings.how == "curriculum":
            values = labels(dataset, "ser", settings.pattern, KEY)
            self.easiest = np.argsort(-np.nan_to_num(np.asarray(values, np.float64), nan=np.inf), kind="stable")
        else:
            self.members = members_of(labels(dataset, settings.by, settings.pattern, KEY))
            length_s = seconds(dataset)
            self.quota = shares(settings.how, [float(length_s[m].sum()) for m in self.members.values()], len(dataset))

    def __len__(self) -> int:
        return len(self.dataset)

    def item(self, index: int, epoch: int) -> Clip:
        return replace(self.dataset.item(int(self.chosen(epoch)[index]), 0), index=index)

    def chosen(self, epoch: int) -> np.ndarray:
        """[len] indices of the clips of an epoch."""
        if self._chosen[0] != epoch:
            self._chosen = (epoch, self._choose(epoch))
        return self._chosen[1]

    def _choose(self, epoch: int) -> np.ndarray:
        s = self.settings
        if s.how == "curriculum":
            share = min(1.0, s.start + (1 - s.start) * epoch / s.epochs)
            known = self.easiest[: max(1, round(share * len(self)))]
            order = np.random.default_rng([s.seed, STREAM, epoch])
            rounds = [order.permutation(known) for _ in range(-(-len(self) // len(known)))]
            return np.concatenate(rounds)[: len(self)]
        parts = [
            members[picks(len(members), count, epoch, (s.seed, STREAM, number))]
            for number, (members, count) in enumerate(zip(self.members.values(), self.quota, strict=True))
        ]
        return np.concatenate(parts)


def members_of(found: Sequence[Any]) -> dict[str, np.ndarray]:
    """Domain -> indices of its clips, domains in alphabetical order."""
    names = np.array([str(label) for label in found])
    return {name: np.flatnonzero(names == name) for name in sorted(set(names.tolist()))}


def shares(how: str, total_s: Sequence[float], count: int) -> list[int]:
    """Seconds of each domain -> clips of each in an epoch of `count`; the largest remainders are rounded up."""
    power = {"balanced": 0.0, "sqrt": 0.5, "seconds": 1.0}[how]
    weight = np.asarray(total_s, np.float64) ** power
    exact = count * weight / weight.sum()
    whole = np.floor(exact).astype(np.int64)
    for k in np.argsort(-(exact - whole), kind="stable")[: count - int(whole.sum())]:
        whole[k] += 1
    return [int(n) for n in whole]
