"""A stuck worker is seen from outside: its clip, its line; and it dies with its rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from echofree.data.loader import Plan, TrainLoader
from echofree.process import children, exists
from toy import ToyData


class Stuck(ToyData):
    def item(self, index: int, epoch: int):  # type: ignore[no-untyped-def]
        if index == 5:
            self.sleeps()
        return super().item(index, epoch)

    def sleeps(self) -> None:
        time.sleep(600)


def until(test: Callable[[], bool], limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not test():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def loader(data: ToyData, workers: int) -> TrainLoader:
    plan = Plan(8, 2, 1, 1, seed=0, shuffle=False)
    return TrainLoader(data, plan, 0, 1, (0, 0), workers, 1)


@pytest.mark.ranks
def test_the_clip_and_the_line_of_a_stuck_worker() -> None:
    stuck = loader(Stuck(8), 2)
    for step in range(2):
        stuck.next_step(step)
    assert until(lambda: [m.index for m in stuck.board.read()].count(5) == 1)
    (making,) = [m for m in stuck.board.read() if m.index == 5]
    assert (making.worker, making.epoch, making.alive) == (0, 0, True)
    assert f"loader worker 0 (process {making.pid}) has been making clip 5 of epoch 0" in stuck.doing()
    text = stuck.board.stacks()[0]
    assert "in sleeps" in text
    assert "test_worker.py" in text
    os.kill(making.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker"):  # torch notices, and the others end with it
        stuck.next_step(2)
    stuck.close()


def test_clips_made_in_the_process_itself_are_named_too() -> None:
    before = threading.active_count()
    data = Stuck(8)
    mine = loader(data, 0)
    seen = []
    data.sleeps = lambda: seen.append(mine.doing())  # type: ignore[method-assign]
    for step in range(4):
        mine.next_step(step)
    assert len(seen) == 1
    assert "the training process has been making clip 5 of epoch 0" in seen[0]
    assert mine.doing() == "the training process has nothing to do"
    assert threading.active_count() <= before  # threads of earlier tests may end meanwhile


@pytest.mark.ranks
def test_workers_die_with_their_rank() -> None:
    """Also those in the middle of a clip, which never look whether the parent is there."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        made = loader(Stuck(8), 2)
        made.next_step(0)
        until(lambda: any(m.index == 5 for m in made.board.read()))
        os.write(write, " ".join(str(c) for c in children(os.getpid())).encode())
        time.sleep(60)
        sys.exit()
    workers = [int(p) for p in os.read(read, 100).split()]
    assert len(workers) == 2
    assert all(exists(w) for w in workers)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert until(lambda: not any(exists(w) for w in workers), 5.0)
    os.close(read)
    os.close(write)


@pytest.mark.ranks
def test_a_signal_to_all_processes_of_a_run_is_for_the_rank_alone() -> None:
    """A scheduler's TERM must not kill the workers under a rank that wants to save; the rank's own ends them."""
    made = loader(ToyData(8), 2)
    made.next_step(0)
    workers = [m.pid for m in made.board.read()]
    assert until(lambda: len([m for m in made.board.read() if m.pid]) == 2)
    stranger = subprocess.Popen(["kill", "-TERM", *map(str, workers)])
    assert stranger.wait() == 0
    for pid in workers:
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
    for step in range(1, 4):
        made.next_step(step)  # would raise if a worker had died
    assert all(exists(pid) for pid in workers)
    os.kill(workers[0], signal.SIGTERM)
    assert until(lambda: not exists(workers[0]), 5.0)
    made.close()
