"""What the times of the parts say about a step, and that they are measured on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echofree import measure
from echofree.config.compose import compose
from echofree.contracts import Clip
from echofree.errors import ConfigError
from toy import Toy, ToyData, meet

BASE = {
    "first_batch": 1.0, "data": 0.01, "copy": 0.0, "forward": 0.04, "local": 0.1, "exchanged": 0.1, "single": 0.0125,
    "update": 0.01, "step": 0.11, "wait": 0.0, "agree": 0.0, "peak_mb": 1.0,
}  # fmt: skip
CONFIG = compose(["train.batch_size=8"]).config


@pytest.mark.parametrize(
    ("change", "bound", "words"),
    [
        ({}, "compute", ["train.compile=true", "more ranks"]),
        ({"wait": 0.3, "data": 0.4, "step": 0.41}, "data", ["data.num_workers=", "faster disk"]),
        ({"exchanged": 0.4, "step": 0.41}, "communication", ["accumulation", "bucket_cap_mb=50"]),
        ({"agree": 0.4, "step": 0.51}, "communication", ["accumulation"]),
        ({"single": 0.09}, "launch", ["train.batch_size=16", "90 ms, with 8 it takes 100 ms"]),
        ({"local": float("nan"), "single": float("nan"), "forward": float("nan")}, "compute", ["more ranks"]),
    ],
)
def test_verdict_and_advice(change: dict[str, float], bound: str, words: list[str]) -> None:
    of = {**BASE, **change}
    share = measure.shares(of, 8)
    assert sum(share.values()) == pytest.approx(1)
    assert measure.verdict(share) == bound
    text = "; ".join(measure.advice(bound, of, CONFIG, 2, "cpu"))
    assert all(word in text for word in words), text


def test_enough_workers_are_named() -> None:
    """4 workers make a step's clips in 0.4 s, the rest takes 0.11 s: with a margin of 1.2, 18 keep up."""
    config = compose(["data.num_workers=4"]).config
    assert "data.num_workers=18" in measure.advice("data", {**BASE, "data": 0.4}, config, 1, "cpu")[0]


def test_fixed_part_is_where_the_line_meets_no_clips() -> None:
    """0.02 s + 0.01 s a clip: 0.03 s with one, 0.1 s with eight."""
    share = measure.shares({**BASE, "single": 0.03}, 8)
    assert share["launch"] * (0.1 + 0.01) == pytest.approx(0.02)


class Slow(ToyData):
    """Every clip takes a while."""

    def item(self, index: int, epoch: int) -> Clip:
        time.sleep(0.05)
        return super().item(index, epoch)


def test_all_ranks_are_measured_and_slow_data_is_seen(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    def work(rank: int, size: int) -> measure.Times:
        loop = Toy(tmp_path, world=meet(rank, size), data=Slow(64), keys={"train.batch_size": 4}).loop()
        return measure.times(loop, 4)

    ranks = run_ranks(work, 2, init=False)
    for times in ranks:
        assert times.data >= 0.2
        assert times.wait >= 0.1  # some of it hides behind waiting for the other
        assert 0 < times.forward < times.step
        assert times.step >= times.wait
    assert measure.verdict(measure.shares(measure.mean(ranks), 4)) == "data"
    text = "\n".join(measure.table(ranks))
    assert "waiting for data" in text
    assert "rank 1" in text or "rank 0" in text


def test_waiting_for_a_rank_that_waits_for_data_is_waiting_for_data() -> None:
    fast, slow = ({**BASE, "wait": wait, "agree": agree} for wait, agree in ((0.1, 0.2), (0.3, 0.0)))
    of = measure.mean([measure.Times(**fast), measure.Times(**slow)])
    assert of["wait"] == pytest.approx(0.3)
    assert of["agree"] == pytest.approx(0)


def test_too_little_data_is_said(tmp_path: Path) -> None:
    loop = Toy(tmp_path, data=ToyData(4), keys={"train.epochs": 1}).loop()
    with pytest.raises(ConfigError, match="1 steps"):
        measure.times(loop, 4)
