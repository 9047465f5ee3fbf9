"""Two runs beside each other: the first place where their records or their weights differ."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echofree import checkpoint

# What the clock and the machine's load decide.
TIMING = ("step_s", "samples_per_s", "audio_s_per_s", "data_wait_share", "peak_mem_mb", "save_stall_s")
FILES = ("model", "ema", "optimizer")


@dataclass
class Difference:
    """Where two runs part.

    Attributes:
        step: of the record or checkpoint.
        key: of the record, or the tensor's name.
        old, new: the values; for tensors what is wrong with them.
    """

    step: int
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"step {self.step}, {self.key}: {self.old} in the run, {self.new} in its reproduction"


def records(run_dir: Path, up_to: int) -> list[dict[str, Any]]:
    """metrics.jsonl up to a step, without timing. A torn last line is left out."""
    found = []
    path = run_dir / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= up_to:
            found.append({key: value for key, value in record.items() if key not in TIMING})
    return found


def in_records(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], rtol: float) -> Difference | None:
    """The first difference of two lists of records.

    Args:
        rtol: how far numbers may differ, as a share of the greater; 0: not at all.
    """
    for a, b in zip(old, new, strict=False):
        for key in ("step", "kind", *sorted({*a, *b} - {"step", "kind"})):
            if not equal(a.get(key), b.get(key), rtol):
                return Difference(int(a["step"]), key, json.dumps(a.get(key)), json.dumps(b.get(key)))
    if len(old) != len(new):
        longer = old if len(old) > len(new) else new
        step = int(longer[min(len(old), len(new))]["step"])
        return Difference(step, "number of records", len(old), len(new))
    return None


def equal(a: Any, b: Any, rtol: float) -> bool:
    """Numbers within `rtol`, mappings key by key, anything else as it is."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key], rtol) for key in a)
    if isinstance(a, float) and isinstance(b, float) and rtol > 0:
        return math.isclose(a, b, rel_tol=rtol)
    return bool(a == b)


def common_checkpoints(old: Path, new: Path, up_to: int) -> list[tuple[Path, Path]]:
    """Undamaged checkpoints of the same step in two runs, oldest first."""
    there = {p.name: p for p in checkpoint.complete(new / "checkpoints") if not checkpoint.damage(p)}
    pairs = [(p, there[p.name]) for p in checkpoint.complete(old / "checkpoints") if p.name in there]
    return [(a, b) for a, b in pairs if checkpoint.manifest(a)["step"] <= up_to and not checkpoint.damage(a)]


def in_weights(old: Path, new: Path, rtol: float) -> tuple[Difference | None, int]:
    """The first difference of two checkpoints in weights, their average and the optimizer's moments.

    Args:
        rtol: how far a tensor may differ, as the norm of the difference over its own; 0: not in a single bit.

    Returns:
        The difference or None, and the number of tensors compared.
    """
    step, count = int(checkpoint.manifest(old)["step"]), 0
    for stem in FILES:
        here = [checkpoint.has(folder, stem) for folder in (old, new)]
        if here[0] != here[1]:
            return Difference(step, stem, *("there" if h else "missing" for h in here)), count
        if not here[0]:
            continue
        a, b = (dict(tensors(checkpoint.load(folder, stem))) for folder in (old, new))
        for name in [*a, *(n for n in b if n not in a)]:
            if name not in a or name not in b:
                return Difference(step, f"{stem} {name}", *("there" if name in x else "missing" for x in (a, b))), count
            count += 1
            wrong = _tensor_difference(a[name], b[name], rtol)
            if wrong is not None:
                return Difference(step, f"{stem} {name}", *wrong), count
    return None, count


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, rtol: float) -> tuple[str, str] | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)}", f"{b.dtype} {list(b.shape)}"
    if torch.equal(a, b):
        return None
    x, y = a.double().flatten(), b.double().flatten()
    if rtol > 0 and float((x - y).norm()) <= rtol * float(x.norm()) + 1e-12:
        return None
    where = int((x != y).nonzero()[0])
    return f"{x[where].item()!r} at {where}", f"{y[where].item()!r} ({int((x != y).sum())} of {len(x)} differ)"


def tensors(node: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested containers, by dotted name."""
    if isinstance(node, torch.Tensor):
        return [(path, node)]
    if isinstance(node, Mapping):
        inner = [(str(key), value) for key, value in node.items()]
    elif isinstance(node, (list, tuple)):
        inner = [(str(i), value) for i, value in enumerate(node)]
    else:
        inner = []
    return [pair for key, value in inner for pair in tensors(value, f"{path}.{key}" if path else key)]
