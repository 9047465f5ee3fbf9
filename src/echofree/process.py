"""What a process tells the kernel about its parent, and asks it about others. Linux."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when `parent` ends, however it ends.

    Args:
        parent: the process that started this one; when it's gone already, this process ends here and now.
    """
    libc: Any = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)  # it died before we could ask to be told


def exists(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and waits to be collected doesn't."""
    try:
        # asked again and again beside a busy main thread: few calls, since each gives up the interpreter lock once more
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(file, 512)
        finally:
            os.close(file)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def num_cores() -> int:
    """Cores that this process may use: a launcher or a scheduler may have given it some of the machine's."""
    return len(os.sched_getaffinity(0))


def num_threads(ranks: int, workers: int, cores: int | None = None) -> int:
    """Intra-op threads of a rank: its share of the cores (None: those that this process may use), less one that its
    loader workers keep busy. Two threads that wait for one core cost far more than they bring: small operations take up
    to ten times as long."""
    return max(1, (cores or num_cores()) // max(1, ranks) - (1 if workers else 0))


def children(parent: int) -> list[int]:
    """Direct children, those of every thread."""
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except FileNotFoundError:
            continue  # that thread ended meanwhile
    return found


def oom_kills() -> int:
    """Processes that the kernel of this machine has killed for want of memory since it started; 0 if it doesn't say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
