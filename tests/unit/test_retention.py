"""What stays beside the last and the best, and the archive that takes what goes."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from echofree import checkpoint, retention
from echofree.config.schema import CheckpointConfig
from echofree.dist.world import World


def save(root: Path, *steps: int, run_id: str = "mine") -> None:
    for step in steps:
        about = {"run_id": run_id, "step": step, "epoch": 0, "scores": {}, "world_size": 1}
        checkpoint.save(root, step, {"model": {"w": torch.full((50,), float(step))}}, {}, about, World())


def steps(root: Path) -> list[int]:
    return [int(p.name.removeprefix("step-")) for p in checkpoint.complete(root)]


def rule(**keys: Any) -> CheckpointConfig:
    return CheckpointConfig(**{"keep_last": 1, "keep_best": 0, **keys})


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ({}, [60]),
        ({"window_steps": 20}, [50, 60]),  # more than 40
        ({"window_steps": 21}, [40, 50, 60]),
        ({"keep_every_steps": 25}, [50, 60]),
        ({"keep_every_steps": 20}, [20, 40, 60]),
        ({"pin": [10, 30, 999]}, [10, 30, 60]),
        ({"pin": [10], "keep_every_steps": 20, "window_steps": 11}, [10, 20, 40, 50, 60]),
    ],
)
def test_a_window_every_n_and_pinned_steps(tmp_path: Path, keys: dict[str, Any], left: list[int]) -> None:
    save(tmp_path, 10, 20, 30, 40, 50, 60)
    retention.retain(tmp_path, "mine", rule(**keys))
    assert steps(tmp_path) == left


def test_a_file_pins(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / "step-000002" / "pinned").touch()
    removed = retention.retain(tmp_path, "mine", rule())
    assert (steps(tmp_path), [p.name for p in removed]) == ([2, 3], ["step-000001"])
    assert checkpoint.damage(tmp_path / "step-000002") == ""


def run_dir(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "run.json").write_text("{}")
    return folder / "checkpoints"


def test_what_goes_lies_in_the_archive_whole_and_loads_from_there(tmp_path: Path) -> None:
    root = run_dir(tmp_path / "run")
    save(root, 1, 2, 3)
    save(root, 1000, run_id="another")
    retention.retain(root, "mine", rule(archive_dir=str(tmp_path / "cold")))
    assert steps(root) == [3, 1000]
    cold = tmp_path / "cold" / "mine"
    assert sorted(p.name for p in (cold / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert (cold / "config.yaml").read_text() == "seed: 0\n"
    assert checkpoint.find(cold) == cold / "checkpoints" / "step-000002"
    assert torch.equal(checkpoint.load(cold / "checkpoints" / "step-000001", "model")["w"], torch.ones(50))


def test_a_full_archive_keeps_the_checkpoint_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = run_dir(tmp_path / "run")
    save(root, 1, 2)

    def full(source: Path, target: Path) -> None:
        target.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", full)
        assert retention.retain(root, "mine", rule(archive_dir=str(tmp_path / "cold"))) == []
    assert "step-000001 stays" in caplog.text
    assert "No space left" in caplog.text
    assert steps(root) == [1, 2]
    assert list((tmp_path / "cold/mine/checkpoints").iterdir()) == [], "no half copy is left"


def test_a_copy_that_came_out_damaged_is_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run_dir(tmp_path / "run")
    save(root, 1, 2)
    real = shutil.copytree

    def torn(source: Path, target: Path) -> None:
        real(source, target)
        (target / "model.pt").write_bytes((target / "model.pt").read_bytes()[:-9])

    monkeypatch.setattr(shutil, "copytree", torn)
    assert retention.retain(root, "mine", rule(archive_dir=str(tmp_path / "cold"))) == []
    assert steps(root) == [1, 2]


def test_a_kill_between_copy_and_removal_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = run_dir(tmp_path / "run")
    save(root, 1, 2)
    assert retention.archive(root / "step-000001", tmp_path / "cold", "mine")  # then the process died
    monkeypatch.setattr(shutil, "copytree", lambda *_: pytest.fail("it is there already"))
    retention.retain(root, "mine", rule(archive_dir=str(tmp_path / "cold")))
    assert steps(root) == [2]
    assert [p.name for p in (tmp_path / "cold/mine/checkpoints").iterdir()] == ["step-000001"]
