"""Runs a verb as a user would: another process, an empty folder, nothing of this checkout around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Result:
    """What a command did. `text` is both streams, for messages and for searching."""

    command: list[str]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        return self.stdout + self.stderr

    def check(self, code: int = 0) -> Result:
        """This result, when it ended with `code`; otherwise an AssertionError that shows both streams."""
        assert self.returncode == code, (
            f"{' '.join(self.command)} ended with {self.returncode}, not {code}, after {self.seconds:.1f} s\n"
            f"--- stdout ---\n{self.stdout[-8000:]}\n--- stderr ---\n{self.stderr[-8000:]}"
        )
        return self


def run_verb(*args: str, cwd: Path, timeout: float = 120.0, env: dict[str, str] | None = None) -> Result:
    """Runs `python -m echofree.<args[0]> <the rest>` in `cwd`.

    Args:
        args: the verb, then its arguments.
        cwd: where; made when missing.
        timeout: seconds; afterwards the process and all its children are killed.
        env: variables added to this process' environment.

    Raises:
        AssertionError: it didn't end in time; shows what it had said.
    """
    verb, *rest = args
    command = [sys.executable, "-m", f"echofree.{verb}", *rest]
    cwd.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **(env or {})}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"{' '.join(command)} didn't end within {timeout:g} s\n--- stdout ---\n{stdout}\n--- stderr ---\n{stderr}"
        ) from None
    return Result(command, process.returncode, stdout, stderr, time.monotonic() - start)
