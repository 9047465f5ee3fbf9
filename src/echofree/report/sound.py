"""What can be heard, embedded: flac files as text, within a budget of bytes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OWN = ("mic", "far", "target")


def embed(runs: Sequence[dict[str, Any]], budget_bytes: int) -> dict[str, Any]:
    """-> {"clips": [...], "left_out": number}.

    Each clip has name, scenario, why, evaluation, start_s, seconds, rate_hz, scores, problems, and signals: a list of
    {"label", "role", "data"}, base64 of a flac file, in the order mic, far, others, target. A clip that several runs
    have kept (same data, same number) comes once, with every run's output. Clips are taken in turn from each evaluation
    until the budget is used up, never a part of one.
    """
    queues: list[list[dict[str, Any]]] = []
    at: dict[tuple[str, int], dict[str, Any]] = {}
    for run in runs:
        for evaluation in run["evaluations"]:
            queue = []
            for listed in evaluation["listen"]:
                key = (str(evaluation["protocol"].get("data_fingerprint")), int(listed["index"]))
                shown = evaluation.get("shown")
                if key in at:
                    _join(at[key], listed, evaluation, shown)
                    continue
                at[key] = _clip(listed, evaluation, shown)
                queue.append(at[key])
            queues.append(queue)
    clips, spent, left_out = [], 0, 0
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn >= len(queue):
                continue
            cost = sum(_cost(signal["path"]) for signal in queue[turn]["signals"])
            if spent + cost > budget_bytes:
                left_out += 1
                continue
            spent += cost
            clips.append(queue[turn])
    for clip in clips:
        for signal in clip["signals"]:
            signal["data"] = base64.b64encode(signal.pop("path").read_bytes()).decode("ascii")
    return {"clips": clips, "left_out": left_out}


def _cost(path: Path) -> int:
    """Bytes of a file as text."""
    return -(-path.stat().st_size // 3) * 4


def _clip(listed: dict[str, Any], evaluation: dict[str, Any], shown: str | None) -> dict[str, Any]:
    keys = ("index", "name", "scenario", "why", "start_s", "seconds", "rate_hz", "problems")
    clip: dict[str, Any] = {key: listed[key] for key in keys}
    own = evaluation["own"]
    clip |= {"evaluation": evaluation["name"], "own": shown or own, "signals": [], "scores": {}}
    order = sorted(listed["signals"], key=lambda name: (name == "target", name not in OWN))
    for name in order:
        _add(clip, name, listed, evaluation, shown)
    for name, scores in listed["scores"].items():
        clip["scores"][_label(name, own, shown)] = scores
    return clip


def _join(clip: dict[str, Any], listed: dict[str, Any], evaluation: dict[str, Any], shown: str | None) -> None:
    """The same clip as another run has kept it: only that run's own output is new."""
    own = evaluation["own"]
    if shown is None or own not in listed["signals"] or any(s["label"] == shown for s in clip["signals"]):
        return
    _add(clip, own, listed, evaluation, shown)
    target = [s for s in clip["signals"] if s["role"] == "target"]
    clip["signals"] = [s for s in clip["signals"] if s["role"] != "target"] + target
    if own in listed["scores"]:
        clip["scores"][shown] = listed["scores"][own]


def _add(
    clip: dict[str, Any], name: str, listed: dict[str, Any], evaluation: dict[str, Any], shown: str | None
) -> None:
    path = Path(evaluation["folder"]) / "listen" / listed["signals"][name]
    if path.is_file():
        role = name if name in OWN else "own" if name == evaluation["own"] else "other"
        clip["signals"].append({"label": _label(name, evaluation["own"], shown), "role": role, "path": path})


def _label(name: str, own: str | None, shown: str | None) -> str:
    return shown if shown is not None and name == own else name
