"""The queue of SLURM: job scripts by submitit, an array for all jobs of a sweep that ask for the same, and what the
scheduler says of them afterwards.

The script names run directories and nothing else; what a job does stands in the frozen config in there. submitit writes
the #SBATCH lines from keys that its users know; its pickles, its signal handler and its way of waiting aren't used
(docs/decisions.md says why).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echofree.durable import write_text
from echofree.errors import EchoFreeError, UserError
from echofree.launch import ticket as tickets
from echofree.launch.request import ranges
from echofree.launch.ticket import Ticket
from echofree.launch.view import Seen
from echofree.rundir import RunDir
from echofree.slurm.states import JobState, Scheduler

SCRIPT = "job.sh"
ARRAY = 1000  # indices of one array; SLURM's own limit (MaxArraySize) is 1001 unless the site has raised it
TRIES, PAUSE_S, LIMIT_S = 3, 5.0, 60.0
BUSY = ("Socket timed out", "Unable to contact", "Temporarily unable", "Connection refused", "Zero Bytes")
# Keys of ours that submitit names otherwise, or doesn't know.
RENAMED = {"name": "job_name", "timeout_min": "time", "tasks_per_node": "ntasks_per_node"}
OURS = ("submitit_folder", "array_parallelism", "srun_args", "additional_parameters", "stderr_to_stdout", "mem_gb")
BY_HAND = ("array", "output", "error", "open-mode", "chdir", "requeue")  # of additional_parameters: written here

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run_command(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=LIMIT_S)


class Slurm:
    """Submits, asks, cancels.

    Args:
        scheduler: who knows the states; it keeps its pace whoever asks.
        run: runs a command; for tests.
    """

    def __init__(self, scheduler: Scheduler | None = None, run: Run = run_command):
        self.scheduler, self.run = scheduler or Scheduler(), run
        self.started = time.monotonic()

    # --- submission --------------------------------------------------------------------------------------------------

    def submit(self, sweep: Path, jobs: Sequence[Ticket]) -> None:
        """One array for all jobs that ask for the same. The script of each lies in the sweep's folder.

        Raises:
            UserError: sbatch refused one of them, in its own words; those before it are cancelled.
            EchoFreeError: the scheduler doesn't answer.
        """
        done: list[Ticket] = []
        before = {job.number: job for job in tickets.read(sweep)}
        try:
            for group in groups(jobs):
                folder = new_folder(Path(group[0].resources["submitit_folder"]))
                indices = {job.number % ARRAY: job for job in group}
                script = self._prepare(sweep, folder, indices)
                number = self._sbatch(script)
                for index, job in indices.items():
                    job.job_id = f"{number}_{index}"
                    tickets.write(sweep, job)
                    done.append(job)
        except EchoFreeError:
            if done:
                self.run(["scancel", *sorted({str(job.job_id).partition("_")[0] for job in done})])
                for job in done:
                    tickets.restore(sweep, job.number, before.get(job.number))
            raise

    def _prepare(self, sweep: Path, folder: Path, indices: dict[int, Ticket]) -> Path:
        first = next(iter(indices.values()))
        together = first.resources.get("stderr_to_stdout", True)
        for index, job in indices.items():
            job.again()
            job.files = [str(folder / f"{index}.{end}") for end in (("out",) if together else ("out", "err"))]
            about = {"queue": "slurm", "sweep": str(sweep.resolve()), "job": job.number, "index": index}
            RunDir(job.folder(sweep), is_first=True).note(
                launcher={**about, "script": str(folder / SCRIPT), "files": job.files}
            )
        text = script_text(sweep, folder, indices, tickets.about(sweep))
        write_text(folder / SCRIPT, text)
        return folder / SCRIPT

    def _sbatch(self, script: Path) -> int:
        said = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S)
            try:
                done = self.run(["sbatch", "--parsable", str(script)])
            except FileNotFoundError:
                raise UserError(
                    "hydra/launcher=slurm: there is no command sbatch on this machine. Type the same on a login "
                    "node of the cluster, or hydra/launcher=local"
                ) from None
            except subprocess.TimeoutExpired:
                said = f"no answer within {LIMIT_S:g} s"
                continue
            if done.returncode == 0:
                return int(done.stdout.strip().splitlines()[-1].partition(";")[0])
            said = (done.stderr or done.stdout).strip()
            if not any(text in said for text in BUSY):
                raise UserError(f"SLURM doesn't take the job. sbatch says:\n{said}")
        raise EchoFreeError(f"SLURM doesn't answer, {TRIES} tries. sbatch says:\n{said}")

    # --- afterwards --------------------------------------------------------------------------------------------------

    def look(self, sweep: Path, jobs: Sequence[Ticket]) -> dict[int, Seen]:
        """How the jobs stand, as of the last question that the scheduler's patience allowed."""
        open_jobs = [job for job in jobs if job.state != "ended" and job.job_id]
        states = self.scheduler.look([str(job.job_id) for job in open_jobs])
        found = {}
        for job in jobs:
            if job.state == "ended" or not job.job_id:
                found[job.number] = Seen("ended", job.exit_code, job.why, job.node)
                continue
            seen = seen_of(states[job.job_id])
            if seen.state == "ended":  # what SLURM will have forgotten tomorrow
                job.state, job.exit_code, job.why, job.ended = "ended", seen.code, seen.why, time.time()
                job.node = seen.node
                job.cancelled = job.cancelled or seen.why == "CANCELLED"
                tickets.write(sweep, job)
            found[job.number] = seen
        return found

    def cancel(self, sweep: Path, jobs: Sequence[Ticket]) -> None:
        names = [job.job_id for job in jobs if job.job_id and job.state != "ended"]
        for job in jobs:
            if job.job_id in names:
                job.cancelled = True
                tickets.write(sweep, job)
        if names:
            done = self.run(["scancel", *[str(name) for name in names]])
            if done.returncode != 0:
                raise EchoFreeError(f"scancel says: {(done.stderr or done.stdout).strip()}")


def seen_of(state: JobState) -> Seen:
    """A scheduler's word as the table has it."""
    if not state.settled:
        kind = "running" if state.is_running else "waiting"
        word = state.reason if state.is_waiting else "" if state.is_running else state.state
        return Seen(kind, None, word if word != "UNKNOWN" else "", state.nodes, seconds(state.left))
    code = state.exit_code.partition(":")[0]
    done = state.state == "COMPLETED"
    number = int(code) if code.isdigit() else 0 if done else None
    if number == 0 and not done:
        number = None  # ended by a signal, or a time limit: no exit code of its own
    return Seen("ended", number, "" if done else state.state, state.nodes)


def seconds(left: str) -> float | None:
    """SLURM's [days-][hours:]minutes:seconds -> seconds."""
    days, dash, rest = left.rpartition("-")
    if not re.fullmatch(r"(\d+:)*\d+", rest) or (dash and not days.isdigit()):
        return None
    total = 0.0
    for part in rest.split(":"):
        total = total * 60 + int(part)
    return total + 86400 * int(days or 0)


def groups(jobs: Sequence[Ticket]) -> list[list[Ticket]]:
    """Jobs that can be one array: they ask for the same, and their numbers fit."""
    found: dict[str, list[Ticket]] = {}
    for job in jobs:
        found.setdefault(f"{job.number // ARRAY} {sorted(job.resources.items(), key=str)}", []).append(job)
    return list(found.values())


def new_folder(asked: Path) -> Path:
    """For the script and the output of one submission; known before SLURM gives it a number.

    Args:
        asked: `submitit_folder`; submitit's own end, %j, is left out.
    """
    parent = asked.parent.resolve() if "%" in asked.name else asked.resolve()
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(10_000):
        folder = parent / f"{number:03d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise EchoFreeError(f"{parent} has 10000 submissions already")


def script_text(sweep: Path, folder: Path, indices: dict[int, Ticket], about: dict[str, Any]) -> str:
    """The job script of an array.

    Raises:
        UserError: a key that submitit doesn't know, or a value that it doesn't take.
    """
    from submitit.slurm import slurm as submitit_slurm

    first = next(iter(indices.values()))
    asked = dict(first.resources)
    own = {key.replace("_", "-"): value for key, value in (asked.get("additional_parameters") or {}).items()}
    if taken := [key for key in own if key in BY_HAND]:
        raise UserError(f"hydra.launcher.additional_parameters.{taken[0]} is set by EchoFree itself. Leave it out")
    parallel = min(len(indices), int(asked.get("array_parallelism") or len(indices)))
    own |= {
        "array": f"{ranges(list(indices))}%{parallel}", "output": str(folder / "%a.out"), "open-mode": "append",
        "chdir": str(about["cwd"]), "requeue": True,
    }  # fmt: skip
    if not asked.get("stderr_to_stdout", True):
        own["error"] = str(folder / "%a.err")
    parameters = {RENAMED.get(key, key): value for key, value in asked.items() if key not in OURS}
    if asked.get("mem_gb") is not None:
        parameters["mem"] = f"{asked['mem_gb']}GB"
    words = ["srun", "--unbuffered", "--kill-on-bad-exit=1", *map(str, asked.get("srun_args") or [])]
    python = [str(about.get("python", sys.executable)), "-m", "echofree.slurm"]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in about["settings"].get("environment", {}).items()]
    lines += ['case "$SLURM_ARRAY_TASK_ID" in']
    lines += [f"{index}) run_dir={shlex.quote(str(job.folder(sweep).resolve()))} ;;" for index, job in indices.items()]
    if command := asked.get("command"):
        lines += ["esac", f'{command} "$run_dir"']
    else:
        lines += ["esac", f'{shlex.join(words)} {shlex.join(python)} "$run_dir"']
    parameters.pop("command", None)
    try:
        text: str = submitit_slurm._make_sbatch_string(
            command="\n".join(lines), folder=folder, use_srun=False, stderr_to_stdout=True,
            additional_parameters=own, **{"wckey": None, **parameters},
        )  # fmt: skip
    except TypeError as error:
        raise UserError(f"hydra.launcher: {error}") from error
    return text.replace("export SUBMITIT_EXECUTOR=slurm\n", "")  # nothing of it is in there
