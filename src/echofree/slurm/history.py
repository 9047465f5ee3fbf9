"""Which run directory an earlier start of this job has used. A job that SLURM requeues begins its script anew; the same
command of the same job goes on in the same directory.

Kept in `<output_root>/.slurm/<cluster>-<job>/`, one file per command, written by rank 0.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from echofree.durable import write_text
from echofree.slurm.env import Task

FOLDER = ".slurm"


def _home(root: Path, task: Task) -> Path:
    return root / FOLDER / f"{task.cluster or 'slurm'}-{task.job_id}"


def _name(words: Sequence[str], step: str | None) -> str:
    return f"{hashlib.sha256(json.dumps(list(words)).encode()).hexdigest()[:12]}-{step or 'batch'}.json"


def remember(root: Path, task: Task, words: Sequence[str], run_dir: Path) -> None:
    """Writes down that this command of this job runs in `run_dir`."""
    home = _home(root, task)
    home.mkdir(parents=True, exist_ok=True)
    facts = {"run_dir": str(run_dir.resolve()), "words": list(words), "restart": task.restart, "time": time.time()}
    write_text(home / _name(words, task.step), json.dumps(facts, indent=1))


def earlier(root: Path, task: Task, words: Sequence[str]) -> Path | None:
    """Where an earlier start of this job ran this command; None on the first.

    A command that a script repeats is told apart by the number of its srun; that number may differ between starts, so
    one that is alone is found under any.
    """
    if task.restart == 0:
        return None
    home = _home(root, task)
    exact = home / _name(words, task.step)
    digest = exact.name.partition("-")[0]
    found = [exact] if exact.is_file() else sorted(home.glob(f"{digest}-*.json"))
    if len(found) != 1:
        return None
    facts = json.loads(found[0].read_text(encoding="utf-8"))
    run_dir = Path(facts["run_dir"])
    return run_dir if (run_dir / "run.json").is_file() else None
