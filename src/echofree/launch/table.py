"""A sweep as people read it: the table while it runs and at its end, and sweep.csv for programs."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echofree.durable import write_text
from echofree.launch.ticket import TABLE, Ticket
from echofree.launch.view import View, run_facts
from echofree.progress import duration, number

COLUMNS = ("job", "state", "node", "step", "loss", "left", "best", "settings")
MAX_ROWS = 40  # on the screen; what runs or failed comes first
FIRST = ("failed", "running", "starting", "preempted", "interrupted", "cancelled", "lost", "waiting", "done")
HIDDEN = ("name", "output_root", "resume", "resume_allow")


def table(views: Sequence[View], best: int | None = None, limit: int = MAX_ROWS) -> list[str]:
    """Lines of text; `best` is marked. Beyond `limit` rows the least interesting are only counted."""
    shown = sorted(views, key=lambda v: (FIRST.index(v.state), v.number))[:limit]
    rows = [list(COLUMNS), *(cells(view, best) for view in sorted(shown, key=lambda v: v.number))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    hidden = [view for view in views if view not in shown]
    if hidden:
        lines.append(f"and {len(hidden)} more: {counts(hidden)}")
    return lines


def cells(view: View, best: int | None) -> list[str]:
    step = "-" if view.step is None else f"{view.step}/{view.total}" if view.total else str(view.step)
    left = "-" if view.left_s is None else duration(view.left_s)
    state = f"{view.state} ({view.why})" if view.why and view.state == "waiting" else view.state
    mark = " *" if view.number == best else ""
    words = " ".join(view.words)
    return [
        str(view.number), state, view.node or "-", step, number(view.loss), left, number(view.best) + mark, words or "-"
    ]  # fmt: skip


def counts(views: Sequence[View]) -> str:
    """ "3 done, 1 failed, 2 running" """
    states = [view.state for view in views]
    return ", ".join(f"{states.count(state)} {state}" for state in reversed(FIRST) if state in states)


def best_of(views: Sequence[View], jobs: Mapping[int, Ticket]) -> int | None:
    """The number of the done job with the best score, by the metric and the mode of its own run."""
    scored = [view for view in views if view.ok and isinstance(view.best, (int, float)) and view.best == view.best]
    if not scored:
        return None
    sign = -1.0 if jobs[scored[0].number].mode == "max" else 1.0
    return min(scored, key=lambda view: sign * float(view.best or 0.0)).number


def write_csv(sweep: Path, views: Sequence[View], best: int | None) -> Path:
    """sweep.csv: one line per job, each changed setting in a column of its own. -> its path"""
    settings = {view.number: changed(view.folder) for view in views}
    keys = sorted({key for one in settings.values() for key in one})
    head = ["job", "run", "state", "exit_code", "node", "steps", "metric", "best", "is_best", "seconds", *keys]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    for view in views:
        seconds = "" if view.start is None or view.end is None else f"{view.end - view.start:.1f}"
        run = os.path.relpath(view.folder, sweep)
        facts = [view.number, run, view.state, view.code, view.node, view.step, view.metric, view.best]
        mine = settings[view.number]
        writer.writerow([*facts, view.number == best, seconds, *(_plain(mine.get(key)) for key in keys)])
    write_text(sweep / TABLE, file.getvalue())
    return sweep / TABLE


def changed(folder: Path) -> dict[str, Any]:
    """What the command line changed in a run, resumes included."""
    facts = run_facts(folder)
    found = dict(facts.get("settings", {}))
    for again in facts.get("resumes", []):
        found.update({key: pair[1] for key, pair in again.get("changed", {}).items()})
    return {key: value for key, value in found.items() if key not in HIDDEN}


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def as_json(views: Sequence[View]) -> str:
    """Every digit, for programs."""
    rows = []
    for view in views:
        row = {key: value for key, value in vars(view).items() if key != "folder"}
        rows.append(
            {**row, "run": str(view.folder), "seconds": (view.end or time.time()) - (view.start or time.time())}
        )
    return json.dumps(rows, indent=1)
