"""Why SLURM stops a job, and starting it again.

The rule, which needs no clock: who was asked to stop by the signal of --signal (USR1, USR2) is out of time, unless
SLURM says that the job is being preempted; who was asked by TERM is told apart by what SLURM says about the job.

    kind        SLURM says                                        what happens to the job
    timeout     nothing special (also: --signal=TERM@n), TIMEOUT  put back into the queue by us
    preemption  PreemptTime is set, or PREEMPTED                  put back by us; SLURM would do it when it has to kill
    requeue     PENDING or REQUEUED: scontrol requeue, a node     it is in the queue already
    cancel      CANCELLED: scancel                                stays out of it
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from enum import Enum

from echofree.slurm.env import Task
from echofree.slurm.states import WAITING, word

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # what people give to --signal
TRIES, PAUSE_S, LIMIT_S = 6, 5.0, 15.0  # for a controller that is restarted just now


class Stop(Enum):
    """Why a job was asked to stop."""

    timeout = "timeout"
    preemption = "preemption"
    requeue = "requeue"
    cancel = "cancel"


def why(number: int | None, facts: Mapping[str, str]) -> Stop:
    """The kind of a stop.

    Args:
        number: the first signal that came; None: the run stopped by itself (train.max_time).
        facts: what scontrol says about the job; may be empty.
    """
    state = word(facts.get("JobState", ""))
    if state == "CANCELLED":
        return Stop.cancel
    if state == "PREEMPTED" or facts.get("PreemptTime", "None") not in ("None", "(null)", ""):
        return Stop.preemption
    if state in WAITING:
        return Stop.requeue
    if state == "COMPLETING" and number not in (None, *WARNINGS):
        return Stop.requeue  # by an administrator, or a node was taken down: it is in SLURM's hands already
    return Stop.timeout


def requeue(task: Task) -> str:
    """Puts this job back into the queue; -> "" or why it can't be, in SLURM's words.

    Everything that SLURM now stops gets SIGTERM, scontrol itself too, before it has its answer: it doesn't listen.
    """
    words = ["scontrol", "requeue", task.name]
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, preexec_fn=_deaf)
        except FileNotFoundError:
            return "scontrol isn't installed on this node"
        except subprocess.TimeoutExpired:
            said = f"no answer within {LIMIT_S:g} s"
            continue
        said = (done.stderr or done.stdout).strip()
        if done.returncode == 0 or "pending" in said.lower():
            return ""
        if "contact" not in said and "onnect" not in said:
            return said
    return said


def _deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
