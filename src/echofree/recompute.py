"""Activation checkpointing: a block keeps its input alone, and computes the rest again when its gradient is due.

Chen et al. 2016, "Training deep nets with sublinear memory cost", arXiv 1604.06174. Memory for activations falls to one
tensor per block, a step takes about a third longer. Dropout is the same both times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from echofree.errors import ConfigError


def recompute(model: nn.Module) -> None:
    """Makes every block of `model` forget, in place. Names of weights stay as they are.

    Raises:
        ConfigError: the model offers no blocks, or a block keeps running statistics.
    """
    found = problems(model)
    if found:
        raise ConfigError(found)
    for block in model.blocks():  # type: ignore[operator]
        block.forward = _forgetting(block.forward)


def problems(model: nn.Module) -> list[str]:
    """Why `train.activation_checkpointing` can't work with this model; mostly nothing."""
    kind = type(model).__name__
    if not callable(getattr(model, "blocks", None)):
        return [
            (
                f"train.activation_checkpointing=true works block by block, and {kind} offers no blocks(). Leave it "
                "out, or type model=base"
            )
        ]
    # computing a block twice would count its batch twice
    counting = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if counting:
        return [
            (
                f"train.activation_checkpointing=true would update the statistics of {counting[0]} (a batch norm) "
                "twice a step. Leave it out, or use a norm without running statistics"
            )
        ]
    return []


def _forgetting(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        return checkpoint(forward, *args, use_reentrant=False)

    return run
