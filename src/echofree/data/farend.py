"""Where only the far end is heard in a device's recordings, found without labels.

A linear filter takes most of a lone echo away and none of a talker: where it takes away nearly as much as it ever does
on this device, for a second or more without a break, nobody talks. Soft talkers far below the echo can't be told from
its residue: what is found may hold a near end about 10 dB below the echo.

Legend: T samples, L blocks of 0.25 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCK_S = 0.25
MIN_REDUCTION_DB = 5.0  # a device on which the filter reaches less gives nothing that can be trusted
MARGIN_DB = 6.0  # below the device's own best blocks
ENOUGH_DB = 12.0  # whatever the best: a talker so far below the echo does no harm
BEST = 90  # percentile
MIN_S = 1.0
ACTIVE_SHARE = 0.4  # of a stretch in which echo is heard; the rest are pauses of the far end
LOUDNESS_DB = -40.0  # of a block's echo estimate, relative to the recording's loudest
QUIET = 1e-9  # mean square


@dataclass(frozen=True)
class Blocks:
    """A recording in blocks, [L] each.

    Attributes:
        reduction_db: what the linear filter takes away.
        active: echo is heard.
        silent: the microphone is at its noise floor.
    """

    reduction_db: np.ndarray
    active: np.ndarray
    silent: np.ndarray


def blocks(mic: np.ndarray, echo: np.ndarray, error: np.ndarray, rate_hz: int) -> Blocks:
    """Microphone, echo estimate and what is left [T] -> blocks; a last partial one is left out."""
    size = round(BLOCK_S * rate_hz)
    count = len(mic) // size
    power = [np.square(x[: count * size].astype(np.float64)).reshape(count, size).mean(1) for x in (mic, echo, error)]
    heard, estimate, left = power
    loudest = estimate.max(initial=0.0)
    active = (estimate > max(loudest * 10 ** (LOUDNESS_DB / 10), QUIET)) & (heard > QUIET)
    floor = np.percentile(heard, 10) if count else 0.0
    reduction = 10 * np.log10(np.maximum(heard, 1e-12) / np.maximum(left, 1e-12))
    return Blocks(reduction, active, (heard <= 4 * floor) & (heard <= 0.01 * heard.max(initial=0.0)))


def threshold_db(recordings: Sequence[Blocks]) -> float | None:
    """The reduction from which a block counts as echo alone; None when the filter never gets far enough."""
    values = np.concatenate([b.reduction_db[b.active] for b in recordings] or [np.zeros(0)])
    if len(values) == 0:
        return None
    best = float(np.percentile(values, BEST))
    return None if best < MIN_REDUCTION_DB else min(ENOUGH_DB, max(MIN_REDUCTION_DB, best - MARGIN_DB))


def stretches(found: Blocks, threshold: float) -> list[tuple[float, float]]:
    """(start, stop) in seconds of stretches of echo alone, at least 1 s each."""
    alone = found.active & (found.reduction_db >= threshold)
    fine = np.append(alone | (found.silent & ~found.active), False)
    result, start = [], None
    for i, good in enumerate(fine):
        if good and start is None:
            start = i
        elif not good and start is not None:
            inside = np.flatnonzero(alone[start:i])
            if len(inside):
                first, last = start + int(inside[0]), start + int(inside[-1]) + 1
                enough = (last - first) * BLOCK_S >= MIN_S and alone[first:last].mean() >= ACTIVE_SHARE
                result += [(first * BLOCK_S, last * BLOCK_S)] if enough else []
            start = None
    return result
