"""One run on several machines: `dist.num_nodes=2 dist.rendezvous=HOST:PORT`, the same command on each.

The machine that holds the meeting point makes the run directory and decides: whether there is a restart, how it ended.
The others find the directory (a file system that all see), start their ranks into it, and end with the same exit code.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, EchoFreeError, ExitCode, UserError
from echofree.rundir import RunDir

if TYPE_CHECKING:
    from echofree.config.compose import Composed
    from echofree.dist.local import Ended
    from echofree.dist.meeting import Meeting

REPORT_S = 12.0  # for the other machines to say how their ranks ended
SEEN_S = 10.0  # for a new folder to show on the other machines of a network file system


@dataclass(frozen=True)
class Steps:
    """What a run on one machine does as well; see train.py."""

    prepare: Callable[[Composed, int], Path]
    verdict: Callable[[Path, Ended], int]
    note_restart: Callable[[Path, int, int], None]


def run(composed: Composed, count: int, steps: Steps) -> int:
    """This machine's share of the run, from the meeting to the exit code.

    Args:
        count: ranks to start here.

    Raises:
        UserError: on every machine, before any rank starts.
    """
    from echofree.config import frozen
    from echofree.config.override import flat
    from echofree.dist.meeting import Meeting

    dist = composed.config.dist
    settings = flat(frozen.freeze(composed.config))
    meeting = None
    try:
        meeting = Meeting(dist.rendezvous, dist.num_nodes, count, dist.interface, dist.start_timeout_s, settings)
        meeting.gather()
        run_dir = lead(meeting, composed, steps) if meeting.is_host else follow(meeting)
        return attempts(meeting, run_dir, count, dist, steps)
    except UserError:
        raise
    except EchoFreeError as error:
        print(error, file=sys.stderr, flush=True)
        return int(error.exit_code)
    finally:
        if meeting is not None:
            meeting.close()


def lead(meeting: Meeting, composed: Composed, steps: Steps) -> Path:
    """The host: makes the run directory and tells the others."""
    try:
        run_dir = steps.prepare(composed, meeting.size)
    except UserError as error:
        meeting.call_off(str(error))
        raise
    meeting.publish(folder=str(run_dir), path=str(run_dir.resolve()), id=_id(run_dir))
    meeting.agree()
    return run_dir


def follow(meeting: Meeting) -> Path:
    """The others: find the run directory."""
    facts = meeting.told()
    run_dir = _seen(facts)
    meeting.agree(
        ""
        if run_dir is not None
        else f"{meeting.me} doesn't see the run directory {facts['path']} that {meeting.nodes[0].host} has made: "
        "checkpoints need one folder for all machines. Type output_root=<a folder of a file system that all of them "
        "see>, the same on each"
    )
    assert run_dir is not None
    return run_dir


def _seen(facts: dict[str, Any]) -> Path | None:
    """The run directory as this machine sees it: at the same absolute path, or below its own working folder."""
    end = time.monotonic() + SEEN_S
    while True:
        for path in (Path(facts["path"]), Path(facts["folder"])):
            if (path / "run.json").is_file() and _id(path) == facts["id"]:
                return path
        if time.monotonic() > end:
            return None
        time.sleep(0.5)


def _id(run_dir: Path) -> str:
    found: str = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))["id"]
    return found


def attempts(meeting: Meeting, run_dir: Path, count: int, dist: Any, steps: Steps) -> int:
    """Launches, and again after a failure as often as `dist.max_restarts` allows."""
    from echofree.dist.local import launch

    for attempt in range(dist.max_restarts + 1):
        ended = launch(count, run_dir, dist.start_timeout_s, meeting.place(attempt))
        meeting.report(attempt, asdict(ended))
        if meeting.is_host:
            code = steps.verdict(run_dir, first_cause(meeting, attempt, ended, run_dir))
            again = code == ExitCode.FAILED and attempt < dist.max_restarts
            if again:
                steps.note_restart(run_dir, attempt + 1, dist.max_restarts)
            meeting.conclude(attempt, again=again, code=code)
        else:
            code, again = _what_the_host_says(meeting, attempt, ended, run_dir)
        if not again:
            break
    return code


def first_cause(meeting: Meeting, attempt: int, ended: Ended, run_dir: Path) -> Ended:
    """Of what all launchers saw, the end that explains the others: of a rank that could say nothing itself."""
    if ended.code in (ExitCode.PREEMPTED, ExitCode.DONE):
        return ended
    told = RunDir(run_dir, is_first=False).first_failure()
    known = told is not None and told["kind"] in ("user", "error", "hang")
    all_ended = [replace(ended, **found) for found in meeting.reports(attempt, 0.0 if known else REPORT_S)]
    silent = [e for e in all_ended if e.text and not (run_dir / "logs" / f"error-rank{e.rank}.json").exists()]
    interrupted = any(e.interrupted for e in all_ended)
    return replace(silent[0] if silent else replace(ended, text=""), interrupted=interrupted)


def _what_the_host_says(meeting: Meeting, attempt: int, ended: Ended, run_dir: Path) -> tuple[int, bool]:
    """-> (exit code, whether to start again)"""
    word = meeting.concluded(attempt)
    if word is None:
        print(
            f"{meeting.nodes[0]}, which holds the meeting point {meeting.rendezvous}, doesn't answer any more (link "
            f"cut, or machine gone): the run can't go on. The ranks here ended with exit code "
            f"{ended.code}; the ends of {run_dir}/logs/rank*.log say where they stood",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return ended.code or int(ExitCode.FAILED), False
    code, again = int(word["code"]), bool(word["again"])
    if code not in (ExitCode.DONE, ExitCode.PREEMPTED):
        print(f"the run failed; {meeting.nodes[0].host} says why, as do {run_dir}/logs", file=sys.stderr, flush=True)
    return code, again


def refuse_sweep(composed: Composed) -> None:
    """Raises ConfigError: the jobs of a sweep would have to meet one after another at one port."""
    if composed.config.dist.num_nodes > 1:
        raise ConfigError(
            f"dist.num_nodes={composed.config.dist.num_nodes} can't be combined with -m: machines meet for one run. "
            "Type the runs one after another, or use a scheduler for the sweep"
        )
