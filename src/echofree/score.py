"""Scoring: systems x clips -> rows -> a summary per scenario. Knows nothing of Hydra, files or the command line.

A recording is processed from its start, as a device would hear it; what is scored is its labelled stretch. No system
and no clip can end an evaluation: whatever fails is a row with the reason in "problems", counted in the summary.

Legend: B batch, T samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from echofree.contracts import Clip, Dataset, Scenario
from echofree.data.collate import collate
from echofree.metric import ClipMetric
from echofree.metric.core import TALK_MUTED_DB
from echofree.standing import gains, interval, worst


@runtime_checkable
class Foreign(Protocol):
    """A system that isn't of this process (`echofree.foreign`)."""

    def est(self, index: int, clip: Clip) -> tuple[np.ndarray, float | None]:
        """-> (estimate [T], real-time factor or None). What it raises is the clip's problem."""


System = Callable[[Tensor, Tensor], Tensor] | Foreign
"""mic, far [B, T] -> est [B, T]; or one that is asked clip by clip."""

Row = dict[str, Any]

BATCH_S = 120.0  # padded seconds of audio processed at once
MIN_SURVIVAL = 0.5  # below this share of near-end speech a system's echo scores say nothing
MAX_DELAY_MS = 1.0
WON_BY_MUTING = ("erle", "erle_late", "aecmos_echo", "aecmos_deg")


def score(
    systems: Mapping[str, System],
    dataset: Dataset,
    metrics: Sequence[ClipMetric],
    limit: int | None = None,
    target: bool = False,
    done: Callable[[int], None] = lambda n: None,
    heard: Callable[[str, Clip, np.ndarray], None] | None = None,
) -> list[Row]:
    """Runs every system over every clip and scores every stretch.

    Args:
        systems: by name, in the order of the table.
        dataset: its clips of epoch 0. If it has `stretch(index)`, giving (first, stop) in samples, that part of each
            clip is scored, otherwise all of it.
        metrics: see `echofree.metric`.
        limit: the first clips only.
        target: adds a system of that name whose output is the clip's own near end, where it has one: the ceiling.
        done: called with the number of clips just finished.
        heard: called with (system, clip, estimate [T]), for example to write files.

    Returns:
        Rows of name, system, scenario, start_s and seconds (of the stretch scored), rtf, problems (a list of texts),
        and every metric: a float, NaN where invalid, None where undefined.
    """
    count = len(dataset) if limit is None else min(limit, len(dataset))
    stretch = getattr(dataset, "stretch", None)
    rows: list[Row] = []
    for clips, failures in _batches(dataset, count):
        rows += [_failed(system, f"clip {i}", reason, metrics) for i, reason in failures for system in systems]
        outputs = [(name, found) for name, run in systems.items() for found in process(run, clips, dataset.sample_rate)]
        if target:
            known = [(i, c) for i, c in clips if c.near is not None and c.scenario != Scenario.FAR_END]
            outputs += [("target", ((i, c), c.near, None, "")) for i, c in known]
        for system, ((index, clip), est, rtf, problem) in outputs:
            if est is not None and heard is not None:
                heard(system, clip, est)
            first, stop = (0, len(clip.mic)) if stretch is None else stretch(index)
            row = _score(clip, est, first, stop, metrics, dataset.sample_rate, problem)
            rows.append({**row, "system": system, "rtf": rtf})
        done(len(clips) + len(failures))
    return rows


Indexed = tuple[int, Clip]


def _batches(dataset: Dataset, count: int) -> Iterator[tuple[list[Indexed], list[tuple[int, str]]]]:
    """Clips in order, together while they fit into `BATCH_S` padded seconds, and those that couldn't be made."""
    clips: list[Indexed] = []
    failures: list[tuple[int, str]] = []
    for i in range(count):
        try:
            clip = dataset.item(i, 0)
        except Exception as error:  # a broken file is a row of the table, not the end of it
            failures.append((i, f"{type(error).__name__}: {error}"))
            continue
        longest = max([len(clip.mic), *(len(c.mic) for _, c in clips)])
        if clips and longest * (len(clips) + 1) > BATCH_S * dataset.sample_rate:
            yield clips, failures
            clips, failures = [], []
        clips.append((i, clip))
    if clips or failures:
        yield clips, failures


def process(
    run: System, clips: list[Indexed], sample_rate: int
) -> Iterator[tuple[Indexed, np.ndarray | None, float | None, str]]:
    """-> (clip, estimate [T] or None, real-time factor, problem) for every clip. A batch that fails is tried clip by
    clip, so that one bad clip doesn't take the others along."""
    if isinstance(run, Foreign):
        yield from (_ask(run, clip) for clip in clips)
        return
    if not clips:
        return
    batch = collate([clip for _, clip in clips], sample_rate)
    start = time.perf_counter()
    try:
        with torch.no_grad():
            est = run(batch.mic, batch.far)
        if est.shape != batch.mic.shape:
            raise ValueError(f"the output has the shape {tuple(est.shape)}, the microphone {tuple(batch.mic.shape)}")
        waves = est.detach().float().cpu().numpy()
    except Exception as error:  # named in the row of the clip
        if len(clips) == 1:
            yield clips[0], None, None, f"{type(error).__name__}: {error}"
            return
        for clip in clips:
            yield from process(run, [clip], sample_rate)
        return
    rtf = (time.perf_counter() - start) / (batch.mic.numel() / sample_rate)
    for clip, wave in zip(clips, waves):
        yield clip, wave[: len(clip[1].mic)], rtf, ""


def _ask(run: Foreign, clip: Indexed) -> tuple[Indexed, np.ndarray | None, float | None, str]:
    try:
        wave, rtf = run.est(*clip)
    except Exception as error:  # named in the row of the clip
        return clip, None, None, f"{type(error).__name__}: {error}"
    return clip, wave, rtf, ""


def _score(
    clip: Clip,
    est: np.ndarray | None,
    first: int,
    stop: int,
    metrics: Sequence[ClipMetric],
    sample_rate: int,
    problem: str,
) -> Row:
    """The row of one clip: every metric over samples [first, stop)."""
    row: Row = {"name": clip.name, "index": clip.index, "scenario": clip.scenario.name.lower()}
    row |= {"start_s": first / sample_rate, "seconds": (stop - first) / sample_rate}
    if est is not None and not 0 <= first < stop <= len(clip.mic):
        est, problem = None, f"samples {first} to {stop} lie outside the recording of {len(clip.mic)}"
    if est is None:
        return {**row, **{m.name: math.nan for m in metrics}, "problems": [problem]}
    cut = replace(
        clip,
        mic=clip.mic[first:stop],
        far=clip.far[first:stop],
        near=None if clip.near is None else clip.near[first:stop],
        echo=None if clip.echo is None else clip.echo[first:stop],
        noise=None if clip.noise is None else clip.noise[first:stop],
    )
    batch, wave = collate([cut], sample_rate), torch.from_numpy(est[first:stop].copy())[None]
    problems: list[str] = []
    for metric in metrics:
        metric.failures.clear()
        value, weight = metric(wave, batch)
        row[metric.name] = float(value[0]) if weight[0] > 0 else None
        problems += [text.removeprefix(f"{clip.name}: ") for text in metric.failures]
    return {**row, "problems": problems}


def _failed(system: str, clip: str, reason: str, metrics: Sequence[ClipMetric]) -> Row:
    row: Row = {"name": clip, "system": system, "scenario": "unknown", "start_s": 0.0, "seconds": 0.0}
    return {**row, "rtf": None, **{m.name: math.nan for m in metrics}, "problems": [reason]}


def summarise(rows: Sequence[Row], metric_names: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """-> {system: {"scenarios": {scenario: {"clips", "metrics": {name: statistics}}}, "rtf", "flags", "failed",
    "worst", "gains"}}.

    Statistics: "mean" over the clips for which the metric is defined and valid, "low" and "high" (95 % percentile
    bootstrap of the mean over clips; None for fewer than two), "count", "invalid", and "valid": False where the system
    mutes the near end and the metric would reward that. "worst": the ten clips on which it does worst. "gains": what it
    has over each system that stands before it, clip by clip.
    """
    systems: dict[str, Any] = {}
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        muted, flags = _flags(own)
        scenarios = {}
        for scenario in dict.fromkeys(row["scenario"] for row in own):
            part = [row for row in own if row["scenario"] == scenario]
            found = {name: _statistics([row.get(name) for row in part], seed) for name in metric_names}
            for name, numbers in found.items():
                if numbers is not None:
                    numbers["valid"] = not (muted and name in WON_BY_MUTING)
            scenarios[scenario] = {
                "clips": len(part),
                "metrics": {name: numbers for name, numbers in found.items() if numbers is not None},
            }
        rtfs = [row["rtf"] for row in own if row["rtf"] is not None]
        systems[system] = {
            "scenarios": scenarios,
            "rtf": float(np.median(rtfs)) if rtfs else None,
            "flags": flags,
            "failed": sum(1 for row in own if row["problems"]),
            "worst": worst(rows, system),
            "gains": {other: gains(rows, system, other, metric_names, seed) for other in systems},
        }
    return systems


def _statistics(values: Sequence[float | None], seed: int) -> dict[str, Any] | None:
    """None when the metric says nothing about any of the clips."""
    return interval([v for v in values if v is not None], seed)


def _flags(rows: Sequence[Row]) -> tuple[bool, list[str]]:
    """-> (whether the system mutes the near end, what a reader must know before believing its scores)."""
    flags = []
    muted = False
    for scenario in dict.fromkeys(row["scenario"] for row in rows):  # one that mutes in double talk alone hides there
        part = [row for row in rows if row["scenario"] == scenario and row.get("speech_survival") is not None]
        kept = float(np.mean(np.nan_to_num([row["speech_survival"] for row in part]))) if part else 1.0
        if kept < MIN_SURVIVAL:  # an invalid output has kept nothing
            muted = True
            flags.append(
                f"mutes the near end: only {100 * kept:.0f} % of its speech is left in {scenario.replace('_', ' ')}; "
                "echo scores don't count"
            )
    levels = [row["talk_level"] for row in rows if row.get("talk_level") is not None]
    if levels and not np.median(np.nan_to_num(levels, nan=-math.inf)) >= TALK_MUTED_DB:
        muted = True
        flags.append(
            "mutes double talk: even its loudest parts are more than "
            f"{-TALK_MUTED_DB:.0f} dB below the microphone in half of the recordings; echo scores don't count"
        )
    blind = all(row.get("speech_survival") is None and row.get("talk_level") is None for row in rows)
    if blind and any("speech_survival" in row for row in rows):
        flags.append("no clip with a known near end: a canceller that mutes everything would not be noticed here")
    delays = [row["delay_ms"] for row in rows if row.get("delay_ms") is not None and math.isfinite(row["delay_ms"])]
    late = [delay for delay in delays if delay > MAX_DELAY_MS]
    if delays and float(np.median(delays)) > MAX_DELAY_MS:
        flags.append(
            f"the output is off the near end by about {float(np.median(delays)):.1f} ms, in {len(late)} of "
            f"{len(delays)} clips by more than {MAX_DELAY_MS:g} ms; with align=none SI-SDR means little then"
        )
    return muted, flags
