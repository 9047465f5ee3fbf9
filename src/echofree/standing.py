"""How clips and systems stand: which clips went worst, and what one system gains over another, clip by clip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]

NUM_WORST = 10
BOOTSTRAP_DRAWS = 1000
CONFIDENCE = 0.95

# Metric -> (value that costs nothing, value that costs 1). Echo and damage to the speech weigh the same.
COSTS = {
    "erle": (40.0, 0.0),
    "true_erle": (25.0, 0.0),
    "aecmos_echo": (5.0, 1.0),
    "aecmos_deg": (5.0, 1.0),
    "speech_survival": (1.0, 0.0),
    "talk_level": (-15.0, -40.0),
    "pesq": (4.5, 1.0),
    "sdr": (25.0, 0.0),
}
NEEDS_ECHO = ("true_erle", "pesq", "sdr")  # without an echo they tell how noisy the recording is
ECHO = ("erle", "erle_late", "aecmos_echo", "true_erle")  # how much echo is gone
SPEECH = (  # what happened to the talker
    "speech_survival", "near_gain", "level_change", "talk_level", "aecmos_deg", "pesq", "stoi", "estoi", "delay_ms"
)  # fmt: skip
BOTH = ("si_sdr", "si_sdr_improvement", "sdr")  # echo and damage in one number


def badness(row: Mapping[str, Any]) -> float:
    """0 (nothing to complain about) to 1: the mean cost of the clip's worst echo score and its worst speech score; 1
    for an output that can't be scored."""
    if row["problems"]:
        return 1.0
    sides = [side for side in (_cost(row, ECHO), _cost(row, (*SPEECH, *BOTH))) if side is not None]
    return sum(sides) / len(sides) if sides else 0.0


def _cost(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    found = []
    idle = row["scenario"] == "near_end"
    for name in names:
        value = row.get(name)
        if name not in COSTS or value is None or not math.isfinite(value) or (idle and name in NEEDS_ECHO):
            continue
        good, bad = COSTS[name]
        found.append(min(1.0, max(0.0, (value - good) / (bad - good))))
    gain = row.get("level_change") if idle and row.get("level_change") is not None else row.get("near_gain")
    if "near_gain" in names and gain is not None and math.isfinite(gain):
        found.append(min(1.0, abs(gain) / 20))
    return max(found) if found else None


def order(row: Mapping[str, Any]) -> tuple[bool, float]:
    """A key that sorts the worst first, what can't be scored before all."""
    return not row["problems"], -badness(row)


def worst(rows: Sequence[Row], system: str, count: int = NUM_WORST) -> list[dict[str, Any]]:
    """The clips on which a system does worst: name, scenario, badness, metrics, problems."""
    own = sorted((row for row in rows if row["system"] == system), key=order)[:count]
    left_out = ("system", "rtf")
    return [
        {**{k: _plain(v) for k, v in row.items() if k not in left_out}, "badness": round(badness(row), 3)}
        for row in own
    ]


def _plain(value: Any) -> Any:
    """NaN isn't JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def gains(rows: Sequence[Row], system: str, other: str, names: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """What `system` has over `other`: {scenario: {metric: {"mean", "low", "high", "count"}}} of the difference clip by
    clip, which is far surer than the difference of two means with their intervals."""
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    theirs = {(row.get("name"), row["scenario"]): row for row in rows if row["system"] == other}
    for row in rows:
        match = theirs.get((row.get("name"), row["scenario"]))
        if row["system"] == system and match is not None:
            pairs.setdefault(row["scenario"], []).append((row, match))
    found: dict[str, Any] = {}
    for scenario, both in pairs.items():
        for name in names:
            values = [
                a[name] - b[name] for a, b in both if all(x.get(name) is not None for x in (a, b))
            ]  # NaN where one is invalid
            numbers = interval(values, seed)
            if numbers is not None and numbers["mean"] is not None:
                found.setdefault(scenario, {})[name] = numbers
    return found


def interval(values: Sequence[float], seed: int) -> dict[str, Any] | None:
    """Mean, and percentile bootstrap of the mean, over the finite ones; None for no values at all."""
    defined = np.array(list(values), dtype=np.float64)
    if not len(defined):
        return None
    valid = defined[np.isfinite(defined)]
    result: dict[str, Any] = {"mean": None, "low": None, "high": None, "count": len(valid)}
    result["invalid"] = len(defined) - len(valid)
    if len(valid):
        result["mean"] = float(valid.mean())
    if len(valid) > 1:
        draws = np.random.default_rng(seed).integers(0, len(valid), (BOOTSTRAP_DRAWS, len(valid)))
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.percentile(valid[draws].mean(1), [tail, 100 - tail])
        result.update(low=float(low), high=float(high))
    return result
