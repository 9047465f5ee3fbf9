"""python -m echofree.report: one page for a run, a comparison of runs, or a sweep.

`gather` reads run directories, `effect` says which setting of a sweep matters, `sound` embeds what can be heard, `page`
puts all of it into one HTML file that needs no network. Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echofree.errors import ConfigError, UserError
from echofree.verb import Key, help_asked, parse, report, show_help

KEYS = {
    "runs": Key("none", "run directories, folders of runs, or what evaluate wrote, a,b,c; also typed without runs="),
    "out": Key("auto", "the file; auto: report.html in the run or sweep directory, for several here"),
    "audio_mb": Key("4", "of sound in the page, the worst clips first; null: none"),
}
NOTES = (
    "One run directory gives that run's page, several compare them, a folder with many runs (a sweep's) tells which",
    "setting matters. The page is one file: it opens without a network, and can be sent by mail.",
)
NAME = "report.html"
MAX_RUNS = 400


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("report", KEYS, NOTES)
        return 0
    plain = [word for word in words if "=" not in word and not word.startswith("-")]
    try:
        asked = parse([word for word in words if word not in plain], KEYS)
        places = [Path(place) for place in [*plain, *([] if asked.given("runs") is None else asked.names("runs"))]]
        megabytes = asked.number("audio_mb") or 0
        out = None if asked["out"] == "auto" else Path(asked["out"])
        path = write_report(places, out, megabytes)
    except UserError as error:
        return report(error)
    print(f"wrote {os.path.relpath(path)} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def write_report(places: Sequence[Path], out: Path | None = None, audio_mb: float = 4.0) -> Path:
    """Writes the page.

    Args:
        places: run directories, or folders with run directories below.
        out: the file; None: see `KEYS`.
        audio_mb: of sound to embed.

    Returns:
        The file written.

    Raises:
        ConfigError: no runs there, or the file can't be written.
    """
    from echofree.durable import write_text
    from echofree.report.page import page

    found, is_sweep = run_folders(places)
    if out is None:
        out = (places[0] if len(places) == 1 else Path()) / NAME
    try:
        write_text(out, page(contents(found, is_sweep, audio_mb)))
    except OSError as error:
        raise ConfigError(f"out={out}: can't be written ({error.strerror}). Type out=FILE.html") from error
    return out


def contents(folders: Sequence[Path], is_sweep: bool, audio_mb: float) -> dict[str, Any]:
    """All that the page shows, as plain values."""
    from echofree.report import effect, gather, sound

    kind = "sweep" if is_sweep else "run" if len(folders) == 1 else "compare"
    runs = [gather.run(folder, name, kind) for folder, name in zip(folders, gather.names(folders), strict=True)]
    if kind == "compare":
        gather.name_systems(runs)
    shared = {"kind": kind, "runs": runs, **gather.about(runs, kind)}
    shared["differences"] = gather.differences(runs) if len(runs) > 1 else []
    if is_sweep:
        shared["sweep"] = effect.effects(runs)
        heard = gather.best(runs)
        chosen = [heard] if heard is not None else []
    else:
        chosen = runs
    shared["sounds"] = sound.embed(chosen, round(audio_mb * 1e6))
    for run in runs:
        for evaluation in run["evaluations"]:
            evaluation.pop("folder")
    return shared


def run_folders(places: Sequence[Path]) -> tuple[list[Path], bool]:
    """-> (the run directories, whether one folder of runs was given).

    Raises:
        ConfigError: nothing given, a place that isn't there or holds no run, too many.
    """
    from echofree.report.gather import SCORES
    from echofree.rundir import RUN
    from echofree.runs import find

    if not places:
        raise ConfigError(
            "runs is missing: say whose page, such as runs=outputs/tiny/DATE_TIME, or a sweep's directory"
        )
    problems, found = [], []
    for place in places:
        below = [Path(folder) for folder in find(place)] if place.is_dir() else []
        if not below and (place / SCORES).is_file():  # an evaluation without a run: other programs, the linear filter
            below = [place]
        if not below:
            what = "there is no run in it" if place.is_dir() else "there is no such folder"
            problems.append(f"runs={place}: {what}. Give a directory with {RUN}, or one above such")
        found += sorted(below, key=_natural)
    if problems:
        raise ConfigError(problems)
    if len(found) > MAX_RUNS:
        raise ConfigError(f"{len(found)} runs are more than a page holds ({MAX_RUNS}). Name fewer")
    is_sweep = len(places) == 1 and not (places[0] / RUN).is_file() and len(found) > 1
    return found, is_sweep


def _natural(folder: Path) -> tuple[Any, ...]:
    """Job 10 behind job 9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in folder.parts)
