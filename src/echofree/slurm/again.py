"""Rank 0 of a job, before anything else: is this the first start of its run, or another one after a requeue?

A job that goes on does so in the same run directory, with the frozen config. Code that was edited meanwhile is used,
and the log and run.json say so: a job that starts in the night must not end for that.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import ExitCode
from echofree.slurm import env, history, states

if TYPE_CHECKING:
    from echofree.config.compose import Composed

HELD_S = 60.0  # for the last start's rank 0 to be gone: the node that has it may be cut off
POLL_S = 1.0


def first_or_again(composed: Composed, size: int, decide: Callable[[], Path]) -> Path | int:
    """Where this command runs, ready for `size` ranks; or the exit code when it has run to its end already.

    Args:
        decide: makes the run directory of a first start. It is all that happens outside of a job.

    Raises:
        UserError: from `decide`, or an earlier start can't be gone on with.
    """
    task = env.found_in(os.environ)
    if task is None:
        return decide()
    root = Path(str(composed.config.output_root))
    old = history.earlier(root, task, composed.words)
    if old is not None:
        found = begin_or_again(old, size)
        return old if found is None else found
    run_dir = decide()
    history.remember(root, task, composed.words, run_dir)
    _note_job(run_dir, task, composed.config)
    return run_dir


def begin_or_again(run_dir: Path, size: int) -> int | None:
    """Makes a prepared run directory ready to be run or gone on with; -> the exit code when there is nothing to do.

    Raises:
        UserError: it can't be gone on with, or another process is still at it.
    """
    from echofree import restart, rundir
    from echofree.config import frozen

    run = rundir.RunDir(run_dir, is_first=True)
    facts, task, config = run.facts, env.found_in(os.environ), frozen.load(run_dir)
    if facts["status"] in ("done", "stopped"):
        print(f"done already: {run_dir}", file=sys.stderr, flush=True)
        return int(ExitCode.DONE)
    if facts["status"] != "created":
        end = time.monotonic() + HELD_S
        while rundir.is_alive(run_dir) and time.monotonic() < end:
            time.sleep(POLL_S)
        allowing = config.copy()
        allowing.resume_allow = ["code"]
        restart.prepare(run, allowing, None, size, [])
        if facts["status"] == "running":  # nobody could write down how it ended
            lost = {"time": time.time(), "kind": "lost", "job": facts.get("slurm", {}).get("job")}
            counts: dict[str, int] = facts.get("stop_counts", {})
            counts = {**counts, "lost": counts.get("lost", 0) + 1}
            run.note(stops=[*facts.get("stops", []), lost], stop_counts=counts)
    if task is not None:
        _note_job(run_dir, task, config)
    return None


def _note_job(run_dir: Path, task: env.Task, config: Any) -> None:
    """Into run.json: the job, where SLURM writes its output, and how often it may run out of time."""
    from echofree.rundir import RunDir

    facts: Mapping[str, str] = states.facts_of(task.name)
    files = {kind: facts[key] for kind, key in (("out", "StdOut"), ("err", "StdErr")) if key in facts}
    RunDir(run_dir, is_first=True).note(
        slurm={
            "job": task.name, "job_id": task.job_id, "step": task.step, "restart": task.restart,
            "nodes": list(task.nodes), "tasks_per_node": list(task.per_node), "files": files,
            "may_requeue": facts.get("Requeue") != "0", "time_limit": facts.get("TimeLimit"),
            "max_timeouts": config.dist.max_timeouts,
        }
    )  # fmt: skip
