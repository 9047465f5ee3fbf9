"""Signs that a training doesn't train: values that aren't finite, weights that don't move, a loss that stays."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echofree.config.schema import Nonfinite
from echofree.errors import NonFiniteError
from echofree.window import Window

if TYPE_CHECKING:
    from echofree.dist.world import World

log = logging.getLogger("echofree")

FEW = 8  # values of each weight, by which it is seen to move
SAME = 3  # records with exactly one loss


class Signs:
    """The two silent ways of not training, each told once.

    Args:
        parameters: the weights before the first step; none: they have moved already.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        self._first = [p.detach().flatten()[:FEW].clone() for p in parameters]
        self._losses: list[float] = []

    def look(self, parameters: Iterable[Tensor], loss: float, step: int, lr: float) -> None:
        """At a record."""
        if self._first:
            pairs = zip(self._first, parameters, strict=True)
            if all(torch.equal(a, p.detach().flatten()[:FEW]) for a, p in pairs):
                log.warning("the weights have not moved after %d steps: is optim.lr (%g) zero?", step, lr)
            self._first = []
        if len(self._losses) < SAME:
            self._losses.append(loss)
            if len(self._losses) == SAME and len(set(self._losses)) == 1:
                log.warning("the loss has been exactly %g three times in a row: does it depend on the weights?", loss)


def not_finite(
    window: Window, steps: Sequence[int], finite: Tensor, scale: float | None, world: World, folder: Path, do: Nonfinite
) -> None:
    """Steps whose loss or gradient isn't finite: their clips go into a list. Every rank comes here together, since the
    gradient norm is equal everywhere.

    Args:
        steps: which of the window.
        finite: [steps of the window] bool, whether this rank's loss was.
        scale: of the loss; None: it isn't scaled.
        folder: for the list, nonfinite.jsonl.

    Raises:
        NonFiniteError: with do=stop.
    """
    mine = [i for i in steps if not finite[i]]
    gathered = world.gather([(window.names[i][0], window.names[i][1]) for i in mine])
    culprits = sorted({(step, name) for part in gathered for step, names in part for name in names})
    if not culprits and scale is not None and scale >= 1:
        return  # the loss scale was too high and is lower now: no fault of the data
    if not culprits:  # every loss was finite, only a gradient wasn't
        gathered = world.gather([window.names[i] for i in steps])
        culprits = sorted({(step, name) for part in gathered for step, names in part for name in names})
    path = folder / "nonfinite.jsonl"
    if world.is_first:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, "clip": name}) + "\n" for step, name in culprits)
    first = window.names[steps[0]][0]
    text = (
        f"{len(steps)} step(s) had a loss or gradient that isn't finite, the first is step {first}; the clips in them "
        f"are listed in {path}"
    )
    if do is Nonfinite.stop:
        raise NonFiniteError(
            f"{text}. train.nonfinite=skip leaves such steps out; a lower optim.lr often cures the cause"
        )
    log.warning("%s; left out (train.nonfinite=skip)", text)
