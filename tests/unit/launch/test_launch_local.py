"""The queue of one machine, with jobs that sleep."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sweeps import end, sweep_of

from echofree.launch import local
from echofree.launch import ticket as tickets
from echofree.launch.follow import views_of
from echofree.launch.queues import Queues
from echofree.launch.view import View
from echofree.process import exists


def until(test: Callable[[], bool], seconds: float = 15.0) -> None:
    stop = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < stop
        time.sleep(0.02)


def ended(sweep: Path) -> list[View]:
    found: list[View] = []

    def over() -> bool:
        found[:] = views_of(sweep, Queues())
        return all(view.final for view in found)

    until(over)
    until(lambda: not local.is_running(sweep))
    return found


def test_shares_of_cores_are_disjoint_and_complete():
    cores = list(range(3, 20))
    for slots in (1, 2, 3, 5, 17):
        parts = local.shares(cores, slots)
        assert sorted(core for part in parts for core in part) == cores
        assert len(parts) == slots
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert local.shares([4, 5], 5) == [[4], [5], [4], [5], [4]]


def test_at_most_max_parallel_at_once_and_no_gpu_twice(tmp_path):
    script = 'echo "$CUDA_VISIBLE_DEVICES" > "$1/gpu"; date +%s%N > "$1/begin"; sleep 0.4; date +%s%N > "$1/end"; '
    scripts = [script + end("done", best=i / 10) for i in range(5)]
    sweep, jobs = sweep_of(tmp_path / "s", scripts, max_parallel=3, devices=["4", "7"])
    for job in jobs:
        job.resources["devices"] = 1
    local.submit(sweep, jobs)
    views = ended(sweep)
    assert [view.state for view in views] == ["done"] * 5
    assert [view.best for view in views] == [0.0, 0.1, 0.2, 0.3, 0.4]
    spans = [[int((sweep / str(i) / name).read_text()) for name in ("begin", "end")] for i in range(5)]
    for begin, _ in spans:
        at_once = [i for i, (a, b) in enumerate(spans) if a <= begin < b]
        assert len(at_once) <= 2  # two GPUs, although three jobs may run
        gpus = [(sweep / str(i) / "gpu").read_text().strip() for i in at_once]
        assert len(set(gpus)) == len(gpus)
        assert set(gpus) <= {"4", "7"}
    assert any(b > c for (_, b), (c, _) in itertools.pairwise(spans))  # they did overlap


def test_how_each_kind_of_end_is_called(tmp_path):
    scripts = [
        end("done"),
        end("failed", 1),
        end("preempted", 75),
        end("interrupted", 130),
        end("running", 0),  # says 0, but the run never got to its end
        "kill -9 $$",
        end("done", 1),  # failed after its last word
    ]
    sweep, jobs = sweep_of(tmp_path / "s", scripts, max_parallel=4)
    local.submit(sweep, jobs)
    views = ended(sweep)
    expected = ["done", "failed", "preempted", "interrupted", "failed", "failed", "failed"]
    assert [view.state for view in views] == expected
    assert views[5].code == 137
    assert "SIGKILL" in views[5].why
    assert "out of memory" in views[5].why


def test_on_failure_stop_starts_no_more(tmp_path):
    scripts = [end("failed", 1), "sleep 0.5; " + end("done"), end("done"), end("done")]
    sweep, jobs = sweep_of(tmp_path / "s", scripts, on_failure="stop")
    local.submit(sweep, jobs)
    assert [view.state for view in ended(sweep)] == ["failed", "done", "cancelled", "cancelled"]
    assert not (sweep / "2/logs/job.out").exists()


def test_cancel_ends_what_runs_and_what_waits(tmp_path):
    trap = "trap '" + end("preempted", 75).replace("'", "'\\''") + "' TERM; "
    scripts = [trap + "touch $1/up; while :; do sleep 0.05; done"] * 3
    sweep, jobs = sweep_of(tmp_path / "s", scripts, max_parallel=1)
    local.submit(sweep, jobs)
    until((sweep / "0/up").exists)
    Queues().cancel(sweep, [0, 1, 2])
    views = ended(sweep)
    assert [view.state for view in views] == ["cancelled"] * 3
    assert json.loads((sweep / "0/run.json").read_text())["status"] == "preempted"  # it had time to save
    assert not (sweep / "1/up").exists()


def test_jobs_outlive_their_queue_and_the_next_one_takes_over(tmp_path):
    scripts = ["touch $1/up; sleep 1; " + end("done", best=1.0), end("done", best=2.0)]
    sweep, jobs = sweep_of(tmp_path / "s", scripts, max_parallel=1)
    local.submit(sweep, jobs)
    until((sweep / "0/up").exists)
    queue = next(
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit() and Path(f"/proc/{pid}/cmdline").exists()
        and f"echofree.launch.local\0{sweep.resolve()}" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    )  # fmt: skip
    job = next(one for one in tickets.read(sweep) if one.number == 0)
    assert job.pid is not None
    assert os.getsid(job.pid) not in (os.getsid(0), os.getsid(queue))  # the terminal's end is nobody's signal
    os.kill(queue, signal.SIGKILL)
    until(lambda: not local.is_running(sweep))
    assert exists(job.pid)
    views = ended(sweep)  # looking starts another queue
    assert [view.state for view in views] == ["done", "done"]
    assert views[1].start is not None
    assert views[0].end is not None
    assert views[1].start >= views[0].end - 0.2  # still one at a time


def test_a_job_number_in_use_again_is_not_taken_for_the_job(tmp_path):
    assert not local.is_job(os.getpid(), tmp_path / "elsewhere")
    assert not local.is_job(2**22 - 3, tmp_path)


@pytest.mark.parametrize("second", [False, True])
def test_two_queues_of_one_sweep_never_run_a_job_twice(tmp_path, second):
    sweep, jobs = sweep_of(tmp_path / "s", ['echo x >> "$1/count"; sleep 0.3; ' + end("done")] * 2, max_parallel=1)
    local.submit(sweep, jobs)
    if second:
        assert local.main([str(sweep)]) == 0  # leaves at once: the first holds the lock
    ended(sweep)
    assert [(sweep / str(i) / "count").read_text() for i in (0, 1)] == ["x\n", "x\n"]
