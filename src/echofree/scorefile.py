"""scores.csv and scores.json: what was measured, and all that must be equal for two of them to be comparable."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from echofree import standing
from echofree.durable import write_text

Row = dict[str, Any]

PACKAGES = ("echofree", "torch", "numpy", "scipy", "soxr", "pesq", "pystoi", "speechmos", "onnxruntime")
ALIGNMENTS = {
    "output": "the output's delay against the target (largest cross-correlation within 200 ms) is taken out for "
    "si_sdr, sdr, pesq and stoi, and reported as delay_ms; the far end is as captured",
    "none": "none: output and target are compared as they are; the far end is as captured",
}
SAME = ("data_fingerprint", "split", "clips", "segments", "rate_hz", "scored", "align", "aecmos")  # or not comparable


def protocol(
    asked: Mapping[str, Any],
    data: Mapping[str, Any],
    source: Any,
    rows: Sequence[Row],
    metrics: Sequence[Any],
    rate_hz: int,
    parts: bool,
) -> dict[str, Any]:
    """What the scores were measured with.

    Args:
        asked: split, aecmos_cut, align, checkpoint (or None), and systems: {name: what it is}.
        data: the data config.
        source: its source, for the fingerprint.
        rows: what was scored.
        parts: whether labelled stretches of recordings were scored, not whole clips.
    """
    from echofree.metric.aecmos import AecmosModel

    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    stretches = sorted({(row["name"], row["scenario"], row["start_s"], row["seconds"]) for row in rows})
    aecmos = AecmosModel(rate_hz, asked["aecmos_cut"]).protocol if any("aecmos" in m.name for m in metrics) else None
    return {
        "checkpoint": asked["checkpoint"],
        "systems": dict(asked["systems"]),
        "data": dict(data),
        "data_fingerprint": source.fingerprint(),
        "split": asked["split"],
        "clips": len({row["index"] for row in rows if "index" in row}),
        "segments": hashlib.sha256(repr(stretches).encode()).hexdigest()[:16],
        "rate_hz": rate_hz,
        "scored": "labelled stretches, processed from the start of the recording" if parts else "whole clips",
        "align": asked["align"],
        "alignment": ALIGNMENTS[asked["align"]],
        "erle": "10 ms frames, far end active in the last 0.3 s, above 100 Hz, at most 60 dB; erle_late: from 3 s on",
        "scenarios": "erle: far end; near_gain, survival, delay: near end and double talk with a target (near end: the "
        "microphone without one); level_change: near end; talk_level: double talk without a target",
        "aecmos": aecmos,
        "speed": "rtf: wall clock over audio, clips together, threads as they are; of other programs processor time on "
        "one thread, start-up taken off. rtf_stream: processor time on one thread, hop by hop",
        "confidence": {
            "method": "percentile bootstrap of the mean over clips",
            "level": standing.CONFIDENCE,
            "draws": standing.BOOTSTRAP_DRAWS,
            "seed": 0,
        },
        "versions": versions,
    }


def incomparable(protocols: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which score files differ that make their numbers mean different things."""
    return [key for key in SAME if len({json.dumps(p.get(key), sort_keys=True) for p in protocols}) > 1]


def write_scores(
    out: Path, rows: Sequence[Row], summary: Mapping[str, Any], about: Mapping[str, Any], names: Sequence[str]
) -> None:
    """scores.csv and scores.json, each whole or not at all."""
    columns = ["system", "name", "scenario", "start_s", "seconds", "rtf", *names, "badness", "problems"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [row.get(c) for c in columns[:-2]]
        cells.append(round(standing.badness(row), 3))
        writer.writerow([*("" if cell is None else cell for cell in cells), "; ".join(row["problems"])])
    write_text(out / "scores.csv", text.getvalue())
    write_text(out / "scores.json", json.dumps({"protocol": about, "systems": summary}, indent=1) + "\n")
