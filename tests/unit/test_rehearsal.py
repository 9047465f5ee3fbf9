"""A dry run sees the largest shapes and leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echofree.config.schema import DryRun, TrainConfig
from echofree.data.synthetic import Synthetic
from echofree.rehearsal import Rehearsal, dry_run, longest_samples, wants_dry_run
from toy import CPU, Toy, ToyData, ToyModel, meet, records, weights

Ranks = Callable[..., list[Any]]


def trained(toy: Toy, rehearse: bool) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], Any]:
    loop = toy.loop()
    if rehearse:
        dry_run(loop, Rehearsal(loop.config, loop.strategy, loop.task, CPU, 64, 64))
        assert not any(p.grad is not None for p in loop.strategy.parameters)
        assert not loop.optimizer.state
    loop.fit()
    toy.world.barrier()
    state = (torch.get_rng_state().sum().item(), random.random(), float(np.random.rand()))
    return records(loop), weights(loop), state


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_is_the_same_to_the_last_bit(run_ranks: Ranks, tmp_path: Path, size: int) -> None:
    """With dropout, batch norm, a moving average and accumulation."""
    keys = {"train.gradient_accumulation_steps": 2, "train.ema_decay": 0.9, "train.batch_size": 2}

    def work(rank: int, size: int, rehearse: bool) -> Any:
        random.seed(1)
        np.random.seed(1)
        folder = tmp_path / f"{size} {rehearse}"
        toy = Toy(folder, world=meet(rank, size), model=lambda: ToyModel(norm=True, dropout=0.5), keys=keys)
        return trained(toy, rehearse)

    pair = [run_ranks(work, size, args=(rehearse,), init=False) for rehearse in (False, True)]
    for without, with_it in zip(*pair, strict=True):
        assert with_it[0] == without[0]
        assert with_it[2] == without[2]
        assert all(torch.equal(with_it[1][n], v) for n, v in without[1].items())


def test_it_sees_the_longest_clips_all_at_once_and_twice_when_they_add_up(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    class Watched(ToyModel):
        def forward(self, mic: torch.Tensor, far: torch.Tensor, details: bool = False) -> torch.Tensor:
            assert self.training
            seen.append(tuple(mic.shape))
            return super().forward(mic, far, details)

    keys = {"train.gradient_accumulation_steps": 5, "train.batch_size": 3}
    loop = Toy(tmp_path, model=Watched, keys=keys).loop()
    dry_run(loop, Rehearsal(loop.config, loop.strategy, loop.task, CPU, 64, 64))
    assert seen == [(3, 64)] * 2
    assert loop.shapes == [(3, 64)]


def test_what_does_not_fit_comes_out_and_still_leaves_no_trace(tmp_path: Path) -> None:
    class Tight(ToyModel):
        def forward(self, mic: torch.Tensor, far: torch.Tensor, details: bool = False) -> torch.Tensor:
            out = super().forward(mic, far, details)
            if len(mic) > 2:
                raise torch.OutOfMemoryError("3 clips don't fit")
            return out

    loop = Toy(tmp_path, model=lambda: Tight(norm=True)).loop()
    before = weights(loop)
    with pytest.raises(torch.OutOfMemoryError):
        dry_run(loop, Rehearsal(loop.config, loop.strategy, loop.task, CPU, 64, 64))
    assert all(torch.equal(before[name], value) for name, value in weights(loop).items())
    assert loop.pulse.phase == "dry run"


def test_longest_clip_is_said_or_looked_for() -> None:
    split = Synthetic(segment_s=1.5, num_train=3).split("train")
    assert split is not None
    assert longest_samples(split) == 24000
    data = ToyData(6)
    assert longest_samples(data) == max(len(data.item(i, 0).mic) for i in range(6))


@pytest.mark.parametrize(
    ("asked", "device", "expected"), [("auto", "cuda", True), ("auto", "cpu", False), ("on", "cpu", True)]
)
def test_when(asked: str, device: str, expected: bool) -> None:
    assert wants_dry_run(TrainConfig(dry_run=DryRun(asked)), torch.device(device)) is expected
