"""From composed jobs to a sweep under way: everything checked, then everything frozen, then submitted.

Nothing is written before all jobs are known to be right, and what is submitted is a run directory each: a later edit
of a YAML file, or another command in the same shell, changes nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, UserError
from echofree.launch import ticket as tickets
from echofree.launch.follow import exit_code, follow, summarise, views_of
from echofree.launch.queues import Queues
from echofree.launch.snapshot import FOLDER as SNAPSHOT
from echofree.launch.snapshot import take
from echofree.launch.ticket import Ticket
from echofree.launch.view import GOOD, View, run_facts
from echofree.rundir import CONFIG, RunDir, command_line, is_alive, status

if TYPE_CHECKING:
    from echofree.config.compose import Composed

POLICIES = {"on_failure": ("continue", "stop"), "on_interrupt": ("ask", "leave", "cancel")}
IGNORED = ("resume", "resume_allow")  # when a job is compared with the run that is there


@dataclass
class Job:
    """One job of a sweep before it is submitted.

    Attributes:
        number: in the sweep.
        words: the settings that make it.
        composed: its config; `run_dir` says where it goes.
        settings: the launcher's keys as this job has them.
        choices: group -> option, of this job.
        ticket: filled when its resources are known.
        state: new, again (start it in its directory), live (it runs or waits already), done.
    """

    number: int
    words: list[str]
    composed: Composed
    settings: dict[str, Any]
    choices: dict[str, str] = field(default_factory=dict)
    ticket: Ticket | None = None
    state: str = "new"

    @property
    def folder(self) -> Path:
        assert self.composed.run_dir is not None
        return self.composed.run_dir


@dataclass
class Launched:
    """What came of it.

    Attributes:
        views: how each job ended, in the order of the jobs; of a detached sweep how it stands.
        detached: nobody has waited.
        code: of the whole.
    """

    views: list[View]
    detached: bool
    code: int


def launch(kind: str, jobs: Sequence[Job], sweep: Path, settings: Mapping[str, Any]) -> Launched:
    """Checks, freezes, submits, follows and sums up.

    Args:
        kind: local or slurm.
        settings: the launcher's keys of the command line; `Job.settings` are those of one job.

    Raises:
        ConfigError: all problems of all jobs; nothing was written or submitted.
        follow.Left: after a Ctrl-C.
    """
    problems, queues = policy_problems(settings), Queues()
    for job in jobs:
        problems += adopt(job, sweep, queues)
    open_jobs = [job for job in jobs if job.state in ("new", "again")]
    if len(open_jobs) < len(jobs) or any(job.state == "again" for job in jobs):
        for job in open_jobs:
            if job.state == "new":
                job.composed.config.resume_allow = []  # meant for the others
    problems += check_jobs(open_jobs)
    total, lines, found = queues.plan(kind, open_jobs, settings)
    problems += found
    if problems:
        _forget(sweep)
        raise ConfigError(list(dict.fromkeys(problems)))
    tell_plan(jobs, lines, sweep)
    if open_jobs:
        freeze(sweep, kind, open_jobs, {**settings, **total})
        made = [job.ticket for job in open_jobs if job.ticket is not None]
        try:
            queues.submit(kind, sweep, made)
        except UserError:
            _undo(sweep, open_jobs)
            raise
    numbers = [job.number for job in jobs]
    if settings["detach"]:
        tell_detached(sweep, [job.ticket for job in open_jobs if job.ticket is not None])
        return Launched(views_of(sweep, queues, numbers), True, 0)
    views = follow(sweep, queues, numbers, settings["on_failure"], settings["on_interrupt"])
    summarise(sweep, views_of(sweep, queues))
    return Launched(views, False, exit_code(views))


def policy_problems(settings: Mapping[str, Any]) -> list[str]:
    """Of the keys that every launcher has."""
    return [
        f"hydra.launcher.{key}={settings[key]}: must be {' | '.join(valid)}. Type: hydra.launcher.{key}={valid[0]}"
        for key, valid in POLICIES.items()
        if settings[key] not in valid
    ]


def adopt(job: Job, sweep: Path, queues: Queues) -> list[str]:
    """Looks for an earlier start of the job in its run directory, and sets `job.state`. -> problems"""
    known = next((one for one in tickets.read(sweep) if one.number == job.number), None)
    under_way = known is not None and queues.look(sweep, [known])[job.number].state != "ended"
    try:
        job.state = "live" if under_way else standing(job.composed)
        if under_way:
            refuse_other(job.composed)
        elif job.state == "again":
            refuse_other_code(job, sweep)
    except UserError as error:
        problems = error.problems if isinstance(error, ConfigError) else [str(error)]
        return [f"job {job.number}: {problem}" for problem in problems]
    if job.state == "done" and known is None:  # it was run without a queue
        tickets.write(sweep, Ticket(job.number, tickets.relative(job.folder, sweep), job.words, state="ended"))
    return []


def refuse_other_code(job: Job, sweep: Path) -> None:
    """Raises CheckpointError when the code has changed since, nobody allowed it, and the sweep has no copy of its own.
    What `restart.prepare` would say, but before anything is touched."""
    from echofree.restart import check_code
    from echofree.rundir import code_digest

    allow = [str(name) for name in job.composed.config.resume_allow]
    if (sweep / SNAPSHOT).is_dir() and job.settings.get("snapshot"):
        allow.append("code")
    check_code(run_facts(job.folder), code_digest(), allow)


def standing(composed: Composed) -> str:
    """Whether the run directory of a job holds an earlier start of the same run: new (no), done, or again: it can be
    gone on with.

    Raises:
        ConfigError: it holds another run, or one that another process is at.
    """
    folder = composed.run_dir
    if folder is None or not (folder / CONFIG).is_file():
        return "new"
    refuse_other(composed)
    if status(folder) in GOOD:
        return "done"
    if is_alive(folder):
        raise ConfigError(f"{folder} is in use by another process. Wait for it, or stop it")
    return "again"


def refuse_other(composed: Composed) -> None:
    """Raises ConfigError when the run directory holds the run of another config."""
    from echofree.config import frozen
    from echofree.config.override import flat

    folder = composed.run_dir
    assert folder is not None
    old, new = flat(frozen.freeze(frozen.load(folder))), flat(frozen.freeze(composed.config))
    differs = [k for k in sorted({*old, *new}) if k.split(".")[0] not in IGNORED and old.get(k) != new.get(k)]
    if differs:
        shown = "; ".join(f"{k} is {old.get(k)!r} there, {new.get(k)!r} here" for k in differs[:4])
        more = f" and {len(differs) - 4} more" if len(differs) > 4 else ""
        raise ConfigError(
            f"{folder} holds another run ({shown}{more}). Type the sweep as it was, or another hydra.sweep.dir"
        )


def check_jobs(jobs: Sequence[Job]) -> list[str]:
    """Values, signatures, and what is built: data and model of each kind once. A problem that several jobs have is
    told once, with the first job that has it."""
    from echofree import parts as built
    from echofree import train
    from echofree.config import build, check, frozen, override

    seen: dict[str, str] = {}
    tried: set[str] = set()
    for job in jobs:
        config = job.composed.config.copy()
        if job.state == "again":
            config.resume_allow = []  # it is read, although nothing is typed as resume=
        problems = check.problems(config, job.choices)
        plain = frozen.freeze(config)
        parts = {key: plain[key] for key in (*override.OPEN_GROUPS, "export", "train", "dist")}
        parts["train"] = {key: plain["train"][key] for key in ("device", "activation_checkpointing")}
        text = json.dumps(parts, sort_keys=True)
        if not problems and text not in tried:
            tried.add(text)
            try:
                build.check(config)
                model = built.build(config).model
                if job.settings.get("nodes") is None:
                    built.check_fit(config, model, train.num_ranks(config))
                else:
                    built.check_fit(config, model, int(job.settings["nodes"]) * int(job.settings["tasks_per_node"]))
            except ConfigError as error:
                problems = error.problems
            except UserError as error:
                problems = [str(error)]
        for problem in problems:
            seen.setdefault(problem, f"job {job.number} ({' '.join(job.words) or 'no settings'}): {problem}")
    return list(seen.values())


def freeze(sweep: Path, kind: str, jobs: Sequence[Job], settings: Mapping[str, Any]) -> None:
    """Writes the run directories, the tickets' contents (not yet the tickets) and sweep.json."""
    from echofree import train

    sweep.mkdir(parents=True, exist_ok=True)
    environment = take(sweep) if settings["snapshot"] else {}
    old = tickets.about(sweep) if (sweep / tickets.SWEEP).is_file() else {}
    tickets.note(
        sweep, id=old.get("id", secrets.token_hex(4)), launcher=kind, command=old.get("command", command_line()),
        cwd=os.getcwd(), python=sys.executable, start=old.get("start", time.time()),
        settings={**settings, "environment": environment},
    )  # fmt: skip
    for job in jobs:
        assert job.ticket is not None
        job.ticket.run_dir = tickets.relative(job.folder, sweep)
        job.composed.resumed = job.state == "again"
        if job.composed.resumed and environment:
            job.composed.config.resume_allow = [*job.composed.config.resume_allow, "code"]  # it runs its old copy
        train.prepare(job.composed, job.ticket.ranks)
        RunDir(job.folder, is_first=True).note(status="created")  # how an earlier start ended says nothing any more
        job.ticket.mode = str(job.composed.config.checkpoint.mode.value)


def tell_plan(jobs: Sequence[Job], lines: Sequence[str], sweep: Path) -> None:
    states = [job.state for job in jobs]
    texts = {"done": "done already", "live": "under way already", "again": "gone on with", "new": "new"}
    parts = [f"{states.count(state)} {text}" for state, text in texts.items() if state in states]
    print(f"[EchoFree] sweep {sweep}: {len(jobs)} jobs ({', '.join(parts)})", file=sys.stderr)
    for line in lines:
        print(f"[EchoFree] {line}", file=sys.stderr)
    sys.stderr.flush()


def tell_detached(sweep: Path, made: Sequence[Ticket]) -> None:
    for job in tickets.read(sweep):
        if job.number in {one.number for one in made}:
            name = job.job_id or "queued"
            print(f"[EchoFree] job {job.number} {name}: {' '.join(job.words)} -> {job.folder(sweep)}")
    print(f"[EchoFree] detached. Ask: python -m echofree.sweep {sweep}", flush=True)


def _undo(sweep: Path, jobs: Sequence[Job]) -> None:
    """The scheduler wanted none of it: what was made a moment ago goes again."""
    for job in jobs:
        if job.state == "new" and run_facts(job.folder).get("status") == "created":
            shutil.rmtree(job.folder)
        elif job.state == "again":
            RunDir(job.folder, is_first=True).note(status="preempted")
    _forget(sweep)


def _forget(sweep: Path) -> None:
    """Removes the folder of a sweep into which nothing was launched."""
    if not sweep.is_dir() or tickets.read(sweep):
        return
    rest = [
        path for path in sweep.iterdir() if path.name not in ("multirun.yaml", tickets.SWEEP, tickets.JOBS, ".slurm")
    ]
    if not rest:
        shutil.rmtree(sweep)
