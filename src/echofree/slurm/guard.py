"""A small process around each task of a job. The rank is its child.

It sees how the rank ends, also when the rank can't say so (killed, out of memory, os._exit); sees that the other ranks
end too, whether they had met or not; and, after the rank was asked to stop, puts the job back into the queue. A rank
that is blocked when the time runs out is ended in time by its guard, which is never blocked.

SLURM signals every process of a task, so nothing is handed on, except to a rank that hasn't got it: a person may have
signalled the guard alone. All of this comes before torch is imported; the guard costs some 15 MB.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from echofree.errors import ExitCode
from echofree.process import die_with, oom_kills
from echofree.slurm import env, requeue, states
from echofree.slurm.requeue import Stop

if TYPE_CHECKING:
    from echofree.rundir import RunDir

PIPE = "ECHOFREE_GUARD"  # file descriptor on which the rank names its run directory
TOLD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGCONT)
END = signal.SIGHUP  # from the guard of a rank that failed to all others: end now. No core is written
FIRST_S, LATER_S = 2.5, 5.0  # until a failed rank ends the others: for their last words; and when it isn't the first
TRIES, SCANCEL_S = 5, 3.0
MARGIN_S = 15.0  # before the time limit: for a blocked rank to be ended, and the job to be requeued
BLOCKED_S = 25.0  # for a rank to come to the edge of a step when nobody knows when the time is over
QUEUE_S = 40.0  # for rank 0 to have requeued the job; leaving before could end the job as failed
POLL_S = 0.1
WORD = "dist.max_timeouts="


def guarded(task: env.Task, main: Callable[[], int], alone: bool = False) -> int:
    """Runs `main` in a child of this process. -> the exit code of the task

    Args:
        task: who this is.
        main: a rank, or a launcher of ranks; gets SystemExit like any main.
        alone: the ranks beside this one aren't SLURM's tasks (torchrun): they are left to their own launcher.
    """
    read, write = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    guard = Guard(task, read, alone)  # listens from here on
    guard.child = os.fork()
    if guard.child == 0:
        for number in (*TOLD, END):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        os.close(read)
        die_with(parent)
        os.environ[PIPE] = str(write)
        _leave(main)
    os.close(write)
    code = guard.watch()
    # srun ends the tasks of a step in which one failed. This one is leaving with a code of its own, and must not die of
    # that while Python shuts down, which gives signals their default back
    for number in (*TOLD, END):
        signal.signal(number, signal.SIG_IGN)
    return code


def tell(run_dir: Path) -> None:
    """From the rank to its guard: the run directory. Nothing without a guard."""
    if (pipe := os.environ.pop(PIPE, None)) is not None:
        os.write(int(pipe), f"{run_dir.resolve()}\n".encode())


def _leave(main: Callable[[], int]) -> None:
    """The child's life; it never returns into the guard's frames."""
    code: Any = int(ExitCode.FAILED)
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))


class Guard:
    """See the module.

    Attributes:
        signals: those that asked to stop, with the time; END isn't among them.
    """

    def __init__(self, task: env.Task, pipe: int, alone: bool):
        self.task, self.child, self.pipe, self.alone, self.oom_before = task, 0, pipe, alone, oom_kills()
        self.signals: list[tuple[int, float]] = []
        self.ended_by_others = False
        self.run_dir: Path | None = None
        self.stop: Stop | None = None
        self.blocked = False
        self._text = b""
        self._deadline: float | None = None
        for number in TOLD:
            signal.signal(number, self._note)
        signal.signal(END, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == END:
            self.ended_by_others = True
        elif number != signal.SIGCONT:
            self.signals.append((number, time.monotonic()))

    # --- while the rank lives

    def watch(self) -> int:
        """-> the exit code, once the rank has ended and what follows from that is done."""
        handed = False
        while (code := self._ended()) is None:
            self._listen()
            if self.ended_by_others:
                _kill(self.child, signal.SIGKILL)
            if self.signals and not handed:
                handed = True
                self._asked_to_stop()
            if self._deadline is not None and time.monotonic() > self._deadline and not self.blocked:
                self.blocked = True
                self._say(f"rank {self.task.rank} hasn't come to the end of a step in time: it is ended, and what was "
                          "saved last counts")  # fmt: skip
                _kill(self.child, signal.SIGKILL)
        self._listen()
        return self._after(code)

    def _ended(self) -> int | None:
        """Exit code of the rank, minus the signal that ended it; None while it lives."""
        pid, status = os.waitpid(self.child, os.WNOHANG)
        if pid == 0:
            return None
        return os.waitstatus_to_exitcode(status)

    def _listen(self) -> None:
        """To what the rank says, and for POLL_S to nothing at all."""
        if self.pipe < 0:
            time.sleep(POLL_S)
            return
        ready, _, _ = select.select([self.pipe], [], [], POLL_S)
        if not ready:
            return
        part = os.read(self.pipe, 4096)
        self._text += part
        if self._text.endswith(b"\n"):
            self.run_dir = Path(os.fsdecode(self._text.strip()))
        if not part:
            os.close(self.pipe)
            self.pipe = -1

    def _asked_to_stop(self) -> None:
        """Rank 0 finds out why, and how much time there is; only a warning before the time limit needs us to hurry."""
        number, _ = self.signals[0]
        if number != signal.SIGINT:
            _kill(self.child, number)
        facts = states.facts_of(self.task.name, states.ask_deaf) if self.task.rank == 0 else {}
        self.stop = requeue.why(number, facts, self.task.restart)
        if number in requeue.WARNINGS and self.stop in (Stop.timeout, Stop.preemption):
            left = _left_s(facts.get("EndTime", ""))
            wait = BLOCKED_S if left is None else max(left - MARGIN_S, 0.2 * left, 3.0)
            if self.task.rank == 0:
                self._deadline = time.monotonic() + wait

    # --- after its end

    def _after(self, code: int) -> int:
        by_signal = code < 0 and any(number == -code for number, _ in self.signals)
        if code == ExitCode.DONE:
            return code
        if any(number == signal.SIGINT for number, _ in self.signals):  # by hand: stays out of the queue
            return code if code == ExitCode.PREEMPTED else int(ExitCode.INTERRUPTED)
        if code == ExitCode.PREEMPTED or self.blocked or by_signal:
            return self._go_on_later(early=by_signal and not self.blocked)
        if self.signals and self._is_victim(code):
            return self._go_on_later()  # of a rank that was asked to stop, too, and was blocked, or hadn't begun
        if not self.ended_by_others:
            self._note_silent(code)
        self._note_failed()
        self._end_the_others(code)
        return code if code > 0 else int(ExitCode.FAILED)

    def _is_victim(self, code: int) -> bool:
        """Whether the rank only lost the others. A real failure stays one, also while a run is being stopped."""
        failure = self._failure()
        return failure is None or failure["kind"] in ("victim", "gone")

    def _failure(self) -> dict[str, Any] | None:
        from echofree.rundir import RunDir

        return None if self.run_dir is None else RunDir(self.run_dir, is_first=False).first_failure()

    def _note_silent(self, code: int) -> None:
        """What a rank couldn't say that was killed, or left by os._exit."""
        rank = self.task.rank
        if code > 0 and (self.run_dir is None or (self.run_dir / "logs" / f"error-rank{rank}.json").exists()):
            return
        text = f"rank {rank} ended with exit code {code} and without an error (os._exit in some library or dataset?)"
        if code < 0:
            text = f"rank {rank} was killed by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:
            memory = "the machine was out of memory (the kernel has just ended a process for that; see dmesg)"
            text += f": {memory if oom_kills() > self.oom_before else 'out of memory? see dmesg'}"
        elif self.run_dir is not None:
            text += f": the end of logs/rank{rank}.log may say more"
        self._say(text)
        if self.run_dir is not None:
            from echofree.rundir import RunDir

            RunDir(self.run_dir, is_first=rank == 0).note_failure(rank, text, kind="killed", shown=True)

    def _note_failed(self) -> None:
        """Rank 0's guard, when its rank had no time to."""
        if self.run_dir is None or self.task.rank != 0:
            return
        from echofree.rundir import RunDir

        run = RunDir(self.run_dir, is_first=True)
        if run.facts["status"] in ("created", "running"):
            run.note(status="failed", end=time.time(), error=run.first_failure())

    def _end_the_others(self, code: int) -> None:
        """All ranks of the step end soon, whatever they do and wherever they are. Who failed first goes first; the
        others only when nobody has done it."""
        if self.alone or self.task.step is None or self.task.size == 1:
            return
        failure = self._failure()
        first = code != ExitCode.USER if self.run_dir is None else failure is None or failure["rank"] == self.task.rank
        if code == ExitCode.USER and self.task.rank == 0:
            late = 0.0  # the others only wait for it
        else:
            late = FIRST_S if first else LATER_S + min(0.05 * self.task.rank, 1.0)
        self._wait_for_end(late)
        words = ["scancel", f"--signal={END.name[3:]}", f"{self.task.job_id}.{self.task.step}"]
        for _ in range(TRIES):
            if self.ended_by_others:  # our own call reaches this task, too
                return
            _, out, error = states.ask_deaf(words, SCANCEL_S)
            self._wait_for_end(1.0)
        if not self.ended_by_others:
            self._say(f"{' '.join(words)} has ended nothing: {(error or out).strip()}")

    def _wait_for_end(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not self.ended_by_others:
            time.sleep(POLL_S)

    def _go_on_later(self, early: bool = False) -> int:
        """Preempted or out of time: rank 0 sees to the next start, the others stay until it has."""
        if early:
            self._say("asked to stop before the first step: nothing to save")
        if self.task.rank == 0:
            self._requeue()
            return int(ExitCode.PREEMPTED)
        end, count = time.monotonic() + QUEUE_S, len(self.signals)
        while time.monotonic() < end and not self.ended_by_others:
            if self._is_settled() or len(self.signals) > count:  # SLURM has begun to end the job
                break
            time.sleep(5 * POLL_S)
        return int(ExitCode.PREEMPTED)

    def _is_settled(self) -> bool:
        return self.run_dir is not None and _mark(self.run_dir, self.task).exists()

    def _requeue(self) -> None:
        run: RunDir | None = None
        if self.run_dir is not None:
            from echofree.rundir import RunDir

            run = RunDir(self.run_dir, is_first=True)
        if self.stop is None:
            self.stop = requeue.why(None, states.facts_of(self.task.name, states.ask_deaf), self.task.restart)
        said = self._why_not(run) or requeue.requeue(self.task)
        if run is not None:
            note(run, self.task, self.stop, said, self.blocked)
            _mark(run.folder, self.task).touch()
        where = "" if self.run_dir is None else f" It goes on with resume={self.run_dir}"
        if self.stop is Stop.cancel:
            self._say(f"job {self.task.name} was cancelled.{where}")
        elif self.stop is Stop.requeue or not said:
            self._say(f"job {self.task.name}: {self.stop.value}; it is in the queue again and goes on where it stopped")
        else:
            self._say(f"job {self.task.name}: {self.stop.value}; it isn't requeued ({said}).{where}")

    def _why_not(self, run: RunDir | None) -> str:
        """What speaks against another start; "" when nothing does."""
        if self.stop is Stop.cancel:
            return "cancelled"
        if self.stop is Stop.requeue:
            return "SLURM has done it"
        facts = {} if run is None else run.facts
        limit = facts.get("slurm", {}).get("max_timeouts")
        if limit is None:
            limit = next(
                (int(w[len(WORD) :]) for w in sys.argv if w.startswith(WORD) and w[len(WORD) :].isdigit()), None
            )
        past = facts.get("stop_counts", {}).get(Stop.timeout.value, 0)
        if self.stop is Stop.timeout and limit is not None and past >= limit:
            return f"dist.max_timeouts={limit}"
        return ""

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def note(run: Any, task: env.Task, stop: Stop, said: str, blocked: bool) -> None:
    """Into run.json: each stop with its kind, and how many of each there were."""
    facts = run.facts
    entry = {
        "time": time.time(), "kind": stop.value, "job": task.name, "restart": task.restart, "requeued": said == "",
        "blocked": blocked,
    }  # fmt: skip
    if said:
        entry["why_not"] = said
    entries = [*facts.get("stops", []), entry]
    counts = {kind.value: sum(e["kind"] == kind.value for e in entries) for kind in Stop}
    changes: dict[str, Any] = {"stops": entries, "stop_counts": {k: v for k, v in counts.items() if v}}
    if facts["status"] not in ("done", "stopped", "preempted"):  # it was blocked, or hadn't begun
        changes |= {"status": "preempted", "end": time.time(), "error": None}
    run.note(**changes)


def _mark(run_dir: Path, task: env.Task) -> Path:
    return run_dir / "logs" / f".settled-{task.job_id}-{task.restart}"


def _left_s(end_time: str) -> float | None:
    """Seconds until SLURM's EndTime, "2026-01-31T12:00:00"; None without one."""
    try:
        return time.mktime(time.strptime(end_time, "%Y-%m-%dT%H:%M:%S")) - time.time()
    except ValueError:
        return None


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended meanwhile


def wanted(environ: Mapping[str, str]) -> env.Task | None:
    """The task to guard; None outside of a job, and for ranks that a launcher of ours has started. torchrun's ranks all
    descend from one task of each node: they have torchrun's numbers."""
    if "ECHOFREE_LAUNCHER_PID" in environ or PIPE in environ:
        return None
    task = env.found_in(environ)
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if task is None or not (rank.isdigit() and size.isdigit()):
        return task
    return replace(task, rank=int(rank), size=int(size))
