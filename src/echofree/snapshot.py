"""Weights, moments and averages on their way into a checkpoint and back: whole tensors gathered from all ranks, or this
rank's parts as they lie. Either way any strategy on any number of ranks can take them up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echofree import checkpoint
from echofree.config.schema import CheckpointFormat
from echofree.contracts import Strategy
from echofree.dist import shard
from echofree.optim import Ema


def is_in_parts(wanted: CheckpointFormat, strategy: Strategy) -> bool:
    """Whether every rank writes its own part. `auto`: where no rank holds the whole, since gathering it takes memory
    and time, and is undone at the next start."""
    return wanted is CheckpointFormat.parts or (wanted is CheckpointFormat.auto and not strategy.whole)


def whole(strategy: Strategy, optimizer: torch.optim.Optimizer, ema: Ema | None) -> dict[str, Any]:
    """File stem -> content in whole tensors, the same on every rank; every rank calls it."""
    content: dict[str, Any] = {"model": strategy.model_state(), "optimizer": strategy.optimizer_state(optimizer)}
    if ema is not None:
        content["ema"] = {**ema.state_dict(), "shadow": strategy.gather(ema.shadow)}
    return content


def parts(strategy: Strategy, optimizer: torch.optim.Optimizer, ema: Ema | None) -> dict[str, Any]:
    """The same with this rank's part of each tensor; nothing is exchanged or copied."""
    moments = shard.each_tensor(shard.named_state(optimizer, strategy.named()), strategy.pieces)
    content: dict[str, Any] = {"model": dict(strategy.bare.state_dict()), "optimizer": {"state": moments}}
    if ema is not None:
        content["ema"] = {**ema.state_dict(), "shadow": strategy.pieces(ema.shadow)}
    return content


def restore(folder: Path, strategy: Strategy, optimizer: torch.optim.Optimizer, ema: Ema | None) -> None:
    """Takes up what a checkpoint holds, in whole tensors or in parts of whatever ranks. The optimizer's settings stay
    this run's.

    Raises:
        CheckpointError: it is of another model, or can't be read.
    """
    given = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if checkpoint.in_parts(folder):
        _take_parts(folder, strategy, optimizer, ema)
    else:
        strategy.load_model_state(checkpoint.load(folder, "model"))
        strategy.load_optimizer_state(optimizer, checkpoint.load(folder, "optimizer"))
        if ema is not None:
            averaged = checkpoint.load(folder, "ema")
            ema.load_state_dict({**averaged, "shadow": strategy.part(averaged["shadow"])})
    for group, settings in zip(optimizer.param_groups, given, strict=True):
        group.update(settings)


def _take_parts(folder: Path, strategy: Strategy, optimizer: torch.optim.Optimizer, ema: Ema | None) -> None:
    """Each rank reads its own part, straight to where it belongs."""
    model, named = strategy.bare.state_dict(), strategy.named()
    shard.check_names(model, checkpoint.outline(folder, "model"))
    checkpoint.read_parts(folder, "model", {name: t for name, t in model.items() if not t.is_meta})
    moments: dict[str, dict[str, Tensor]] = {}
    for place, facts in checkpoint.outline(folder, "optimizer").items():
        _, name, key = place.split("/")
        if name in named:
            like = named[name]
            shaped = facts.dim() == like.dim()  # else a number, such as the count of steps
            empty = torch.empty_like(like, dtype=facts.dtype) if shaped else torch.empty(facts.shape, dtype=facts.dtype)
            moments.setdefault(name, {})[key] = empty.detach()
    pieces = shard.each_tensor(moments, strategy.pieces)
    targets = {f"state/{name}/{key}": t for name, values in pieces.items() for key, t in values.items()}
    checkpoint.read_parts(folder, "optimizer", targets)
    shard.load_named_state(optimizer, moments, named)
    if ema is not None:
        shadow = {name: torch.empty_like(weight) for name, weight in ema.shadow.items()}
        targets = {f"shadow/{name}": tensor for name, tensor in strategy.pieces(shadow).items()}
        checkpoint.read_parts(folder, "ema", targets)
        ema.load_state_dict({**checkpoint.load(folder, checkpoint.PARTS)["ema"], "shadow": shadow})
