"""python -m echofree.parity as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks
Cli = Callable[..., Any]
SMALL = ("data.segment_s=0.5", "data.num_train=24", "data.num_workers=0", "data.num_rooms=4", "parity.steps=3")
BASE = (
    "model=base", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.context_frames=8",
    "optim.warmup_steps=0", "train.batch_size=2", "train.gradient_accumulation_steps=2", "train.clip_norm=0.5",
)  # fmt: skip


@pytest.mark.slow
def test_base_is_equal_everywhere(cli: Cli, tmp_path: Path) -> None:
    result = cli("parity", *SMALL, *BASE, "parity.worlds=[1,2]", "parity.out=told", timeout=400).check(0)
    told = json.loads((tmp_path / "empty/told/parity.json").read_text())
    names = [case["case"]["name"] for case in told["cases"]]
    assert names == [
        "one process, 4 x 1", "ddp on 2", "fsdp on 2", "tensor on 2", "pipeline on 2", "one process, bf16"
    ]  # fmt: skip
    assert told["uneven"]
    for case in told["cases"]:
        assert case["equal"]
        assert [row["step"] for row in case["rows"]] == [1, 2, 3]
        assert [row["clips"] for row in case["rows"]] == [row["clips"] for row in told["reference"]["rows"]]
        if case["case"]["precision"] == "fp32":
            assert case["weights"] < 1e-6
    assert "pipeline on 2" in result.stdout
    assert (tmp_path / "empty/told/parity.svg").read_text().startswith("<svg")
    assert not (tmp_path / "empty/told/cases").exists()


@pytest.mark.slow
def test_a_difference_is_found_and_explained(cli: Cli, tmp_path: Path) -> None:
    """tiny normalises over batches: padding counts, and each split has its own."""
    words = (
        "train.batch_size=4",
        "parity.uneven=true",
        "parity.strategies=ddp",
        "parity.bf16=false",
        "parity.worlds=2",
    )
    result = cli("parity", *SMALL, *words, "parity.out=told", timeout=300).check(1)
    assert "DIFFERS at step" in result.stdout
    assert "Likely: batch norm" in result.stdout
    told = json.loads((tmp_path / "empty/told/parity.json").read_text())
    assert not told["cases"][0]["equal"]


def test_mistakes(cli: Cli) -> None:
    assert "parity.steps=4" in cli("parity", "parity.step=4").check(2).text
    refused = cli("parity", "parity.strategies=[tensor]", "data.num_rooms=4").check(2).text
    assert "BarkNet" in refused
    assert "model=base" in refused


def test_help(cli: Cli) -> None:
    text = cli("parity", "--help").check(0).stdout
    for key in ("parity.worlds", "parity.tolerance", "parity.uneven"):
        assert key in text
