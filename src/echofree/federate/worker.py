"""Processes in which clients train: started by the server of a simulation or by a client, asked over a socket.

A process of its own because a client may be late, and is then ended; may crash, and must take nobody along; and because
the loop forks workers of its loader, which a process full of gRPC's threads mustn't.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from echofree.errors import EchoFreeError, UserError

START_S = 600.0  # to import torch and to look at the data
WATCH_S = 1.0

Message = dict[str, Any]


class WorkerLate(EchoFreeError):
    """No answer in time; the process has been ended."""


class WorkerGone(EchoFreeError):
    """The process ended without an answer."""


class Worker:
    """One process.

    Args:
        config_dir: whose config.yaml it reads.
        folder: where clients keep their files.
        run_dir: the server's run directory, or None.
        number: of its log.
        threads: intra-op threads.
    """

    def __init__(self, config_dir: Path, folder: Path, run_dir: Path | None, number: int, threads: int):
        self.config_dir, self.folder, self.run_dir = config_dir, folder, run_dir
        self.number, self.threads = number, threads
        self.log = folder / f"process-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def begin(self) -> None:
        """Starts the process, which then looks at its data; `ask` waits for it."""
        mine, theirs = socket.socketpair()
        words = [str(self.config_dir), str(self.folder), str(self.run_dir or ""), str(self.threads)]
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log, theirs:
            # a session of its own: Ctrl-C is the server's to answer, and its loader's workers end with it
            self._process = subprocess.Popen(
                [sys.executable, "-m", "echofree.federate.worker", str(theirs.fileno()), *words],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._pipe = Connection(mine.detach())
        self._hello = True

    def ask(self, message: Message, timeout_s: float | None) -> Message:
        """
        Raises:
            WorkerLate, WorkerGone: see there; the next question starts a new process.
            EchoFreeError: what the process has raised.
        """
        if self._process is None:
            self.begin()
        if self._hello:
            self._exchange({"what": "hello"}, START_S)
            self._hello = False
        return self._exchange(message, timeout_s)

    def _exchange(self, message: Message, timeout_s: float | None) -> Message:
        assert self._pipe is not None
        try:
            self._pipe.send(message)
            if not self._pipe.poll(timeout_s):
                self.end()
                raise WorkerLate(f"no answer within {timeout_s:g} s")
            reply: Message = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self._wait()
            self.end()
            raise WorkerGone(f"its process ended with exit code {code}, see {self.log}") from error
        if "error" in reply:
            raise (UserError if reply["user"] else EchoFreeError)(reply["error"])
        return reply

    def _wait(self) -> int | None:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(5)
        return None

    def end(self) -> None:
        """Ends the process and its loader's workers, if there is one."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


class Pool:
    """Several workers; whoever wants one waits for it."""

    def __init__(self, workers: list[Worker]):
        self.workers = workers
        self._idle: queue.Queue[Worker] = queue.Queue()
        for worker in workers:
            worker.begin()
            self._idle.put(worker)

    @contextmanager
    def one(self) -> Iterator[Worker]:
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def ask(self, message: Message, timeout_s: float | None = None) -> Message:
        """As `Worker.ask`; the time counts from when a worker was free."""
        with self.one() as worker:
            return worker.ask(message, timeout_s)

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


# --- in the process -------------------------------------------------------------------------------------------------


def answer(site: Any, message: Mapping[str, Any]) -> Message:
    """What a site says to a message."""
    what = message["what"]
    if what == "hello":
        facts = {"device": str(site.device), "mark": site.plan.mark}
        return {"names": site.names, "shared": len(site.plan.shared), **facts}
    if what == "about":  # asked once: it may have to look at every clip
        counts = [len(site.indices(k)[0]) for k in range(max(1, len(site.names)))]
        rows = site.parts.source.survey() if site.names else []
        return {"clips": counts, "unevenness": next((text for key, text in rows if key == "unevenness"), "")}
    rest = {key: value for key, value in message.items() if key != "what"}
    reply: Message = {"fit": site.fit, "evaluate": site.evaluate, "central": site.central}[what](**rest)
    return reply


def serve(fd: int, config_dir: Path, folder: Path, run_dir: Path | None, threads: int) -> None:
    """Answers until the other side is gone."""
    from echofree.config import frozen
    from echofree.federate.site import Site

    pipe = Connection(fd)
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    config = frozen.load(config_dir)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("echofree").setLevel(config.logger.level.upper())
    site: Site | None = None
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            if site is None:
                site = Site(config, folder, run_dir, threads)
            reply = answer(site, message)
        except UserError as error:
            reply = {"error": str(error), "user": True}
        except Exception as error:
            traceback.print_exc()
            text = str(error) or type(error).__name__
            reply = {"error": text if isinstance(error, EchoFreeError) else f"{type(error).__name__}: {text}",
                     "user": False}  # fmt: skip
        try:
            pipe.send(reply)
        except OSError:
            return


def _watch(parent: int) -> None:
    """Ends this process when the one that started it is gone. The kernel's own way (`process.die_with`) would end it
    with the thread that started it."""
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    channel, config_dir, folder, run_dir, threads = sys.argv[1:]
    serve(int(channel), Path(config_dir), Path(folder), Path(run_dir) if run_dir else None, int(threads))
