"""The task of learning from clips whose near end is known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echofree.contracts import Batch, Loss, Scenario
from echofree.errors import ConfigError
from echofree.metric import default_metrics


class Supervised:
    """The loss between the model's estimate and the target; in evaluation also metrics.

    Args:
        loss: see `contracts.Loss`; the model is asked for details only if the loss needs more than the wave.
        metrics: names out of `echofree.metric`, scored at each evaluation: cheap ones, since every clip is scored.
        sample_rate: Hz of the model and the data.
        aecmos_cut: which part of a clip AECMOS hears, if it is among the metrics: whole | challenge.
    """

    passes_front = True

    def __init__(self, loss: Loss, metrics: Sequence[str], sample_rate: int, aecmos_cut: str = "whole"):
        self.loss_fn = loss
        self.sample_rate = int(sample_rate)
        self.metrics = default_metrics(metrics, self.sample_rate, aecmos_cut)

    def weight(self, batch: Batch) -> float:
        """Seconds of valid audio."""
        return float(batch.weight.sum())

    def loss(self, model: torch.nn.Module, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return self.loss_fn(self.forward(model, batch), batch)

    def forward(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, Any]:
        """What the model gives for a batch, always with "est" [B, T]."""
        return ask(model, batch, self.loss_fn.needs, "The loss")

    @torch.no_grad()
    def evaluate(self, model: torch.nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """-> a row per clip that counts: name, index, scenario (its name in lower case), seconds, loss, and every
        metric: a float, NaN where the output is invalid, None where the metric says nothing about the clip."""
        rate = getattr(model, "sample_rate", self.sample_rate)  # a wrapped model doesn't show its rate
        if rate != self.sample_rate:
            raise ConfigError(f"The model works at {rate} Hz and the data at {self.sample_rate} Hz: make them equal")
        out = self.forward(model, batch)
        scores = {metric.name: metric(out["est"], batch) for metric in self.metrics}
        rows = []
        for i in range(len(batch)):
            if batch.weight[i] <= 0:
                continue
            row: dict[str, Any] = {
                "name": batch.name[i] if batch.name else "",
                "index": int(batch.index[i]),
                "scenario": Scenario(int(batch.scenario[i])).name.lower(),
                "seconds": float(batch.weight[i]),
                "loss": self._clip_loss(out, batch, i),
            }
            for name, (values, weights) in scores.items():
                row[name] = float(values[i]) if weights[i] > 0 else None
            rows.append(row)
        return rows

    def _clip_loss(self, out: Mapping[str, Any], batch: Batch, i: int) -> float:
        """The loss of one clip. Losses promise sums only, so the clip is given to the loss alone."""
        count = len(batch)
        piece = {
            k: v[i : i + 1] if isinstance(v, Tensor) and v.ndim and v.shape[0] == count else v for k, v in out.items()
        }
        one = replace(batch.map(lambda t: t[i : i + 1]), name=batch.name[i : i + 1])
        total, weight, _ = self.loss_fn(piece, one)
        return float(total / weight) if weight > 0 else math.nan


def ask(model: torch.nn.Module, batch: Batch, needs: Sequence[str], who: str) -> dict[str, Any]:
    """What the model gives for a batch: "est" [B, T], and `needs` where there are any.

    Raises:
        ConfigError: it doesn't give what `who` needs.
    """
    if not needs:
        return {"est": model(batch.mic, batch.far, **batch.given)}
    out: dict[str, Any] = dict(model(batch.mic, batch.far, details=True, **batch.given))
    missing = [name for name in ("est", *needs) if name not in out]
    if missing:
        raise ConfigError(
            f"{who} needs {', '.join(missing)} and the model returns only {', '.join(out)}. "
            "Choose loss=default, which needs the wave alone, or another model"
        )
    return out
