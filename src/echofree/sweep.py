"""python -m echofree.sweep: a sweep that was started by hydra/launcher=local or =slurm, from any terminal: show it,
wait for it, cancel it, start again what didn't get done.

Nothing here imports torch, but for `retry`, which prepares run directories.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echofree.errors import ConfigError, ExitCode, UserError
from echofree.launch import table
from echofree.launch import ticket as tickets
from echofree.launch.follow import Left, exit_code, follow, summarise, views_of
from echofree.launch.queues import Queues
from echofree.launch.ticket import Ticket
from echofree.launch.view import OPEN, View
from echofree.verb import Key, Words, help_asked, parse, report, show_help

KEYS = {
    "dir": Key("", "the sweep's folder, also typed without dir="),
    "do": Key("show", "show | wait | cancel | retry, also typed without do="),
    "jobs": Key("", "[0,3]: these jobs only; left out: all"),
    "format": Key("table", "of show: table | csv | json"),
    "detach": Key("false", "of retry: true: return at once"),
    "resume_allow": Key("", "of retry: [code] when the code has changed since and may"),
    "on_interrupt": Key("ask", "of wait and retry, what Ctrl-C does to the jobs: ask | leave | cancel"),
}
VERBS = ("show", "wait", "cancel", "retry")
NOTES = (
    "cancel: what waits never starts; what runs finishes its step, saves and ends. retry goes on in the same run",
    "directories, from the last checkpoint, with the config that was frozen when the sweep was launched.",
    "Exit code of wait and retry: 0 all done, 1 some failed, 75 some preempted, 130 some cancelled.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        show_help("sweep", KEYS, NOTES)
        return 0
    try:
        return run(parse(spelled(words), KEYS))
    except UserError as error:
        return report(error)
    except Left:
        return int(ExitCode.INTERRUPTED)


def spelled(words: Sequence[str]) -> list[str]:
    """The folder and the word for what to do, with their keys."""
    found, named = [], False
    for word in words:
        if "=" in word or word.startswith("-"):
            found.append(word)
        elif word in VERBS and named:
            found.append(f"do={word}")
        else:
            named = True
            found.append(f"dir={word}")
    return found


def run(asked: Words) -> int:
    sweep, do = Path(asked["dir"] or "."), asked["do"]
    if do not in VERBS:
        raise ConfigError(f"do={do}: give {' | '.join(VERBS)}")
    if asked["format"] not in ("table", "csv", "json"):
        raise ConfigError(f"format={asked['format']}: give table | csv | json")
    settings = tickets.about(sweep)["settings"]
    numbers, queues = chosen(asked, sweep), Queues()
    if do == "show":
        show(sweep, views_of(sweep, queues, numbers), asked["format"])
        return 0
    if do == "cancel":
        views = views_of(sweep, queues, numbers)
        live = [view.number for view in views if not view.final]
        queues.cancel(sweep, live)
        print(f"cancelled: {', '.join(map(str, live)) or 'nothing was waiting or running'}")
        return 0
    if do == "retry":
        numbers = retry(sweep, queues, numbers, asked.names("resume_allow"))
        if not numbers or asked.switch("detach"):
            return 0
    views = follow(sweep, queues, numbers, settings["on_failure"], asked["on_interrupt"])
    summarise(sweep, views_of(sweep, queues))
    return exit_code(views)


def chosen(asked: Words, sweep: Path) -> list[int]:
    """The jobs that are meant.

    Raises:
        ConfigError: there is no such job.
    """
    known = [job.number for job in tickets.read(sweep)]
    if asked.given("jobs") is None:
        return known
    wrong = [name for name in asked.names("jobs") if not name.isdigit() or int(name) not in known]
    if wrong:
        raise ConfigError(f"jobs={asked['jobs']}: there is no job {wrong[0]}. Jobs: {', '.join(map(str, known))}")
    return [int(name) for name in asked.names("jobs")]


def show(sweep: Path, views: Sequence[View], form: str) -> None:
    best = table.best_of(views, {job.number: job for job in tickets.read(sweep)})
    if form == "json":
        print(table.as_json(views))
    elif form == "csv":
        print(table.write_csv(sweep, views, best).read_text("utf-8"), end="")
    else:
        print(*table.table(views, best, limit=len(views)), table.counts(views), sep="\n")


def retry(sweep: Path, queues: Queues, numbers: Sequence[int], allow: Sequence[str]) -> list[int]:
    """Starts again, in their directories, the jobs that ended without being done. -> their numbers"""
    views = views_of(sweep, queues, numbers)
    again = [view.number for view in views if view.state in OPEN]
    jobs = [job for job in tickets.read(sweep) if job.number in again]
    if not jobs:
        print(f"nothing to start again: {table.counts(views)}")
        return []
    for job in jobs:
        ready(sweep, job, allow)
    for kind in sorted({job.queue for job in jobs}):
        queues.submit(kind, sweep, [job for job in jobs if job.queue == kind])
    print(f"started again: {', '.join(map(str, again))}", file=sys.stderr)
    return again


def ready(sweep: Path, job: Ticket, allow: Sequence[str]) -> None:
    """The run directory, ready to be gone on with.

    Raises:
        CheckpointError: the code has changed since, and the jobs don't run a snapshot.
    """
    from echofree import restart
    from echofree.config import frozen
    from echofree.rundir import RunDir

    settings: dict[str, Any] = tickets.about(sweep)["settings"]
    folder = job.folder(sweep)
    config = frozen.load(folder)
    config.resume_allow = [*allow, *(["code"] if settings.get("environment") else [])]
    run = RunDir(folder, is_first=True)
    restart.prepare(run, config, None, job.ranks, [])
    run.note(status="created")  # how the last start ended says nothing any more


if __name__ == "__main__":
    sys.exit(main())
