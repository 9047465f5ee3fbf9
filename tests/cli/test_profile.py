"""python -m echofree.profile as a user types it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
SMALL = ("data.segment_s=0.5", "data.num_train=24", "data.num_valid=1", "data.num_test=1", "data.num_workers=1")


def run_dir(result: Any, root: Path) -> Path:
    return next((root / "empty" / "outputs" / "profile").iterdir())


@pytest.mark.slow
def test_two_ranks(cli: Cli, tmp_path: Path) -> None:
    result = cli(
        "profile", *SMALL, "train.batch_size=2", "dist=ddp", "dist.num_procs=2", "profile.steps=2", timeout=200
    )
    result.check(0)
    folder = run_dir(result, tmp_path)
    facts = json.loads((folder / "profile.json").read_text())
    assert len(facts["ranks"]) == 2
    assert sum(facts["share"].values()) == pytest.approx(1)
    assert facts["bound_by"] == max(facts["share"], key=facts["share"].get)
    assert f"bound by {facts['bound_by']}" in result.text
    assert "forward and backward" in result.text
    assert facts["advice"]
    for rank in range(2):
        with gzip.open(folder / f"trace-rank{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        assert any("aten::" in event.get("name", "") for event in events)
    assert json.loads((folder / "run.json").read_text())["status"] == "done"
    assert not list((folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_estimate_runs_nothing(cli: Cli, tmp_path: Path) -> None:
    result = cli("profile", *SMALL, "train.batch_size=4", "estimate=true", timeout=120)
    result.check(0)
    assert "memory of one rank, 4 clips of 8000 samples" in result.stdout
    assert "activations" in result.stdout
    assert not (tmp_path / "empty" / "outputs").exists()


def test_mistakes(cli: Cli) -> None:
    result = cli("profile", "profile.step=3")
    assert "profile.steps=3" in result.check(2).text
    result = cli("profile", "train.batchsize=3")
    assert "train.batch_size=3" in result.check(2).text


def test_help(cli: Cli) -> None:
    text = cli("profile", "--help").check(0).stdout
    assert "profile.steps" in text
    assert "estimate=true" in text
