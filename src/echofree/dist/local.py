"""Ranks started on this machine, through torch's elastic launcher.

The launcher process builds nothing itself: it hands every rank the run directory with the frozen config, forwards
signals, waits, and tells which rank failed first and why.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from echofree.dist.world import JOB_ID

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LAUNCHER = "ECHOFREE_LAUNCHER_PID"
GRACE_S = 5  # between asking the other ranks of a failed job to leave and ending them


def how_many(asked: str, device: str) -> int:
    """`dist.num_procs` -> ranks to start here. auto: one per GPU, one on a machine without."""
    if asked != "auto":
        return int(asked)
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return 1


def launch(num_procs: int, run_dir: Path, start_timeout_s: float) -> int:
    """Runs `num_procs` ranks to their end; -> 0, or the exit code of the first rank that failed.

    The meeting point is a free port of the loopback interface that the machine chooses, and every rank checks the job's
    id, so that two jobs at once never meet.
    """
    job_id = uuid.uuid4().hex
    added = {JOB_ID: job_id, LAUNCHER: str(os.getpid())}
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_procs))
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        added["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that doesn't resolve must not matter on one machine
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we say it ourselves, with the cause
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_procs,
        run_id=job_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": int(start_timeout_s)},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr="localhost",
        signals_to_handle="SIGQUIT",  # the others are forwarded: torch would kill ranks that are saving
        shutdown_timeout=GRACE_S,
    )
    old = {number: signal.signal(number, _forward) for number in FORWARDED}
    try:
        elastic_launch(config, sys.executable)("-m", "echofree.rank", str(run_dir))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 1
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return 0


def _forward(number: int, frame: FrameType | None) -> None:
    for child in _children(os.getpid()):
        try:
            os.kill(child, number)
        except ProcessLookupError:
            continue  # it ended meanwhile


def _children(parent: int) -> list[int]:
    """Direct children, from /proc."""
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def follow_launcher() -> None:
    """Called by a rank first thing: the kernel kills it when the launcher dies, however it dies. (torch starts ranks in
    sessions of their own, so a Ctrl-C at the terminal reaches them only through the launcher, once.)"""
    import ctypes

    libc: Any = ctypes.CDLL(None, use_errno=True)
    pr_set_pdeathsig = 1
    libc.prctl(pr_set_pdeathsig, int(signal.SIGKILL))
    if os.getppid() != int(os.environ[LAUNCHER]):
        os._exit(1)  # it died before we could ask to be told
