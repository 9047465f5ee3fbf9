"""Why SLURM stops a job, and starting it again.

The rule, which needs no clock, is what SLURM says about the job when the first signal comes:

    kind        SLURM says                                         what happens to the job
    preemption  PreemptTime is set                                 put back by us; SLURM would, when it has to kill
    requeue     Restarts has grown (scontrol requeue)              it is in the queue already
    cancel      COMPLETING or CANCELLED after SIGTERM (scancel)    stays out of it
    timeout     TimeLimit; or nothing at all: it was a warning     put back by us
                (--signal=USR2@n, USR1, TERM), or train.max_time
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from enum import Enum

from echofree.slurm.env import Task
from echofree.slurm.states import WAITING, ask_deaf, word

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # what people give to --signal
TRIES, PAUSE_S, LIMIT_S = 6, 5.0, 15.0  # for a controller that is restarted just now


class Stop(Enum):
    """Why a job was asked to stop."""

    timeout = "timeout"
    preemption = "preemption"
    requeue = "requeue"
    cancel = "cancel"


def why(number: int | None, facts: Mapping[str, str], restart: int) -> Stop:
    """The kind of a stop.

    Args:
        number: the first signal that came; None: the run stopped by itself (train.max_time).
        facts: what scontrol says about the job; may be empty.
        restart: how often the job had been requeued when this start of it began.
    """
    state = word(facts.get("JobState", ""))
    if state == "PREEMPTED" or facts.get("PreemptTime", "None") not in ("None", "(null)", ""):
        return Stop.preemption
    if state in WAITING or int(facts.get("Restarts", restart)) > restart:
        return Stop.requeue
    if state == "TIMEOUT" or facts.get("Reason") == "TimeLimit":
        return Stop.timeout
    if state == "CANCELLED" or (state == "COMPLETING" and number == signal.SIGTERM):
        return Stop.cancel
    return Stop.timeout


def requeue(task: Task) -> str:
    """Puts this job back into the queue; -> "" or why it can't be, in SLURM's words.

    Everything that SLURM now stops gets SIGTERM, scontrol itself too, before it has its answer: it doesn't listen.
    """
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE_S)
        code, out, error = ask_deaf(["scontrol", "requeue", task.name], LIMIT_S)
        said = (error or out).strip()
        if code == 0 or "pending" in said.lower():
            return ""
        if code > 0 and "contact" not in said and "onnect" not in said:
            return said
    return said
