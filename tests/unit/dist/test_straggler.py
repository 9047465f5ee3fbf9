"""Who is slow is named after three windows; the clock sees the wait for the other rank and nothing else."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echofree.dist.straggler import REPEAT, WINDOWS, GradientClock, Stragglers


def told(hosts: list[str], own: list[float], data: list[float]) -> list[float]:
    meter = Stragglers(hosts)
    return np.sum([meter.slots(r, o, d) for r, (o, d) in enumerate(zip(own, data, strict=True))], 0).tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_slow_rank_is_named_after_three_windows(size: int, rng: np.random.Generator) -> None:
    hosts = [f"node{r}" for r in range(size)]
    own = rng.uniform(0.018, 0.022, size)
    slow = int(rng.integers(size))
    own[slow] = 0.08
    meter = Stragglers(hosts)
    told_now = told(hosts, own.tolist(), [0.03 if r == slow else 0.001 for r in range(size)])
    found = [meter.compare(told_now, 0.1) for _ in range(WINDOWS + REPEAT)]
    assert [len(f) for f in found] == [0, 0, 1, *[0] * (REPEAT - 1), 1]
    text = found[WINDOWS - 1][0]
    assert f"rank {slow} on node{slow} is slow" in text
    assert "80 ms a step (30 ms of it waiting for data)" in text
    others = float(np.median(np.delete(own, slow)))
    assert f"{100 * (0.08 - others) / 0.1:.0f} % of the time" in text


def test_a_pause_and_a_trifle_are_no_stragglers() -> None:
    hosts = ["a", "b"]
    meter = Stragglers(hosts)
    for own in ([0.09, 0.02], [0.09, 0.02], [0.02, 0.02]) * 4:  # twice, then not
        assert meter.compare(told(hosts, own, [0.0, 0.0]), 0.1) == []
    meter = Stragglers(hosts)
    for _ in range(6):  # twice as slow, but 1 % of the step
        assert meter.compare(told(hosts, [0.002, 0.001], [0.0, 0.0]), 0.1) == []


@pytest.mark.ranks
def test_the_clock_measures_the_wait_for_the_slow_rank(run_ranks: Any) -> None:
    def work(rank: int, size: int) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        model = nn.parallel.DistributedDataParallel(net)
        clock = GradientClock(list(net.parameters()), torch.device("cpu"))
        waits = []
        for _ in range(4):
            loss = model(torch.randn(4, 8)).square().mean()
            if rank == 1:
                time.sleep(0.2)
            loss.backward()
            clock.stop()
            waits.append(clock.take_s())
        return waits

    fast, slow = run_ranks(work, 2)
    assert all(0.12 < w < 0.6 for w in fast), fast
    assert float(np.median(slow)) < 0.1, slow
