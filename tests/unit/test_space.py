"""Room on the disk against what a run needs."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from echofree import space
from echofree.config.schema import CheckpointConfig, OptimConfig, OptimKind, TrainConfig


def disk(monkeypatch: pytest.MonkeyPatch, num_bytes: int, num_files: int = 10**6, inodes: int = 10**6) -> None:
    told = SimpleNamespace(f_bavail=num_bytes // 512, f_frsize=512, f_favail=num_files, f_files=inodes)
    monkeypatch.setattr(os, "statvfs", lambda path: told)


def test_free_is_asked_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    num_bytes, num_files = space.free(tmp_path / "not" / "yet" / "there")
    found = os.statvfs(tmp_path)
    assert num_bytes == pytest.approx(found.f_bavail * found.f_frsize, rel=0.2)
    assert num_files > 0


def test_what_does_not_fit_is_told_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 2_500_000_000)
    assert space.problem(tmp_path, 2_400_000_000, 9) == ""
    assert "needs 2.6 GB and its disk has 2.5 GB left" in space.problem(tmp_path, 2_600_000_000, 9)
    disk(monkeypatch, 10**12, num_files=8)
    assert "needs 9 files and its disk has room for 8 more (inodes)" in space.problem(tmp_path, 1, 9)
    disk(monkeypatch, 10**12, num_files=0, inodes=0)
    assert space.problem(tmp_path, 1, 9) == "", "a file system without a limit on inodes says 0 of 0"


def test_sizes_by_hand() -> None:
    tree = {"a": torch.zeros(10), "b": [torch.zeros(3, dtype=torch.int64), (torch.zeros(2, dtype=torch.bool), "x")]}
    assert space.size(OrderedDict(tree)) == 40 + 24 + 2


def test_expected_is_what_a_checkpoint_takes() -> None:
    """By hand: Adam has two moments, SGD one with momentum and none without; frozen weights have neither."""
    model = torch.nn.Sequential(torch.nn.Linear(25, 4, bias=False), torch.nn.BatchNorm1d(5))
    trained, frozen = 4 * (100 + 5), 4 * 5
    state = trained + frozen + 4 * (5 + 5) + 8  # running statistics, and how many batches they saw
    model[1].bias.requires_grad_(False)
    headers = space.HEADER_BYTES * 6
    for optim, averaged, writers, moments, numbers in [
        (OptimConfig(), True, 1, 3, 8),
        (OptimConfig(name=OptimKind.sgd, momentum=0.9), False, 1, 1, 4),
        (OptimConfig(name=OptimKind.sgd, momentum=0.0), False, 1, 0, 2),
        (OptimConfig(), False, 4, 2, 6),
    ]:
        beside = space.SLACK_BYTES + writers * (headers + space.HEADER_BYTES * numbers)
        assert space.expected(model, optim, averaged, writers) == state + moments * trained + beside


@pytest.mark.parametrize(
    ("train", "rule", "count"),
    [
        ({}, {}, 4),  # two last, one best, one being written
        ({"save_interval": 0}, {"keep_last": 9}, 3),  # one save at the end, a best
        ({"save_every_steps": 10}, {"keep_every_steps": 100}, 4 + 10),
        ({"save_every_steps": 10}, {"window_steps": 200, "pin": [10]}, 4 + 20 + 1),
        (
            {"save_every_steps": 500, "save_interval": 0},
            {"keep_every_steps": 1},
            4,
        ),  # no more than there are saves, and a best
    ],
)
def test_how_many_checkpoints_a_run_keeps(train: dict[str, int], rule: dict[str, object], count: int) -> None:
    config = SimpleNamespace(train=TrainConfig(**train), checkpoint=CheckpointConfig(**rule))
    assert space.count(config, total_steps=1000, steps_per_epoch=100) == count
