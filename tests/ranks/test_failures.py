"""Real runs that fail: the job ends in seconds, the cause comes first, and nothing is left behind.

Each test starts the command a user types, on two ranks, with a model that fails on demand (experiments/faulty.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

EXPERIMENTS = Path(__file__).parent / "experiments"
MARK = "FAILURE_TEST_MARK"
WORDS = [
    "model=faulty", "data=faulty", "task.metrics=[si_sdr]", "task.sample_rate=16000", "train.batch_size=2",
    "train.final_test=false", "train.device=cpu", "train.epochs=1", "dist=ddp", "dist.num_procs=2", "name=run",
]  # fmt: skip
START_S = 120.0  # two interpreters that import torch on a busy machine
END_S = 10.0  # from the failure to the end of everything


class Job:
    """A command that runs; `mark` is in the environment of every process it makes."""

    def __init__(self, folder: Path, words: list[str], head: list[str] | None = None):
        self.folder, self.mark = folder, f"{os.getpid()}-{time.monotonic_ns()}"
        folder.mkdir(exist_ok=True)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "ECHOFREE_EXPERIMENTS": str(EXPERIMENTS), MARK: self.mark}
        self.output = folder / f"output-{self.mark}"
        with open(self.output, "w") as file:
            command = [*(head or [sys.executable, "-m", "echofree.train"]), *WORDS, *words]
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def run(self) -> Path:
        (found,) = (self.folder / "outputs" / "run").iterdir()
        return found

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.run / "run.json").read_text())
        return facts

    def said(self, text: str, limit_s: float = START_S) -> None:
        until(lambda: text in self.text or self.process.poll() is not None, limit_s, lambda: self.text)
        assert text in self.text, self.text

    def ends(self, code: int, limit_s: float = START_S) -> None:
        until(lambda: self.process.poll() is not None, limit_s, lambda: f"still there: {self.left()}\n{self.text}")
        assert self.process.returncode == code, self.text
        until(lambda: not self.left(), 2.0, lambda: f"left behind: {self.left()}")

    def left(self) -> list[str]:
        """Processes with our mark that still run."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                    alive = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                except OSError:
                    continue
                if marked and alive:
                    found.append(folder.name)
        return found

    def clean(self) -> None:
        for pid in self.left():
            os.kill(int(pid), signal.SIGKILL)
        self.process.wait()


def until(test: Callable[[], bool], limit_s: float, what: Callable[[], str]) -> None:
    end = time.monotonic() + limit_s
    while not test():
        assert time.monotonic() < end, what()
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """start(*words, folder="a", head=None) -> Job; what is left of it at the end of the test is killed."""
    jobs: list[Job] = []

    def begin(*words: str, folder: str = "a", head: list[str] | None = None) -> Job:
        jobs.append(Job(tmp_path / folder, list(words), head))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.clean()


def seconds_after_failure(job: Job) -> float:
    """From the failure (the model writes the time into its file) to now."""
    return time.time() - (job.folder / "failed").stat().st_mtime


# --- a rank fails ---------------------------------------------------------------------------------------------------

CASES = {
    "raise": ("ValueError: the sky is falling", "error"),
    "kill": ("rank 1 was killed by signal 9 (SIGKILL): ", "killed"),
    "exit": ("rank 1 ended with exit code 3 and without an error", "killed"),
    "oom": ("rank 1 on .* ran out of memory in 'forward and backward' of step 3\n.*\\[2, 1600\\]; peak", "error"),
}


@pytest.mark.parametrize(
    "fault", ["kill", *(pytest.param(f, marks=pytest.mark.slow) for f in ("raise", "exit", "oom"))]
)
def test_a_rank_that_fails_ends_the_job_and_is_named_first(start: Callable[..., Job], fault: str) -> None:
    job = start(f"model.fault={fault}", "model.mark=failed", "data.num_workers=1")
    job.ends(1)
    assert seconds_after_failure(job) < END_S
    text, kind = CASES[fault]
    assert re.search(text if fault == "oom" else re.escape(text), job.text), job.text
    assert "Connection closed" not in job.text  # that is what the other rank sees
    error = job.facts["error"]
    assert (job.facts["status"], error["rank"], error["kind"]) == ("failed", 1, kind)
    if fault in ("raise", "oom"):
        assert re.search(text, (job.run / "logs" / "rank1.log").read_text())
    if fault == "oom":
        levers = re.findall(r"^  \d\. (\S+ \S+)", job.text, re.MULTILINE)
        assert levers[0] == "train.batch_size=1 train.gradient_accumulation_steps=2"
        assert levers[1].startswith("train.precision=bf16")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_the_same_under_torchrun(start: Callable[..., Job], fault: str) -> None:
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "echofree.train"]
    job = start(f"model.fault={fault}", "model.mark=failed", head=head)
    job.ends(1)
    assert seconds_after_failure(job) < END_S
    assert (job.facts["status"], job.facts["error"]["rank"]) == ("failed", 1)
    says = "ValueError: the sky is falling" if fault == "raise" else "is gone without a word: killed (out of memory?"
    assert says in job.text
    assert "Connection closed" not in job.text.split(says)[0]


@pytest.mark.slow
def test_a_rank_that_sleeps_is_ended_when_another_fails(start: Callable[..., Job]) -> None:
    """Rank 0 makes a clip that never comes, far from any collective, when rank 1 raises."""
    job = start("model.fault=raise", "model.mark=failed", "data.stuck=8", "model.step=3")
    job.ends(1)
    assert seconds_after_failure(job) < END_S + 3
    assert "the sky is falling" in job.text


# --- restarts -------------------------------------------------------------------------------------------------------


def steps(job: Job) -> list[int]:
    records = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    return [r["step"] for r in records if r["kind"] == "train"]


@pytest.mark.slow
def test_restart_from_the_last_checkpoint_in_the_same_directory(start: Callable[..., Job]) -> None:
    once = ["model.fault=kill", "model.step=10", "model.mark=failed", "train.save_every_steps=4", "train.log_every=1"]
    job = start(*once, "dist.max_restarts=1")
    job.ends(0, 2 * START_S)
    facts = job.facts
    assert facts["status"] == "done"
    (restart,) = facts["restarts"]
    assert (restart["number"], restart["rank"], restart["kind"], restart["from"]) == (1, 1, "killed", "step-000008")
    assert steps(job) == list(range(1, 17))  # once each, in order
    assert "restart 1 of 1 (dist.max_restarts) from step-000008" in job.text


# --- signals --------------------------------------------------------------------------------------------------------

PACED = ["data.num_train=4000", "train.log_every=1", "data.num_workers=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "code", "status"),
    [
        ([signal.SIGTERM], 75, "preempted"),
        ([signal.SIGINT], 75, "preempted"),
        ([signal.SIGINT, signal.SIGINT], 130, "interrupted"),
    ],
)
def test_signals_to_the_launcher(
    start: Callable[..., Job], signals: list[signal.Signals], code: int, status: str
) -> None:
    job = start(*PACED, f"model.pace_s={0.1 if len(signals) == 1 else 3.0}")
    job.said("step=1]")
    began = time.monotonic()
    for number in signals:
        job.process.send_signal(number)
        time.sleep(0.2)
    job.ends(code, 30.0)
    assert time.monotonic() - began < (30.0 if code == 75 else END_S)  # saving may take its time
    assert job.facts["status"] == status
    saved = list((job.run / "checkpoints").glob("step-*/manifest.json"))
    # the second signal cuts a save short; on a busy machine the first one's may be over before it comes
    assert len(saved) == 1 if code == 75 else len(saved) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "status"), [(15, 75, "preempted"), (2, 130, "interrupted")])
def test_a_signal_while_the_ranks_start(start: Callable[..., Job], number: int, code: int, status: str) -> None:
    job = start(*PACED)
    until(lambda: len(job.left()) >= 3, START_S, lambda: job.text)
    job.process.send_signal(number)
    job.ends(code, 30.0)
    assert job.facts["status"] == status


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(start: Callable[..., Job]) -> None:
    job = start(*PACED, "model.pace_s=0.1")
    job.said("step=1]")
    assert len(job.left()) >= 5  # launcher, two ranks, two loader workers
    job.process.kill()
    job.ends(-signal.SIGKILL, END_S)


# --- several jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_jobs_at_once_and_the_usual_port_taken(start: Callable[..., Job]) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 29500))
        listener.listen()
        jobs = [start("train.max_steps=3", f"seed={i}", folder=f"job{i}") for i in range(2)]
        for i, job in enumerate(jobs):
            job.ends(0, 2 * START_S)
            assert (job.facts["status"], job.facts["seed"], job.facts["world"]["size"]) == ("done", i, 2)


def test_a_wrong_interface_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from echofree.dist.world import World, join
    from echofree.errors import ConfigError

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=\^lo.*no interface.*NCCL's syntax.*It has .*lo"):
        join(World(0, 2), "gloo", torch.device("cpu"), 1.0, 1.0)
