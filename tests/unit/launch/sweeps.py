"""A sweep of jobs that sleep instead of training: run directories as the launcher would leave them, and a shell command
for each that plays the run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from echofree.launch import ticket as tickets
from echofree.launch.ticket import Ticket

SETTINGS = {"max_parallel": 2, "devices": [], "on_failure": "continue", "on_interrupt": "leave"}


def end(status: str, code: int = 0, best: float | None = None) -> str:
    """A line of shell that ends the run in the folder $1 as a rank would."""
    facts = json.dumps({"status": status, "best": best, "metric": "loss", "steps": 7})
    return f"echo '{facts}' > \"$1/run.json\"; exit {code}"


def sweep_of(root: Path, scripts: Sequence[str], queue: str = "local", **settings: object) -> tuple[Path, list[Ticket]]:
    """A sweep whose job i runs `scripts[i]` in a shell, its run directory as $1."""
    root.mkdir(exist_ok=True)
    cwd, python = os.getcwd(), sys.executable
    tickets.note(root, launcher=queue, settings={**SETTINGS, **settings}, cwd=cwd, python=python, command="test")
    jobs = []
    for number, script in enumerate(scripts):
        folder = root / str(number)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text(json.dumps({"status": "created", "settings": {"seed": number}}))
        job = Ticket(number, str(number), [f"seed={number}"], queue=queue)
        job.resources = {"command": ["sh", "-c", script, "job", str(folder.resolve())]}
        jobs.append(job)
    return root, jobs
