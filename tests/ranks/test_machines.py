"""The same command on several machines, which are network namespaces here."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_failures
from machines import Machines, why_not
from test_failures import Job

pytestmark = pytest.mark.ranks
PORT = 29400
TRAIN = [sys.executable, "-m", "echofree.train"]
START_S = 150.0
OWN = ["dist.num_procs=1", "dist.num_nodes=2"]


@functools.cache
def obstacle() -> str:
    return why_not()


@pytest.fixture
def machines() -> Iterator[Machines]:
    if obstacle():
        pytest.skip(obstacle())
    with Machines() as found:
        yield found


@pytest.fixture
def start(tmp_path: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """start(index, *words) -> a Job of one rank on that machine; all share one folder."""
    jobs: list[Job] = []
    monkeypatch.setattr(test_failures, "WORDS", [w for w in test_failures.WORDS if not w.startswith("dist.num_procs")])

    def begin(index: int, *words: str, apart: bool = False, start_s: float = 120.0, host: str = "") -> Job:
        own = [f"dist.rendezvous={host or machines.address(0)}:{PORT}", f"dist.start_timeout_s={start_s:g}"]
        head = machines.head(index, tmp_path / "shared" if apart else None)
        jobs.append(Job(tmp_path / ("apart" if apart else "shared"), [*OWN, *own, *words], [*head, *TRAIN]))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean()


def last_train(job: Job) -> dict[str, Any]:
    records = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    return next(r for r in reversed(records) if r["kind"] == "train")


@pytest.mark.slow
def test_the_identical_command_on_both(start: Callable[..., Job], machines: Machines) -> None:
    words = ["train.max_steps=4", "train.log_every=1"]
    second, first = start(1, *words), start(0, *words)  # who comes first doesn't matter
    first.ends(0, START_S)
    second.ends(0, 15.0)
    world = first.facts["world"]
    assert (first.facts["status"], world["size"], world["hosts"]) == ("done", 2, machines.names)  # nobody typed a rank
    assert last_train(first)["step"] == 4
    assert {path.name for path in (first.run / "logs").glob("rank*.log")} == {"rank0.log", "rank1.log"}


@pytest.mark.slow
def test_a_link_that_is_cut_in_mid_run(start: Callable[..., Job], machines: Machines) -> None:
    words = ["train.log_every=1", "data.num_train=4000", "model.pace_s=0.1", "dist.timeout_s=6", "data.num_workers=1"]
    jobs = [start(0, *words), start(1, *words)]
    jobs[0].said("step=2]", START_S)
    began = time.monotonic()
    machines.link(1, "down")
    for job in jobs:
        job.ends(1, 60.0)  # leaves no process
    assert time.monotonic() - began < 45.0
    assert "its network is cut, or its machine is gone" in jobs[0].text
    assert machines.names[1] in jobs[0].text
    assert "doesn't answer any more" in jobs[1].text
    assert (jobs[0].facts["status"], jobs[0].facts["error"]["kind"]) == ("failed", "hang")


@pytest.mark.slow
def test_a_rank_that_fails_ends_both_machines_and_a_restart_goes_on(start: Callable[..., Job]) -> None:
    words = [
        "train.max_steps=8", "train.log_every=1", "train.save_every_steps=2", "model.fault=kill", "model.step=6",
        "model.mark=failed", "dist.max_restarts=1",
    ]  # fmt: skip
    jobs = [start(0, *words), start(1, *words)]
    for job in jobs:
        job.ends(0, 2 * START_S)
    facts = jobs[0].facts
    (restart,) = facts["restarts"]
    assert (facts["status"], restart["rank"], restart["from"]) == ("done", 1, "step-000004")
    steps = [json.loads(line) for line in (jobs[0].run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in steps if r["kind"] == "train"] == list(range(1, 9))


# --- what goes wrong before any rank starts ---------------------------------------------------------------------------


def test_a_meeting_point_that_nobody_opens(start: Callable[..., Job], machines: Machines) -> None:
    job = start(1, start_s=4)
    job.ends(1, START_S)
    assert f"could not reach the meeting point dist.rendezvous={machines.address(0)}:{PORT} within" in job.text
    assert "nobody listens at the port there" in job.text
    assert f"eth0 {machines.address(1)}, eth1 192.168.101.1" in job.text or f"eth0 {machines.address(1)}" in job.text
    assert not (job.folder / "outputs").exists()


@pytest.mark.slow
def test_a_machine_that_is_off_and_a_name_that_leads_nowhere(start: Callable[..., Job], machines: Machines) -> None:
    machines.link(0, "down")
    off = start(1, start_s=4)
    unknown = start(1, host="nowhere.invalid")
    off.ends(1, START_S)
    assert "doesn't answer" in off.text or "no way leads to" in off.text
    unknown.ends(2, START_S)
    assert "the name 'nowhere.invalid' leads to no address" in unknown.text
    assert machines.address(1) in unknown.text


@pytest.mark.slow
def test_a_machine_that_never_comes(start: Callable[..., Job], machines: Machines) -> None:
    job = start(0, start_s=4)
    job.ends(1, START_S)
    assert "has waited dist.start_timeout_s=4 s" in job.text
    assert "for dist.num_nodes=2 machines; with it there were 1" in job.text
    assert f"eth0 {machines.address(0)}" in job.text


@pytest.mark.slow
def test_a_wrong_interface(start: Callable[..., Job], machines: Machines) -> None:
    missing = start(1, "dist.interface=ib0")
    jobs = [start(0), start(1, "dist.interface=eth1")]
    missing.ends(2, START_S)
    assert "has no interface 'ib0'" in missing.text
    assert "Type: dist.interface=eth" in missing.text
    for job in jobs:
        job.ends(2, START_S)
        assert f"can't reach {machines.names[1]} at 192.168.101.1, the address of its interface eth1" in job.text
        assert f"eth0 {machines.address(0)}" in job.text


@pytest.mark.slow
def test_commands_that_differ_and_folders_that_are_not_shared(start: Callable[..., Job], machines: Machines) -> None:
    first, other = start(0, start_s=60), start(1, "optim.lr=0.5", start_s=60)
    other.ends(2, START_S)
    assert "optim.lr is 0.5 here and 0.001 there" in other.text
    apart = start(1, apart=True, start_s=60)  # the first still waits
    for job in (first, apart):
        job.ends(2, START_S)
        assert f"{machines.names[1]} doesn't see the run directory" in job.text
        assert "output_root=" in job.text
