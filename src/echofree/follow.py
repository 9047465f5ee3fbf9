"""A training that writes down what it did, step by step, or compares it with one that did: the ranks' half of parity.

The reference leaves a file of weights per step. The others compare theirs on the spot, so that only numbers remain.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echofree.contracts import Batch

if TYPE_CHECKING:
    from echofree.loop import Loop, Outcome

FILE = "steps.jsonl"
KEPT = 5  # tensors that are named per step


def follow(loop: Loop, reference: str | None) -> Outcome:
    """Trains as `fit` does; every rank calls it.

    Args:
        reference: the folder of the reference's weights; None: this run is the reference, and writes them into
            `weights` of its own directory.
    """
    folder = loop.run.folder / "weights" if reference is None else Path(reference)
    if reference is None and loop.world.is_first:
        folder.mkdir()
        torch.save(loop.strategy.model_state(), folder / "0.pt")
    original = loop.step

    def step(batches: list[Batch], total_weight: float) -> None:
        original(batches, total_weight)
        _look(loop, batches, folder, reference is None)

    loop.step = step  # type: ignore[method-assign]
    return loop.fit()


def _look(loop: Loop, batches: list[Batch], folder: Path, write: bool) -> None:
    number = loop.state.step
    state = loop.strategy.model_state()  # exchanged: every rank
    mine = [int(i) for batch in batches for i, w in zip(batch.index, batch.weight, strict=True) if w > 0]
    clips = sorted({i for part in loop.world.gather(mine) for i in part})
    loss = loop.world.sum([float(loop.window.loss[-1]) / loop.replicas])[0]
    if not loop.world.is_first:
        return
    row: dict[str, Any] = {
        "step": number, "clips": clips, "loss": _number(loss / loop.window.weight[-1]),
        "grad_norm": _number(float(loop.norm)),
    }  # fmt: skip
    if write:
        torch.save({name: tensor.detach().cpu() for name, tensor in state.items()}, folder / f"{number}.pt")
    else:
        expected = torch.load(folder / f"{number}.pt", weights_only=True)
        row["worst"] = differences(state, expected)[:KEPT]
    with open(loop.run.folder / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def differences(state: dict[str, Tensor], expected: dict[str, Tensor]) -> list[tuple[str, float]]:
    """[(name, largest difference)], the worst first; inf where one of two isn't a number. Absolute up to a tensor whose
    largest value is 1, relative to that beyond it: running statistics can be large."""
    found = []
    for name, tensor in expected.items():
        if not tensor.numel():
            continue
        gap = (state[name].detach().cpu().double() - tensor.double()).abs()
        worst = float(gap.max() / tensor.double().abs().max().clamp(min=1.0))
        found.append((name, worst if math.isfinite(worst) else math.inf))
    return sorted(found, key=lambda pair: -pair[1])


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """What a followed run wrote down, a row per step."""
    path = run_dir / FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
