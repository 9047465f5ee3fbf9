"""Which stretches of a device's recordings hold nothing but echo, and which of them judge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from echofree.contracts import Scenario
from echofree.data.farend import blocks, stretches, threshold_db
from echofree.data.remix import Stretch
from echofree.model.frontend import FrontEnd

PIECE_S = 8.0  # longer stretches are cut, so that some of each recording may judge
HELD_OUT = 4  # every fourth piece


def stretches_of(recordings: Any, model: Any) -> list[Stretch]:
    """Labelled stretches of far-end single talk, and those found in recordings without a label; every fourth piece has
    split=valid.

    Args:
        recordings: `data.recording.Recordings`, whole.
        model: whose rate counts.
    """
    front = FrontEnd(sample_rate=int(model.sample_rate), hop_samples=256 * int(model.sample_rate) // 16000).eval()
    labelled, heard = [], []
    for index, recording in enumerate(recordings.recordings):
        if recording.far is None or recording.scenario not in (Scenario.FAR_END, Scenario.UNKNOWN):
            continue
        clip = recordings.item(index, 0)
        out = front(*(torch.from_numpy(wave)[None] for wave in (clip.mic, clip.far)), details=True)
        delay_s = float(out["flags"]["delay_samples"][0]) / recordings.sample_rate
        whole = Stretch(str(recording.mic), str(recording.far), 0.0, recording.stop_s, max(0.0, delay_s))
        if recording.scenario == Scenario.FAR_END:
            labelled.append(replace(whole, start_s=recording.start_s))
        else:
            mic, echo, error = (out[name][0].numpy() for name in ("mic", "echo", "error"))
            heard.append((whole, blocks(mic, echo, error, recordings.sample_rate)))
    threshold = threshold_db([found for _, found in heard])
    result = list(labelled)
    if threshold is not None:
        for whole, found in heard:
            result += [replace(whole, start_s=a, stop_s=b) for a, b in stretches(found, threshold)]
    return held_out(result)


def held_out(found: list[Stretch]) -> list[Stretch]:
    """Cut into pieces of at most 8 s, at least two; every fourth is for validation."""
    pieces = []
    for s in found:
        count = max(1, round((s.stop_s - s.start_s) / PIECE_S))
        if len(found) == 1:
            count = max(count, 2)
        step = (s.stop_s - s.start_s) / count
        pieces += [replace(s, start_s=s.start_s + i * step, stop_s=s.start_s + (i + 1) * step) for i in range(count)]
    last = len(pieces) - 1
    few = last < HELD_OUT - 1
    return [
        replace(s, split="valid" if i % HELD_OUT == HELD_OUT - 1 or (few and i == last and i > 0) else "train")
        for i, s in enumerate(pieces)
    ]
