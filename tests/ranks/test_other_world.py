"""Going on with another number of ranks, saves in the background of several, and agreement when one disk is full."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echofree import checkpoint, compare, restart
from echofree.errors import CheckpointError, SaveFailed
from echofree.rundir import RunDir
from toy import Toy, ToyData, ToyModel, meet, records, weights

pytestmark = pytest.mark.ranks

Ranks = Callable[..., list[Any]]
# the same global batch of 8 clips: 2 ranks x 4, 1 rank x 8, 4 ranks x 2
SIZES = {1: 8, 2: 4, 4: 2}


def build(folder: Path, rank: int, size: int, dropout: float = 0.0, **keys: Any) -> Any:
    settings = {
        "train.batch_size": SIZES[size], "train.epochs": 3, "train.save_every_steps": 4, "checkpoint.keep_last": 99,
        "optim.schedule": "cosine", "train.ema_decay": 0.9, "train.log_every": 2,
        **{name.replace("__", "."): value for name, value in keys.items()},
    }  # fmt: skip
    log = str(folder.parent / f"{folder.name}.{rank}")
    return Toy(
        folder,
        world=meet(rank, size),
        data=ToyData(24, log=log),
        model=lambda: ToyModel(dropout=dropout),
        keys=settings,
    ).loop()


@pytest.mark.parametrize("size", [1, 4])
def test_two_ranks_become_another_number(run_ranks: Ranks, tmp_path: Path, size: int) -> None:
    """B28, B32: refused without leave; with it the clips of each step stay the same, and with them, but for rounding,
    the weights, as nothing here is random by rank."""

    def first(rank: int, ranks: int) -> None:
        loop = build(tmp_path / "run", rank, ranks)
        loop.stop.file = tmp_path / f"stop{rank}"
        loop.stop.file.write_text("4")
        assert loop.fit().status == "preempted"

    def uncut(rank: int, ranks: int) -> tuple[Any, ...]:
        loop = build(tmp_path / "uncut", rank, ranks)
        loop.fit()
        return weights(loop), records(loop)

    def go_on(rank: int, ranks: int) -> tuple[Any, ...]:
        run = RunDir(tmp_path / "run", is_first=rank == 0)
        loop = build(tmp_path / "run", rank, ranks)
        loop.run.note(resume=True)
        loop.world.barrier()
        with pytest.raises(CheckpointError, match=rf"saved by 2 rank\(s\), this start has {ranks}"):
            restart.go_on(loop, run, "any")
        loop.run.note(resume_allow=["world_size"])
        loop.world.barrier()
        torch.manual_seed(5)
        restart.go_on(loop, run, "any")
        assert (loop.state.step, loop.state.shift) == (4, 0)
        loop.fit()
        return weights(loop), records(loop), float(torch.rand(()))

    run_ranks(first, 2, init=False)
    expected = run_ranks(uncut, 2, init=False)[0]
    got = run_ranks(go_on, size, init=False)
    for key, value in expected[0].items():
        torch.testing.assert_close(got[0][0][key], value, atol=2e-6, rtol=2e-5)
    assert [r["step"] for r in got[0][1]] == [r["step"] for r in expected[1]]
    assert [r["lr"] for r in got[0][1]] == [r["lr"] for r in expected[1]], "the schedule goes on where it was"
    assert len({draw for *_, draw in got}) == size, "every rank has a random stream of its own"


def test_a_background_save_of_two_ranks_is_the_same_run(run_ranks: Ranks, tmp_path: Path) -> None:
    """With a save at every step, so that one is nearly always under way while the ranks exchange gradients."""

    def work(rank: int, size: int, folder: str, background: bool) -> None:
        keys = {"train__save_every_steps": 1, "checkpoint__async_save": background}
        assert build(tmp_path / folder, rank, size, dropout=0.3, **keys).fit().status == "done"

    run_ranks(work, 2, init=False, args=("ahead", False))
    run_ranks(work, 2, init=False, args=("beside", True))
    ahead, beside = tmp_path / "ahead", tmp_path / "beside"
    assert compare.in_records(compare.records(ahead, 99), compare.records(beside, 99), 0.0) is None
    pairs = compare.common_checkpoints(ahead, beside, 99)
    assert [a.name for a, _ in pairs] == [f"step-{k:06d}" for k in range(1, 10)]
    for a, b in pairs:
        assert compare.in_weights(a, b, 0.0)[0] is None
        for rank in range(2):
            mine, theirs = (checkpoint.load(f, f"rank{rank}")["torch"] for f in (a, b))
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("background", [False, True])
def test_one_full_disk_ends_both_ranks_with_the_same_error(run_ranks: Ranks, tmp_path: Path, background: bool) -> None:
    def work(rank: int, size: int) -> str:
        loop = build(tmp_path / "run", rank, size, train__save_every_steps=2, checkpoint__async_save=background)
        real = checkpoint._write

        def refuse(path: Path, content: Any) -> None:
            if rank == 1 and "step-000004" in str(path):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(path, content)

        checkpoint._write = refuse
        with pytest.raises(SaveFailed) as caught:
            loop.fit()
        assert caught.value.full
        return str(caught.value)

    first, second = run_ranks(work, 2, init=False)
    assert first == second
    assert "rank 1: [Errno 28] No space left on device" in first
    root = tmp_path / "run/checkpoints"
    assert checkpoint.newest_good(root) == root / "step-000002"
