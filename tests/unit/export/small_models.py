"""Models for the tests of exports: shipped classes, cut down, with weights that make every layer count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from echofree.model.bark import BarkNet
from echofree.model.crn import ConvRecurrentNet
from echofree.model.linear import Linear
from echofree.model.transformer import Transformer

FRONT = {"num_partitions": 4, "max_delay_ms": 200.0}
MAKERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: Linear(num_partitions=4, max_delay_ms=200.0),
    "tiny": lambda: BarkNet(hidden_size=24, front_end=FRONT),
    "wide tiny": lambda: BarkNet(front_end=FRONT),
    "small": lambda: ConvRecurrentNet(channels=(8, 8, 8), hidden_size=24, front_end=FRONT),
    "base": lambda: Transformer(hidden_size=32, num_layers=2, num_heads=2, context_frames=6, front_end=FRONT),
}


def make(name: str, seed: int = 0, spread: float = 0.05) -> Any:
    """A model in evaluation mode with statistics and weights as after a training: nothing is 0 or 1."""
    torch.manual_seed(seed)
    model = MAKERS[name]().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 2)
            module.bias.data.normal_(0, 0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return model
