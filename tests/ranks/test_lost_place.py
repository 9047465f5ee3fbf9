"""A run directory that is gone, read-only or full in the middle of a run: every rank ends, the text says what happened
and what to do, nothing is half written, and the run goes on from its last checkpoint."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echofree import checkpoint, rundir
from echofree.durable import append
from echofree.place import trouble
from ranks.test_failures import Job, until

pytestmark = pytest.mark.ranks

WORDS = [
    "data.num_train=40000", "train.log_every=1", "train.save_every_steps=3", "train.save_interval=0",
    "train.eval_interval=0", "dist.timeout_s=30",
]  # fmt: skip


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A folder `outputs` of 8 MB."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs to be root")
    yield folder
    subprocess.run(["umount", "--recursive", "--lazy", str(folder)], check=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """start(*words) -> Job; what is left of it at the end of the test is killed."""
    jobs: list[Job] = []

    def begin(*words: str) -> Job:
        jobs.append(Job(tmp_path, [*WORDS, *words]))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean()


def under_way(job: Job) -> Path:
    """The run directory, once two checkpoints are there."""
    job.said("step-000006 in")
    return job.run


def trained(run: Path) -> list[int]:
    """The steps of which there is a record; the scores of an epoch's end are records of their own."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["step"] for record in records if "grad_norm" in record]


def whole(run: Path) -> None:
    """Nothing in a run directory is half written, and what says that it runs isn't believed."""
    for folder in checkpoint.complete(run / "checkpoints"):
        assert checkpoint.damage(folder) == ""
    assert (run / "metrics.jsonl").read_bytes().endswith(b"}\n")
    steps = trained(run)
    assert steps == list(range(1, len(steps) + 1))
    assert rundir.status(run) == "failed"


def goes_on(start: Callable[..., Job], run: Path, *words: str) -> None:
    before = len((run / "metrics.jsonl").read_text().splitlines())
    last = max(12, before + 6)
    start(f"resume={run}", f"train.max_steps={last}", "resume_allow=[train.max_steps,code]", *words).ends(0)
    steps = trained(run)
    assert steps == list(range(1, last + 1))


def test_a_run_directory_that_is_gone(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start("model.pace_s=0.02")
    run = under_way(job)
    run.rename(tmp_path / "elsewhere")
    job.ends(1)
    assert job.text.count(f"{run.name} is gone: removed, renamed") == 1
    assert "start again with resume=" in job.text
    assert "Traceback" not in job.text
    assert not run.exists(), "nothing of it was made anew"
    whole(tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_run_directory_that_becomes_read_only(start: Callable[..., Job], mounted: Path) -> None:
    job = start()
    run = under_way(job)
    subprocess.run(["mount", "--bind", str(run), str(run)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(run)], check=True)
    job.ends(1)
    assert f"{run.name} can't be written any more (Read-only file system). Make it writable" in job.text
    assert "Traceback" not in job.text
    whole(run)
    subprocess.run(["umount", str(run)], check=True)
    goes_on(start, run)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "wait"])
def test_a_disk_that_runs_full(policy: str, start: Callable[..., Job], mounted: Path) -> None:
    job = start(f"checkpoint.on_full={policy}", "train.max_steps=150", "model.pace_s=0.03")
    run = under_way(job)
    fill = os.open(mounted / "fill", os.O_WRONLY | os.O_CREAT)
    until(lambda: not _write(fill) or job.process.poll() is not None, 60, lambda: job.text)
    if policy == "stop":
        job.ends(1)
        assert "full disk" in job.text or "No space left" in job.text or "its disk has" in job.text
        assert "Traceback" not in job.text
        (mounted / "fill").unlink()
        os.close(fill)
        whole(run)
        goes_on(start, run, "model.pace_s=0.03")
        return
    job.said("(checkpoint.on_full=wait)", 60)
    (mounted / "fill").unlink()
    os.close(fill)
    job.ends(0)
    steps = trained(run)
    assert steps == list(range(1, 151))


def _write(fd: int) -> bool:
    """Whether there was room for more."""
    try:
        for _ in range(64):
            os.write(fd, bytes(4096))
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_a_checkpoint_folder_that_is_gone_is_made_anew(start: Callable[..., Job], tmp_path: Path) -> None:
    """What it held is lost, which is said; the run itself loses nothing."""
    job = start("model.pace_s=0.2")  # leaves time between two saves
    run = under_way(job)
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    job.said("was gone and is made anew", 60)
    until(lambda: bool(checkpoint.complete(run / "checkpoints")), 60, lambda: job.text)
    job.process.terminate()
    job.ends(75)
    assert (run / "checkpoints/best").read_text() in [f"{p.name}\n" for p in checkpoint.complete(run / "checkpoints")]


# --- the parts --------------------------------------------------------------------------------------------------------


def test_trouble_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trouble(tmp_path) == ""
    assert list(tmp_path.iterdir()) == [], "the probe is gone"
    assert "is gone" in trouble(tmp_path / "none")
    for number, text in [
        (errno.ENOSPC, "is on a full disk"), (errno.EDQUOT, "is on a full disk"),
        (errno.EROFS, "Make it writable"), (errno.EACCES, "Make it writable"), (errno.EIO, "Input/output error"),
    ]:  # fmt: skip

        def refuse(*_: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "write_bytes", refuse)
        assert text in trouble(tmp_path)


def test_a_line_is_added_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "lines", os.write
    append(path, "one\n")

    def torn(fd: int, data: bytes) -> int:
        if len(data) > 3:
            return real(fd, data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", torn)
    with pytest.raises(OSError, match="No space left"):
        append(path, "two\n")
    monkeypatch.undo()
    append(path, "three\n")
    assert path.read_text() == "one\nthree\n"
