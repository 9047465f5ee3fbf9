"""What a loader's workers are at, to be read by the process that waits for them.

A worker that is stuck can't be asked: it writes the key of its clip into shared memory before it makes it, and dumps
its stack into an open file when a signal tells it to, whatever its Python code is doing. No locks, no files by name.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass

from echofree.process import die_with, exists

STACK_SIGNAL = signal.SIGRTMIN + 5  # none that a scheduler or a user sends
PID, EPOCH, INDEX, SINCE_NS, FIELDS = 0, 1, 2, 3, 4
IDLE = -1


@dataclass
class Making:
    """One worker. `index` is None between two batches; worker None is the training process itself."""

    worker: int | None
    pid: int
    alive: bool
    epoch: int
    index: int | None
    for_s: float

    def __str__(self) -> str:
        who = "the training process" if self.worker is None else f"loader worker {self.worker} (process {self.pid})"
        if not self.alive:
            return f"{who} is dead"
        if self.index is None:
            return f"{who} has nothing to do"
        return f"{who} has been making clip {self.index} of epoch {self.epoch} for {self.for_s:.1f} s"


class WorkerBoard:
    """One row per worker of a loader; made before the workers are forked.

    Args:
        num_workers: 0: clips are made in this process, which gets the only row.
    """

    def __init__(self, num_workers: int):
        self.num_workers = num_workers
        self._parent = os.getpid()
        self._memory = mmap.mmap(-1, 8 * FIELDS * max(1, num_workers))  # shared with forked processes
        self._rows = memoryview(self._memory).cast("q")
        self._stacks = [os.memfd_create("stack") for _ in range(num_workers)]
        weakref.finalize(self, _close, self._stacks)
        self._rows[INDEX] = IDLE
        if not num_workers:
            self._rows[PID] = self._parent

    def start(self, worker: int) -> None:
        """In a worker, first thing: it dies with its rank, not by signals, and can be asked for its stack."""
        die_with(self._parent)
        _leave_signals_to(self._parent)
        faulthandler.register(STACK_SIGNAL, file=self._stacks[worker], all_threads=True)
        self._rows[worker * FIELDS + INDEX] = IDLE
        self._rows[worker * FIELDS + PID] = os.getpid()

    def begin(self, worker: int, epoch: int, index: int) -> None:
        row = worker * FIELDS
        self._rows[row + SINCE_NS] = time.monotonic_ns()
        self._rows[row + EPOCH] = epoch
        self._rows[row + INDEX] = index

    def rest(self, worker: int) -> None:
        self._rows[worker * FIELDS + INDEX] = IDLE

    def read(self) -> list[Making]:
        """All workers that have started."""
        found = []
        for row in range(max(1, self.num_workers)):
            pid, epoch, index, since_ns = self._rows[row * FIELDS : (row + 1) * FIELDS].tolist()
            if pid:
                age_s = (time.monotonic_ns() - since_ns) / 1e9
                worker = row if self.num_workers else None
                found.append(Making(worker, pid, exists(pid), epoch, None if index == IDLE else index, age_s))
        return found

    def stacks(self, wait_s: float = 0.5) -> dict[int, str]:
        """Worker -> the stacks of its threads, innermost frame first, as faulthandler writes them."""
        alive = [m for m in self.read() if m.worker is not None and m.alive]
        for making in alive:
            os.kill(making.pid, STACK_SIGNAL)
        end = time.monotonic() + wait_s
        texts: dict[int, str] = {}
        while len(texts) < len(alive) and time.monotonic() < end:
            time.sleep(0.02)
            for making in alive:
                assert making.worker is not None
                file = self._stacks[making.worker]
                size = os.fstat(file).st_size
                if size:
                    texts[making.worker] = os.pread(file, size, 0).decode(errors="replace")
        return texts

    def __str__(self) -> str:
        return "; ".join(str(making) for making in self.read()) or "no loader worker has started"


def _leave_signals_to(parent: int) -> None:
    """Who stops a run (a scheduler, a launcher, Ctrl-C) signals all of its processes. A worker that died of it would
    turn the rank's orderly end into an error; so only the rank's own TERM, its way to end a worker, counts."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_obey, args=[parent], daemon=True, name="signals").start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        continue
    os._exit(0)


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
