"""The queue of one machine: so many jobs at once, each with devices and cores of its own.

It is a process apart (`python -m echofree.launch.local SWEEP`), in a session of its own, and so is each job: closing
the terminal, or a Ctrl-C in it, ends neither. It ends when nothing is left to do; killed, its jobs run on, and the next
one that is started takes them over.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echofree.errors import EchoFreeError, ExitCode
from echofree.launch import ticket as tickets
from echofree.launch.ticket import JOBS, Ticket
from echofree.launch.view import Seen, run_facts
from echofree.process import exists, oom_kills
from echofree.rundir import RunDir, is_alive

POLL_S = 0.1
DETACH = "detach"  # behind the sweep's name: go on as nobody's child
LOCK, CANCEL, LOG = "queue.lock", "cancel", "queue.log"
OUTPUT = "logs/job.out"  # of the run directory: what the job prints


# --- from outside: whoever launches, watches or cancels -------------------------------------------------------------


def submit(sweep: Path, jobs: Sequence[Ticket]) -> None:
    """Queues the jobs and sees to it that somebody runs them."""
    for job in jobs:
        job.again()
        job.files = [str((job.folder(sweep) / OUTPUT).resolve())]
        tickets.write(sweep, job)
    ensure_running(sweep)


def ensure_running(sweep: Path) -> None:
    """Starts the queue's process unless there is one."""
    if is_running(sweep):
        return
    folder = sweep / JOBS
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOG, "ab") as log:
        subprocess.run(
            [sys.executable, "-m", "echofree.launch.local", str(sweep.resolve()), DETACH],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, check=True,
        )  # fmt: skip
    end = time.monotonic() + 20
    while not is_running(sweep) and any(is_live(job) for job in tickets.read(sweep)):
        if time.monotonic() > end:
            raise EchoFreeError(f"the queue of {sweep} didn't start within 20 s; {folder / LOG} may say why")
        time.sleep(0.05)


def is_live(job: Ticket) -> bool:
    """Whether this queue still has something to do for the job."""
    return job.queue == "local" and job.state in tickets.LIVE


def is_running(sweep: Path) -> bool:
    """Whether the queue's process lives."""
    try:
        fd = os.open(sweep / JOBS / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def look(sweep: Path, jobs: Sequence[Ticket]) -> dict[int, Seen]:
    """How the jobs stand. A queue that died is started again, since somebody waits for it."""
    if any(is_live(job) for job in jobs):
        ensure_running(sweep)
    return {job.number: seen(sweep, job) for job in tickets.read(sweep)}


def seen(sweep: Path, job: Ticket) -> Seen:
    host = os.uname().nodename
    if job.state == "waiting":
        return Seen("waiting")
    if job.state == "running":
        return Seen("running", node=host)
    return Seen("ended", job.exit_code, job.why, host if job.started else "")


def cancel(sweep: Path, numbers: Sequence[int]) -> None:
    """Waiting jobs never start; running ones save and end."""
    (sweep / JOBS / CANCEL).write_text(json.dumps(list(numbers)), encoding="utf-8")
    ensure_running(sweep)


# --- inside: the queue's own process ---------------------------------------------------------------------------------


def shares(cores: Sequence[int], slots: int) -> list[list[int]]:
    """The cores, divided among `slots` jobs; with more jobs than cores some share one."""
    if slots >= len(cores):
        return [[cores[i % len(cores)]] for i in range(slots)]
    return [list(cores[len(cores) * i // slots : len(cores) * (i + 1) // slots]) for i in range(slots)]


class Queue:
    """Runs the waiting tickets of a sweep.

    Args:
        sweep: the sweep's folder.
        max_parallel: jobs at once.
        devices: names for CUDA_VISIBLE_DEVICES; empty: jobs see what there is.
        on_failure: continue, or stop: no job starts after one has failed.
        environment: variables added to each job's.
    """

    def __init__(
        self, sweep: Path, max_parallel: int, devices: Sequence[str], on_failure: str, environment: dict[str, str]
    ):
        self.sweep, self.on_failure, self.environment = sweep, on_failure, environment
        self.shares = shares(sorted(os.sched_getaffinity(0)), max_parallel)
        self.free_slots = list(range(max_parallel))
        self.free_devices = list(devices)
        self.running: dict[int, tuple[Ticket, int, subprocess.Popen[bytes] | None]] = {}
        self.waiting: list[Ticket] = []
        self._changed: float | None = None
        self._oom = oom_kills()

    def scan(self) -> None:
        """Looks for tickets that came or changed; a job that an earlier queue started is taken over."""
        changed = (self.sweep / JOBS).stat().st_mtime
        if changed == self._changed:
            return
        self._changed = changed
        found = tickets.read(self.sweep)
        self.waiting = [job for job in found if job.state == "waiting" and job.queue == "local"]
        for job in found:
            if job.state == "running" and job.queue == "local" and job.number not in self.running:
                slot = self.free_slots.pop(0) if self.free_slots else -1
                self.free_devices = [name for name in self.free_devices if name not in job.devices]
                self.running[job.number] = (job, slot, None)

    def run(self) -> None:
        """Until nothing waits and nothing runs."""
        while True:
            self.scan()
            self._cancel()
            for number in list(self.running):
                self._collect(number)
            self._start()
            if not self.waiting and not self.running:
                self.scan()
                if not self.waiting:
                    return
            time.sleep(POLL_S)

    def _start(self) -> None:
        while self.waiting and self.free_slots:
            job = self.waiting[0]
            need = int(job.resources.get("devices", 0))
            if need > len(self.free_devices):
                return
            slot = self.free_slots.pop(0)
            job.devices, self.free_devices = self.free_devices[:need], self.free_devices[need:]
            job.cores = self.shares[slot]
            self.waiting.pop(0)
            process = self._spawn(job)
            job.pid, job.state, job.started = process.pid, "running", time.time()
            tickets.write(self.sweep, job)
            self.running[job.number] = (job, slot, process)

    def _spawn(self, job: Ticket) -> subprocess.Popen[bytes]:
        folder, cores = job.folder(self.sweep), job.cores
        env = {**os.environ, **self.environment}
        if job.devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
        words = job.resources.get("command") or [sys.executable, "-m", "echofree.job", str(folder)]
        (folder / OUTPUT).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / OUTPUT, "ab") as out:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )  # fmt: skip

    def _collect(self, number: int) -> None:
        job, slot, process = self.running[number]
        if process is not None:
            code = process.poll()
            if code is None:
                return
        else:
            if job.pid is not None and exists(job.pid) and is_job(job.pid, job.folder(self.sweep)):
                return
            code = code_of(job.folder(self.sweep))
        del self.running[number]
        if slot >= 0:
            self.free_slots.append(slot)
            self.free_slots.sort()
        self.free_devices += job.devices
        job.state, job.ended = "ended", time.time()
        job.why = self._why(job, code)
        job.exit_code = 128 - code if code < 0 else code
        tickets.write(self.sweep, job)
        if self.on_failure == "stop" and not job.cancelled and job.exit_code in (ExitCode.FAILED, ExitCode.USER, 137):
            self._never_start([w.number for w in self.waiting], f"job {number} failed and on_failure=stop")

    def _why(self, job: Ticket, code: int) -> str:
        """What a job that a signal ended can't say itself."""
        if code >= 0:
            return job.why
        text = f"killed by signal {-code} ({signal.Signals(-code).name})"
        if -code == signal.SIGKILL:
            text += ": out of memory" + (
                " (the kernel has just ended a process for that)" if oom_kills() > self._oom else "?"
            )
            self._oom = oom_kills()
        folder = job.folder(self.sweep)
        if run_facts(folder).get("status") in ("created", "running", "restarting") and not is_alive(folder):
            RunDir(folder, is_first=True).note(status="failed", end=time.time(), error={"rank": 0, "traceback": text})
        return text

    def _cancel(self) -> None:
        path = self.sweep / JOBS / CANCEL
        try:
            numbers = [int(number) for number in json.loads(path.read_text(encoding="utf-8"))]
        except (FileNotFoundError, ValueError):
            return
        path.unlink(missing_ok=True)
        self._never_start(numbers, "cancelled")
        for number, (job, _, _) in self.running.items():
            if number in numbers and job.pid is not None and is_job(job.pid, job.folder(self.sweep)):
                job.cancelled = True
                tickets.write(self.sweep, job)
                os.kill(job.pid, signal.SIGTERM)

    def _never_start(self, numbers: Sequence[int], why: str) -> None:
        for job in list(self.waiting):
            if job.number in numbers:
                self.waiting.remove(job)
                tickets.write(self.sweep, replace(job, state="ended", cancelled=True, why=why, ended=time.time()))


def is_job(pid: int, folder: Path) -> bool:
    """Whether `pid` is still the job of `folder`, and no other process that got its number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return str(folder).encode() in command


def code_of(folder: Path) -> int:
    """The exit code that a run's own record stands for, when nobody saw it end."""
    said = run_facts(folder).get("status")
    codes = {"done": ExitCode.DONE, "stopped": ExitCode.DONE, "preempted": ExitCode.PREEMPTED}
    return int(codes.get(str(said), ExitCode.FAILED))


def _locked(fd: int) -> bool:
    """Takes the lock; with patience for somebody who only asks whether it is held."""
    for _ in range(6):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05)
        else:
            return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """The queue of the sweep that is named. -> the exit code"""
    name, *how = sys.argv[1:] if argv is None else argv
    if DETACH in how and os.fork():
        return 0
    sweep = Path(name)
    fd = os.open(sweep / JOBS / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    while True:
        if not _locked(fd):
            return 0  # another one is at it
        settings: dict[str, Any] = tickets.about(sweep)["settings"]
        Queue(
            sweep, int(settings["max_parallel"]), [str(name) for name in settings["devices"]],
            settings["on_failure"], settings.get("environment", {}),
        ).run()  # fmt: skip
        fcntl.flock(fd, fcntl.LOCK_UN)
        # a ticket that came between the last look and the unlocking would wait for ever
        if not any(job.state == "waiting" and job.queue == "local" for job in tickets.read(sweep)):
            return 0


if __name__ == "__main__":
    sys.exit(main())
