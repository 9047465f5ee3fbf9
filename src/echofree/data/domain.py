"""What tells the clips of a corpus apart: who speaks, in which room, on which device, how loud the echo is.

A dataset may know it (`domain(index)`, as synthetic scenes do); for files a pattern finds it in their names; the ratio
of near end to echo is measured where a clip knows both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from echofree.contracts import Dataset
from echofree.data.level import active_mask, frame_energy
from echofree.errors import ConfigError

NAMED = ("speaker", "room", "device")
KINDS = (*NAMED, "scenario", "ser")


def labels(dataset: Dataset, by: str, pattern: str | None, key: str) -> list[Any]:
    """What `by` says of each clip of epoch 0: a text, for ser dB (NaN where there is no near end or no echo).

    Args:
        by: out of `KINDS`.
        pattern: a regular expression that is searched in a clip's name; its group of the name `by`, or its first one.
        key: where `by` stands in the config, for error texts.

    Raises:
        ConfigError: nothing is known of that kind.
    """
    if by not in KINDS:
        raise ConfigError(f"{key}.by={by}: must be one of {', '.join(KINDS)}")
    known = getattr(dataset, "domain", None)
    if pattern is not None:
        return [_found(pattern, by, _name(dataset, i), key) for i in range(len(dataset))]
    if known is not None and len(dataset) and by in known(0):
        return [known(i)[by] for i in range(len(dataset))]
    if by == "scenario":
        return [dataset.item(i, 0).scenario.name.lower() for i in range(len(dataset))]
    if by == "ser":
        return [ser_db(dataset.item(i, 0), dataset.sample_rate) for i in range(len(dataset))]
    raise ConfigError(
        f"{key}.by={by}: this data doesn't know it. Say where it stands in the names, such as {_name(dataset, 0)!r}: "
        f"'{key}.pattern=\"^(?P<{by}>[^/_-]+)\"'"
    )


def _name(dataset: Dataset, index: int) -> str:
    named = getattr(dataset, "clip_name", None)
    return str(named(index)) if named is not None else dataset.item(index, 0).name


def _found(pattern: str, by: str, name: str, key: str) -> str:
    try:
        match = re.search(pattern, name)
    except re.error as error:
        raise ConfigError(f"{key}.pattern={pattern}: no regular expression ({error})") from error
    if match is None:
        raise ConfigError(f"{key}.pattern={pattern}: isn't found in the clip's name {name!r}")
    return match[by] if by in match.re.groupindex else match[min(1, match.re.groups)]


def ser_db(clip: Any, rate_hz: int) -> float:
    """Near end over echo where each is active, dB; NaN when one of them is silent or unknown."""
    if clip.near is None or clip.echo is None:
        return math.nan
    energies = [frame_energy(wave, rate_hz) for wave in (clip.near, clip.echo)]
    means = [float(e[active_mask(e)].mean()) if active_mask(e).any() else 0.0 for e in energies]
    return 10 * math.log10(means[0] / means[1]) if min(means) > 0 else math.nan


def seconds(dataset: Dataset) -> np.ndarray:
    """[len(dataset)] of each clip."""
    told = getattr(dataset, "seconds", None)
    if told is not None:
        return np.array([told(i) for i in range(len(dataset))], np.float64)
    return np.array([len(dataset.item(i, 0).mic) / dataset.sample_rate for i in range(len(dataset))], np.float64)


def bins(values: Sequence[float], num: int) -> np.ndarray:
    """Equally many values in each of `num` bins, the lowest first; NaN counts as the highest, which is easy: no echo,
    or nobody to protect. -> [len(values)] int64"""
    order = np.argsort(np.nan_to_num(np.asarray(values, np.float64), nan=np.inf), kind="stable")
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order)) * num // max(1, len(order))
    return found
