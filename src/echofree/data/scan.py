"""A look at every recording before training: what can be used, what can't and why.

Legend: T samples.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from echofree import audio
from echofree.contracts import Scenario
from echofree.data.device import fast_length
from echofree.data.match import LeftOut
from echofree.data.recording import Reading, Recording
from echofree.errors import DataError

SILENT_PEAK = 1e-4  # -80 dBFS
CLEAR_CORRELATION = 0.3  # below it, near end and microphone say nothing about their alignment
SEARCH_S = 0.2
LOOK_S = 20.0  # seconds of a recording that the alignment check reads
MAX_EXAMPLES = 3


@dataclass(frozen=True)
class ScanOptions:
    """What is looked at.

    Attributes:
        decode: read all samples (finds silence, truncated FLAC, misaligned targets), or headers only.
        min_s: shorter recordings are left out.
        max_label_offset_ms: a near file that leads or lags the microphone by more is left out.
    """

    decode: bool = True
    min_s: float = 0.3
    max_label_offset_ms: float = 8.0


@dataclass
class Scan:
    """What a scan found.

    Attributes:
        recordings: usable ones, with duration and, where it could be told, scenario.
        left_out: the others, and files that fit nothing.
        rates: how many microphone files have which rate, Hz.
        notes: counts of what was repaired, such as far ends that were padded.
    """

    recordings: list[Recording] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    rates: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)


def scan(candidates: Sequence[Recording], reading: Reading, options: ScanOptions) -> Scan:
    """Looks at all candidates, several at a time."""
    result = Scan()
    with ThreadPoolExecutor(min(8, (os.cpu_count() or 1) * 2)) as pool:
        for found in pool.map(lambda r: check(r, reading, options), candidates):
            if isinstance(found, LeftOut):
                result.left_out.append(found)
            else:
                recording, rate_hz, notes = found
                result.recordings.append(recording)
                result.rates[rate_hz] += 1
                result.notes.update(notes)
    return result


def check(recording: Recording, reading: Reading, options: ScanOptions) -> LeftOut | tuple[Recording, int, list[str]]:
    """One recording -> why it's left out, or (it with its duration, the microphone's rate in Hz, notes)."""
    headers: dict[str, audio.AudioInfo] = {}
    for role in ("mic", "far", "near", "echo"):
        path: Path | None = getattr(recording, role)
        if path is None:
            continue
        try:
            headers[role] = audio.info(path)
        except DataError as error:
            return LeftOut(recording.name, f"{role}: {reason_of(error, path)}")
        if headers[role].channels > 1 and reading.channel == "error":
            return LeftOut(
                recording.name,
                f"{role}: {headers[role].channels} channels; say data.channel=mean, first, or a number from 0",
            )
    if recording.far is None and recording.scenario not in (Scenario.NEAR_END, Scenario.SILENCE):
        return LeftOut(recording.name, "no far-end file")
    mic = headers["mic"]
    recording = replace(recording, duration_s=mic.duration_s)
    if recording.stop_s - recording.start_s < options.min_s:
        return LeftOut(recording.name, f"shorter than data.min_s={options.min_s:g} s")
    notes = _length_notes(headers)
    if not options.decode:
        return recording, mic.rate_hz, notes
    try:
        return _look_inside(recording, reading, options, mic.rate_hz, notes)
    except DataError as error:
        return LeftOut(recording.name, reason_of(error, *recording.paths))


def label_offset(near: np.ndarray, mic: np.ndarray, rate_hz: int) -> tuple[int, float]:
    """Where the near end sits in the microphone: -> (samples by which the microphone lags, normalised correlation
    there).

    Searched within +-0.2 s. A target made without its travel time lags 0 to a few ms; a shifted one shows its shift.
    """
    size = fast_length(len(mic) + len(near))
    cross = np.fft.irfft(np.fft.rfft(mic, size) * np.conj(np.fft.rfft(near, size)), size)
    reach = min(round(SEARCH_S * rate_hz), size // 2 - 1)
    window = np.concatenate([cross[-reach:], cross[: reach + 1]])
    at = int(np.argmax(np.abs(window)))
    scale = float(np.sqrt(np.sum(np.square(near, dtype=np.float64)) * np.sum(np.square(mic, dtype=np.float64))))
    return at - reach, float(abs(window[at])) / max(scale, 1e-12)


def reason_of(error: DataError, *paths: Path) -> str:
    """An error's text without the file's name, so that equal reasons are counted together."""
    text = str(error)
    for path in paths:
        text = text.removeprefix(f"{path}: ")
    return text.rstrip(".")


def _look_inside(
    recording: Recording, reading: Reading, options: ScanOptions, rate_hz: int, notes: list[str]
) -> LeftOut | tuple[Recording, int, list[str]]:
    stretch = (recording.start_s, recording.stop_s)
    mic = reading.read(recording.mic, *stretch)
    if _silent(mic):
        return LeftOut(recording.name, "mic: silent")
    far_silent = recording.far is None or _silent(reading.read(recording.far, *stretch))
    near = reading.read(recording.near, *stretch) if recording.near else None
    if recording.echo is not None:
        reading.read(recording.echo, *stretch)  # proves that it can be read
    scenario = recording.scenario
    if far_silent and scenario in (Scenario.FAR_END, Scenario.DOUBLE_TALK):
        return LeftOut(recording.name, f"far: silent in a {scenario.name.lower()} recording")
    if scenario == Scenario.UNKNOWN:
        scenario = _guess(far_silent, near)
    if near is not None and not _silent(near):
        length = round(LOOK_S * reading.sample_rate)
        offset, clarity = label_offset(near[:length], mic[:length], reading.sample_rate)
        offset_ms = 1000.0 * offset / reading.sample_rate
        if clarity > CLEAR_CORRELATION and abs(offset_ms) > options.max_label_offset_ms:
            return LeftOut(
                recording.name, f"near: {abs(offset_ms):.0f} ms {'ahead of' if offset > 0 else 'behind'} the microphone"
            )
    return replace(recording, scenario=scenario), rate_hz, notes


def _silent(wave: np.ndarray) -> bool:
    return float(np.abs(wave).max(initial=0.0)) < SILENT_PEAK


def _guess(far_silent: bool, near: np.ndarray | None) -> Scenario:
    """From what is silent; without a near file only a silent far end tells anything."""
    if far_silent:
        return Scenario.SILENCE if near is not None and _silent(near) else Scenario.NEAR_END
    if near is None:
        return Scenario.UNKNOWN
    return Scenario.FAR_END if _silent(near) else Scenario.DOUBLE_TALK


def _length_notes(headers: dict[str, audio.AudioInfo]) -> list[str]:
    notes = []
    for role in ("far", "near", "echo"):
        if role in headers:
            difference_s = headers[role].duration_s - headers["mic"].duration_s
            if abs(difference_s) > 1e-3:
                notes.append(
                    f"{role} end shorter than the microphone: padded with zeros"
                    if difference_s < 0
                    else f"{role} end longer than the microphone: cut"
                )
    return notes
