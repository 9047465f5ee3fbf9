"""Distillation under every way of sharing out the data: the same curve as in one process, with a cache and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echofree.dist.world import World
from echofree.loss import CompressedSpectral, SiSdr, Weighted
from echofree.task.cache import SUFFIX
from echofree.task.distill import Distill
from parent import make_run
from ranks.sharing import RATE, base, difference, run_of
from toy import meet, records, weights

pytestmark = pytest.mark.ranks
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("teacher") / "run")[0]


def outcome(folder: Path, world: World, teacher: Path, keys: dict[str, Any], cache: Path | None = None) -> Any:
    toy = run_of(folder, world, base, {"train.max_steps": 3, **keys})
    loss = Weighted({"spectral": CompressedSpectral(), "sdr": SiSdr()}, {"spectral": 1.0, "sdr": 0.02})
    where = None if cache is None else str(cache)
    toy.task = Distill(loss, ["si_sdr"], RATE, str(teacher), {"output": 2.0, "latent": 0.5}, cache_dir=where)
    toy.task.check_model(base())
    loop = toy.loop()
    loop.fit()
    result = {"weights": weights(loop), "records": records(loop)}
    toy.world.barrier()
    return result


def split(name: str, data_size: int) -> dict[str, Any]:
    return {"dist.name": name, "train.batch_size": 4 // data_size, "train.gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def alone(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcome(tmp_path_factory.mktemp("alone"), World(), teacher, split("single", 1))


@pytest.mark.parametrize(
    ("name", "data_size"), [("ddp", 2), ("fsdp", 2), pytest.param("pipeline", 1, marks=pytest.mark.slow),
                            pytest.param("tensor", 1, marks=pytest.mark.slow)]
)  # fmt: skip
def test_the_curve_is_that_of_one_process(
    name: str, data_size: int, teacher: Path, alone: Any, run_ranks: Ranks, tmp_path: Path
) -> None:
    def work(rank: int, size: int) -> Any:
        return outcome(tmp_path / "run", meet(rank, size), teacher, split(name, data_size), tmp_path / "cache")

    for got in run_ranks(work, 2, init=False, timeout=240):
        assert difference(got["weights"], alone["weights"]) < 1e-6
        assert difference(got["weights"], base().state_dict()) > 1e-5
    mine = got["records"] or run_records(tmp_path / "run")
    assert len(mine) == len(alone["records"]) == 3
    for record, theirs in zip(mine, alone["records"], strict=True):
        for key in ("loss", "loss_output", "loss_latent", "loss_selected", "grad_norm"):
            assert record[key] == pytest.approx(theirs[key], rel=2e-3 if key == "loss_selected" else 1e-4)
            assert record[key] != 0
    assert len(list((tmp_path / "cache").rglob(f"*{SUFFIX}"))) == 24  # each clip once, whoever asked


def run_records(folder: Path) -> Any:
    from echofree.rundir import RunDir
    from toy import TIMES

    found = RunDir(folder, is_first=False).metrics()
    return [{k: v for k, v in record.items() if k not in TIMES} for record in found]
