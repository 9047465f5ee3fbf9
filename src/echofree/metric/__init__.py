"""Metrics by name. `core` needs nothing more than scipy; `intrusive` and `aecmos` need the extra `metrics`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import cache

from echofree.errors import ConfigError
from echofree.metric import core
from echofree.metric.aecmos import AecmosModel, aecmos
from echofree.metric.core import ClipMetric, View
from echofree.metric.intrusive import pesq, stoi

CORE = (
    "si_sdr",
    "si_sdr_improvement",
    "sdr",
    "erle",
    "erle_late",
    "true_erle",
    "near_gain",
    "speech_survival",
    "delay_ms",
    "level_change",
    "talk_level",
)
EXTRA = ("pesq", "stoi", "estoi", "aecmos_echo", "aecmos_deg")
LOWER_IS_BETTER = ("delay_ms",)
ALIGNED = ("si_sdr", "si_sdr_improvement", "sdr", "pesq", "stoi", "estoi")  # those that a shift between waves ruins

__all__ = ["ALIGNED", "CORE", "EXTRA", "AecmosModel", "ClipMetric", "default_metrics"]


def default_metrics(
    names: Iterable[str], sample_rate: int, aecmos_cut: str = "whole", align: bool = False
) -> list[ClipMetric]:
    """Builds the metrics named.

    Args:
        names: of `CORE` (cheap, a few ms a clip) and `EXTRA` (0.1 to 0.5 s a clip; need the extra `metrics`).
        sample_rate: Hz of the waves that will be scored.
        aecmos_cut: see `aecmos.cut_span`: whole | challenge.
        align: the metrics of `ALIGNED` see the output with its delay taken out (`core.aligned`).

    Raises:
        ConfigError: a name that doesn't exist.
        MissingExtra: a metric whose package isn't installed.
    """
    model = cache(lambda: AecmosModel(sample_rate, aecmos_cut))  # one for both of its scores
    makers: dict[str, Callable[[], Callable[[View], float | None]]] = {
        "si_sdr": lambda: core.clip_si_sdr,
        "si_sdr_improvement": lambda: core.clip_si_sdr_improvement,
        "sdr": lambda: core.clip_sdr,
        "erle": lambda: lambda view: core.clip_erle(view, sample_rate),
        "erle_late": lambda: lambda view: core.clip_erle(view, sample_rate, start_s=3.0),
        "true_erle": lambda: core.clip_true_erle,
        "near_gain": lambda: lambda view: core.clip_near_gain(view, sample_rate),
        "speech_survival": lambda: core.clip_survival,
        "delay_ms": lambda: lambda view: core.clip_delay_ms(view, sample_rate),
        "level_change": lambda: lambda view: core.clip_level_change(view, sample_rate),
        "talk_level": lambda: core.clip_talk_level,
        "pesq": lambda: pesq(sample_rate),
        "stoi": lambda: stoi(sample_rate),
        "estoi": lambda: stoi(sample_rate, extended=True),
        "aecmos_echo": lambda: aecmos(model(), "echo"),
        "aecmos_deg": lambda: aecmos(model(), "deg"),
    }
    names = list(names)
    problems = []
    for name in names:
        if name not in makers:
            close = difflib.get_close_matches(name, makers, 1)
            hint = f"did you mean {close[0]}? " if close else ""
            problems.append(f"metrics: {name!r} doesn't exist; {hint}There are: {', '.join(makers)}")
    if problems:
        raise ConfigError(problems)
    shifts = ALIGNED if align else ()
    scores = {name: makers[name]() for name in names}
    scores |= {name: _aligned(score, sample_rate) for name, score in scores.items() if name in shifts}
    return [ClipMetric(name, scores[name], name not in LOWER_IS_BETTER) for name in names]


def _aligned(score: Callable[[View], float | None], sample_rate: int) -> Callable[[View], float | None]:
    return lambda view: score(core.aligned(view, sample_rate))
