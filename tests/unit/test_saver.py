"""Saving beside the training, and what a full disk does to a run."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from echofree import checkpoint, compare, saver, space
from echofree.config.schema import CheckpointConfig, OnFull
from echofree.dist.watchdog import Pulse
from echofree.dist.world import World
from echofree.errors import SaveFailed
from echofree.saver import Saver
from echofree.stop import StopFlag
from toy import Toy, ToyModel, records, weights


def make(root: Path, **rule: Any) -> Saver:
    return Saver(root, "mine", CheckpointConfig(keep_best=0, **rule), World(), Pulse(), StopFlag())


def about(step: int) -> dict[str, Any]:
    return {"run_id": "mine", "step": step, "epoch": 0, "scores": {}, "world_size": 1, "best_step": 0}


def save(one: Saver, step: int, tensor: torch.Tensor) -> Path:
    return one.save({"model": {"w": tensor}, "train": {"n": [1, (2, "x")]}}, {"r": torch.zeros(2)}, about(step), False)


# --- in the background ----------------------------------------------------------------------------------------------


def test_a_run_that_saves_in_the_background_is_the_same_run(tmp_path: Path) -> None:
    def toy(folder: str, background: bool) -> Any:
        keys = {"train.save_every_steps": 1, "train.ema_decay": 0.9, "checkpoint.async_save": background}
        keys |= {"train.eval_every_steps": 2, "checkpoint.keep_last": 99}
        loop = Toy(tmp_path / folder, valid_clips=3, model=lambda: ToyModel(norm=True, dropout=0.2), keys=keys).loop()
        assert loop.fit().status == "done"
        return loop

    ahead, beside = toy("ahead", False), toy("beside", True)
    assert records(beside) == records(ahead)
    assert all(torch.equal(weights(beside)[k], v) for k, v in weights(ahead).items())
    folders = checkpoint.complete(tmp_path / "beside/checkpoints")
    assert [p.name for p in folders] == [p.name for p in checkpoint.complete(tmp_path / "ahead/checkpoints")]
    for folder in folders:
        assert checkpoint.damage(folder) == ""
        theirs = tmp_path / "ahead/checkpoints" / folder.name
        assert compare.in_weights(theirs, folder, 0.0)[0] is None
        mine, other = (checkpoint.load(f, "train") for f in (folder, theirs))
        assert (mine["state"], mine["schedule"], mine["plan"]) == (other["state"], other["schedule"], other["plan"])
    assert (tmp_path / "beside/checkpoints/last").read_text() == (tmp_path / "ahead/checkpoints/last").read_text()
    stalls = [r["save_stall_s"] for r in beside.run.metrics() if "save_stall_s" in r]
    assert stalls
    assert all(s > 0 for s in stalls)


def test_what_training_does_meanwhile_is_not_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), checkpoint._write

    def slow(path: Path, content: Any) -> None:
        assert go.wait(20)
        real(path, content)

    monkeypatch.setattr(checkpoint, "_write", slow)
    one, tensor = make(tmp_path, async_save=True), torch.ones(1000)
    folder = save(one, 1, tensor)
    assert not folder.exists(), "save has returned before anything is written"
    tensor.zero_()
    go.set()
    one.finish()
    assert torch.equal(checkpoint.load(folder, "model")["w"], torch.ones(1000))
    assert checkpoint.load(folder, "train") == {"n": [1, (2, "x")]}
    assert (tmp_path / "last").read_text() == "step-000001\n"


def test_an_error_in_the_background_comes_up_at_the_next_save_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, content: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    one = make(tmp_path, async_save=True)
    save(one, 1, torch.ones(3))
    one.finish()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write", broken)
        save(one, 2, torch.ones(3))
        with pytest.raises(SaveFailed, match=r"step-000002 could not be written.*Input/output error"):
            save(one, 3, torch.ones(3))
        save(one, 3, torch.ones(3))
        with pytest.raises(SaveFailed, match="step-000003"):
            one.finish()
    one.finish()  # told once
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-000001"]


# --- a full disk ----------------------------------------------------------------------------------------------------


def test_no_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "problem", lambda *_: "here needs 9 GB and its disk has 1 GB left")
    with pytest.raises(SaveFailed, match=r"needs 9 GB .*Earlier checkpoints are untouched.*on_full=wait") as caught:
        save(make(tmp_path), 1, torch.ones(3))
    assert caught.value.full
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("background", [False, True])
def test_waiting_for_space_saves_once_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    """The first look finds a full disk; then a quota, which no look shows, refuses the write itself."""
    looks, writes = ["no room", "no room", ""], [True, True, False]
    monkeypatch.setattr(saver, "POLL_S", 0.01)
    monkeypatch.setattr(space, "problem", lambda *_: looks.pop(0) if looks else "")
    real = checkpoint._write

    def refused(path: Path, content: Any) -> None:
        if path.stem == "model" and writes and writes.pop(0):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        real(path, content)

    monkeypatch.setattr(checkpoint, "_write", refused)
    one = make(tmp_path, on_full=OnFull.wait, async_save=background)
    folder = save(one, 1, torch.ones(3))
    one.finish()
    assert not looks
    assert not writes
    assert checkpoint.damage(folder) == ""
    assert "waiting for space (checkpoint.on_full=wait): no room" in caplog.text
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_run_that_waits_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "POLL_S", 0.01)
    monkeypatch.setattr(space, "problem", lambda *_: "no room")
    one = make(tmp_path, on_full=OnFull.wait)
    threading.Timer(0.2, lambda: setattr(one.stop, "reason", "signal SIGTERM")).start()
    began = time.monotonic()
    with pytest.raises(SaveFailed, match="no room"):
        save(one, 1, torch.ones(3))
    assert 0.1 < time.monotonic() - began < 5


def test_other_errors_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(SaveFailed) as caught:
        save(make(tmp_path / "checkpoints", on_full=OnFull.wait), 1, torch.ones(3))
    assert not caught.value.full


def test_a_warning_while_training_and_not_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(space, "problem", lambda *_: "no room")
    one = make(tmp_path)
    one.watch(10)
    one.watch(10)
    assert caplog.text.count("the next checkpoint won't fit: no room") == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs to be root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("looked", [True, False])
def test_a_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch, looked: bool) -> None:
    """Found by the look before the save, and, should that be wrong, by the write: the old checkpoint stays whole, the
    rest is cleared away, and with space again the next save works."""
    monkeypatch.setattr(space, "SLACK_BYTES", 50_000)
    if not looked:
        monkeypatch.setattr(space, "problem", lambda *_: "")
    one = make(small_disk / "checkpoints", keep_last=9)
    good = save(one, 1, torch.ones(50_000))
    (small_disk / "other").write_bytes(b"x" * 600_000)
    with pytest.raises(SaveFailed, match="Earlier checkpoints are untouched") as caught:
        save(one, 2, torch.ones(100_000))
    assert caught.value.full
    assert checkpoint.newest_good(small_disk / "checkpoints") == good
    assert [p.name for p in (small_disk / "checkpoints").iterdir() if "tmp" in p.name] == []
    (small_disk / "other").unlink()
    assert checkpoint.damage(save(one, 2, torch.ones(100_000))) == ""
