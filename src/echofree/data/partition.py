"""A corpus shared out over clients that differ, as devices in the field do, and a report of how much they differ.

By a label (speaker, room, device, scenario: whole labels go to one client), by the ratio of near end to echo (each
client has its own range), or by a Dirichlet draw: of each class, client k gets the share p_k, p ~ Dir(alpha), as Hsu
et al. 2019 (arXiv 1909.06335) do for images. A small alpha makes clients that hardly share a class, a large one makes
them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echofree.contracts import Clip, Dataset
from echofree.data.domain import KINDS, bins, labels, seconds
from echofree.errors import ConfigError

KEY = "data.partition"
STREAM = 0xD17
WAYS = (*KINDS, "dirichlet")


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        by: out of `WAYS`.
        num: clients; None: one for each label.
        client: whose clips are trained on; None: everybody's.
        alpha: of the Dirichlet draw, above 0.
        classes: what the Dirichlet draw shares out: out of `domain.KINDS` but ser.
        pattern: see `domain.labels`.
        seed: of the draw.
    """

    by: str
    num: int | None = None
    client: int | None = None
    alpha: float = 0.5
    classes: str = "scenario"
    pattern: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        found = []
        if self.by not in WAYS:
            found.append(f"{KEY}.by={self.by}: must be one of {', '.join(WAYS)}")
        if self.num is None and self.by in ("ser", "dirichlet"):
            found.append(f"{KEY}.by={self.by} needs a number of clients. Type: {KEY}.num=8")
        if self.num is not None and self.num < 1:
            found.append(f"{KEY}.num={self.num}: must be at least 1")
        if not self.alpha > 0:
            found.append(f"{KEY}.alpha={self.alpha}: must be greater than 0. Type: {KEY}.alpha=0.5")
        if found:
            raise ConfigError(found)


@dataclass(frozen=True)
class Partition:
    """
    Attributes:
        names: of the clients.
        clients: [number of its clips] indices of each, ascending; every clip has one client.
    """

    names: list[str]
    clients: list[np.ndarray]


def partition(dataset: Dataset, settings: Settings) -> Partition:
    """
    Raises:
        ConfigError: more clients than labels or clips.
    """
    count = len(dataset)
    if settings.num is not None and settings.num > count:
        raise ConfigError(f"{KEY}.num={settings.num}: there are only {count} clips")
    if settings.by == "dirichlet":
        assert settings.num is not None
        classes = labels(dataset, settings.classes, settings.pattern, KEY)
        owner = dirichlet(classes, settings.num, settings.alpha, settings.seed)
        names = [f"client {k}" for k in range(settings.num)]
    elif settings.by == "ser":
        assert settings.num is not None
        values = np.asarray(labels(dataset, "ser", settings.pattern, KEY), np.float64)
        owner = bins(list(values), settings.num)
        names = [_range(values[owner == k]) for k in range(settings.num)]
    else:
        found = [str(label) for label in labels(dataset, settings.by, settings.pattern, KEY)]
        owner, names = dealt(found, seconds(dataset), settings.num)
    return Partition(names, [np.flatnonzero(owner == k) for k in range(len(names))])


def _range(values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    return f"SER {known.min():.1f} to {known.max():.1f} dB" if len(known) else "no SER"


def dealt(found: Sequence[str], weight: np.ndarray, num: int | None) -> tuple[np.ndarray, list[str]]:
    """Whole labels to clients: the heaviest first, each to the client that has least. -> (owner of each clip, names)

    Raises:
        ConfigError: more clients than labels.
    """
    kinds = sorted(set(found))
    if num is not None and num > len(kinds):
        raise ConfigError(f"{KEY}.num={num}: there are only {len(kinds)} labels: {', '.join(kinds[:8])}")
    total = {kind: float(sum(w for label, w in zip(found, weight, strict=True) if label == kind)) for kind in kinds}
    load = np.zeros(num or len(kinds))
    client: dict[str, int] = {}
    for place, kind in enumerate(kinds if num is None else sorted(kinds, key=lambda k: (-total[k], k))):
        client[kind] = place if num is None else int(load.argmin())
        load[client[kind]] += total[kind]
    names = [", ".join(kind for kind in kinds if client[kind] == k) for k in range(len(load))]
    return np.array([client[label] for label in found], np.int64), names


def dirichlet(classes: Sequence[Any], num: int, alpha: float, seed: int) -> np.ndarray:
    """-> owner of each clip [len(classes)], 0 to num - 1; no client is left without a clip."""
    rng = np.random.default_rng([seed, STREAM])
    owner = np.empty(len(classes), np.int64)
    values = np.array([str(c) for c in classes])
    for kind in sorted(set(values.tolist())):
        mine = rng.permutation(np.flatnonzero(values == kind))
        cuts = np.cumsum(rng.dirichlet(np.full(num, alpha)))[:-1]
        for k, part in enumerate(np.split(mine, np.round(cuts * len(mine)).astype(np.int64))):
            owner[part] = k
    for k in range(num):
        if not (owner == k).any():
            richest = int(np.bincount(owner, minlength=num).argmax())
            owner[rng.choice(np.flatnonzero(owner == richest))] = k
    return owner


class Part:
    """Some clips of a dataset: always those of epoch 0, since what is made anew each epoch would change its client."""

    def __init__(self, dataset: Dataset, indices: np.ndarray):
        self.dataset, self.indices, self.sample_rate = dataset, indices, dataset.sample_rate
        if (longest := getattr(dataset, "longest_samples", None)) is not None:
            self.longest_samples = longest

    def __len__(self) -> int:
        return len(self.indices)

    def item(self, index: int, epoch: int) -> Clip:
        return replace(self.dataset.item(int(self.indices[index]), 0), index=index)


def report(found: Partition, length_s: np.ndarray, kinds: Sequence[str]) -> list[tuple[str, str]]:
    """How uneven it is: a row per client, and three numbers.

    "evenness" is exp(entropy of the clients' seconds) / clients: 1 when all have equally much. "mix" is the mean total
    variation distance between a client's scenarios and everybody's: 0 when all hear the same, near 1 when each hears
    something of its own.

    Args:
        length_s: of each clip.
        kinds: scenario of each clip.
    """
    everyone = _mix(kinds, sorted(set(kinds)))
    rows: list[tuple[str, str]] = []
    totals: list[float] = []
    apart: list[float] = []
    for name, indices in zip(found.names, found.clients, strict=True):
        mix = _mix([kinds[i] for i in indices], sorted(set(kinds)))
        totals.append(float(length_s[indices].sum()))
        apart.append(0.5 * float(np.abs(mix - everyone).sum()))
        told = ", ".join(f"{100 * m:.0f} % {kind}" for kind, m in zip(sorted(set(kinds)), mix, strict=True) if m > 0)
        rows.append((f"client {len(rows)}", f"{name}: {len(indices)} clips, {totals[-1]:.0f} s ({told})"))
    share = np.asarray(totals) / max(sum(totals), 1e-9)
    entropy = -float(np.sum(share[share > 0] * np.log(share[share > 0])))
    ratio, even = max(totals) / max(min(totals), 1e-9), np.exp(entropy) / len(totals)
    text = f"largest / smallest {ratio:.1f}, evenness {even:.2f}, mix {np.mean(apart):.2f}"
    rows.append(("unevenness", text))
    return rows


def _mix(kinds: Sequence[str], order: Sequence[str]) -> np.ndarray:
    return np.array([sum(k == kind for k in kinds) for kind in order], np.float64) / max(1, len(kinds))
