"""A step with the largest shapes before step one: what doesn't fit is known after seconds, not in the third hour.

Legend: B batch, T samples.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echofree import checkpoint
from echofree.config.schema import DryRun, OptimKind, TrainConfig
from echofree.contracts import Batch, Dataset, Scenario, Strategy, Task
from echofree.meter import peak_mb

if TYPE_CHECKING:
    from echofree.loop import Loop

log = logging.getLogger("echofree")

LOOKED_AT = 8  # clips, of a dataset that doesn't say how long its longest is


def longest_samples(dataset: Dataset) -> int:
    """T of the longest clip: what the dataset says (`longest_samples`), else the longest of a few clips spread over
    the list."""
    said = getattr(dataset, "longest_samples", None)
    if said is not None:
        return int(said)
    count = min(LOOKED_AT, len(dataset))
    return max(len(dataset.item(i * len(dataset) // count, 0).mic) for i in range(count))


def full_batch(clips: int, num_samples: int, sample_rate: int, device: torch.device) -> Batch:
    """A batch in which every sample is valid and 1: [B, T]."""

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    waves: Any = {name: ones(clips, num_samples) for name in ("mic", "far", "near", "echo", "noise")}  # [B, T]
    flags: Any = {name: ones(clips, dtype=torch.bool) for name in ("has_near", "has_echo")}
    return Batch(
        **waves,
        **flags,
        num_samples=ones(clips, dtype=torch.int64) * num_samples,
        weight=ones(clips) * (num_samples / sample_rate),
        scenario=ones(clips, dtype=torch.int64) * int(Scenario.DOUBLE_TALK),
        delay_samples=ones(clips, dtype=torch.int64),
        index=torch.arange(clips, device=device),
        name=[f"clip {i} of the dry run" for i in range(clips)],
    )


def moments(config: Any, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    """As much memory as the optimizer's states will take."""
    count = 1 if config.optim.name is OptimKind.sgd else 2
    return [torch.empty_like(p, requires_grad=False) for p in parameters for _ in range(count)]


class Rehearsal:
    """Steps that leave no trace: weights, running statistics, gradients and random states are as before.

    Args:
        config: the run config.
        sample_rate: Hz, of the clips.
        num_samples: T of the longest clip.
    """

    def __init__(self, config: Any, strategy: Strategy, task: Task, device: torch.device, rate: int, num_samples: int):
        self.config, self.strategy, self.task, self.device = config, strategy, task, device
        self.sample_rate, self.num_samples = rate, num_samples

    def batch(self, clips: int) -> Batch:
        return full_batch(clips, self.num_samples, self.sample_rate, self.device)

    def step(self, clips: int, micro_batches: int = 1) -> None:
        """Forward, backward, exchange and clipping of this many clips; every rank calls it.

        Raises:
            torch.OutOfMemoryError, RuntimeError, MemoryError: it doesn't fit.
        """
        batches = [self.batch(clips)] * micro_batches
        weight = float(clips * micro_batches * self.strategy.data_size)
        self.strategy.model.train()
        random, buffers = checkpoint.random_state(), [b.clone() for b in self.strategy.buffers]
        states = moments(self.config, self.strategy.parameters)
        try:
            self.strategy.run(self.task, batches, weight)
            self.strategy.clip(self.config.train.clip_norm)
        finally:
            del states
            self._forget(random, buffers)
        clock = getattr(self.strategy, "clock", None)
        if clock is not None:
            clock.take_s()

    def alone(self, clips: int, amp: Any) -> None:
        """The same without any other rank: only for a strategy whose ranks hold the whole model."""
        random, buffers = checkpoint.random_state(), [b.clone() for b in self.strategy.buffers]
        states = moments(self.config, self.strategy.parameters)
        self.strategy.bare.train()
        try:
            with amp.autocast():
                loss, _, _ = self.task.loss(self.strategy.bare, self.batch(clips))
            amp.backward(loss)
        finally:
            del states
            self._forget(random, buffers)

    def _forget(self, random: dict[str, Any], buffers: list[Tensor]) -> None:
        for parameter in self.strategy.parameters:
            parameter.grad = None
        for buffer, old in zip(self.strategy.buffers, buffers, strict=True):
            buffer.copy_(old)
        checkpoint.restore_random_state(random)


def wants_dry_run(train: TrainConfig, device: torch.device) -> bool:
    """Whether `train.dry_run` asks for one on this device."""
    return train.dry_run is DryRun.on or (train.dry_run is DryRun.auto and device.type == "cuda")


def dry_run(loop: Loop, rehearsal: Rehearsal) -> None:
    """One step of the loop with the largest shapes; every rank calls it. What is wrong with it is told as of a step.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: it doesn't fit.
    """
    train, began = loop.config.train, time.perf_counter()
    loop.pulse.at("dry run")
    loop.shapes = [(train.batch_size, rehearsal.num_samples)]
    rehearsal.step(train.batch_size, min(2, train.gradient_accumulation_steps))  # a third adds nothing
    log.info(
        "dry run: %d clips of %d samples fit on this rank (peak %.0f MB), %.1f s",
        train.batch_size, rehearsal.num_samples, peak_mb(loop.device), time.perf_counter() - began,
    )  # fmt: skip
