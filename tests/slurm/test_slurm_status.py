"""`Scheduler` beside the real thing, with accounting and on a cluster that has none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echofree.slurm.states import JobState, Scheduler
from slurm.jobs import Job, ask, until

pytestmark = pytest.mark.slurm

HERE = Path(__file__).resolve().parent


def follow(names: list[str], limit_s: float = 60.0) -> tuple[dict[str, JobState], Scheduler]:
    """Until all have ended, asked far more often than it asks."""
    scheduler = Scheduler(1.0)
    end = time.monotonic() + limit_s
    while True:
        found = scheduler.look(names)
        if all(state.settled for state in found.values()):
            return found, scheduler
        assert time.monotonic() < end, found
        time.sleep(0.05)


def check_all_kinds(submit: Callable[..., Job]) -> None:
    began = time.monotonic()
    array = submit("if [ $SLURM_ARRAY_TASK_ID = 1 ]; then exit 3; fi", "--array=0-3%2")
    cancelled, lost = submit("exec sleep 60"), submit("exec sleep 60", "-w", "node2", "--no-requeue")
    until(lambda: (cancelled.state, lost.state) == ("RUNNING", "RUNNING"), 30, cancelled.told)
    ask("scancel", cancelled.number)
    ask("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    names = [*(f"{array.number}_{i}" for i in range(4)), cancelled.number]
    found, scheduler = follow(names)
    assert [found[name].state for name in names] == ["COMPLETED", "FAILED", "COMPLETED", "COMPLETED", "CANCELLED"]
    assert scheduler.questions <= time.monotonic() - began + 1
    assert Scheduler().look([lost.number])[lost.number].state == "NODE_FAIL"


def test_states_with_accounting(submit: Callable[..., Job]) -> None:
    check_all_kinds(submit)


def test_states_that_only_the_accounting_remembers(submit: Callable[..., Job]) -> None:
    job = submit("exit 3")
    job.ends("FAILED")
    until(lambda: ask("sacct", "-n", "-X", "-o", "State", "-j", job.number), 15, job.told)
    scheduler = Scheduler(0.0)
    scheduler._missing = [job.number]  # the controller forgets only after minutes
    found = scheduler.look([job.number])[job.number]
    assert (found.state, found.exit_code, found.source, found.settled) == ("FAILED", "3:0", "sacct", True)


def test_a_cluster_without_accounting() -> None:
    """Another cluster, inside of this one; this file's first test again."""
    if os.environ["SLURM_CONF"] != "/run/cluster/slurm.conf":
        pytest.skip("isn't run by cluster.py")
    words = [sys.executable, str(HERE / "cluster.py"), "--no-accounting", "--", sys.executable, "-m", "pytest", "-q"]
    done = subprocess.run(
        [*words, "-m", "slurm", f"{HERE}/test_slurm_status.py::test_states_with_accounting", "-p", "no:cacheprovider"],
        capture_output=True, text=True, timeout=120, cwd=HERE.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
