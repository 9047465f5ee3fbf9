"""From a record, as metrics.jsonl holds it, to the named numbers that a tracker plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLACE = ("kind", "step", "epoch", "split")  # say where a record belongs and aren't plotted


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under "train/loss", "valid/si_sdr", "valid/double_talk/si_sdr".

    The first word is the split of an evaluation and otherwise the kind. Numbers inside mappings get the path as their
    name. What isn't a number (None, text, lists) is left to metrics.jsonl.
    """
    head = record.get("split") or record.get("kind", "run")
    return dict(_walk(str(head), {k: v for k, v in record.items() if k not in PLACE}))


def _walk(path: str, values: Mapping[Any, Any]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _walk(f"{path}/{name}", value)
        elif isinstance(value, (int, float)):
            found.append((f"{path}/{name}", float(value)))
    return found
