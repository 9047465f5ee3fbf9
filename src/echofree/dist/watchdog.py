"""Notices that a run stands still, says which rank, where and why, and ends it.

Each rank has one thread that looks every two seconds, or more often for short limits, whether the main thread has
moved, and publishes that through a store connection of its own (the main one may be blocked). Nobody is asked while all
goes well. A rank that hasn't moved for its limit raises an alarm, unless it only waits for a rank that moves; every
rank then reports where it stands, the lowest one that lives writes logs/hang.json, and all leave with exit code 1 by
themselves, without a collective. The process groups' own time limits are a backstop far behind.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from echofree.data.worker import WorkerBoard
from echofree.dist import verdict
from echofree.dist.world import World
from echofree.errors import ExitCode
from echofree.log import Position
from echofree.rundir import RunDir

log = logging.getLogger("echofree")

POLL_S = 2.0
HURRY_S = 0.25  # between looks, once another rank has failed
PATIENCE_S = 5.0  # for one answer of the store
REPORT_S = 3.0  # for the other ranks' reports after an alarm
READ_S = 1.0  # for all ranks to have the verdict
FRESH_S = 5.0  # a heartbeat that is older says nothing about now
GRACE_S = 5.0  # for a rank to leave by itself after another one failed
REMIND_S = 60.0


class Pulse:
    """Where the main thread is. The loop writes plain attributes and the watchdog reads them: no lock, no system call
    (the clock is read in user space).

    Attributes:
        phase: start, data, agree, forward and backward, step, log, evaluate, gather, save, end.
        since: time.monotonic() of the last sign of life.
        warm: past the first step, so that the short limit holds.
        board: what the loader in use is at.
    """

    __slots__ = ("board", "phase", "since", "warm")

    def __init__(self) -> None:
        self.phase, self.since, self.warm = "start", time.monotonic(), False
        self.board: WorkerBoard | None = None

    def at(self, phase: str) -> None:
        self.phase = phase
        self.since = time.monotonic()


class Unreachable(Exception):
    """The store didn't answer in time."""


class Mailbox:
    """The store, with patience: a network that is cut must not block the watchdog as well."""

    def __init__(self, store: Any):
        self._store = store
        self._pool = ThreadPoolExecutor(1, "watchdog-store")
        self._last: Future[Any] | None = None

    def put(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> str | None:
        """None: nobody has put it yet."""
        found: str | None = self._ask(self._get, key)
        return found

    def swap(self, key: str, value: str, asked: str) -> str | None:
        """Puts one and gets another, in one turn of the thread: on a busy machine each turn costs."""

        def both() -> str | None:
            self._store.set(key, value)
            return self._get(asked)

        found: str | None = self._ask(both)
        return found

    def close(self) -> None:
        """Without waiting for an answer that may never come."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._last is not None and not self._last.done():
            raise Unreachable
        self._last = self._pool.submit(function, *args)
        try:
            return self._last.result(PATIENCE_S)
        except Exception as error:  # torch has several for a store that is gone
            raise Unreachable from error


class Watchdog:
    """One per rank, also in a world of one, where it finds a stuck loader.

    Args:
        log_file: this rank's log; the stack of a thread that never gives up the interpreter lock goes there too.
    """

    def __init__(
        self,
        pulse: Pulse,
        position: Position,
        world: World,
        run: RunDir,
        timeout_s: float,
        start_timeout_s: float,
        log_file: Path,
    ):
        self.pulse, self.position, self.world, self.run = pulse, position, world, run
        self.timeout_s, self.start_timeout_s, self.log_file = timeout_s, start_timeout_s, log_file
        self.poll_s = min(POLL_S, timeout_s / 8)
        self.mail = Mailbox(world.store) if world.store is not None else None
        self._file = open(log_file, "a", encoding="utf-8")  # noqa: SIM115
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._seen, self._still_s, self._tick = pulse.since, 0.0, time.monotonic()
        self._armed = 0.0
        self._beats: dict[int, tuple[str, float]] = {}  # rank -> (its last beat, when it last changed)
        self._failed_since: float | None = None
        self._reminded = 0.0
        hidden = set(world.gone())  # in another container, which this one can't see into
        self._can_see = not hidden

    # --- from the main thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, failed: bool = False) -> None:
        """Ends the watch.

        Args:
            failed: this rank raised: the others learn it, and leave by themselves if nothing else makes them.
        """
        self._stop.set()
        self._thread.join(2 * PATIENCE_S)
        faulthandler.cancel_dump_traceback_later()
        if self.mail is not None:
            try:
                self.mail.put(*self._beat("left"))
                if failed:
                    self.mail.put("stop", "failed")
            except Unreachable:
                log.debug("the store is gone already")
            self.mail.close()
        self._file.close()

    def gone(self) -> list[int]:
        """Ranks of this machine whose process is gone although they hadn't left."""
        return [rank for rank in self.world.gone() if not self._left(rank)] if self._can_see else []

    # --- the thread

    def _watch(self) -> None:
        while not self._stop.wait(self.poll_s if self._failed_since is None else HURRY_S):
            try:
                self._look()
            except Unreachable:
                if self._is_hung():
                    self._end(alarm=False)

    @property
    def limit_s(self) -> float:
        return self.timeout_s if self.pulse.warm else self.start_timeout_s

    @property
    def limit(self) -> str:
        return f"dist.{'timeout_s' if self.pulse.warm else 'start_timeout_s'}={self.limit_s:g}"

    def _look(self) -> None:
        self._measure()
        if self.mail is None:
            if self._is_hung() and not verdict.debugged(next(iter(verdict.threads().values()), [])):
                self._end(alarm=False)
            return
        word = self.mail.swap(*self._beat(self.pulse.phase), "stop")
        if word == "alarm":
            self._end(alarm=False)
        if word == "failed" or self.gone():
            self._others_failed()
        if self._still_s > min(self.limit_s / 3, FRESH_S):
            self._read_beats()
        if self._is_hung() and not self._waits_for_a_moving_rank():
            self._end(alarm=True)

    def _measure(self) -> None:
        """How long the main thread has stood, in time that this thread was awake for: a process that a user had
        suspended with Ctrl-Z didn't hang."""
        now = time.monotonic()
        passed = min(now - self._tick, 3 * self.poll_s)
        self._tick = now
        if self.pulse.since != self._seen:
            self._seen, self._still_s = self.pulse.since, min(now - self.pulse.since, passed)
        else:
            self._still_s += passed
        if now - self._armed > self.timeout_s / 10:
            # C code that keeps the interpreter lock stops this thread too; faulthandler's timer doesn't need the lock
            faulthandler.dump_traceback_later(0.8 * self.limit_s, file=self._file)
            self._armed = now

    def _is_hung(self) -> bool:
        return self._still_s > self.limit_s

    def _beat(self, phase: str) -> tuple[str, str]:
        """Key and value by which the others see how this rank stands."""
        beat = {
            "phase": phase, "step": self.position.step, "still_s": self._still_s, "limit_s": self.limit_s,
            "tick": self._tick, "collectives": verdict.progress(),
        }  # fmt: skip
        return f"beat/{self.world.rank}", json.dumps(beat)

    def _read_beats(self) -> None:
        assert self.mail is not None
        now = time.monotonic()
        for rank in range(self.world.size):
            if rank != self.world.rank:
                text = self.mail.get(f"beat/{rank}") or ""
                if self._beats.get(rank, ("", 0.0))[0] != text or rank not in self._beats:
                    self._beats[rank] = (text, now)

    def _left(self, rank: int) -> bool:
        assert self.mail is not None
        text = self.mail.get(f"beat/{rank}")
        return text is not None and json.loads(text)["phase"] == "left"

    def _waits_for_a_moving_rank(self) -> bool:
        mine = {"pending": verdict.pending(), "collectives": verdict.progress(), "phase": self.pulse.phase}
        if not verdict.waits(mine):
            return False
        now = time.monotonic()
        moving = []
        for rank, (text, changed) in self._beats.items():
            beat: dict[str, Any] = json.loads(text) if text else {"still_s": 0.0, "limit_s": 0.0, "phase": "left"}
            if now - changed < FRESH_S and beat["phase"] != "left" and beat["still_s"] < beat["limit_s"]:
                moving.append(f"rank {rank} ({beat['phase']}, step {beat['step'] + 1})")
        if moving and now - self._reminded > REMIND_S:
            self._reminded = now
            log.warning("has waited for %.0f s for %s, still moving", self._still_s, ", ".join(moving))
        return bool(moving)

    def _others_failed(self) -> None:
        """A rank failed. The others notice by a broken connection; one that doesn't (it sleeps, decodes, computes) is
        ended here, whoever started it."""
        now = time.monotonic()
        if self._failed_since is None:
            self._failed_since = now
        if now - self._failed_since > GRACE_S:
            stack = "\n".join(next(iter(verdict.threads().values()), []))
            self._write(
                f"another rank failed; this one had not noticed after {GRACE_S:g} s and ends. It stood in:\n{stack}"
            )
            self._leave()

    # --- the end

    def _end(self, alarm: bool) -> None:
        """Reports, judges, tells, leaves. Never returns."""
        pulse, place, world = self.pulse, self.position, self.world
        mine = verdict.report(world.rank, place.step, place.epoch, pulse.phase, self._still_s, pulse.board)
        self._write(
            "this rank stands in:\n" + "\n".join(f"{n}:\n  " + "\n  ".join(t) for n, t in mine["threads"].items())
        )
        text = self._verdict(mine, alarm)
        self._write(text)
        self._say(text)
        self._wait_for_readers()
        self._leave()

    def _wait_for_readers(self) -> None:
        """A rank that leaves breaks the connections of those that still read: they would see that first."""
        if self.mail is None:
            return
        try:
            self.mail.put(f"read/{self.world.rank}", "")
            end = time.monotonic() + READ_S
            while time.monotonic() < end:
                if all(self.mail.get(f"read/{rank}") is not None for rank in range(self.world.size)):
                    return
                time.sleep(0.05)
        except Unreachable:
            return

    def _verdict(self, mine: verdict.Report, alarm: bool) -> str:
        world, limit = self.world, self.limit
        if self.mail is None:
            return self._compose([mine], {}, limit)
        try:
            if alarm:
                self.mail.put("limit", limit)
                self.mail.put("stop", "alarm")
            self.mail.put(f"report/{world.rank}", json.dumps(mine))
            reports = self._collect()
            limit = self.mail.get("limit") or limit
            if min(reports) == world.rank:
                text = self._compose(list(reports.values()), self._silent(reports), limit)
                self.mail.put("verdict", text)
                return text
            end = time.monotonic() + REPORT_S
            while time.monotonic() < end:
                if (told := self.mail.get("verdict")) is not None:
                    return told
                time.sleep(0.05)
            return self._compose(list(reports.values()), self._silent(reports), limit)
        except Unreachable:
            where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            cut = (
                f"can't be reached from {mine['host']}: the meeting point {where} doesn't answer (network cut, or its "
                "machine is gone)"
            )
            return self._compose([mine], {r: cut for r in range(world.size) if r != world.rank}, limit)

    def _collect(self) -> dict[int, verdict.Report]:
        assert self.mail is not None
        reports: dict[int, verdict.Report] = {}
        end = time.monotonic() + REPORT_S
        while len(reports) < self.world.size and time.monotonic() < end:
            for rank in set(range(self.world.size)) - set(reports):
                if (text := self.mail.get(f"report/{rank}")) is not None:
                    reports[rank] = json.loads(text)
            time.sleep(0.05)
        return reports

    def _silent(self, reports: dict[int, verdict.Report]) -> dict[int, str]:
        """Why a rank gave no report."""
        found = {}
        for rank in set(range(self.world.size)) - set(reports):
            host, pid = self.world.hosts[rank], self.world.pids[rank]
            text, changed = self._beats.get(rank, ("", time.monotonic()))
            last = json.loads(text) if text else None
            at = f", its last heartbeat came from {last['phase']!r} of step {last['step'] + 1}" if last else ""
            ago = f" and has been silent for {time.monotonic() - changed:.0f} s"
            if rank in self.gone():
                found[rank] = f"on {host} (process {pid}) is gone without a word{at}"
            elif self._can_see and host == self.world.hosts[self.world.rank]:
                dump = verdict.last_dump(self.run.folder / "logs" / f"rank{rank}.log")
                why = f"native code keeps the interpreter lock:\n    {dump}" if dump else "it was stopped (kill -STOP?)"
                found[rank] = f"on {host} (process {pid}) lives{ago}{at}: {why}"
            else:
                found[rank] = f"on {host} doesn't answer{ago}{at}: its network is cut, or its machine is gone"
        return found

    def _compose(self, reports: list[verdict.Report], silent: dict[int, str], limit: str) -> str:
        """The verdict; also as files, unless another rank was first."""
        found = verdict.judge(reports, silent, self.world.size, limit)
        body = {
            "time": time.time(),
            "verdict": found.text,
            "culprits": found.culprits,
            "limit": limit,
            "ranks": reports,
        }
        body["silent"] = {str(rank): why for rank, why in silent.items()}
        try:
            with open(self.run.folder / "logs" / "hang.json", "x", encoding="utf-8") as file:
                json.dump(body, file, indent=1)
        except FileExistsError:
            return found.text
        culprit = found.rank if found.rank is not None else self.world.rank
        self.run.note_failure(culprit, found.text, kind="hang", shown=self.world.is_first)
        self.run.note(status="failed", end=time.time(), error=self.run.first_failure())
        return found.text

    def _write(self, text: str) -> None:
        """Into the log of this rank, past every lock that the main thread may hold."""
        prefix = self.position.prefix()
        self._file.write("".join(f"{prefix}{line}\n" for line in text.splitlines()))
        self._file.flush()

    def _say(self, text: str) -> None:
        """On the console, if this rank has one; a console that doesn't take it must not keep us."""
        if self.world.is_first:
            speaker = threading.Thread(target=self._print, args=[text], daemon=True, name="watchdog-console")
            speaker.start()
            speaker.join(2.0)

    def _print(self, text: str) -> None:
        prefix = self.position.prefix()
        bar = "\n" if os.isatty(2) else ""  # a progress bar may stand in the line
        os.write(2, (bar + "".join(f"{prefix}{line}\n" for line in text.splitlines())).encode())

    def _leave(self) -> None:
        os._exit(int(ExitCode.FAILED))
