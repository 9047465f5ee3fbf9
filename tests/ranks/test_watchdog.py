"""The watchdog: who is blamed for what, and that a rank which only waits, is suspended or debugged isn't."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echofree.dist import verdict, watchdog
from echofree.dist.watchdog import Mailbox, Pulse, Unreachable, Watchdog
from echofree.dist.world import World
from echofree.log import Position
from echofree.rundir import RunDir
from ranks.harness import RanksFailed, run_ranks
from ranks.test_failures import Job, start  # noqa: F401
from toy import Toy, ToyData, meet

pytestmark = pytest.mark.ranks
LIMIT_S = 1.0


# --- who is to blame ------------------------------------------------------------------------------------------------


def said(rank: int, pending: int | None = None, entered: int = 5, still_s: float = 9.0, group: str = "0") -> Any:
    wait = {"group": group, "name": "data", "number": pending, "op": "all_reduce", "sizes": [[3]]}
    return {
        "rank": rank, "host": f"node{rank}", "pid": 100 + rank, "step": 6, "epoch": 0, "phase": "forward and backward",
        "still_s": still_s, "since": "01:02:03", "where": f"there.py:{rank} in f", "loader": [], "threads": {},
        "collectives": {"0": [entered, 5], "1": [3, 3]}, "pending": [] if pending is None else [wait],
    }  # fmt: skip


def judge(reports: list[Any], silent: dict[int, str] | None = None, size: int = 3) -> verdict.Verdict:
    return verdict.judge(reports, silent or {}, size, "dist.timeout_s=8")


def test_the_rank_outside_the_collective_is_to_blame() -> None:
    found = judge([said(0, 6, 6), said(1), said(2, 6, 6)])
    assert (found.rank, found.culprits) == (1, [1])
    first, second, third, *rest = found.text.splitlines()
    assert first == "hang: rank 1 of 3 has not moved for 9.0 s; the others wait for it (dist.timeout_s=8)"
    assert "rank 1 on node1 (process 101) stands in 'forward and backward' of step 7, epoch 0, since 01:02:03" in second
    assert third.strip() == "there.py:1 in f"
    assert "    in all_reduce number 6 of the data group (rank 1 has entered 5)" in rest


def test_a_rank_in_another_collective_is_behind() -> None:
    found = judge([said(0, 6, 6), said(1, 4, 5, group="1"), said(2, 6, 6)])
    assert found.culprits == [1]
    assert "the ranks are in different collectives" in found.text
    found = judge([said(0, 6, 6), said(1, 4, 5, group="1")], size=2)  # no majority
    assert (found.rank, found.culprits) == (None, [])
    assert "every rank has not moved" in found.text


def test_all_in_the_same_collective_is_the_network() -> None:
    found = judge([said(r, 6, 6) for r in range(3)])
    assert (found.rank, found.culprits) == (None, [])
    assert "every rank has not moved for 9.0 s" in found.text
    assert "the network between them has stopped" in found.text


def test_a_rank_that_cannot_report_is_to_blame() -> None:
    found = judge([said(0, 6, 6), said(1)], {2: "on node2 is gone"})
    assert found.culprits == [2]
    assert "  rank 2 on node2 is gone" in found.text.splitlines()


# --- real ranks -----------------------------------------------------------------------------------------------------


def watched(folder: Path, world: World, pulse: Pulse, limit_s: float = LIMIT_S) -> Watchdog:
    run = Toy(folder, world).run_dir()
    dog = Watchdog(
        pulse, Position(rank=world.rank), world, run, limit_s, limit_s, folder / "logs" / f"rank{world.rank}.log"
    )
    dog.start()
    return dog


def hang(folder: Path, work: Callable[[World, Pulse], None], ranks: int = 2, timeout: float = 40.0) -> Any:
    """Runs `work` on ranks that are watched; -> logs/hang.json, once all have left with exit code 1 by themselves."""

    def body(rank: int, size: int) -> None:
        world = meet(rank, size) if size > 1 else World()
        pulse = Pulse()
        dog = watched(folder, world, pulse)
        pulse.warm = True
        work(world, pulse)
        dog.stop()

    began = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(body, ranks, timeout=timeout, init=False)
    reports = failure.value.reports
    assert "died with exit code 1" in reports
    for report in reports:  # between the ends of two ranks the later one may see the connection break, or its end
        assert report in ("", "died with exit code 1") or "Connection closed by peer" in report
    assert time.monotonic() - began < 25
    return json.loads((folder / "logs" / "hang.json").read_text())


def test_a_stuck_rank_is_named_with_line_and_collective(tmp_path: Path) -> None:
    def decode_for_ever() -> None:
        time.sleep(600)

    def work(world: World, pulse: Pulse) -> None:
        for _ in range(3):
            pulse.at("agree")
            world.sum([1.0])
        pulse.at("data")
        if world.rank == 1:
            decode_for_ever()
        pulse.at("agree")
        world.sum([1.0])

    found = hang(tmp_path, work)
    assert found["culprits"] == [1]
    one = next(r for r in found["ranks"] if r["rank"] == 1)
    zero = next(r for r in found["ranks"] if r["rank"] == 0)
    assert "test_watchdog.py" in one["where"]
    assert "in decode_for_ever: time.sleep(600)" in one["where"]
    assert one["phase"] == "data"
    (wait,) = zero["pending"]
    assert (wait["op"], wait["name"]) == ("all_reduce", "control")
    assert wait["number"] == one["collectives"][wait["group"]][0] + 1
    assert any("in sum: dist.all_reduce" in line for line in zero["threads"]["MainThread"])
    for rank in range(2):  # every rank has the verdict and its own stack in its log
        log = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert found["verdict"].splitlines()[0] in log
        assert all(line.startswith("[EchoFree: rank=") for line in log.splitlines())
    first = json.loads((tmp_path / "logs" / "first_error.json").read_text())
    assert (first["rank"], first["kind"]) == (1, "hang")


def test_ranks_in_different_collectives(tmp_path: Path) -> None:
    def work(world: World, pulse: Pulse) -> None:
        pulse.at("forward and backward")
        if world.rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            world.sum([1.0])

    found = hang(tmp_path, work)
    assert {w["name"] for r in found["ranks"] for w in r["pending"]} == {"data", "control"}
    assert "(rank 1 has entered" in found["verdict"]
    assert "(rank 0 has entered" in found["verdict"]


def test_a_single_process_whose_loader_is_stuck(tmp_path: Path) -> None:
    class Stuck(ToyData):
        def item(self, index: int, epoch: int) -> Any:
            if epoch == 0 and index == self.plan_first:
                time.sleep(600)
            return super().item(index, epoch)

    data = Stuck(16)
    toy = Toy(tmp_path, data=data, workers=2)
    loop = toy.loop()
    data.plan_first = int(loop.plan.order(0)[9])  # type: ignore[attr-defined]  # of the third batch

    def work(world: World, pulse: Pulse) -> None:
        loop.pulse = pulse
        loop.fit()

    found = hang(tmp_path, work, ranks=1)
    assert found["verdict"].startswith("hang: rank 0 has not moved for")
    clip = int(loop.plan.order(0)[9])
    pattern = (
        rf"loader worker \d \(process \d+\) has been making clip {clip} of epoch 0 for .* in item: time.sleep\(600\)"
    )
    assert re.search(pattern, found["verdict"]), found["verdict"]


def test_waiting_for_a_slow_rank_is_no_hang(tmp_path: Path) -> None:
    """Rank 1 takes twice the limit and more, but moves."""
    limit_s = 3.0  # a busy machine may hold a rank up for a second

    def body(rank: int, size: int) -> float:
        world = meet(rank, size)
        pulse = Pulse()
        dog = watched(tmp_path, world, pulse, limit_s)
        pulse.warm = True
        if rank == 1:
            for _ in range(10):
                pulse.at("evaluate")
                time.sleep(0.7)
        pulse.at("gather")
        began = time.monotonic()
        world.sum([1.0])
        waited = time.monotonic() - began
        dog.stop()
        world.close()
        return waited

    waited = run_ranks(body, 2, init=False)
    assert waited[0] > 2 * limit_s
    assert not (tmp_path / "logs" / "hang.json").exists()


def test_a_suspended_process_does_not_hang(tmp_path: Path) -> None:
    """Ctrl-Z for longer than the limit, then fg."""
    pid = os.fork()
    if pid == 0:
        pulse = Pulse()
        watched(tmp_path, World(), pulse)
        pulse.warm = True
        for _ in range(100):
            pulse.at("data")
            time.sleep(0.02)
        (tmp_path / "ready").touch()
        end = time.monotonic() + 3.0 * LIMIT_S
        while time.monotonic() < end:  # suspended for most of it, and without a sign of life
            time.sleep(0.05)
        os._exit(0)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(2.6 * LIMIT_S)
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not (tmp_path / "logs" / "hang.json").exists()


def test_the_debugger_is_no_hang() -> None:
    assert verdict.debugged(["/usr/lib/python3.11/bdb.py:1 in x", "/home/me/model.py:2 in forward"])
    assert not verdict.debugged(["/home/me/pdb_reader.py:1 in x"])


def test_a_store_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is cut: the rank blames it by itself, and isn't blocked."""
    monkeypatch.setattr(watchdog, "PATIENCE_S", 0.2)

    back = threading.Event()

    class Cut:
        def set(self, key: str, value: str) -> None: ...

        def check(self, keys: list[str]) -> bool:
            back.wait()
            return False

    mail = Mailbox(Cut())
    mail.put("a", "b")
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(Unreachable):
            mail.get("a")
    assert time.monotonic() - began < 1.0
    world = World(0, 2, hosts=["here", "there"], pids=[os.getpid(), 1], store=Cut())
    run = RunDir(tmp_path, is_first=False)
    (tmp_path / "logs").mkdir()
    dog = Watchdog(Pulse(), Position(), world, run, 1.0, 1.0, tmp_path / "logs" / "rank0.log")
    first, dog.mail = dog.mail, mail
    assert first is not None
    text = dog._verdict(verdict.report(0, 3, 0, "agree", 9.0, None), alarm=True)
    assert "rank 1 can't be reached from" in text
    assert "network cut" in text
    dog._file.close()
    back.set()
    for box in (mail, first):
        box.close()
        box._pool.shutdown(wait=True)  # tests that fork come after this one


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stuck_loader_worker_through_the_command_line(start: Callable[..., Job]) -> None:  # noqa: F811
    job = start("data.stuck=20", "data.num_workers=1", "dist.timeout_s=4", "train.log_every=1")
    job.ends(1)
    found = json.loads((job.run / "logs" / "hang.json").read_text())
    assert found["culprits"] == [1]
    pattern = r"loader worker 0 \(process \d+\) has been making clip 20 of epoch 0 for .*faulty.py:\d+ in decode"
    assert re.search(pattern, job.text), job.text
    assert "hang: rank 1 of 2 has not moved" in job.text
    assert job.text.count("hang:") == 1
    assert (job.facts["status"], job.facts["error"]["kind"]) == ("failed", "hang")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lock", "stop"])
def test_a_rank_that_cannot_speak(start: Callable[..., Job], fault: str) -> None:  # noqa: F811
    """Native code with the interpreter lock in rank 1, or rank 0 stopped from outside: the other one tells."""
    rank = 1 if fault == "lock" else 0
    job = start(f"model.fault={fault}", f"model.rank={rank}", "model.step=10", "model.pace_s=0.2", "dist.timeout_s=4")
    job.ends(1)
    why = r"keeps the interpreter lock:\n.*faulty.py:\d+ in do_lock" if fault == "lock" else "it was stopped"
    assert re.search(f"rank {rank} on .* lives and has been silent for .*{why}", job.text), job.text
    assert (job.facts["status"], job.facts["error"]["rank"]) == ("failed", rank)


@pytest.mark.slow
def test_a_straggler_is_named_and_not_killed(start: Callable[..., Job]) -> None:  # noqa: F811
    job = start("model.fault=slow", "model.step=2", "train.log_every=3", "model.pace_s=0.01")
    job.ends(0)
    assert re.search(r"WARNING: rank 1 on .* is slow: its own work takes \d+ ms a step", job.text), job.text


def test_a_heartbeat_costs_next_to_nothing() -> None:
    """A heartbeat is two plain attribute writes: well under a microsecond or so, on any machine."""
    pulse = Pulse()
    best = min(_time(pulse) for _ in range(5))
    assert best < 20e-6, best
    assert not hasattr(pulse, "__dict__")
    assert sys.getsizeof(pulse) < 200


def _time(pulse: Pulse) -> float:
    began = time.perf_counter()
    for _ in range(1000):
        pulse.at("step")
    return (time.perf_counter() - began) / 1000
