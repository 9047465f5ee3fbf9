"""The clips that a person should hear: those on which a system does worst, and one of each kind that is always there.

They lie beside the scores, in `listen/`, as flac files with an index; the report plays them.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echofree import audio
from echofree.contracts import Clip, Dataset, Scenario
from echofree.durable import write_text
from echofree.score import System, process
from echofree.standing import order

Row = dict[str, Any]
log = logging.getLogger(__name__)

FOLDER, INDEX = "listen", "listen.json"
NUM_CLIPS = 6
MAX_S = 10.0
SHOWN_FIRST = (Scenario.DOUBLE_TALK, Scenario.NEAR_END)  # of each the first clip, so that runs can be compared


def choose(rows: Sequence[Row], system: str, count: int = NUM_CLIPS) -> list[tuple[int, str]]:
    """-> (index of the clip, why), the worst first."""
    own = [row for row in rows if row["system"] == system and "index" in row]
    fixed = []
    for scenario in SHOWN_FIRST:
        part = [row for row in own if row["scenario"] == scenario.name.lower()]
        if part:
            fixed.append((int(min(row["index"] for row in part)), f"the first of {scenario.name.lower()}"))
    fixed = fixed[: max(0, count - 1)]
    poor = sorted((row for row in own if row["index"] not in dict(fixed)), key=order)
    chosen = [(int(row["index"]), f"number {n + 1} of the worst") for n, row in enumerate(poor[: count - len(fixed)])]
    return [*chosen, *fixed]


def write_listening(
    out: Path, rows: Sequence[Row], systems: Mapping[str, System], dataset: Dataset, system: str, count: int = NUM_CLIPS
) -> None:
    """Writes out/listen/: for each chosen clip its microphone, far end, every system's output and the target, 16 bits,
    the first `MAX_S` seconds of what was scored, and listen.json. Replaces what was there.

    Args:
        rows: of `score`.
        systems: by name; "mic" is not written twice.
        dataset: global indices.
        system: by which the clips are chosen.
        count: of clips.
    """
    folder = out / FOLDER
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    chosen, reasons = [], dict(choose(rows, system, count))
    for at in reasons:
        try:
            chosen.append((at, dataset.item(at, 0)))
        except Exception as error:  # its row of the table says so; here nothing is to be heard
            log.warning("clip %d can't be heard: %s", at, error)
    outputs: dict[str, dict[int, Any]] = {}
    for name, run in systems.items():
        if name != "mic":  # all clips at once: hop by hop costs the same for six as for one
            found = process(run, chosen, dataset.sample_rate)
            outputs[name] = {clip[0]: est for clip, est, _, _ in found if est is not None}
    index = []
    for number, (at, clip) in enumerate(chosen):
        why = reasons[at]
        first, stop = _stretch(dataset, at, clip)
        signals = {"mic": clip.mic, "far": clip.far}
        signals |= {name: found[at] for name, found in outputs.items() if at in found}
        if clip.near is not None:
            signals["target"] = clip.near
        files = {}
        for place, (name, wave) in enumerate(signals.items()):
            files[name] = f"{number}-{place}.flac"
            audio.write(folder / files[name], wave[first:stop], dataset.sample_rate, "PCM_16")
        scores = {
            row["system"]: {k: v for k, v in row.items() if isinstance(v, float) and v == v and k != "rtf"}
            for row in rows
            if row.get("index") == at
        }
        problems = [
            text for row in rows if row.get("index") == at and row["system"] == system for text in row["problems"]
        ]
        index.append(
            {
                "index": at, "name": clip.name, "scenario": clip.scenario.name.lower(), "why": why, "signals": files,
                "start_s": first / dataset.sample_rate, "seconds": (stop - first) / dataset.sample_rate,
                "rate_hz": dataset.sample_rate, "scores": scores, "problems": problems,
            }
        )  # fmt: skip
    write_text(folder / INDEX, json.dumps({"system": system, "clips": index}, indent=1) + "\n")


def _stretch(dataset: Dataset, index: int, clip: Clip) -> tuple[int, int]:
    inner = getattr(dataset, "stretch", None)
    first, stop = (0, len(clip.mic)) if inner is None else inner(index)
    return int(first), min(int(stop), int(first) + round(MAX_S * dataset.sample_rate))
