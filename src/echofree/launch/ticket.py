"""The record of a sweep on disk: sweep.json says what was asked for, .jobs/<number>.json how each job stands.

A ticket is written as a whole, by one process at a time: whoever submits, then whoever runs the job. Everyone may read,
so a sweep can be watched, cancelled and gone on with from another terminal, or after its launcher is gone.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from echofree.durable import write_text
from echofree.errors import ConfigError

SWEEP, JOBS, TABLE = "sweep.json", ".jobs", "sweep.csv"
LIVE = ("waiting", "running")


@dataclass
class Ticket:
    """One job.

    Attributes:
        number: its number in the sweep.
        run_dir: its run directory, relative to the sweep's folder when it lies below it.
        words: the settings of the command line that make this job.
        queue: local or slurm.
        state: waiting, running or ended, as last written; a scheduler may know better.
        job_id: SLURM's, such as 123_4; None on this machine.
        pid, cores, devices: of a job of this machine.
        node: where it ran.
        exit_code: None until it has ended, or when nobody saw it end.
        cancelled: somebody asked for its end.
        why: what to say of a job that ended without a word of its own.
        ranks: processes of the job.
        resources: what it was submitted with.
        files: what the scheduler writes, absolute.
    """

    number: int
    run_dir: str
    words: list[str] = field(default_factory=list)
    queue: str = "local"
    state: str = "waiting"
    job_id: str | None = None
    pid: int | None = None
    cores: list[int] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    node: str = ""
    submitted: float = 0.0
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    cancelled: bool = False
    why: str = ""
    mode: str = "min"
    ranks: int = 1
    resources: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def folder(self, sweep: Path) -> Path:
        """The run directory as this process finds it."""
        return sweep / self.run_dir

    def again(self) -> None:
        """Back to the start of the queue."""
        self.state, self.job_id, self.pid, self.exit_code = "waiting", None, None, None
        self.started = self.ended = None
        self.cancelled, self.why, self.submitted = False, "", time.time()


def relative(folder: Path, sweep: Path) -> str:
    """A run directory as a ticket names it."""
    inside = os.path.relpath(folder.resolve(), sweep.resolve())
    return str(folder.resolve()) if inside.startswith("..") else inside


def write(sweep: Path, ticket: Ticket) -> None:
    folder = sweep / JOBS
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{ticket.number}.json", json.dumps(asdict(ticket), indent=1))


def restore(sweep: Path, number: int, before: Ticket | None) -> None:
    """Back to what stood there before a submission that was refused."""
    if before is not None:
        write(sweep, before)
    else:
        (sweep / JOBS / f"{number}.json").unlink(missing_ok=True)


def read(sweep: Path) -> list[Ticket]:
    """All tickets, by number. Keys that another version wrote are ignored."""
    known = {item.name for item in fields(Ticket)}
    found = []
    for path in (sweep / JOBS).glob("*.json"):
        if re.fullmatch(r"\d+", path.stem):
            found.append(Ticket(**{k: v for k, v in json.loads(path.read_text("utf-8")).items() if k in known}))
    return sorted(found, key=lambda ticket: ticket.number)


def about(sweep: Path) -> dict[str, Any]:
    """What sweep.json says.

    Raises:
        ConfigError: no such folder, or nothing was launched into it.
    """
    path = sweep / SWEEP
    if not path.is_file():
        hint = ""
        found = sorted(Path("multirun").glob(f"*/*/{SWEEP}"), key=lambda file: file.stat().st_mtime)
        if found:
            hint = f", for example {found[-1].parent}"
        what = "holds no sweep" if sweep.is_dir() else "doesn't exist"
        raise ConfigError(
            f"{sweep} {what}: there is no {SWEEP}, which hydra/launcher=local and =slurm write. Type the folder of a "
            f"sweep{hint}"
        )
    facts: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return facts


def note(sweep: Path, **facts: Any) -> None:
    """Adds to sweep.json."""
    path = sweep / SWEEP
    old = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    write_text(path, json.dumps({**old, **facts}, indent=1))
