"""Whatever shares out the work, the model learns the same: `base` cut to test size after eight steps of AdamW in
float32, with accumulation, clipping and clips of unequal length, the last group of an epoch partial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echofree.dist.world import World
from ranks.sharing import base, difference, run_of
from toy import meet, records, weights

pytestmark = pytest.mark.ranks
Ranks = Callable[..., list[Any]]
TOLERANCE = 1e-6

# name, keys, ranks that read different clips
TWO = [
    ("ddp", {}, 2),
    ("fsdp", {}, 2),
    ("fsdp", {"dist.reshard_after_forward": False}, 2),
    ("tensor", {}, 1),
    ("pipeline", {"dist.schedule": "1f1b"}, 1),
    ("pipeline", {"dist.schedule": "gpipe"}, 1),
    ("pipeline", {"dist.schedule": "interleaved"}, 1),
    ("pipeline", {"dist.stages": ["layers.2"]}, 1),
]
FOUR = [
    ("ddp", {}, 4),
    ("fsdp", {}, 4),
    ("fsdp", {"dist.mesh": {"replicate": 2, "data": 2}}, 4),
    ("fsdp", {"dist.mesh": {"data": 2, "tensor": 2}}, 2),
    ("tensor", {}, 1),
    ("tensor", {"dist.mesh": {"data": 2, "tensor": 2}}, 2),
    ("pipeline", {"dist.microbatches": 4}, 1),
    ("pipeline", {"dist.mesh": {"data": 2, "pipeline": 2}}, 2),
]


def split(data_size: int, name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Global batch 8 in two accumulated parts over `data_size` ranks."""
    return {"dist.name": name, "train.batch_size": 4 // data_size, "train.gradient_accumulation_steps": 2, **keys}


def outcome(toy: Any) -> dict[str, Any]:
    loop = toy.loop()
    loop.fit()
    result = {"weights": weights(loop), "records": records(loop), "kind": type(loop.strategy).__name__}
    toy.world.barrier()
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome(run_of(tmp_path_factory.mktemp("alone"), World(), base, split(1, "single", {})))


@pytest.mark.parametrize(("size", "name", "keys", "data_size"), [(2, *c) for c in TWO] + [(4, *c) for c in FOUR])
def test_equal_to_one_process(
    size: int, name: str, keys: dict[str, Any], data_size: int, alone: dict[str, Any], run_ranks: Ranks, tmp_path: Path
) -> None:
    def work(rank: int, size: int) -> dict[str, Any]:
        return outcome(run_of(tmp_path, meet(rank, size), base, split(data_size, name, keys)))

    ranks = run_ranks(work, size, init=False, timeout=120)
    expected = {"ddp": "Ddp", "fsdp": "Fsdp", "tensor": "TensorParallel", "pipeline": "Pipeline"}[name]
    assert len(alone["records"]) == 8
    for got in ranks:
        assert got["kind"] == expected
        worst = difference(got["weights"], alone["weights"])
        print(f"{name} {keys} on {size} ranks: weights differ by at most {worst:.2e}")
        assert worst < TOLERANCE
    for mine, theirs in zip(ranks[0]["records"], alone["records"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
