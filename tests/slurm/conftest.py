"""The cluster that a test runs in: jobs by sbatch, and an empty queue after each test.

All of it works on a real cluster too, except for the tests that take a node down. Two nodes of four cores, as
cluster.py makes them.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.jobs import EXPERIMENTS, Job, ask, until


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """submit(script, *sbatch options, folder="a") -> Job. Two ranks on two nodes are `-N2 --ntasks-per-node=1`."""

    def send(script: str, *options: str, folder: str = "a", env: dict[str, str] | None = None) -> Job:
        home = tmp_path / folder
        home.mkdir(exist_ok=True)
        nodes_up()
        text = "#!/bin/bash\n" + textwrap.dedent(script).strip() + "\n"
        path = home / f"script-{time.monotonic_ns()}.sh"
        path.write_text(text)
        given = {**os.environ, "OMP_NUM_THREADS": "1", "ECHOFREE_EXPERIMENTS": str(EXPERIMENTS), **(env or {})}
        words = ["sbatch", "--parsable", "-o", "%j.out", "--open-mode=append", "-t", "30", *options, str(path)]
        done = subprocess.run(words, cwd=home, env=given, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return Job(done.stdout.strip(), home)

    yield send
    ask("scancel", "-u", str(os.getuid()), check=False)
    ask("scancel", "-f", "-s", "KILL", "-u", str(os.getuid()), check=False)
    until(lambda: not ask("squeue", "-h", check=False), 40, lambda: ask("squeue"))


def nodes_up() -> None:
    """Both nodes take jobs: an earlier test may have taken one down."""
    until(lambda: ask("sinfo", "-h", "-N", "-p", "main", "-t", "idle,mix,alloc,comp", "-o", "%n").count("\n") >= 1, 40,
          lambda: ask("sinfo"))  # fmt: skip
