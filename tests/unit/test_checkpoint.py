"""Checkpoints under damage, full disks, kills, foreign folders and retention."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echofree import checkpoint, durable, retention
from echofree.config.schema import CheckpointConfig, Mode
from echofree.dist.world import World
from echofree.errors import CheckpointError, EchoFreeError


def save(root: Path, step: int, run_id: str = "mine", fill: int = 500, **scores: float) -> Path:
    shared = {"model": {"weight": torch.full((fill,), float(step))}, "train": {"step": step, "names": ["a"]}}
    about = {"run_id": run_id, "version": "0", "step": step, "epoch": 0, "scores": scores, "world_size": 1}
    return checkpoint.save(root, step, shared, checkpoint.random_state(), about, World())


def steps(root: Path) -> list[int]:
    return [int(p.name.removeprefix("step-")) for p in checkpoint.complete(root)]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


# --- one checkpoint -------------------------------------------------------------------------------------------------


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", 100, loss=0.5)
    assert folder.name == "step-000100"
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "model.pt", "rank0.pt", "train.pt"]
    assert torch.equal(checkpoint.load(folder, "model")["weight"], torch.full((500,), 100.0))
    assert checkpoint.load(folder, "train") == {"step": 100, "names": ["a"]}
    about = checkpoint.manifest(folder)
    assert (about["step"], about["scores"], about["format"]) == (100, {"loss": 0.5}, 1)
    for path in folder.glob("*.pt"):
        assert about["files"][path.name]["bytes"] == path.stat().st_size
    assert checkpoint.damage(folder) == ""
    assert [p.name for p in folder.parent.iterdir()] == ["step-000100"], "nothing temporary is left"


def test_random_states_come_back_through_the_safe_loader(tmp_path: Path) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    random.gauss(0, 1)  # both keep a second value for later
    np.random.standard_normal()

    def draw() -> list[float]:
        return [
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            np.random.rand(),
            float(torch.rand(())),
        ]

    folder = save(tmp_path, 1)
    expected = draw()
    assert draw() != expected
    checkpoint.restore_random_state(torch.load(folder / "rank0.pt", weights_only=True))
    assert draw() == expected


def test_the_same_step_again_replaces_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 1, fill=10)
    folder = save(tmp_path, 1, fill=20)
    assert len(checkpoint.load(folder, "model")["weight"]) == 20
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


@pytest.mark.parametrize("foreign", [True, False])
def test_a_folder_of_the_same_name_that_is_not_ours_is_kept(tmp_path: Path, foreign: bool) -> None:
    if foreign:
        save(tmp_path, 1, run_id="another")
    else:
        (tmp_path / "step-000001").mkdir()
        (tmp_path / "step-000001" / "half.pt").write_bytes(b"x")
    folder = save(tmp_path, 1)
    assert checkpoint.manifest(folder)["run_id"] == "mine"
    (kept,) = (p for p in tmp_path.iterdir() if p.name.startswith("left-step-000001"))
    assert (kept / ("manifest.json" if foreign else "half.pt")).exists()
    assert checkpoint.complete(tmp_path) == [folder]


# --- damage ---------------------------------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    path = folder / "model.pt"
    path.write_bytes(path.read_bytes()[:-100])


def rewrite(**change: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        about = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**about, **change}))

    return apply


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, r"model\.pt has \d+ bytes, its manifest says \d+: truncated"),
    "flipped bit": (lambda f: flip(f / "model.pt"), r"model\.pt has another checksum"),
    "flipped bit in the random state": (lambda f: flip(f / "rank0.pt"), r"rank0\.pt has another checksum"),
    "missing file": (lambda f: (f / "train.pt").unlink(), r"train\.pt is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "not a complete checkpoint: it has no manifest.json"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text(""), "can't be read as JSON"),
    "manifest of another kind": (lambda f: (f / "manifest.json").write_text("[1]"), "is not a manifest"),
    "newer format": (rewrite(format=2, version="9.9"), r"has format 2, this EchoFree reads format 1.*\(9\.9\)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_taken(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The automatic resume passes over it with a warning; asked for by name, it is refused."""
    harm, text = DAMAGE[kind]
    root = tmp_path / "checkpoints"
    good, bad = save(root, 9), save(root, 10)
    harm(bad)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest_good(root) == good
    assert "passing over step-000010" in caplog.text
    with pytest.raises(CheckpointError, match=text if kind != "no manifest" else "no complete checkpoint"):
        checkpoint.find(bad)
    assert checkpoint.damage(good) == ""
    assert checkpoint.find(tmp_path) == good
    # retention lives with it, and doesn't touch what it can't read
    retention.retain(root, "mine", CheckpointConfig(keep_last=1, keep_best=0))
    assert bad.exists()
    assert good.exists() == ("flipped" not in kind), "the only good one stays; retention looks at sizes"


def test_a_file_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    truncate(folder)
    with pytest.raises(CheckpointError, match=r"model\.pt can't be loaded"):
        checkpoint.load(folder, "model")
    with pytest.raises(CheckpointError, match=r"ema\.pt is missing"):
        checkpoint.load(folder, "ema")


def test_objects_are_refused(tmp_path: Path) -> None:
    """A file that would run code isn't loaded, whatever its manifest says."""
    folder = save(tmp_path, 1)
    torch.save({"path": tmp_path}, folder / "model.pt")
    with pytest.raises(CheckpointError, match="can't be loaded"):
        checkpoint.load(folder, "model")


@pytest.mark.parametrize("name", ["run", "step-000001", "checkpoints"])
def test_nothing_to_use(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="doesn't exist"):
        checkpoint.find(tmp_path / name)
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.find(tmp_path / name)
    assert checkpoint.newest_good(tmp_path / name) is None


def test_find_takes_the_best_else_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    first, second = save(root, 1), save(root, 2)
    assert checkpoint.find(tmp_path) == checkpoint.find(root) == second
    checkpoint.point(root, "best", first)
    assert checkpoint.find(tmp_path) == checkpoint.find(root) == first
    assert checkpoint.find(second) == second
    assert checkpoint.run_of(second) == tmp_path
    flip(first / "model.pt")
    assert checkpoint.find(tmp_path) == second
    shutil.rmtree(first)
    assert checkpoint.pointed(root, "best") is None


def test_steps_are_numbers(tmp_path: Path) -> None:
    """From a million on, names no longer sort."""
    for step in (999_999, 1_000_000, 5):
        save(tmp_path, step)
    (tmp_path / "step-last").mkdir()
    assert steps(tmp_path) == [5, 999_999, 1_000_000]
    assert checkpoint.newest_good(tmp_path) == tmp_path / "step-1000000"
    retention.retain(tmp_path, "mine", CheckpointConfig(keep_last=1, keep_best=0))
    assert steps(tmp_path) == [1_000_000]


# --- full disks and kills -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["model", "train", "rank0", "manifest"])
def test_a_full_disk_keeps_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stem: str) -> None:
    good = save(tmp_path, 1)

    def full(path: Path, *_: Any) -> None:
        if path.stem == stem:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(b"")

    monkeypatch.setattr(checkpoint, "_write", full)
    if stem == "manifest":
        monkeypatch.setattr(durable, "sync_text", full)
    with pytest.raises(EchoFreeError, match=r"step-000002 could not be written: .*No space left.*Earlier .* untouched"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.damage(good) == ""


def test_a_full_disk_as_torch_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(EchoFreeError, match=r"model\.pt: .*PytorchStreamWriter failed"):
        save(tmp_path, 1)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(EchoFreeError, match="could not be written"):
        save(tmp_path / "checkpoints", 1)


KILLED_IN = ["os.fsync", "os.replace", "durable.sha256", "durable.sync_text", "checkpoint.remove"]


@pytest.mark.parametrize("same_step", [False, True])
def test_a_kill_at_any_moment_leaves_a_good_one(tmp_path: Path, same_step: bool) -> None:
    """A process is killed at each call of each function that touches the disk, in turn: an undamaged checkpoint is
    always found, also while a step replaces itself."""
    calls = 0
    for name in KILLED_IN:
        for nth in range(1, 12):
            root = tmp_path / f"{name}{nth}"
            save(root, 1, fill=10)
            status = _save_and_die(root, 1 if same_step else 2, name, nth)
            found = checkpoint.newest_good(root)
            assert found is not None, f"killed in call {nth} of {name}"
            checkpoint.load(found, "model")
            if not same_step:
                assert checkpoint.damage(root / "step-000001") == ""
            if status == 0:  # there weren't so many calls
                assert found == root / f"step-{1 if same_step else 2:06d}"
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            calls += 1
            save(root, 3)  # the next start isn't disturbed by what lies around
            assert checkpoint.newest_good(root) == root / "step-000003"
    assert calls >= 8


def _save_and_die(root: Path, step: int, name: str, nth: int) -> int:
    """Saves in a forked process that kills itself before call `nth` of `name`; -> its wait status."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    module = {"os": os, "durable": durable, "checkpoint": checkpoint}[name.split(".")[0]]
    real, count = getattr(module, name.split(".")[1]), [0]

    def deadly(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(module, name.split(".")[1], deadly)
    try:
        save(root, step)
        os._exit(0)
    finally:
        os._exit(1)


def test_pointers_change_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    checkpoint.point(tmp_path, "last", first)

    def full(path: Path, text: str) -> None:
        path.write_text("st")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "sync_text", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.point(tmp_path, "last", second)
    assert checkpoint.pointed(tmp_path, "last") == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step-000001", "step-000002"]
    checkpoint.point(tmp_path, "last", second)
    assert checkpoint.pointed(tmp_path, "last") == second
    assert checkpoint.pointed(tmp_path, "never") is None


# --- retention ------------------------------------------------------------------------------------------------------


def retain(root: Path, keep_last: int, keep_best: int, mode: str = "min", **rule: Any) -> list[int]:
    wanted = CheckpointConfig(keep_last=keep_last, keep_best=keep_best, mode=Mode(mode), **rule)
    retention.retain(root, "mine", wanted)
    return steps(root)


def test_retention_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, loss in enumerate([0.5, 0.2, 0.3, 0.4, 0.9, 0.8], start=1):
        save(tmp_path, step, loss=loss)
    save(tmp_path, 7)  # not scored
    assert retain(tmp_path, keep_last=3, keep_best=2) == [2, 3, 5, 6, 7]
    assert retain(tmp_path, keep_last=1, keep_best=1) == [2, 7]
    assert retain(tmp_path, keep_last=1, keep_best=1, mode="max") == [2, 7], "a lone scored one is the best both ways"
    assert retain(tmp_path, keep_last=0, keep_best=0) == [7], "the last one stays whatever is asked"


def test_retention_by_a_score_of_which_more_is_better(tmp_path: Path) -> None:
    for step, loss in enumerate([0.5, 0.2, 0.9, 0.4], start=1):
        save(tmp_path, step, loss=loss)
    assert retain(tmp_path, keep_last=1, keep_best=1, mode="max") == [3, 4]


def test_retention_keeps_what_is_pointed_at(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpoint.point(tmp_path, "best", tmp_path / "step-000001")
    assert retain(tmp_path, keep_last=1, keep_best=0) == [1, 3]


def test_retention_never_touches_what_another_run_wrote(tmp_path: Path) -> None:
    save(tmp_path, 1, run_id="another")
    save(tmp_path, 5, run_id="another", loss=0.1)
    (tmp_path / "step-000006").mkdir()
    (tmp_path / "notes").mkdir()
    for step in (2, 3):
        save(tmp_path, step, loss=1.0)
    assert retain(tmp_path, keep_last=1, keep_best=1) == [1, 2, 3, 5]
    assert (tmp_path / "step-000006").is_dir()
    assert (tmp_path / "notes").is_dir()


def test_half_written_ones_do_not_count(tmp_path: Path) -> None:
    """Else two broken saves would push out the only good checkpoint."""
    save(tmp_path, 1)
    for step in (2, 3):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}/model.pt").write_bytes(b"")
    assert retain(tmp_path, keep_last=2, keep_best=0) == [1]


def test_a_kill_while_removing_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def killed(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        retain(tmp_path, keep_last=1, keep_best=0)
    assert (tmp_path / "step-000001/model.pt").exists()
    assert steps(tmp_path) == [2], "it isn't taken for a checkpoint"


def test_set_aside_takes_this_runs_later_ones_only(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    save(tmp_path, 4, run_id="another")
    checkpoint.point(tmp_path, "last", tmp_path / "step-000003")
    assert [p.name for p in checkpoint.set_aside(tmp_path, "mine", 2)] == ["step-000003"]
    assert steps(tmp_path) == [1, 2, 4]
    assert checkpoint.pointed(tmp_path, "last") == tmp_path / "step-000002"
    assert checkpoint.set_aside(tmp_path, "mine", 2) == []
