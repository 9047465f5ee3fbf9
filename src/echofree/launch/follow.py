"""Watching a sweep until it ends: a table that lives, failures told the moment they are seen.

Nothing here keeps a job alive: whoever watches may leave, and come back with `python -m echofree.sweep`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from echofree.errors import ExitCode
from echofree.launch import table
from echofree.launch import ticket as tickets
from echofree.launch.ticket import Ticket
from echofree.launch.view import OPEN, Seen, View, cause, look

REDRAW_S = 1.0
LINE_S = 30.0  # between two lines where nobody can redraw a table
TICK_S = 0.25
FAILED_LINES = 60  # of a traceback on the screen; the whole is in the run directory


class Left(Exception):
    """Whoever watched has gone; the jobs haven't."""


class Queue(Protocol):
    """Where the jobs are."""

    @property
    def trouble(self) -> str:
        """Why a scheduler didn't answer the last time; "" when it did."""

    def look(self, sweep: Path, jobs: Sequence[Ticket]) -> dict[int, Seen]:
        """Asks the scheduler, not more often than it likes."""

    def cancel(self, sweep: Path, numbers: Sequence[int]) -> None:
        """Waiting jobs never start; running ones save and end."""


class Screen:
    """The table in place on a terminal; elsewhere a line per change, and one every LINE_S seconds."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self.stream, self.clock = stream or sys.stderr, clock
        self.redraws = self.stream.isatty()
        self._height = 0
        self._shown = -LINE_S
        self._states: dict[int, str] = {}

    def show(self, views: Sequence[View], force: bool = False) -> None:
        """The rows as they stand now."""
        changes = [view for view in views if self._states.get(view.number) != view.state]
        now = self.clock()
        if self.redraws:
            if force or changes or now - self._shown >= REDRAW_S:
                self._clear()
                size = shutil.get_terminal_size()
                lines = table.table(views, limit=max(3, size.lines - 4))
                lines = [line[: size.columns - 1] for line in lines]
                self.stream.write("\n".join(lines) + "\n")
                self._height = len(lines)
                self._shown = now
        else:
            quiet = len(views) > 20  # of so many, only the ends are worth a line each
            for view in changes:
                if view.final or not quiet:
                    self.stream.write(f"[EchoFree] job {view.number} {view.state}{self._more(view)}\n")
            if now - self._shown >= LINE_S:
                self.stream.write(f"[EchoFree] {table.counts(views)}{self._running(views)}\n")
                self._shown = now
        self._states.update({view.number: view.state for view in views})
        self.stream.flush()

    def write(self, text: str) -> None:
        """Lines that stay."""
        self._clear()
        self.stream.write(text.rstrip() + "\n")
        self.stream.flush()

    def _clear(self) -> None:
        if self._height:
            self.stream.write(f"\x1b[{self._height}F\x1b[J")
            self._height = 0

    @staticmethod
    def _more(view: View) -> str:
        parts = [f"on {view.node}" if view.node and not view.final else "", view.why]
        if view.ok and view.best is not None:
            parts.append(f"{view.metric} {view.best:.4g}")
        text = ", ".join(part for part in parts if part)
        return f" ({text})" if text else f": {' '.join(view.words)}" if view.state == "waiting" and view.words else ""

    @staticmethod
    def _running(views: Sequence[View]) -> str:
        going = [v for v in views if v.state == "running" and v.step is not None][:4]
        return "".join(f"; job {v.number} step {v.step}/{v.total}" for v in going)


def follow(sweep: Path, queue: Queue, numbers: Sequence[int], on_failure: str, on_interrupt: str) -> list[View]:
    """Waits until the named jobs have ended. -> how each did

    Args:
        on_failure: stop: what still waits is cancelled after the first failure.
        on_interrupt: what Ctrl-C does: ask (on a terminal; elsewhere leave), leave or cancel.

    Raises:
        Left: after a Ctrl-C; the jobs run on.
    """
    screen, told, stopped, trouble = Screen(), set[int](), False, ""
    while True:
        try:
            views = views_of(sweep, queue, numbers)
            screen.show(views)
            if queue.trouble and queue.trouble != trouble:
                screen.write(f"[EchoFree] SLURM doesn't answer, asking again: {queue.trouble}")
            trouble = queue.trouble
            jobs = {job.number: job for job in tickets.read(sweep)}
            for view in views:
                early = view.said == "failed" and jobs[view.number].queue == "slurm"  # which is slow to say so
                if (view.final or early) and view.number not in told:
                    told.add(view.number)
                    if view.state == "failed" or early:
                        screen.write(failure(view, jobs[view.number]))
            if on_failure == "stop" and not stopped and any(view.state == "failed" for view in views):
                stopped = True
                queue.cancel(sweep, [view.number for view in views if view.state == "waiting"])
            if all(view.final for view in views):
                return views
            time.sleep(TICK_S)
        except KeyboardInterrupt:
            if _interrupted(sweep, queue, screen, numbers, on_interrupt):
                raise Left from None


def views_of(sweep: Path, queue: Queue, numbers: Sequence[int] | None = None) -> list[View]:
    """How the jobs stand now, by number."""
    jobs = [job for job in tickets.read(sweep) if numbers is None or job.number in numbers]
    seen = queue.look(sweep, jobs)
    jobs = [job for job in tickets.read(sweep) if numbers is None or job.number in numbers]
    return [look(sweep, job, seen[job.number]) for job in jobs if job.number in seen]


def failure(view: View, job: Ticket) -> str:
    """What is said the moment a failure is seen."""
    words = f" ({' '.join(view.words)})" if view.words else ""
    lines = cause(view, job).splitlines()
    if len(lines) > FAILED_LINES:
        lines = [*lines[:5], f"... {len(lines) - FAILED_LINES} lines ...", *lines[5 - FAILED_LINES :]]
    head = f"[EchoFree] job {view.number}{words} failed{f' (exit code {view.code})' if view.code else ''}, "
    return "\n".join([head + lines[0], *(f"  {line}" for line in lines[1:]), f"  more: {view.folder}/logs"])


def _interrupted(sweep: Path, queue: Queue, screen: Screen, numbers: Sequence[int], policy: str) -> bool:
    """After a Ctrl-C. -> whether to leave"""
    answer = policy
    if policy == "ask":
        answer = "leave"
        if sys.stdin is not None and sys.stdin.isatty():
            screen.write("\n[l]eave the jobs running, [c]ancel them, or Enter to go on watching?")
            with contextlib.suppress(EOFError, KeyboardInterrupt):
                typed = input().strip().lower()
                answer = {"c": "cancel", "l": "leave"}.get(typed[:1], "stay")
    if answer == "stay":
        return False
    if answer == "cancel":
        queue.cancel(sweep, numbers)
        screen.write(
            f"[EchoFree] cancelling; what runs saves and ends. Go on later: python -m echofree.sweep {sweep} retry"
        )
    else:
        screen.write(
            f"[EchoFree] the jobs run on. Watch: python -m echofree.sweep {sweep} wait. "
            f"End: python -m echofree.sweep {sweep} cancel"
        )
    return True


def summarise(sweep: Path, views: Sequence[View], stream: TextIO | None = None) -> None:
    """The table, sweep.csv and the best run."""
    out = stream or sys.stdout
    jobs = {job.number: job for job in tickets.read(sweep)}
    best = table.best_of(views, jobs)
    path = table.write_csv(sweep, views, best)
    print(*table.table(views, best), sep="\n", file=out)
    print(f"[EchoFree] {table.counts(views)}. Table: {path}", file=out)
    if best is not None:
        view = next(view for view in views if view.number == best)
        words = f" ({' '.join(view.words)})" if view.words else ""
        print(f"[EchoFree] best: job {best}{words}, {view.metric} {view.best:.6g}: {view.folder}", file=out)
    again = [view.number for view in views if view.state in OPEN]
    if again:
        print(f"[EchoFree] start those that didn't get done again: python -m echofree.sweep {sweep} retry", file=out)
    out.flush()


def exit_code(views: Sequence[View]) -> int:
    """1 if any failed; else 75 or 130 if any was preempted or interrupted; else 0."""
    states = {view.state for view in views}
    if states & {"failed", "lost"}:
        return int(ExitCode.FAILED)
    if "preempted" in states:
        return int(ExitCode.PREEMPTED)
    return int(ExitCode.INTERRUPTED if states & {"interrupted", "cancelled"} else ExitCode.DONE)
