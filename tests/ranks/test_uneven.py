"""Work that doesn't divide by the number of ranks: evaluations, last steps, and ranks with nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echofree.loop import mean_scores
from toy import Toy, ToyData, gradients, meet, records, weights

pytestmark = pytest.mark.ranks
Ranks = Callable[..., list[Any]]


@pytest.mark.parametrize(("clips", "batch_size"), [(5, 2), (1, 4), (3, 1)])
def test_scores_do_not_depend_on_the_number_of_ranks(
    run_ranks: Ranks, tmp_path: Path, clips: int, batch_size: int
) -> None:
    """5 clips in batches of 2 on 2 ranks: rank 1 has a batch less. 1 clip on 2 ranks: it has none."""
    keys = {"train.batch_size": batch_size}

    def work(rank: int, size: int) -> list[dict[str, Any]]:
        world = meet(rank, size)
        loop = Toy(tmp_path / str(size), world=world, valid_clips=clips, keys=keys).loop()
        return loop.evaluate(loop.valid)  # type: ignore[arg-type]

    alone = Toy(tmp_path / "1", valid_clips=clips, keys=keys).loop()
    rows = alone.evaluate(alone.valid)  # type: ignore[arg-type]
    assert mean_scores(rows)["place"] == (clips - 1) / 2
    for size in (2, 3):
        for rank in run_ranks(work, size, init=False):
            assert rank == rows
            assert mean_scores(rank) == mean_scores(rows)


def test_a_last_step_with_fewer_clips_than_ranks(run_ranks: Ranks, tmp_path: Path) -> None:
    """13 clips on 3 ranks x 2: the last step holds one clip, two ranks repeat it with weight 0. The gradient is that of
    the one clip, and every rank says so."""
    data = ToyData(13)
    keys = {"train.batch_size": 2, "train.epochs": 1, "optim.name": "sgd"}

    def train(toy: Toy) -> tuple[list[dict[str, Tensor]], list[dict[str, Any]], dict[str, Tensor]]:
        loop = toy.loop()
        seen: list[dict[str, Tensor]] = []
        update = loop.amp.update

        def watched(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
            seen.append(gradients(loop))
            update(optimizer, norm)

        loop.amp.update = watched  # type: ignore[method-assign]
        loop.fit()
        toy.world.barrier()
        return seen, records(loop), weights(loop)

    def work(rank: int, size: int) -> Any:
        return train(Toy(tmp_path / "three", world=meet(rank, size), data=data, keys=keys))

    expected, lines, last = train(Toy(tmp_path / "one", data=data, keys={**keys, "train.batch_size": 6}))
    assert len(expected) == 3
    for got, mine, end in run_ranks(work, 3, init=False):
        for a, b in zip(got, expected, strict=True):
            for name, value in b.items():
                torch.testing.assert_close(a[name], value, rtol=1e-5, atol=1e-6)
        for name, value in last.items():
            torch.testing.assert_close(end[name], value, rtol=1e-5, atol=1e-6)
        assert [r["loss"] for r in mine] == pytest.approx([r["loss"] for r in lines], rel=1e-5)


def test_the_order_of_a_run_is_the_same_on_any_number_of_ranks(run_ranks: Ranks, tmp_path: Path) -> None:
    def work(rank: int, size: int) -> list[set[str]]:
        keys = {"train.batch_size": 12 // size, "train.epochs": 2}
        loop = Toy(tmp_path / str(size), world=meet(rank, size), data=ToyData(29), keys=keys).loop()
        loader = loop.make_loader((0, 0))
        return [
            {n for b in loader.next_step(k) for n, w in zip(b.name, b.weight, strict=True) if w > 0}
            for _ in range(2)
            for k in range(loop.plan.steps_per_epoch)
        ]

    one, two, three = (run_ranks(work, size, init=False) for size in (1, 2, 3))
    whole = one[0]
    assert len(whole) == 6
    for ranks in (two, three):
        for step, clips in enumerate(whole):
            parts = [rank[step] for rank in ranks]
            assert set.union(*parts) == clips
            assert sum(map(len, parts)) == len(clips), "a clip went to two ranks"
