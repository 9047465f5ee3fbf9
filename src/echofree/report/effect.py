"""Which setting of a sweep matters: how much of the spread of the results goes with each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_LEVELS = 6  # a setting with more values than these is read as a number
DRAWS = 500


def effects(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """-> {"metric", "mode", "settings": [...], "runs", "unscored"}, the settings that matter most first.

    Each has "key", "values" (one for each run, None where it has none), "levels" (value, mean, low, high, count, best),
    "share": the part of the variance of the best value that the setting explains alone (eta squared over its levels;
    for numbers with many values R squared of a parabola over the value or its logarithm), "by_chance": the share that
    a setting without any effect would reach on average here, and "p": how often chance alone reaches `share`.
    """
    results = [run["best"] for run in runs]
    keys = list(dict.fromkeys(key for run in runs for key in run["settings"]))
    varied = [key for key in keys if len({json.dumps(run["config"].get(key)) for run in runs}) > 1]
    if not varied:  # jobs that differ in something that the command line doesn't name
        keys = list(dict.fromkeys(key for run in runs for key in run["config"]))
        varied = [key for key in keys if len({json.dumps(run["config"].get(key)) for run in runs}) > 1]
    varied = [key for key in varied if key not in ("name", "output_root", "resume")]
    scored = [i for i, value in enumerate(results) if value is not None]
    settings = []
    for key in varied:
        values = [run["config"].get(key) for run in runs]
        y = np.array([results[i] for i in scored], dtype=np.float64)
        x = [values[i] for i in scored]
        share, chance, p = explained(x, y)
        settings.append(
            {
                "key": key, "values": values, "levels": levels(x, y, runs[0]["mode"]), "numeric": numeric(x),
                "log": spans_decades(x), "share": share, "by_chance": chance, "p": p,
            }
        )  # fmt: skip
    settings.sort(key=lambda s: -(s["share"] if s["share"] is not None else -1))
    return {
        "metric": runs[0]["metric"], "mode": runs[0]["mode"], "settings": settings, "runs": len(runs),
        "unscored": len(runs) - len(scored),
    }  # fmt: skip


def explained(x: Sequence[Any], y: np.ndarray, seed: int = 0) -> tuple[float | None, float | None, float | None]:
    """-> (share of the variance of y [N] that x explains, the mean share over shuffled y, how often a shuffle reaches
    the real one); None for fewer than 3 results or without any spread."""
    if len(y) < 3 or float(np.ptp(y)) == 0 or len({json.dumps(v) for v in x}) < 2:
        return None, None, None
    basis = _basis(x)
    share = _share(basis, y)
    rng = np.random.default_rng(seed)
    shuffled = np.array([_share(basis, rng.permutation(y)) for _ in range(DRAWS)])
    return share, float(shuffled.mean()), float((shuffled >= share - 1e-12).mean())


def _share(basis: np.ndarray, y: np.ndarray) -> float:
    centred = y - y.mean()
    fitted = basis @ (basis.T @ centred)
    return float(np.clip(fitted @ fitted / (centred @ centred), 0, 1))


def _basis(x: Sequence[Any]) -> np.ndarray:
    """[N, K]: orthonormal columns over the runs, all orthogonal to the constant."""
    kinds = list(dict.fromkeys(json.dumps(v) for v in x))
    if numeric(x) and len(kinds) > MAX_LEVELS:
        v = np.array(x, dtype=np.float64)
        v = np.log10(v) if spans_decades(x) else v
        columns = np.stack([v, v**2], axis=1)
    else:
        columns = np.array([[json.dumps(v) == kind for kind in kinds] for v in x], dtype=np.float64)
    columns = columns - columns.mean(0)
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(u[:, s > 1e-9 * max(s[0], 1e-300)])


def levels(x: Sequence[Any], y: np.ndarray, mode: str) -> list[dict[str, Any]]:
    """For each value: how many runs, their mean, extremes and best."""
    found = []
    for kind in dict.fromkeys(json.dumps(v) for v in x):
        part = np.array([result for v, result in zip(x, y, strict=True) if json.dumps(v) == kind])
        found.append(
            {
                "value": json.loads(kind), "count": len(part), "mean": float(part.mean()), "low": float(part.min()),
                "high": float(part.max()), "best": float(part.max() if mode == "max" else part.min()),
            }
        )  # fmt: skip
    if numeric(x):
        found.sort(key=lambda level: level["value"])
    return found


def numeric(x: Sequence[Any]) -> bool:
    return bool(x) and all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in x)


def spans_decades(x: Sequence[Any]) -> bool:
    """Whether a logarithm shows the values better."""
    return numeric(x) and min(x) > 0 and max(x) / min(x) >= 8
