"""How a job stands: what its queue says, what its run directory says, and which of the two is right.

A job is done only if both agree. A queue that says "ended well" beside a run.json that doesn't is a failure, and so is
a run that says "running" while its process is gone.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echofree.errors import ExitCode
from echofree.launch.ticket import Ticket
from echofree.rundir import METRICS, RUN

TAIL_BYTES = 8192
OUTPUT_LINES = 20  # of a job that ended without a traceback
GOOD = ("done", "stopped")
# What can be started again; the rest is done or under way.
OPEN = ("failed", "preempted", "interrupted", "cancelled", "lost")


@dataclass
class Seen:
    """What a queue says of a job.

    Attributes:
        state: waiting, running or ended.
        code: the exit code of an ended one; None: unknown.
        why: the scheduler's own word: a reason to wait, NODE_FAIL, TIMEOUT.
        left_s: until its time limit.
    """

    state: str
    code: int | None = None
    why: str = ""
    node: str = ""
    left_s: float | None = None


@dataclass
class View:
    """A row of the table.

    Attributes:
        state: waiting, starting, running; then done, failed, preempted, interrupted, cancelled, lost.
        final: it won't change by itself.
        said: the status in run.json.
        left_s: until the last step, at the pace of the last record.
    """

    number: int
    state: str
    final: bool
    words: list[str]
    folder: Path
    node: str = ""
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    left_s: float | None = None
    best: float | None = None
    metric: str | None = None
    code: int | None = None
    why: str = ""
    start: float | None = None
    end: float | None = None
    said: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "done"


def look(sweep: Path, ticket: Ticket, seen: Seen) -> View:
    """-> the row of one job"""
    folder = ticket.folder(sweep)
    facts = run_facts(folder)
    view = View(ticket.number, "", False, ticket.words, folder, seen.node, code=seen.code, why=seen.why)
    view.metric, view.best = facts.get("metric"), facts.get("best")
    view.total, view.step = facts.get("total_steps"), facts.get("steps")
    view.start, view.end = ticket.started or facts.get("start"), ticket.ended or facts.get("end")
    said = view.said = str(facts.get("status", "created"))
    if seen.state == "waiting":
        view.state = "waiting"
    elif seen.state == "running":
        view.state = "starting" if said == "created" else "running"
    else:
        view.final = True
        view.state = _ended(said, seen, ticket)
    if view.state != "waiting":
        _progress(view)
    return view


def _ended(said: str, seen: Seen, ticket: Ticket) -> str:
    if said in GOOD and seen.code in (0, None):
        return "done"
    if ticket.cancelled:
        return "cancelled"
    if said == "preempted" or (seen.code == ExitCode.PREEMPTED and said != "failed"):
        return "preempted"
    if said == "interrupted" or seen.code == ExitCode.INTERRUPTED:
        return "interrupted"
    return "failed"


def run_facts(folder: Path) -> dict[str, Any]:
    """run.json; empty while there is none that can be read."""
    try:
        facts: dict[str, Any] = json.loads((folder / RUN).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return facts


def _progress(view: View) -> None:
    """Step, loss and time left, from the last records."""
    for record in reversed(tail(view.folder / METRICS)):
        if view.step is None or (not view.final and record.get("step", 0) > view.step):
            view.step = record.get("step")
        if record.get("kind") == "train":
            view.loss = record.get("loss")
            if view.total is not None and not view.final and record.get("step_s") and view.step is not None:
                view.left_s = max(0, view.total - view.step) * float(record["step_s"])
            return


def tail(path: Path) -> list[dict[str, Any]]:
    """The last whole records of a file of JSON lines."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines[1:] if size > TAIL_BYTES else lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # being written
    return found


def cause(view: View, ticket: Ticket) -> str:
    """Why a job failed: the first failing rank's traceback; else what its queue says and the end of its output."""
    path = view.folder / "logs" / "first_error.json"
    try:
        first = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        first = None
    if first is not None:
        where = f"rank {first['rank']} on {first['host']}"
        return f"{where}:\n{str(first['traceback']).rstrip()}"
    said = view.why or ticket.why
    code = "" if view.code is None else f"exit code {view.code}"
    lines = [", ".join(part for part in (said, code) if part) or "it ended without a word"]
    for name in ticket.files:
        try:
            text = Path(name).read_text("utf-8", errors="replace").strip()
        except OSError:
            continue
        if text:
            lines += [f"the end of {name}:", *text.splitlines()[-OUTPUT_LINES:]]
    return "\n".join(lines)
