"""What TensorBoard reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echofree.logger.tensorboard_logger import TensorBoardLogger

pytest.importorskip("tensorboard")


def attempt(run_dir: Path, steps: list[int], add: float) -> None:
    logger = TensorBoardLogger(run_dir)
    logger.start({"id": "a"}, {"train": {"epochs": 2}})
    for step in steps:
        logger.log({"kind": "train", "step": step, "epoch": 0, "loss": step + add})
    logger.log({"kind": "eval", "split": "valid", "step": steps[-1], "epoch": 0, "si_sdr": add})
    logger.finish("done")


def read(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    return events.Reload()


def test_scalars_at_their_steps(tmp_path: Path) -> None:
    attempt(tmp_path, [0, 10, 20], 0.5)
    events = read(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "valid/si_sdr"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0.5), (10, 10.5), (20, 20.5)]
    assert [(e.step, e.value) for e in events.Scalars("valid/si_sdr")] == [(20, 0.5)]


def test_resume_replaces_the_steps_it_repeats(tmp_path: Path) -> None:
    attempt(tmp_path, [0, 10, 20, 30], 0.5)
    attempt(tmp_path, [20, 30, 40], 0.25)
    losses = read(tmp_path).Scalars("train/loss")
    assert [(e.step, e.value) for e in losses] == [(0, 0.5), (10, 10.5), (20, 20.25), (30, 30.25), (40, 40.25)]


def test_no_record_no_file(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.start({"id": "a"}, {})
    logger.finish("failed")
    assert list(tmp_path.iterdir()) == []
