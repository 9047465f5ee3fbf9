"""Memory of this process as the system counts it. No torch here: the runtime's checks import this as well."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")  # Linux


def peak_mb() -> float:
    """The most that this process has held, MB.

    Not getrusage on Linux: its maximum outlives exec, so that a process started by a large one is told to be as large.
    """
    if STATUS.exists():
        return _field("VmHWM")
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / (2**20 if sys.platform == "darwin" else 2**10)


def now_mb() -> float:
    """What this process holds now, MB: interpreter, libraries, tensors, data. Elsewhere than on Linux its peak."""
    return _field("VmRSS") if STATUS.exists() else peak_mb()


def _field(name: str) -> float:
    for line in STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 2**10
    raise OSError(f"{STATUS} has no line {name}")
