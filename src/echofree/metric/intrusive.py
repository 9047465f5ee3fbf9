"""PESQ and STOI against the target, through the extra `metrics`.

Both are scored at 16 kHz; other rates are resampled with soxr, target and output alike.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from echofree.audio import resample
from echofree.errors import MissingExtra
from echofree.metric.core import NEAR_SCENARIOS, InvalidOutput, View, active_frames

RATE_HZ = 16000
MIN_ACTIVE_FRAMES = 25  # half a second of speech; with less PESQ finds no utterance and STOI no frame


def need(package: str, purpose: str) -> Any:
    """Imports a package of the extra `metrics`, or says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingExtra(package, "metrics", purpose) from None


def pesq(sample_rate: int) -> Callable[[View], float | None]:
    """PESQ wide-band (ITU-T P.862.2), 1.04 to 4.64. Undefined without a target; invalid when PESQ itself fails."""
    package = need("pesq", "The metric pesq")

    def score(view: View) -> float | None:
        pair = near_and_est(view, sample_rate)
        if pair is None:
            return None
        try:
            return float(package.pesq(RATE_HZ, *pair, "wb"))
        except Exception as error:  # the package raises its own kinds, and a ValueError for a silent output
            raise InvalidOutput(f"PESQ failed: {type(error).__name__}: {error}") from error

    return score


def stoi(sample_rate: int, extended: bool = False) -> Callable[[View], float | None]:
    """STOI (Taal et al. 2011), or ESTOI, 0 to 1. Undefined without a target."""
    package = need("pystoi", "The metric stoi")

    def score(view: View) -> float | None:
        pair = near_and_est(view, sample_rate)
        return None if pair is None else float(package.stoi(*pair, RATE_HZ, extended=extended))

    return score


def near_and_est(view: View, sample_rate: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(target, output) at 16 kHz, or None when the clip has no target with at least half a second of speech."""
    if view.near is None or view.scenario not in NEAR_SCENARIOS or active_frames(view.near).sum() < MIN_ACTIVE_FRAMES:
        return None
    near, est = (resample(x.astype(np.float32), sample_rate, RATE_HZ) for x in (view.near, view.est))
    return near, est
