"""How jobs stand. squeue knows first: also of jobs that have ended, for as long as the controller remembers them
(MinJobAge, 5 minutes as a rule). For older ones sacct is asked, and where there is no accounting, scontrol.

A `Scheduler` asks at most one question per `every_s`, however many jobs it follows and however often it is asked, and
no question waits for longer than `limit_s`.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

EVERY_S = 5.0
LIMIT_S = 20.0
SETTLE_S = 90.0  # for a job that has lost its node, or was preempted, to show up in the queue again
MAX_IDS = 500  # in one command line

WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"})
# SLURM's own doing, usually followed by another start
FLEETING = frozenset({"NODE_FAIL", "PREEMPTED", "SPECIAL_EXIT", "REVOKED"})
FAILED = frozenset({"FAILED", "CANCELLED", "TIMEOUT", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"})

# Runs a command; -> (exit code, output, error output). -1: there is no such command, or no answer in time.
Run = Callable[[Sequence[str], float], tuple[int, str, str]]


@dataclass(frozen=True)
class JobState:
    """How a job stands.

    Attributes:
        name: as it was asked for: 123 or 123_4.
        state: SLURM's word, such as PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, CANCELLED, NODE_FAIL; UNKNOWN when
            neither the queue nor the accounting knows the job, or nobody has answered yet.
        reason: why it waits, in SLURM's words; else "".
        nodes: where it runs or ran.
        left: until its time limit, as SLURM writes it; "" when it doesn't run.
        exit_code: "code:signal"; "" when unknown.
        source: squeue, sacct or scontrol; "" for UNKNOWN.
        settled: this is the end: it will not run again by itself.
    """

    name: str
    state: str = "UNKNOWN"
    reason: str = ""
    nodes: str = ""
    left: str = ""
    exit_code: str = ""
    source: str = ""
    settled: bool = False

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

    @property
    def is_running(self) -> bool:
        return self.state in RUNNING


def ask(words: Sequence[str], limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """One command; never for longer than `limit_s`."""
    return _ask(words, limit_s, None)


def ask_deaf(words: Sequence[str], limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """The same from inside a job, whose signals reach every process of it: they must not end the command halfway. A
    scancel that signals a step of several nodes, itself included, would otherwise leave some of them out."""
    return _ask(words, limit_s, deafen)


def deafen() -> None:
    """In the child, before the command."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _ask(words: Sequence[str], limit_s: float, before: Callable[[], None] | None) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=limit_s, preexec_fn=before
        )  # fmt: skip
    except FileNotFoundError:
        return -1, "", f"{words[0]}: no such command"
    except subprocess.TimeoutExpired:
        return -1, "", f"{words[0]}: no answer within {limit_s:g} s"
    return done.returncode, done.stdout, done.stderr


class Scheduler:
    """The states of jobs, with patience.

    Args:
        every_s: the least time between two questions.
        run: runs a command; for tests.
        clock: seconds, monotonic; for tests.
    """

    def __init__(self, every_s: float = EVERY_S, run: Run = ask, clock: Callable[[], float] = time.monotonic):
        self.every_s, self._run, self._clock = every_s, run, clock
        self._asked = -every_s
        self._known: dict[str, JobState] = {}
        self._since: dict[str, tuple[str, float]] = {}  # job -> (state, seen since)
        self._missing: list[str] = []  # not in the queue any more: whom the next question is about
        self._turn = 0
        self.trouble = ""  # why the last question had no answer
        self.questions = 0

    def look(self, names: Sequence[str]) -> dict[str, JobState]:
        """How these jobs stand, by name: freshly asked if the last question is long enough ago, else as known."""
        now = self._clock()
        if names and now - self._asked >= self.every_s:
            self._asked = now
            self.questions += 1
            self._question(names)
        return {name: self._settle(self._known.get(name, JobState(name))) for name in names}

    def wait_s(self) -> float:
        """Until the next question is allowed."""
        return max(0.0, self._asked + self.every_s - self._clock())

    def _question(self, names: Sequence[str]) -> None:
        """About those in the queue; in turn with it about those that aren't there any more."""
        self._missing = [name for name in self._missing if name in names]
        live = [name for name in names if name not in self._missing and not self._over(name)]
        self._turn += 1
        if self._missing and (self._turn % 2 == 0 or not live):
            self._ask_history(self._missing[:MAX_IDS])
        elif live:
            self._ask_queue(live)

    def _over(self, name: str) -> bool:
        return self._settle(self._known.get(name, JobState(name))).settled

    def _ask_queue(self, names: Sequence[str]) -> None:
        words = ["squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N|%L"]
        if len(names) <= MAX_IDS:
            words += ["-j", ",".join(dict.fromkeys(name.partition("_")[0] for name in names))]
        else:
            words += ["--me"]
        code, out, error = self._run(words, LIMIT_S)
        if code != 0 and "Invalid job id" not in error:  # that one means: none of them is known any more
            self.trouble = (error or out).strip()
            return
        self.trouble = ""
        found = parse_queue(out)
        for name in names:
            if name in found:
                self._known[name] = found[name]
            elif name not in self._missing:
                self._missing.append(name)

    def _ask_history(self, names: Sequence[str]) -> None:
        words = ["sacct", "-n", "-P", "-X", "-o", "JobID,State,NodeList,ExitCode", "-j", ",".join(names)]
        code, out, error = self._run(words, LIMIT_S)
        found = parse_history(out) if code == 0 else {}
        if not found:  # no accounting, or it is late
            code, out, error = self._run(["scontrol", "show", "job", "-o", names[0]], LIMIT_S)
            self.questions += 1
            self._asked = self._clock()
            found = parse_jobs(out)
            if names[0] not in found:
                self.trouble = error.strip()
                self._missing.append(self._missing.pop(0))  # the next one, the next time
        for name in names:
            if name in found:
                self._known[name] = found[name]
                self._missing.remove(name)

    def _settle(self, state: JobState) -> JobState:
        """Whether that's the end. SLURM puts a job that lost its node back into the queue; give it the time."""
        now = self._clock()
        before, since = self._since.get(state.name, ("", now))
        if before != state.state:
            since = now
            self._since[state.name] = (state.state, since)
        final = state.state == "COMPLETED" or state.state in FAILED
        if state.state in FLEETING or state.state == "UNKNOWN":
            final = now - since > SETTLE_S
        return replace(state, settled=final)


def word(state: str) -> str:
    """ "CANCELLED by 1000" and "CANCELLED+" are CANCELLED."""
    return state.split()[0].rstrip("+") if state.split() else "UNKNOWN"


def parse_queue(text: str) -> dict[str, JobState]:
    """Lines of squeue -o "%i|%T|%r|%N|%L"."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 5:
            continue
        name, state, reason, nodes, left = fields
        state = word(state)
        found[name] = JobState(
            name, state, "" if reason == "None" else reason, nodes, left if state in RUNNING else "", source="squeue"
        )
    return found


def parse_history(text: str) -> dict[str, JobState]:
    """Lines of sacct -P -o JobID,State,NodeList,ExitCode. Later lines are later starts."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 4:
            nodes = "" if fields[2] == "None assigned" else fields[2]
            found[fields[0]] = JobState(fields[0], word(fields[1]), "", nodes, "", fields[3], source="sacct")
    return found


def parse_jobs(text: str) -> dict[str, JobState]:
    """Lines of scontrol show job -o."""
    found = {}
    for line in text.splitlines():
        facts = parse_facts(line)
        if "JobId" in facts:
            array, index = facts.get("ArrayJobId"), facts.get("ArrayTaskId", "")
            name = f"{array}_{index}" if array and index.isdigit() else facts["JobId"]
            nodes = facts.get("NodeList", "")
            found[name] = JobState(
                name, word(facts.get("JobState", "")), "", "" if nodes == "(null)" else nodes, "",
                facts.get("ExitCode", ""), source="scontrol",
            )  # fmt: skip
    return found


def parse_facts(line: str) -> dict[str, str]:
    """Key=Value words of scontrol; a value with blanks keeps its first word only."""
    return {key: value for key, sep, value in (item.partition("=") for item in line.split()) if sep}


def facts_of(name: str, run: Run = ask) -> dict[str, str]:
    """What scontrol says about one job; empty when it says nothing."""
    code, out, _ = run(["scontrol", "show", "job", "-o", name], LIMIT_S)
    lines = out.splitlines()
    return parse_facts(lines[0]) if code == 0 and lines else {}
