"""Batch jobs of the tests: what was submitted, how it stands, what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = ROOT / "tests" / "ranks" / "experiments"
START_S = 90.0  # interpreters that import torch on a busy machine
END_S = 10.0  # from a failure to the end of all ranks
TINY = [
    "model=faulty", "data=faulty", "task.metrics=[si_sdr]", "task.sample_rate=16000", "train.batch_size=2",
    "train.final_test=false", "train.device=cpu", "train.epochs=1", "train.log_every=1", "name=run",
]  # fmt: skip
PYTHON = sys.executable


def ask(*words: str | Path, check: bool = True) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def until(test: Callable[[], Any], limit_s: float, what: Callable[[], str]) -> Any:
    """The first true answer of `test`."""
    end = time.monotonic() + limit_s
    while not (found := test()):
        assert time.monotonic() < end, what()
        time.sleep(0.1)
    return found


class Job:
    """A batch job; `folder` is its working directory and holds its output and its runs."""

    def __init__(self, number: str, folder: Path):
        self.number, self.folder = number, folder

    @property
    def state(self) -> str:
        """As the controller has it; "" when it has forgotten."""
        return ask("squeue", "-h", "-r", "-t", "all", "-o", "%T", "-j", self.number, check=False)

    @property
    def facts(self) -> dict[str, str]:
        line = ask("scontrol", "show", "job", "-o", self.number, check=False)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    @property
    def text(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{self.number.partition('_')[0]}*.out")))

    @property
    def run(self) -> Path:
        (found,) = (self.folder / "outputs" / "run").iterdir()
        return found

    @property
    def record(self) -> dict[str, Any]:
        """run.json; {} before there is one."""
        found = list((self.folder / "outputs" / "run").glob("*/run.json"))
        facts: dict[str, Any] = json.loads(found[0].read_text()) if found else {}
        return facts

    @property
    def steps(self) -> list[int]:
        """Those logged."""
        found = [json.loads(line) for path in self.folder.glob("outputs/run/*/metrics.jsonl")
                 for line in path.read_text().splitlines()]  # fmt: skip
        return [line["step"] for line in found if line["kind"] == "train"]

    def told(self) -> str:
        paths = sorted(self.folder.glob("outputs/run/*/logs/*.log"))
        logs = "".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in paths)
        return f"{self.state}\n{self.facts}\n{self.text}\n{logs}"

    def reaches(self, step: int, limit_s: float = START_S) -> None:
        until(lambda: max(self.steps, default=0) >= step or self.is_over(), limit_s, self.told)
        assert max(self.steps, default=0) >= step, self.told()

    def is_over(self) -> bool:
        return self.state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")

    def ends(self, state: str, limit_s: float = START_S) -> str:
        """-> its exit code as SLURM has it, "code:signal"."""
        until(self.is_over, limit_s, self.told)
        assert self.state == state, self.told()
        return self.facts["ExitCode"]

    def accounted(self, limit_s: float = 15.0) -> dict[str, str]:
        """Step -> state, from the accounting, once the job has ended there too."""

        def look() -> dict[str, str]:
            lines = ask("sacct", "-n", "-P", "-D", "-o", "JobID,State,ExitCode", "-j", self.number).splitlines()
            found = {line.split("|")[0]: "|".join(line.split("|")[1:]) for line in lines}
            live = [v for v in found.values() if v.startswith(("RUNNING", "PENDING", "COMPLETING"))]
            return {} if live or self.number not in found else found

        return dict(until(look, limit_s, lambda: ask("sacct", "-D", "-j", self.number)))


def train(*words: str) -> str:
    """The command that a user types, for a model that is trained in seconds."""
    return " ".join([PYTHON, "-m echofree.train", *(f"'{w}'" for w in [*TINY, *words])])
