"""A rank fails: all end within seconds, SLURM's record says FAILED, and the first cause is told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import pytest

from slurm.jobs import END_S, Job, train, until

pytestmark = pytest.mark.slurm

CASES = {
    "raise": ("ValueError: the sky is falling", "error", "1:0"),
    "exit": ("rank 1 ended with exit code 3 and without an error", "killed", "3:0"),
    "kill": ("rank 1 was killed by signal 9 (SIGKILL): out of memory?", "killed", "1:0"),
    "oom": ("ran out of memory", "error", "1:0"),
}


@pytest.mark.parametrize("fault", list(CASES))
def test_a_rank_fails(submit: Callable[..., Job], fault: str) -> None:
    text, kind, code = CASES[fault]
    mark = "$PWD/failed"
    words = ("dist=ddp", f"model.fault={fault}", "model.rank=1", "data.num_train=400", "+model.pace_s=0.02")
    job = submit(f'srun {train(*words)} "+model.mark={mark}"', "-N2", "--ntasks-per-node=1")
    assert job.ends("FAILED") == code, job.told()
    failed = (job.folder / "failed").stat().st_mtime
    assert time.time() - failed < END_S + 2  # END_S for the ranks; SLURM's own epilogue
    failure = json.loads((job.run / "logs" / "first_error.json").read_text())
    assert (failure["rank"], failure["kind"]) == (1, kind), job.told()
    assert text in job.text, job.told()
    assert job.record["status"] == "failed"
    assert job.accounted()[f"{job.number}.0"].startswith("FAILED"), job.accounted()


@pytest.mark.parametrize("early", ["raise", "exit", "kill"])
def test_a_rank_dies_before_the_group_exists(submit: Callable[..., Job], early: str) -> None:
    script = f"srun {train('dist=ddp', 'data.num_train=400')}"
    job = submit(script, "-N2", "--ntasks-per-node=1", env={"FAULTY_IMPORT": early, "FAULTY_FILE": "failed"})
    code = job.ends("FAILED")
    assert time.time() - (job.folder / "failed").stat().st_mtime < END_S + 2
    assert code == {"raise": "1:0", "exit": "7:0", "kill": "1:0"}[early], job.told()
    if early == "kill":
        assert "rank 1 was killed by signal 9 (SIGKILL)" in job.text, job.text


def test_a_task_without_its_guard(submit: Callable[..., Job]) -> None:
    """SLURM's own memory limit kills guard and rank at once: the others see the connection break."""
    job = submit(f"srun {train('dist=ddp', 'data.num_train=4000', '+model.pace_s=0.02')}", "-N2", "--ntasks-per-node=1")
    job.reaches(3)
    guard = min(tasks(job, "1"))
    began = time.monotonic()
    os.kill(guard, 9)
    job.ends("FAILED", 30)
    assert time.monotonic() - began < END_S + 2
    until(lambda: not tasks(job, "1"), 5, job.told)


def tasks(job: Job, rank: str) -> list[int]:
    """Processes of a task: its guard, the rank, loader workers."""
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_task(int(pid), job.number, rank)]


def _is_task(pid: int, number: str, rank: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = set(file.read().split(b"\0"))
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return {f"SLURM_JOB_ID={number}".encode(), f"SLURM_PROCID={rank}".encode()} <= words and b"echofree" in command
