"""How jobs stand, from recorded answers: few questions, right also without accounting, never for ever."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Sequence

import pytest

from echofree.slurm.requeue import Stop, why
from echofree.slurm.states import SETTLE_S, JobState, Scheduler, ask, parse_history, parse_jobs, parse_queue

NO_ACCOUNTING = (1, "", "Slurm accounting storage is disabled")


class Slurm:
    """A cluster with a clock. `queue`, `history` and `jobs` are what the three commands print.

    Attributes:
        asked: (time, first word of the command).
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.queue: tuple[int, str, str] = (0, "", "")
        self.history: tuple[int, str, str] = (0, "", "")
        self.jobs: tuple[int, str, str] = (1, "", "slurm_load_jobs error: Invalid job id specified")
        self.asked: list[tuple[float, str]] = []

    def run(self, words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
        self.asked.append((self.now, words[0]))
        return {"squeue": self.queue, "sacct": self.history, "scontrol": self.jobs}[words[0]]

    def scheduler(self) -> Scheduler:
        return Scheduler(5.0, self.run, lambda: self.now)


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


def states(found: dict[str, JobState]) -> dict[str, tuple[str, bool]]:
    return {name: (state.state, state.settled) for name, state in found.items()}


def test_one_question_in_five_seconds_for_two_hundred_jobs(slurm: Slurm) -> None:
    names = [f"70_{i}" for i in range(200)]
    slurm.queue = (0, "".join(f"{name}|PENDING|Priority||1:00\n" for name in names), "")
    scheduler = slurm.scheduler()
    for _ in range(300):  # a minute of a table that is drawn five times a second
        found = scheduler.look(names)
        slurm.now += 0.2
    assert all(found[name].is_waiting and found[name].reason == "Priority" for name in names)
    times = [when for when, _ in slurm.asked]
    assert 10 <= len(times) <= 13
    assert min(b - a for a, b in itertools.pairwise(times)) >= 5.0


def test_who_has_left_the_queue_is_looked_up(slurm: Slurm) -> None:
    scheduler = slurm.scheduler()
    slurm.queue = (0, "7_0|RUNNING|None|n1|9:00\n7_1|RUNNING|None|n2|9:00\n", "")
    assert states(scheduler.look(["7_0", "7_1"])) == {"7_0": ("RUNNING", False), "7_1": ("RUNNING", False)}
    slurm.queue = (0, "7_1|RUNNING|None|n2|8:00\n", "")
    slurm.history = (0, "7_0|CANCELLED by 1000|n1|0:15\n", "")
    for _ in range(4):
        slurm.now += 5
        found = scheduler.look(["7_0", "7_1"])
    assert states(found) == {"7_0": ("CANCELLED", True), "7_1": ("RUNNING", False)}
    assert found["7_0"].exit_code == "0:15"


def test_without_accounting_scontrol_is_asked(slurm: Slurm) -> None:
    scheduler = slurm.scheduler()
    slurm.history = NO_ACCOUNTING
    slurm.queue = (1, "", "slurm_load_jobs error: Invalid job id specified")
    slurm.jobs = (0, "JobId=9 JobName=x JobState=OUT_OF_MEMORY Reason=OutOfMemory ExitCode=0:125 NodeList=n1\n", "")
    for _ in range(3):
        found = scheduler.look(["9"])
        slurm.now += 5
    assert states(found) == {"9": ("OUT_OF_MEMORY", True)}


def test_a_job_that_nobody_knows_is_given_up_in_the_end(slurm: Slurm) -> None:
    scheduler = slurm.scheduler()
    slurm.history = NO_ACCOUNTING
    slurm.queue = (1, "", "slurm_load_jobs error: Invalid job id specified")
    begin = slurm.now
    while not scheduler.look(["9"])["9"].settled:
        slurm.now += 1
        assert slurm.now < begin + SETTLE_S + 10
    assert scheduler.look(["9"])["9"].state == "UNKNOWN"


def test_a_controller_that_is_away_changes_nothing(slurm: Slurm) -> None:
    scheduler = slurm.scheduler()
    slurm.queue = (0, "9|RUNNING|None|n1|9:00\n", "")
    scheduler.look(["9"])
    slurm.queue = (1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    slurm.now += 600
    assert states(scheduler.look(["9"])) == {"9": ("RUNNING", False)}
    assert "Unable to contact" in scheduler.trouble


def test_a_lost_node_is_not_the_end(slurm: Slurm) -> None:
    scheduler = slurm.scheduler()
    for state in ("NODE_FAIL", "PENDING", "RUNNING", "COMPLETED"):
        slurm.queue = (0, f"9|{state}|None|n1|\n", "")
        slurm.now += 6
        found = scheduler.look(["9"])["9"]
        assert (found.state, found.settled) == (state, state == "COMPLETED")


def test_a_lost_node_is_the_end_when_nothing_follows(slurm: Slurm) -> None:
    scheduler = slurm.scheduler()
    slurm.queue = (0, "9|NODE_FAIL|None|n1|\n", "")
    scheduler.look(["9"])
    slurm.now += SETTLE_S + 6
    assert scheduler.look(["9"])["9"].settled


def test_parsers() -> None:
    running = JobState("8", "RUNNING", "", "n[1-2]", "1:00", "", "squeue")
    assert parse_queue("8|RUNNING|None|n[1-2]|1:00\n") == {"8": running}
    assert parse_history("8_1|FAILED|n1|75:0\n8_1|COMPLETED|n2|0:0\n")["8_1"].state == "COMPLETED"
    array = "JobId=11 ArrayJobId=8 ArrayTaskId=2 JobState=TIMEOUT NodeList=(null) ExitCode=0:15"
    assert parse_jobs(array)["8_2"] == JobState("8_2", "TIMEOUT", "", "", "", "0:15", "scontrol")
    assert parse_jobs("JobId=8 ArrayJobId=8 ArrayTaskId=0-3%2 JobState=PENDING")["8"].is_waiting


def test_commands_that_are_not_there_or_do_not_answer() -> None:
    assert ask(["no-such-command-at-all"])[0] == -1
    code, _, error = ask(["sleep", "5"], 0.1)
    assert (code, "no answer" in error) == (-1, True)


USR2, TERM = signal.SIGUSR2, signal.SIGTERM
RUNNING = {"JobState": "RUNNING", "Reason": "None", "Restarts": "1"}


@pytest.mark.parametrize(
    ("number", "facts", "kind"),
    [
        (USR2, RUNNING, Stop.timeout),
        (USR2, {}, Stop.timeout),
        (TERM, RUNNING, Stop.timeout),  # --signal=TERM@120
        (None, RUNNING, Stop.timeout),  # train.max_time
        (USR2, {**RUNNING, "PreemptTime": "2026-01-31T12:00:00"}, Stop.preemption),  # also in a job of five minutes
        (TERM, {**RUNNING, "PreemptTime": "2026-01-31T12:00:00"}, Stop.preemption),
        (TERM, {**RUNNING, "JobState": "COMPLETING", "Restarts": "2"}, Stop.requeue),
        (TERM, {**RUNNING, "JobState": "PENDING", "Restarts": "2"}, Stop.requeue),
        (TERM, {**RUNNING, "JobState": "COMPLETING", "Reason": "TimeLimit"}, Stop.timeout),
        (TERM, {**RUNNING, "JobState": "COMPLETING"}, Stop.cancel),
        (TERM, {**RUNNING, "JobState": "CANCELLED"}, Stop.cancel),
    ],
)
def test_why_a_job_is_stopped(number: int | None, facts: dict[str, str], kind: Stop) -> None:
    assert why(number, facts, restart=1) is kind
