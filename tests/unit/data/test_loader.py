"""The order of the clips is a pure function; the loader follows it from any position, with any number of workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from echofree.contracts import Batch
from echofree.data.loader import Key, Plan, TrainLoader, eval_batches, eval_loader
from toy import ToyData


def step_of(plan: Plan, epoch: int, step: int) -> list[list[list[Key]]]:
    """[data rank][micro-batch][clip]"""
    order = plan.order(epoch)
    return [plan.micro_batches(order, epoch, step, rank) for rank in range(plan.data_size)]


def arithmetics() -> Iterator[tuple[int, int, int]]:
    """(micro-batch, accumulation, data ranks) of global batch 12."""
    for size in (1, 2, 3, 4, 6, 12):
        for accumulation in (1, 2, 3, 4, 6, 12):
            if 12 % (size * accumulation) == 0:
                yield 12 // (size * accumulation), accumulation, size


@pytest.mark.parametrize("num", [1, 11, 12, 13, 29, 60])
def test_any_split_sees_the_same_clips_in_the_same_step(num: int) -> None:
    reference = Plan(num, 12, 1, 1, seed=4)
    for batch, accumulation, size in arithmetics():
        plan = Plan(num, batch, accumulation, size, seed=4)
        assert plan.steps_per_epoch == reference.steps_per_epoch == -(-num // 12)
        for epoch in range(2):
            seen: list[int] = []
            for step in range(plan.steps_per_epoch):
                ranks = step_of(plan, epoch, step)
                clips = sorted(k.index for rank in ranks for micro in rank for k in micro if not k.filler)
                whole = [k.index for micro in step_of(reference, epoch, step)[0] for k in micro]
                assert clips == sorted(whole)
                seen += clips
                counts = {len(rank) for rank in ranks}
                assert len(counts) == 1, "every rank has equally many micro-batches"
                assert counts.pop() <= accumulation
                sizes = [len(micro) for rank in ranks for micro in rank]
                assert min(sizes) >= 1
                assert max(sizes) <= batch
            assert sorted(seen) == list(range(num)), "every clip once per epoch"


def test_a_rank_without_a_clip_repeats_one_that_counts_nothing() -> None:
    plan = Plan(num_items=5, batch_size=1, accumulation=1, data_size=4, seed=0)
    ranks = step_of(plan, 0, 1)
    real = int(plan.order(0)[4])
    assert ranks == [[[Key(0, real, False)]], *[[[Key(0, real, True)]]] * 3]


def test_orders() -> None:
    plan = Plan(50, 4, 1, 1, seed=0)
    orders = [tuple(plan.order(epoch)) for epoch in range(5)]
    assert len(set(orders)) == 5, "every epoch has an own order"
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders == [tuple(Plan(50, 8, 2, 3, seed=0).order(epoch)) for epoch in range(5)], "0 is a seed"
    assert tuple(Plan(50, 4, 1, 1, seed=1).order(0)) != orders[0]
    assert list(Plan(50, 4, 1, 1, seed=0, shuffle=False).order(3)) == list(range(50))


def names(batches: list[Batch]) -> list[list[str]]:
    return [batch.name for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_from_any_position_the_rest_is_the_same(workers: int) -> None:
    """7 steps an epoch, 2 epochs, rank 1 of 2 with accumulation 2, the last step partial."""
    data = ToyData(53)
    plan = Plan(len(data), 2, 2, 2, seed=9)
    assert plan.steps_per_epoch == 7
    positions = [(epoch, step) for epoch in range(2) for step in range(7)]

    def read(start: tuple[int, int]) -> list[list[list[str]]]:
        loader = TrainLoader(data, plan, 1, 2, start, workers, 2)
        found = [names(loader.next_step(step)) for _, step in positions[positions.index(start) :]]
        loader.close()
        return found

    whole = read((0, 0))
    assert [len(step) for step in whole] == [2, 2, 2, 2, 2, 2, 2] * 2
    for (epoch, step), got in zip(positions, whole, strict=True):
        keys = step_of(plan, epoch, step)[1]
        assert got == [[f"epoch {k.epoch}/clip {k.index}" for k in micro] for micro in keys]
    for start in positions if not workers else [(0, 3), (1, 0), (1, 6)]:
        assert read(start) == whole[positions.index(start) :]


def test_workers_change_nothing_in_a_clip() -> None:
    data, plan = ToyData(12), Plan(12, 5, 1, 1, seed=0)
    alone, helped = (TrainLoader(data, plan, 0, 1, (0, 0), workers) for workers in (0, 2))
    for step in range(plan.steps_per_epoch):
        for a, b in zip(alone.next_step(step), helped.next_step(step), strict=True):
            assert torch.equal(a.mic, b.mic)
            assert torch.equal(a.weight, b.weight)
            assert a.index.tolist() == b.index.tolist()
    helped.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_done_ahead_comes_with_its_batch(workers: int) -> None:
    data = ToyData(12)

    def ahead(mic: torch.Tensor, far: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": mic + far, "threads": torch.full((len(mic),), torch.get_num_threads())}

    loader = TrainLoader(data, Plan(12, 5, 1, 1, seed=0), 0, 1, (0, 0), workers, ahead=ahead)
    for step in range(3):
        (batch,) = loader.next_step(step)
        assert batch.front is not None
        assert torch.equal(batch.front["sum"], batch.mic + batch.far)
        halves = batch.map(lambda t: t[:1])
        assert halves.front is not None
        assert torch.equal(halves.front["sum"], batch.front["sum"][:1])
        if workers:
            assert batch.front["threads"].tolist() == [1] * len(batch)
    loader.close()
    (batch,) = list(eval_loader(data, eval_batches(3, 4, 0, 1), workers, 2, False, ahead))
    assert batch.front is not None
    assert torch.equal(batch.front["sum"], batch.mic + batch.far)


def test_the_same_clip_differs_between_epochs_and_ranks_make_different_ones() -> None:
    """The first gain of each (rank, epoch) with workers: all different, and the same the next time."""
    data = ToyData(16)

    def firsts() -> list[float]:
        found = []
        for rank in range(2):
            plan = Plan(16, 4, 1, 2, seed=0)
            loader = TrainLoader(data, plan, rank, 2, (0, 0), 2)
            found += [float(loader.next_step(step)[0].mic[0, 0]) for _ in range(2) for step in range(2)]
            loader.close()
        return found

    gains = firsts()
    assert len(set(gains)) == 8
    assert firsts() == gains


def test_a_loader_takes_nothing_from_the_run_s_random_streams() -> None:
    """Else a resume, which makes a fresh loader, would shift the dropout."""
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    data = ToyData(8)
    loader = TrainLoader(data, Plan(8, 2, 1, 1, seed=0), 0, 1, (0, 0), 2)
    loader.next_step(0)
    loader.close()
    list(eval_loader(data, eval_batches(8, 4, 0, 1), 0, 2, False))
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1], states[2]) == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_comes_through(workers: int) -> None:
    class Broken(ToyData):
        def item(self, index: int, epoch: int) -> Any:
            raise OSError(f"clip {index} of epoch {epoch} is gone")

    loader = TrainLoader(Broken(4), Plan(4, 2, 1, 1, seed=0, shuffle=False), 0, 1, (0, 0), workers)
    with pytest.raises(OSError, match="clip 0 of epoch 0 is gone"):
        loader.next_step(0)
    loader.close()


def test_closing_ends_the_workers() -> None:
    loader = TrainLoader(ToyData(64), Plan(64, 2, 1, 1, seed=0), 0, 1, (0, 0), 2)
    loader.next_step(0)
    processes = loader._iterator._workers  # type: ignore[attr-defined]
    assert all(p.is_alive() for p in processes)
    loader.close()
    assert not any(p.is_alive() for p in processes)
    loader.close()


@pytest.mark.parametrize("num", [0, 1, 5, 8, 17])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_evaluation_batches(num: int, size: int) -> None:
    ranks = [eval_batches(num, 4, rank, size) for rank in range(size)]
    real = [[k for k in batch if not k.filler] for rank in ranks for batch in rank]
    assert sorted(k.index for batch in real for k in batch) == list(range(num)), "every clip exactly once"
    assert len({len(rank) for rank in ranks}) == 1, "equally many batches"
    assert all(batch for rank in ranks for batch in rank), "none is empty"
    # a clip has the same neighbours, so the same padding, whatever the number of ranks
    alone = {tuple(batch) for batch in map(tuple, eval_batches(num, 4, 0, 1))}
    assert {tuple(batch) for batch in real if batch} == alone
