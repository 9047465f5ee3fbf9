"""The guard of a training that began from another model: what the parent could do must not be lost.

At each evaluation the old data's validation clips are scored too. A checkpoint can be the best only if their score lies
at most `checkpoint.guard.max_drop` below the parent's. If none does, the run fails and the parent is what remains.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from echofree.contracts import Dataset
from echofree.errors import ConfigError, DataError, EchoFreeError
from echofree.metric import LOWER_IS_BETTER
from echofree.rundir import RunDir

log = logging.getLogger("echofree")


class Forgotten(EchoFreeError):
    """No checkpoint kept what the parent could do."""


class Guard:
    """
    Args:
        metric: a score of the task.
        max_drop: by how much it may fall.
        dataset: validation clips of the old data.
        run: where the parent's score is written down.
    """

    def __init__(self, metric: str, max_drop: float, dataset: Dataset, run: RunDir):
        self.metric, self.max_drop, self.dataset, self.run = metric, max_drop, dataset, run
        self.before: float | None = (run.facts.get("guard") or {}).get("before")
        self.nearest, self.nearest_step = -math.inf, 0

    @property
    def sign(self) -> int:
        return -1 if self.metric in (*LOWER_IS_BETTER, "loss") else 1

    def begin(self, scores: Mapping[str, float]) -> None:
        """The parent's scores, before the first step.

        Raises:
            ConfigError: they lack the metric.
        """
        value = scores.get(self.metric)
        if value is None or not math.isfinite(value):
            raise ConfigError(
                f"checkpoint.guard.metric={self.metric} has no value on the old data's validation clips. There are: "
                f"{', '.join(name for name in scores if name != 'clips')}"
            )
        self.before = float(value)
        self.run.note(guard={"metric": self.metric, "before": self.before, "max_drop": self.max_drop})
        log.info("guard: %s of the old data is %.3f with the parent, may fall by %g", self.metric, value, self.max_drop)

    def holds(self, scores: Mapping[str, float], step: int) -> bool:
        """Whether the weights of this step may be the best."""
        assert self.before is not None, "begin was called"
        value = scores.get(self.metric, math.nan)
        gain = self.sign * (value - self.before)
        if gain > self.nearest:
            self.nearest, self.nearest_step = gain, step
        held = gain >= -self.max_drop  # NaN doesn't hold
        if not held:
            log.warning(
                "guard: %s of the old data is %.3f, %.3f with the parent: this step can't be the best",
                self.metric, value, self.before,
            )  # fmt: skip
        return held

    def end(self, best: float | None, parent: str) -> None:
        """
        Raises:
            Forgotten: no step held.
        """
        assert self.before is not None, "begin was called"
        self.run.note(
            guard={
                "metric": self.metric, "before": self.before, "max_drop": self.max_drop, "passed": best is not None
            }
        )  # fmt: skip
        if best is None:
            near = (
                f"nearest: {self.nearest:+.3f} at step {self.nearest_step}"
                if math.isfinite(self.nearest)
                else "none valid"
            )
            raise Forgotten(
                f"guard: at no evaluation was {self.metric} of the old data within {self.max_drop:g} of the parent's "
                f"{self.before:.3f} ({near}). The parent is kept: use {parent}. Type a larger data.replay.share, a "
                "lower optim.lr, or freeze more with optim.freeze"
            )


def build_guard(config: Any, source: Any, run: RunDir) -> Guard | None:
    """`checkpoint.guard` -> a guard, or None when nothing is watched.

    Raises:
        DataError: there are no validation clips, old or new.
    """
    wanted = config.checkpoint.guard
    if wanted.max_drop is None:
        return None
    old, new = source.old.split("valid"), source.split("valid")
    for which, dataset in (("old", old), ("new", new)):
        if dataset is None or len(dataset) == 0:
            raise DataError(f"checkpoint.guard: the {which} data has no validation clips to score")
    return Guard(wanted.metric, wanted.max_drop, old, run)
