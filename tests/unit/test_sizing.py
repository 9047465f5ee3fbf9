"""The arithmetic of a global batch and the search for what fits, with memory that only seems to run out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echofree import sizing
from echofree.config.compose import compose
from echofree.config.schema import TrainConfig
from echofree.dist.world import World
from echofree.errors import ConfigError, OutOfMemory
from echofree.rehearsal import Rehearsal
from toy import CPU, Toy, ToyModel, meet

Ranks = Callable[..., list[Any]]


class Tight(ToyModel):
    """Runs out of memory above a number of clips."""

    limit = 4

    def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor:
        if len(mic) > self.limit:
            raise torch.OutOfMemoryError(f"{len(mic)} clips don't fit")
        return super().forward(mic, far, details)


def settled(toy: Toy, keys: dict[str, Any], before: dict[str, Any] | None = None) -> sizing.Size:
    """The size that a run with these keys would have."""
    loop = toy.loop()
    config = loop.config.copy()
    for key, value in keys.items():
        config.train[key] = value

    def rehearsal() -> Rehearsal:
        return Rehearsal(config, loop.strategy, loop.task, CPU, 64, 64)

    return sizing.settle(config, toy.world, loop.strategy, loop.amp, rehearsal, before)


@pytest.mark.parametrize("per_rank", [8, 12])
def test_all_ranks_settle_on_what_fits_on_the_tightest(run_ranks: Ranks, tmp_path: Path, per_rank: int) -> None:
    """Memory for 6 clips on rank 0 and for 4 on rank 1: both take 4, the global batch stays."""

    def work(rank: int, size: int) -> sizing.Size:
        def model() -> Tight:
            tight = Tight()
            tight.limit = (6, 4)[rank]
            return tight

        toy = Toy(tmp_path, world=meet(rank, size), model=model)
        return settled(toy, {"batch_size": "auto", "global_batch_size": per_rank * size})

    both = run_ranks(work, 2, init=False)
    assert both == [sizing.Size(4, per_rank // 4, 2, found=True)] * 2
    assert both[0].global_batch == 2 * per_rank


def test_search_finds_the_largest_in_few_tries(rng: np.random.Generator) -> None:
    candidates = sizing.divisors(720)
    for limit in rng.integers(1, 800, 20):
        tried: list[int] = []

        def fits(clips: int, limit: int = limit, tried: list[int] = tried) -> bool:
            tried.append(clips)
            return clips <= limit

        assert sizing.search(World(), candidates, fits) == max(d for d in candidates if d <= limit)
        assert len(tried) <= 6  # of 30
    assert sizing.search(World(), candidates, lambda clips: False) is None


def test_nothing_fits_names_shapes_and_levers(tmp_path: Path) -> None:
    def model() -> Tight:
        tight = Tight()
        tight.limit = 0
        return tight

    with pytest.raises(OutOfMemory, match=r"rank 0 .*\n.*\[1, 64\](.|\n)*1\. shorter clips"):
        settled(Toy(tmp_path, model=model), {"batch_size": "auto:4"})


def test_other_errors_are_no_lack_of_memory(tmp_path: Path) -> None:
    class Broken(ToyModel):
        def forward(self, mic: Tensor, far: Tensor, details: bool = False) -> Tensor:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        settled(Toy(tmp_path, model=Broken), {"batch_size": "auto:4"})


def test_a_cpu_is_asked_before_it_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error comes on a CPU: what small steps take is extrapolated and compared with what is free."""
    loop = Toy(tmp_path).loop()
    trial = Rehearsal(loop.config, loop.strategy, loop.task, CPU, 64, 64)
    fits = sizing.Fits(World(), loop.strategy, loop.amp, trial)
    few, more = fits.expected(100), fits.expected(200)
    assert more - few == pytest.approx(few - fits.expected(0))  # a line
    fits.free = (few + more) / 2
    assert fits(100)
    assert not fits(200)


@pytest.mark.parametrize(
    ("batch_size", "whole", "accumulation", "expected"),
    [("auto:16", None, 1, 16), ("auto:16", None, 3, 48), ("auto", None, 1, 16), ("auto", 24, 1, 12), (4, 24, 1, 12)],
)
def test_share_of_a_rank(batch_size: int | str, whole: int | None, accumulation: int, expected: int) -> None:
    train = TrainConfig(batch_size=batch_size, global_batch_size=whole, gradient_accumulation_steps=accumulation)
    assert sizing.share(train, 2) == expected


def test_share_that_is_not_whole_says_what_to_type() -> None:
    with pytest.raises(ConfigError, match=r"2 data rank\(s\) x train.batch_size=4 = 8 clips. Type .*size=16"):
        sizing.share(TrainConfig(batch_size=4, global_batch_size=18), 2)


def test_a_resume_takes_what_was_found(tmp_path: Path) -> None:
    before = sizing.Size(3, 4, 1, True).note()
    assert settled(Toy(tmp_path), {"batch_size": "auto:12"}, before) == sizing.Size(3, 4, 1, True)
    # with other ranks it's searched anew, for the same global batch
    assert sizing.share(TrainConfig(batch_size="auto:12"), 2, before) == 6


def test_numbers_as_typed_need_no_search(tmp_path: Path) -> None:
    assert settled(Toy(tmp_path), {"batch_size": 3}) == sizing.Size(3, 1, 1)
    assert settled(Toy(tmp_path), {"batch_size": 3, "global_batch_size": 12}) == sizing.Size(3, 4, 1)


def test_applied_leaves_the_frozen_config_alone() -> None:
    config = compose(["train.batch_size=auto"]).config
    derived = sizing.Size(4, 4, 1, True).applied(config)
    assert (derived.train.batch_size, derived.train.gradient_accumulation_steps) == (4, 4)
    assert (config.train.batch_size, config.train.gradient_accumulation_steps) == ("auto:16", 1)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["train.batch_size=many"], "auto:N"),
        (["train.batch_size=auto:0"], "auto:N"),
        (["train.global_batch_size=32", "train.gradient_accumulation_steps=2"], "Leave one of them out"),
        (["train.batch_size=5", "train.global_batch_size=32"], "train.global_batch_size=30"),
    ],
)
def test_rules(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert text in str(caught.value)


def test_auto_keeps_the_number_of_the_preset() -> None:
    assert compose(["train.batch_size=auto", "model=base"]).config.train.batch_size == "auto:16"
    assert compose(["train.batch_size=auto:4"]).config.train.batch_size == "auto:4"
