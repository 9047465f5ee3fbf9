"""The guard: no step may be the best that unlearnt what the parent could, whatever the new data says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from echofree.contracts import Clip
from echofree.errors import ConfigError, ExitCode
from echofree.forgetting import Forgotten, Guard
from toy import Toy, ToyData, records


def guard_of(tmp_path: Path, metric: str = "si_sdr", max_drop: float = 0.2) -> Guard:
    return Guard(metric, max_drop, ToyData(4, seed=9), Toy(tmp_path / "run").run_dir())


@pytest.mark.parametrize(
    ("metric", "value", "held"),
    [
        ("si_sdr", 9.9, True),
        ("si_sdr", 9.7, False),
        ("si_sdr", 12.0, True),
        ("si_sdr", math.nan, False),
        ("loss", 10.1, True),
        ("loss", 10.3, False),
        ("delay_ms", 5.0, True),
    ],
)
def test_what_holds(metric: str, value: float, held: bool, tmp_path: Path) -> None:
    guard = guard_of(tmp_path, metric)
    guard.begin({metric: 10.0, "clips": 4})
    assert guard.holds({metric: value}, 3) is held


def test_a_score_that_isnt_there_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There are: loss"):
        guard_of(tmp_path).begin({"loss": 1.0, "clips": 4})


def test_a_run_that_forgot_fails_and_names_the_parent(tmp_path: Path) -> None:
    guard = guard_of(tmp_path)
    guard.begin({"si_sdr": 10.0})
    guard.holds({"si_sdr": 8.0}, 5)
    guard.holds({"si_sdr": 9.0}, 10)
    with pytest.raises(Forgotten, match=r"nearest: -1\.000 at step 10.*parent is kept: use runs/old") as caught:
        guard.end(None, "runs/old")
    assert caught.value.exit_code == ExitCode.FAILED
    assert guard.run.facts["guard"] == {"metric": "si_sdr", "before": 10.0, "max_drop": 0.2, "passed": False}
    guard.end(1.0, "runs/old")
    assert guard.run.facts["guard"]["passed"] is True
    assert Guard("si_sdr", 0.2, guard.dataset, guard.run).before == 10.0  # a resume compares with the parent, too


class Turned(ToyData):
    """Another target, so that learning the new data unlearns this."""

    def item(self, index: int, epoch: int) -> Clip:
        clip = super().item(index, epoch)
        assert clip.near is not None
        return replace(clip, near=-3.0 * clip.near)


@pytest.mark.parametrize("max_drop", [0.0, 1e9])
def test_the_loop_asks_it(max_drop: float, tmp_path: Path) -> None:
    keys = {"train.eval_interval": 1, "train.epochs": 3, "dist.name": "single", "optim.lr": 0.05}
    loop = Toy(tmp_path / "run", valid_clips=4, keys=keys).loop()
    loop.guard = Guard("loss", max_drop, Turned(4, seed=9), loop.run)
    loop.fit()
    old = [r for r in records(loop) if r.get("split") == "old"]
    assert [r["step"] for r in old] == [4, 8, 12]
    assert loop.guard.before is not None
    assert old[-1]["loss"] > loop.guard.before  # the case means something
    if max_drop == 0.0:
        assert loop.state.best is None
        assert loop.state.stale == 3
    else:
        assert loop.state.best is not None
