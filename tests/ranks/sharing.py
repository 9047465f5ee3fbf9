"""A run of `base` cut to test size, and of tiny and small, for tests of the strategies: real model, loss, loop and
checkpoints; clips of 75 to 250 ms of noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import echofree.dist.fsdp
import echofree.dist.parts
import echofree.dist.pipeline
import echofree.dist.tensor  # noqa: F401  # once here, not in every forked rank anew (3 s)
from echofree.contracts import Clip
from echofree.dist.world import World
from echofree.loss import CompressedSpectral, SiSdr, Weighted
from echofree.model.bark import BarkNet
from echofree.model.crn import ConvRecurrentNet
from echofree.model.transformer import Transformer
from echofree.task.supervised import Supervised
from toy import Toy

RATE = 16000
FRONT = {"num_partitions": 2, "max_delay_ms": 100.0}


def base(num_layers: int = 3, dropout: float = 0.0) -> Transformer:
    return Transformer(
        hidden_size=32, num_layers=num_layers, num_heads=4, context_frames=8, dropout=dropout, front_end=FRONT
    )


def tiny() -> BarkNet:
    return BarkNet(hidden_size=24, front_end=FRONT)


def small() -> ConvRecurrentNet:
    return ConvRecurrentNet(channels=[4, 6, 8, 8, 8], hidden_size=16, front_end=FRONT)


class Noise:
    """Clips that are a pure function of (epoch, index), of unequal length unless `even`."""

    sample_rate = RATE

    def __init__(self, num: int, seed: int = 3, even: bool = False):
        self.num, self.seed, self.even = num, seed, even

    def __len__(self) -> int:
        return self.num

    def item(self, index: int, epoch: int) -> Clip:
        rng = np.random.default_rng([self.seed, epoch, index])
        length = 2400 if self.even else int(rng.integers(1200, 4000))
        near, far = (rng.standard_normal((2, length)) * 0.1).astype(np.float32)
        mic = near + 0.5 * np.concatenate([np.zeros(40, np.float32), far[:-40]])
        return Clip(mic, far, near, name=f"clip {index}", index=index)


def task() -> Supervised:
    loss = Weighted({"spectral": CompressedSpectral(), "sdr": SiSdr()}, {"spectral": 1.0, "sdr": 0.02})
    return Supervised(loss, ["si_sdr"], RATE)


def run_of(folder: Path, world: World, model: Any, keys: Mapping[str, Any], num_clips: int = 29) -> Toy:
    """29 clips as 8 + 8 + 8 + 5: two epochs are 8 steps.

    Blocks and loss give gradients that agree to 1e-10 however clips are batched; the adaptive filter before them turns
    other rounding of its FFTs into 1e-7. The rate is that of `base`, and Adam's eps far above such rounding."""
    chosen = {
        "train.epochs": 2, "train.clip_norm": 0.5, "train.save_interval": 0, "optim.lr": 1e-4, "optim.eps": 1e-4,
        "dist.microbatches": 2, **keys,
    }  # fmt: skip
    return Toy(folder, world=world, model=model, data=Noise(num_clips), task=task(), keys=chosen)  # type: ignore[arg-type]


def difference(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute difference of two states."""
    assert list(a) == list(b)
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
