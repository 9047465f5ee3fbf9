"""Decisions that one rank alone has reasons for are taken by all: stops, steps that aren't finite, early stops."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echofree import checkpoint
from echofree.contracts import Batch
from echofree.errors import NonFiniteError
from echofree.loop import Loop
from echofree.stop import StopFlag
from toy import Toy, ToyData, ToyModel, ToyTask, meet, records, weights

pytestmark = pytest.mark.ranks
Ranks = Callable[..., list[Any]]


def in_step(loop: Loop, number: int, action: Callable[[], None]) -> None:
    """Calls `action` in the second micro-batch of step `number` (1 is the first)."""
    micro, calls = loop.strategy.micro, [0]

    def watched(last: bool) -> Any:
        calls[0] += 1
        if loop.state.step + 1 == number and last:
            action()
        return micro(last)

    loop.strategy.micro = watched


@pytest.mark.parametrize("who", [0, 1])
def test_a_signal_to_one_rank_stops_both_at_the_same_step(run_ranks: Ranks, tmp_path: Path, who: int) -> None:
    """TERM arrives in the second of two micro-batches: the step is finished, both save it, and the run goes on from
    there as if nothing had been."""
    keys = {"train.batch_size": 2, "train.gradient_accumulation_steps": 2, "train.epochs": 3}

    def work(rank: int, size: int, folder: str, strike: int, load: bool) -> tuple[Any, ...]:
        stop = StopFlag()
        stop.install()
        toy = Toy(tmp_path / folder, world=meet(rank, size), stop=stop, keys=keys)
        loop = toy.loop()
        if load:
            found = checkpoint.newest_good(loop.run.checkpoints)
            assert found is not None
            loop.load(found)
        if strike and rank == who:
            in_step(loop, strike, lambda: os.kill(os.getpid(), signal.SIGTERM))
        outcome = loop.fit()
        toy.world.barrier()
        return outcome.status, outcome.why, loop.state.step, weights(loop), records(loop)

    cut = run_ranks(work, 2, init=False, args=("cut", 3, False))
    assert [r[0] for r in cut] == ["preempted", "preempted"]
    assert [r[2] for r in cut] == [3, 3]
    assert cut[who][1] == "signal SIGTERM"
    assert cut[1 - who][1] == "another rank was asked to stop"
    folder = tmp_path / "cut/checkpoints/step-000003"
    assert checkpoint.damage(folder) == ""
    again = run_ranks(work, 2, init=False, args=("cut", 0, True))
    uncut = run_ranks(work, 2, init=False, args=("uncut", 0, False))
    for rank in range(2):
        assert again[rank][0] == "done"
        assert all(torch.equal(again[rank][3][k], v) for k, v in uncut[rank][3].items())
    assert again[0][4] == uncut[0][4], "every step once, in order"


@pytest.mark.parametrize(
    ("name", "first", "norm"), [("adamw", True, False), ("sgd", True, False), ("adamw", False, True)]
)
def test_nan_on_one_rank_is_skipped_by_both(
    run_ranks: Ranks, tmp_path: Path, name: str, first: bool, norm: bool
) -> None:
    """The NaN clip is on rank 1 only. Both leave the step out, whole: weights, statistics, optimizer state."""
    keys = {"optim.name": name, "train.batch_size": 2, "train.epochs": 1, "train.log_every": 2, "train.clip_norm": 1.0}
    order = Toy(tmp_path / "probe", num_clips=16, keys={**keys, "train.batch_size": 4}).loop().plan.order(0)
    at = 0 if first else 2
    bad = int(order[4 * at + 3])  # the last clip of the step's four is rank 1's

    def work(rank: int, size: int) -> tuple[Any, ...]:
        def model() -> ToyModel:
            return ToyModel(norm=norm)

        data = ToyData(16, nan_at=(bad,))
        toy = Toy(tmp_path / "run", world=meet(rank, size), data=data, model=model, keys=keys)
        loop = toy.loop()
        history, mine, step = [weights(loop)], [], loop.step

        def watched(batches: list[Batch], total: float) -> None:
            mine.append(any(bad in b.index.tolist() for b in batches))
            step(batches, total)
            history.append(weights(loop))

        loop.step = watched  # type: ignore[method-assign]
        status = loop.fit().status
        toy.world.barrier()
        moments = [float(s["step"]) for s in loop.optimizer.state_dict()["state"].values() if "step" in s]
        return status, history, mine, loop.state.skipped, moments, records(loop)

    ranks = run_ranks(work, 2, init=False)
    assert [r[2][at] for r in ranks] == [False, True], "the clip has to be rank 1's"
    for status, history, _, skipped, moments, _ in ranks:
        assert status == "done"
        assert skipped == 1
        assert all(torch.equal(history[at][k], v) for k, v in history[at + 1].items()), "the skipped step"
        assert not all(torch.equal(history[at + 1][k], v) for k, v in history[at + 2].items()), "the next one"
        assert all(v.isfinite().all() for v in history[-1].values())
        assert all(torch.equal(ranks[0][1][-1][k], v) for k, v in history[-1].items())
        assert set(moments) <= {3.0}, "Adam counts the steps it took"
    told = [json.loads(line) for line in (tmp_path / "run/logs/nonfinite.jsonl").read_text().splitlines()]
    assert {"step": at + 1, "clip": f"epoch 0/clip {bad}"} in told
    # the clips of the rank that had it; synchronised statistics carry a NaN to the other one
    assert len(told) == (4 if norm else 2)


def test_policy_stop_raises_on_all_ranks(run_ranks: Ranks, tmp_path: Path) -> None:
    def work(rank: int, size: int) -> str:
        keys = {"train.nonfinite": "stop", "train.batch_size": 2}
        loop = Toy(tmp_path, world=meet(rank, size), data=ToyData(16, nan_at=(3,)), keys=keys).loop()
        try:
            loop.fit()
        except NonFiniteError as error:
            return str(error)
        return ""

    a, b = run_ranks(work, 2, init=False)
    assert a == b
    assert "epoch 0/clip 3" in (tmp_path / "logs/nonfinite.jsonl").read_text()


def test_early_stop_and_best_are_agreed_when_scores_differ_by_rank(run_ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's own clips alone would say something else: rank 0's get better, rank 1's get worse faster."""

    class Drifting(ToyTask):
        calls = 0

        def evaluate(self, model: torch.nn.Module, batch: Batch) -> list[dict[str, Any]]:
            rows = super().evaluate(model, batch)
            for row in rows:
                row["drift"] = -1.0 * Drifting.calls if row["index"] < 2 else 3.0 * Drifting.calls
            Drifting.calls += 1
            return rows

    keys = {
        "train.eval_interval": 1, "train.epochs": 9, "train.early_stop_patience": 2, "train.batch_size": 2,
        "checkpoint.metric": "drift",
    }  # fmt: skip

    def work(rank: int, size: int) -> tuple[str, int, float | None, int]:
        toy = Toy(tmp_path, world=meet(rank, size), valid_clips=4, task=Drifting(), keys=keys)
        loop = toy.loop()
        status = loop.fit().status
        return status, loop.state.step, loop.state.best, loop.state.best_step

    ranks = run_ranks(work, 2, init=False)
    assert ranks[0] == ranks[1] == ("stopped", 12, 0.0, 4)
    assert checkpoint.pointed(tmp_path / "checkpoints", "best") == tmp_path / "checkpoints/step-000004"


def test_an_error_on_the_way_out_waits_for_nobody(run_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1's data fails in epoch 1; it leaves at once with that error instead of joining an exchange."""

    class Broken(ToyData):
        def item(self, index: int, epoch: int) -> Any:
            if os.environ["RANK"] == "1" and epoch == 1:
                raise RuntimeError("the file is gone")
            return super().item(index, epoch)

    def work(rank: int, size: int) -> str:
        loop = Toy(tmp_path, world=meet(rank, size), data=Broken(16)).loop()
        try:
            loop.fit()
        except RuntimeError as error:
            return str(error)
        return "no error"

    other, first = run_ranks(work, 2, init=False, timeout=20)
    assert "the file is gone" in first
    assert other != "no error", "the other one is told by the connection that closed"
