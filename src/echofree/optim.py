"""Optimizers, learning-rate schedules and the moving average of the weights, from the `optim` group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from echofree.config.schema import OptimConfig, OptimKind, ScheduleKind


def build_optimizer(
    config: OptimConfig, parameters: Iterable[nn.Parameter], named: Mapping[str, Tensor] | None = None
) -> torch.optim.Optimizer:
    """Adam is fused, since only fused optimizers leave out a non-finite step without a read-back. SGD is not: torch's
    fused kernel leaves its momentum uninitialised when the very first step is left out.

    Weight decay is kept off biases, norms and other one-dimensional parameters.

    Args:
        named: the same parameters by the model's names, for `optim.lr_by_part`.
    """
    trainable = [p for p in parameters if p.requires_grad]
    names = {id(p): name for name, p in (named or {}).items()}
    factors = {id(p): rate_factor(config, names.get(id(p), "")) for p in trainable}
    groups: list[dict[str, Any]] = []
    for factor in dict.fromkeys(factors.values()):
        part = [p for p in trainable if factors[id(p)] == factor]
        groups += [
            {"params": [p for p in part if p.dim() > 1], "weight_decay": config.weight_decay, "lr": config.lr * factor},
            {"params": [p for p in part if p.dim() <= 1], "weight_decay": 0.0, "lr": config.lr * factor},
        ]
    groups = [g for g in groups if g["params"]]
    if config.name is OptimKind.sgd:
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.name is OptimKind.adamw else torch.optim.Adam
    return kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def rate_factor(config: OptimConfig, name: str) -> float:
    """What `optim.lr_by_part` makes of the rate of this weight: the factor of the last pattern that fits, else 1."""
    parts = [word.rpartition(":") for word in config.lr_by_part]
    return next((float(factor) for pattern, _, factor in reversed(parts) if fnmatchcase(name, pattern)), 1.0)


class Schedule:
    """The learning rate as a function of finished optimizer steps: linear warm-up, then constant, cosine or plateau.

    Written as a function of the step, not of calls, so that a resume can't step it twice.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int):
        self.optimizer, self.config, self.total_steps = optimizer, config, total_steps
        self.base = [group["lr"] for group in optimizer.param_groups]
        self.plateau_scale, self.best, self.stale = 1.0, math.inf, 0

    def factor(self, step: int) -> float:
        """Share of the base rate used by step number `step` (0 is the first)."""
        c = self.config
        if step < c.warmup_steps:
            return (step + 1) / c.warmup_steps
        if c.schedule is ScheduleKind.cosine:
            span = max(1, self.total_steps - c.warmup_steps)
            progress = min(1.0, (step - c.warmup_steps) / span)
            return c.min_lr_ratio + (1 - c.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
        return self.plateau_scale if c.schedule is ScheduleKind.plateau else 1.0

    def apply(self, step: int) -> float:
        """Sets the rate for step number `step`; -> that of the parts that keep to optim.lr."""
        factor = self.factor(step)
        for base, group in zip(self.base, self.optimizer.param_groups, strict=True):
            group["lr"] = base * factor
        return self.config.lr * factor

    def evaluated(self, value: float) -> None:
        """Tells plateau a validation value of which less is better."""
        if self.config.schedule is not ScheduleKind.plateau:
            return
        if value < self.best:
            self.best, self.stale = value, 0
            return
        self.stale += 1
        if self.stale > self.config.plateau_patience:
            self.plateau_scale = max(self.plateau_scale * self.config.plateau_factor, self.config.min_lr_ratio)
            self.stale = 0

    def state_dict(self) -> dict[str, float]:
        return {"plateau_scale": self.plateau_scale, "best": self.best, "stale": self.stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.plateau_scale, self.best, self.stale = state["plateau_scale"], state["best"], int(state["stale"])


class Ema:
    """Exponential moving average of the trainable weights (name -> weight), kept beside the model.

    The decay is ramped as min(decay, (1 + n) / (10 + n)) so that early weights don't linger in short runs.
    """

    def __init__(self, named: Mapping[str, Tensor], decay: float):
        self.decay, self.count = decay, 0
        self.named = dict(named)
        self.shadow = {n: p.detach().clone() for n, p in self.named.items()}

    @torch.no_grad()
    def update(self) -> None:
        decay = min(self.decay, (1 + self.count) / (10 + self.count))
        torch._foreach_lerp_(list(self.shadow.values()), [p.detach() for p in self.named.values()], 1 - decay)
        self.count += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges averaged and live weights; call it again to go back."""
        for name, parameter in self.named.items():
            live = parameter.detach().clone()
            parameter.copy_(self.shadow[name])
            self.shadow[name].copy_(live)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)
