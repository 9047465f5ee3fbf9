"""Recordings that nobody labelled become clips with a target: what a good canceller makes of them, where that can be
trusted.

    python experiments/pseudo.py teacher=outputs/base/DATE_TIME student=outputs/tiny/DATE_TIME data.root=DIR out=pseudo
    python -m echofree.train data=folder data.root=pseudo init_from=outputs/tiny/DATE_TIME data.replay.share=0.5

The teacher hears each recording whole; pieces of it are kept when all of this holds:

- the far end plays in it
- AECMOS of the teacher's output: echo and other at least min_echo and min_other (the extra `metrics`)
- where the far end is silent the talker's level is kept within max_change dB
- teacher and student agree, by SI-SDR, to min_agreement dB: where they don't, one of them is badly wrong

pseudo.csv in `out` tells these figures of every piece, and why it was left out. Exit code 1 when nothing was kept.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echofree import audio
from echofree.adapt import device_recordings, number
from echofree.checkpoint import load_model
from echofree.contracts import Scenario
from echofree.errors import ConfigError, ExitCode
from echofree.metric.aecmos import AecmosModel
from echofree.metric.core import FRAME_SAMPLES, View, frames, si_sdr
from echofree.progress import Progress
from echofree.verb import REQUIRED, Key, Words, ending, help_asked, parse

KEYS = {
    "teacher": Key(REQUIRED, "a run directory, a checkpoint or a shipped name: whose output becomes the target"),
    "student": Key(REQUIRED, "the same of the model that will learn: the teacher must not be far from it"),
    "out": Key(REQUIRED, "a new folder for mic, far and near of each piece"),
    "piece_s": Key("6", "seconds of a piece"),
    "min_echo": Key("4.0", "AECMOS, echo"),
    "min_other": Key("3.5", "AECMOS, other degradation"),
    "max_change": Key("1.5", "dB by which the level of a lone talker may change"),
    "min_agreement": Key("5", "dB of SI-SDR between teacher and student"),
}
COLUMNS = ["piece", "recording", "start_s", "stop_s", "echo", "other", "agreement", "level_change", "left_out"]
QUIET_DB, FAR_ACTIVE_DB = -35.0, -50.0  # of a frame, relative to the loudest of the recording
ALONE_FRAMES = 25  # of a lone talker, from which his level says something
DECAY_FRAMES = 15  # after the far end has stopped, the room still sounds


@dataclass(frozen=True)
class Piece:
    """Samples [start, stop) of a recording, what is known of them, and why they are left out; "" when they aren't."""

    start: int
    stop: int
    figures: dict[str, float | None]
    why: str


@dataclass(frozen=True)
class Bounds:
    """What a piece must keep; the keys of the command."""

    piece_s: float
    min_echo: float
    min_other: float
    max_change: float
    min_agreement: float


def pieces(
    waves: dict[str, np.ndarray], rate_hz: int, bounds: Bounds, aecmos: Callable[[View], tuple[float, float] | None]
) -> list[Piece]:
    """waves: mic, far, teacher, student, [T] each. A last part shorter than half a piece is left out."""
    size, found = round(bounds.piece_s * rate_hz), []
    total = len(waves["mic"])
    energy = {name: frames(waves[name].astype(np.float64)) for name in ("mic", "far", "teacher")}
    playing, alone = playing_and_alone(energy["mic"], energy["far"])
    for start in range(0, total, size):
        stop = min(start + size, total)
        if stop - start < size / 2:
            break
        here = slice(start // FRAME_SAMPLES, stop // FRAME_SAMPLES)
        cut = {name: wave[start:stop].astype(np.float64) for name, wave in waves.items()}
        if not playing[here].any():
            found.append(Piece(start, stop, {}, "nothing plays"))
            continue
        view = View(cut["teacher"], cut["mic"], cut["far"], None, None, None, Scenario.DOUBLE_TALK, str(start))
        echo, other = aecmos(view) or (float("nan"), float("nan"))
        change = None
        if alone[here].sum() >= ALONE_FRAMES:
            after, before = (energy[name][here][alone[here]].sum() for name in ("teacher", "mic"))
            change = float(10 * np.log10(max(after, 1e-20) / max(before, 1e-20)))
        figures: dict[str, float | None] = {
            "echo": echo, "other": other, "level_change": change,
            "agreement": float(si_sdr(cut["student"], cut["teacher"])),
        }  # fmt: skip
        found.append(Piece(start, stop, figures, problem(figures, bounds)))
    return found


def playing_and_alone(mic: np.ndarray, far: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Energies of frames, [L] each -> [L] each: whether the far end plays; whether a talker is heard while it has long
    been silent."""
    playing = far > max(far.max(initial=0.0) * 10 ** (FAR_ACTIVE_DB / 10), 1e-9)
    lately = np.convolve(playing, np.ones(DECAY_FRAMES + 1))[: len(playing)] > 0
    talking = mic > mic.max(initial=0.0) * 10 ** (QUIET_DB / 10)
    return playing, talking & ~lately


def problem(figures: dict[str, float | None], bounds: Bounds) -> str:
    """Why a piece can't be trusted; "" when it can. What isn't known counts as right, what isn't a number as wrong."""
    least = {"echo": bounds.min_echo, "other": bounds.min_other, "agreement": bounds.min_agreement}
    for name, bound in least.items():
        value = figures[name]
        if value is None or not value >= bound:
            return f"{name} below {bound:g}"
    change = figures["level_change"]
    if change is not None and not abs(change) <= bounds.max_change:
        return f"a lone talker's level changes by more than {bounds.max_change:g} dB"
    return ""


def run(words: Words) -> int:
    """Hears, judges, writes. -> the exit code"""
    bounds = Bounds(**{name: number(words, name, least) for name, least in
                       {"piece_s": 1.0, "min_echo": 0.0, "min_other": 0.0, "max_change": 0.0,
                        "min_agreement": -100.0}.items()})  # fmt: skip
    out = Path(words["out"])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out} is there already: give a new folder")
    teacher, student = (load_model(words[name])[0] for name in ("teacher", "student"))
    rate_hz = int(student.sample_rate)
    if int(teacher.sample_rate) != rate_hz:
        raise ConfigError(
            f"the teacher works at {teacher.sample_rate} Hz, the student at {rate_hz}: give one of its rate"
        )
    aecmos = AecmosModel(rate_hz)
    recordings = device_recordings(words, rate_hz)
    out.mkdir(parents=True, exist_ok=True)
    reasons = Counter[str]()
    with (
        (out / "pseudo.csv").open("w", encoding="utf-8", newline="", buffering=1) as file,
        Progress(len(recordings), "recordings") as bar,
    ):
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for index in range(len(recordings)):
            clip = recordings.item(index, 0)
            waves = {"mic": clip.mic, "far": clip.far}
            waves |= {name: heard(model, clip) for name, model in (("teacher", teacher), ("student", student))}
            for place, piece in enumerate(pieces(waves, rate_hz, bounds, aecmos)):
                name = f"{index:04d}-{place:03d}"
                if not piece.why:
                    for kind, wave in (("mic", clip.mic), ("far", clip.far), ("near", waves["teacher"])):
                        audio.write(out / f"{name}_{kind}.flac", wave[piece.start : piece.stop], rate_hz, "PCM_16")
                reasons[piece.why or "kept"] += 1
                table.writerow({"piece": name, "recording": clip.name, "start_s": piece.start / rate_hz,
                                "stop_s": piece.stop / rate_hz, **piece.figures, "left_out": piece.why})  # fmt: skip
            bar.update()
    for why, count in reasons.most_common():
        print(f"{count:6d}  {why}")
    if not reasons["kept"]:
        print(f"nothing was kept; {out}/pseudo.csv tells by how much each piece falls short", file=sys.stderr)
        return int(ExitCode.FAILED)
    print(f"train on it: python -m echofree.train data=folder data.root={out} init_from={words['student']} "
          "data.replay.share=0.5")  # fmt: skip
    return int(ExitCode.DONE)


def heard(model: Any, clip: Any) -> np.ndarray:
    """The estimate, [T]."""
    with torch.no_grad():
        return np.asarray(model(*(torch.from_numpy(wave)[None] for wave in (clip.mic, clip.far)))[0].numpy())


def main(argv: Sequence[str] | None = None) -> int:
    """The command. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        print(__doc__)
        for name, key in KEYS.items():
            default = "must be given" if key.default == REQUIRED else f"default: {key.default}"
            print(f"  {name:14} {key.what} ({default})")
        return 0
    return ending(lambda: run(parse(words, KEYS, ("data",))), "interrupted: the pieces that pseudo.csv lists are whole")


if __name__ == "__main__":
    sys.exit(main())
