"""Ranks started on this machine, through torch's elastic launcher.

The launcher process builds nothing itself: it hands every rank the run directory with the frozen config, forwards
signals, waits, and tells which rank failed first and why.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from echofree.dist.endpoint import Place
from echofree.dist.world import ATTEMPT, INTERFACE, JOB_ID
from echofree.errors import ExitCode
from echofree.process import children, die_with, exists, num_cores, oom_kills

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LAUNCHER = "ECHOFREE_LAUNCHER_PID"
GRACE_S = 5  # between asking the other ranks of a failed job to leave and ending them
AT_ONCE_S = 1.0  # for the ranks to leave after the second Ctrl-C


def how_many(asked: str, device: str) -> int:
    """`dist.num_procs` -> ranks to start here. auto: one per GPU, one on a machine without."""
    if asked != "auto":
        return int(asked)
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return 1


@dataclass
class Ended:
    """How the ranks ended.

    Attributes:
        code: 0, or the exit code of the first rank that failed (1 if a signal ended it).
        rank: which one that was.
        text: what a rank can't say itself: that it was killed, or left without an error.
        asked: the launcher was told to stop by a signal; `by_hand`: one of them was Ctrl-C; `interrupted`: it was told
            twice by Ctrl-C, or once before the ranks could save.
    """

    code: int = 0
    rank: int = 0
    text: str = ""
    asked: bool = False
    by_hand: bool = False
    interrupted: bool = False


class Ranks:
    """The ranks of one launch as the launcher sees them: who ended first and how, and an end for those that stay.

    torch's launcher asks the others to leave when one has failed, but waits 30 s before it ends them.
    """

    def __init__(self, num_procs: int):
        self.num_procs = num_procs
        self.signals: list[int] = []
        self.first: tuple[int, int] | None = None  # (rank, exit code; minus the signal) of the first that failed
        self._pids: dict[int, int] = {}
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._oom_before = oom_kills()
        threading.Thread(target=self._find, name="ranks", daemon=True).start()

    def forward(self, number: int, frame: FrameType | None) -> None:
        """A signal to the launcher is one to the ranks; the second Ctrl-C doesn't wait for them."""
        self.signals.append(number)
        for child in children(os.getpid()):
            _kill(child, number)
        if self.signals.count(signal.SIGINT) == 2:
            self._end_all_in(AT_ONCE_S)

    def close(self) -> None:
        self._over.set()

    def ended(self, code: int) -> Ended:
        """After the launch: what to report."""
        told = self.first
        asked = bool(self.signals)
        early = told is not None and told[1] in (-signal.SIGINT, ExitCode.INTERRUPTED)
        by_hand = signal.SIGINT in self.signals
        ended = Ended(code, asked=asked, by_hand=by_hand, interrupted=early or self.signals.count(signal.SIGINT) > 1)
        if told is None or code == 0:
            return ended
        ended.rank = told[0]
        if told[1] < 0:
            ended.text = self._killed(*told)
        else:
            ended.text = (
                f"rank {told[0]} ended with exit code {told[1]} and without an error (os._exit in some library or "
                f"dataset?); the end of logs/rank{told[0]}.log may say more"
            )
        return ended

    def _killed(self, rank: int, code: int) -> str:
        name = signal.Signals(-code).name
        text = f"rank {rank} was killed by signal {-code} ({name})"
        if -code == signal.SIGKILL and oom_kills() > self._oom_before:
            return f"{text}: the machine was out of memory (the kernel has just ended a process for that; see dmesg)"
        if -code == signal.SIGKILL:
            return f"{text}: out of memory? see dmesg"
        return f"{text}: a crash in native code; faulthandler's stack is at the end of logs/rank{rank}.log"

    def _find(self) -> None:
        """Waits for the ranks to appear, then for each of them in a thread of its own."""
        while len(self._pids) < self.num_procs and not self._over.is_set():
            for pid in children(os.getpid()):
                rank = _rank_of(pid)
                if rank is not None and pid not in self._pids:
                    self._pids[pid] = rank
                    threading.Thread(target=self._wait, args=[pid, rank], name=f"rank {rank}", daemon=True).start()
            time.sleep(0.05)

    def _wait(self, pid: int, rank: int) -> None:
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # looks, and leaves it to torch to collect
        except ChildProcessError:
            return  # collected already
        assert status is not None
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        with self._lock:
            if code == 0 or self.first is not None:
                return
            self.first = (rank, code)
        if code != ExitCode.PREEMPTED:  # those that saved leave together
            self._end_all_in(GRACE_S)

    def _end_all_in(self, seconds: float) -> None:
        """Ends what is left of the ranks by then."""
        threading.Thread(target=self._end_all, args=[seconds], name="grace", daemon=True).start()

    def _end_all(self, seconds: float) -> None:
        if not self._over.wait(seconds):
            for pid in self._pids:
                if exists(pid):
                    _kill(pid, signal.SIGKILL)


def launch(
    num_procs: int, run_dir: Path, start_timeout_s: float, place: Place | None = None, interface: str | None = None
) -> Ended:
    """Runs `num_procs` ranks to their end: all there are, or those of one of several machines.

    The meeting point is a free port of the loopback interface that the machine chooses, or where the machines have met.
    Every rank checks the job's id, so that two jobs at once never meet.

    Args:
        place: this machine's among several, or None.
        interface: `dist.interface` of a run on one machine.
    """
    job_id = uuid.uuid4().hex if place is None else place.job_id
    added = {JOB_ID: job_id, LAUNCHER: str(os.getpid()), **_network(place, interface)}
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, num_cores() // num_procs))
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it ourselves, with the cause
    config = LaunchConfig(
        **_meet(place, start_timeout_s),
        nproc_per_node=num_procs,
        run_id=job_id,
        max_restarts=0,  # ours start a fresh job: torch's reuse the store, which breaks over gloo
        monitor_interval=0.1,
        start_method="spawn",
        signals_to_handle="SIGQUIT",  # the others are forwarded: torch would kill ranks that are saving
        shutdown_timeout=GRACE_S,
    )
    ranks = Ranks(num_procs)
    old = {number: signal.signal(number, ranks.forward) for number in FORWARDED}
    code = 0
    try:
        elastic_launch(config, sys.executable)("-m", "echofree.rank", str(run_dir))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode > 0 else 1
    finally:
        ranks.close()
        for number, handler in old.items():
            signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return ranks.ended(code)


def _network(place: Place | None, interface: str | None) -> dict[str, str]:
    """The variables by which gloo and NCCL find the interface; what the user has exported stays."""
    if place is not None:
        found = {INTERFACE: place.interface, "NCCL_SOCKET_IFNAME": place.interface, ATTEMPT: str(place.attempt)}
        return {k: v for k, v in found.items() if v and (k != "NCCL_SOCKET_IFNAME" or k not in os.environ)}
    if interface is not None:
        return {INTERFACE: interface, "NCCL_SOCKET_IFNAME": interface}
    # a host name that doesn't resolve must not matter on one machine
    return {} if INTERFACE in os.environ else {INTERFACE: "lo"}


def _meet(place: Place | None, start_timeout_s: float) -> dict[str, Any]:
    """Where torch's launcher finds the others: nobody, on a free port; or the store of the meeting."""
    timeout = max(1, int(start_timeout_s))
    if place is None:
        return {
            "min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0",
            "rdzv_configs": {"timeout": timeout}, "local_addr": "localhost",
        }  # fmt: skip
    host = f"[{place.host}]" if ":" in place.host else place.host
    return {
        "min_nodes": place.num_nodes, "max_nodes": place.num_nodes, "rdzv_backend": "static",
        "rdzv_endpoint": f"{host}:{place.port}", "rdzv_configs": {"timeout": timeout, "rank": place.number},
    }  # fmt: skip


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended meanwhile


def _rank_of(pid: int) -> int | None:
    """From its environment; None for a child that is no rank, or not yet."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    found = [word for word in words if word.startswith(b"RANK=")]
    return int(found[0].partition(b"=")[2]) if found and b"echofree.rank" in command else None


def follow_launcher() -> None:
    """Called by a rank first thing: the kernel kills it when the launcher dies, however it dies. (torch starts ranks in
    sessions of their own, so a Ctrl-C at the terminal reaches them only through the launcher, once.)"""
    die_with(int(os.environ[LAUNCHER]))
