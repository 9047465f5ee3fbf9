"""The harness itself: results come back, failures and stuck ranks are told with their place."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ranks.harness import RanksFailed, run_ranks

pytestmark = pytest.mark.ranks


def test_results_by_rank() -> None:
    def work(rank: int, world: int, base: int) -> tuple[int, torch.Tensor]:
        total = torch.tensor([float(rank + base)])
        dist.all_reduce(total)
        return rank, total

    results = run_ranks(work, 3, args=(10,))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(total, torch.tensor([33.0])) for _, total in results)


def test_every_traceback_is_shown() -> None:
    def work(rank: int, world: int) -> None:
        raise ValueError(f"rank {rank} is unhappy")

    with pytest.raises(RanksFailed) as failure:
        run_ranks(work, 2)
    for rank in range(2):
        assert f"rank {rank} is unhappy" in failure.value.reports[rank]


def test_one_failure_ends_the_waiting_rank() -> None:
    def work(rank: int, world: int) -> None:
        if rank == 1:
            os._exit(7)
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RanksFailed, match="died with exit code 7"):
        run_ranks(work, 2, timeout=40)
    assert time.monotonic() - start < 15


def test_stuck_rank_shows_where() -> None:
    def sleeps_for_ever(rank: int, world: int) -> None:
        if rank == 1:
            time.sleep(600)

    with pytest.raises(RanksFailed) as failure:
        run_ranks(sleeps_for_ever, 2, timeout=2)
    assert "sleeps_for_ever" in failure.value.reports[1]


def test_without_a_group() -> None:
    def work(rank: int, world: int) -> tuple[bool, str, str]:
        return dist.is_initialized(), os.environ["RANK"], os.environ["RANKS_INIT_METHOD"][:7]

    assert run_ranks(work, 2, init=False) == [(False, "0", "file://"), (False, "1", "file://")]


def test_refuses_a_parent_with_threads() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="busy")
    thread.start()
    try:
        with pytest.raises(AssertionError, match="busy"):
            run_ranks(lambda rank, world: None, 2)
    finally:
        stop.set()
        thread.join()
