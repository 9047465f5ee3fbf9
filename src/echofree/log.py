"""What a rank says: every line prefixed with rank, epoch and step, into one file per rank; the console shows rank 0.

Nothing else in EchoFree prints. `print`, warnings, logging and tracebacks of a rank all pass through the streams that
`open_log` installs.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger("echofree")


@dataclass
class Position:
    """Where the run is; the loop moves it, the prefix shows it."""

    rank: int = 0
    epoch: int = 0
    step: int = 0

    def prefix(self) -> str:
        return f"[EchoFree: rank={self.rank}, epoch={self.epoch}, step={self.step}] "


class PrefixStream(io.TextIOBase):
    """A text stream that writes whole lines, prefixed, to a log file and, if asked, to the console."""

    def __init__(self, position: Position, file: IO[str], console: IO[str] | None, owner: RankLog | None = None):
        self.position, self.file, self.console, self.owner = position, file, console, owner
        self._part, self._lock = "", threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._part = (self._part + text.replace("\r", "\n")).split("\n")
            for line in lines:
                if line.strip():
                    self._emit(self.position.prefix() + line + "\n")
        return len(text)

    def _emit(self, line: str) -> None:
        write(self.file, line)
        if self.console is not None:
            if self.owner is not None and self.owner.before_console is not None:
                self.owner.before_console()
            self.console.write(line)
            self.console.flush()

    def flush(self) -> None:
        with self._lock:
            if self._part.strip():
                self._emit(self.position.prefix() + self._part + "\n")
                self._part = ""
            write(self.file, "")
            if self.console is not None:
                self.console.flush()

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return (self.console or self.file).fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


class RankLog:
    """The open log of one rank; `close` gives the streams back."""

    def __init__(self, path: Path, position: Position, console: bool, level: str):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.position, self.path = position, path
        self.file = open(path, "a", buffering=1, encoding="utf-8", errors="replace")  # noqa: SIM115
        self.saved = (sys.stdout, sys.stderr)
        self.before_console: Callable[[], None] | None = None  # takes a progress bar away
        self.terminal = sys.stderr
        sys.stdout = PrefixStream(position, self.file, self.saved[0] if console else None, self)
        sys.stderr = PrefixStream(position, self.file, self.saved[1] if console else None, self)
        self.handler = logging.StreamHandler(sys.stderr)
        self.handler.setFormatter(logging.Formatter("%(label)s%(message)s"))
        self.handler.addFilter(_label)
        root = logging.getLogger()
        root.addHandler(self.handler)
        logger.setLevel(level.upper())
        self._show = warnings.showwarning
        warnings.showwarning = _show_warning
        faulthandler.enable(file=self.file)

    def keep(self, text: str) -> None:
        """Into the file alone: what a person needs only when looking for it."""
        prefix = self.position.prefix()
        write(self.file, "".join(f"{prefix}{line}\n" for line in text.splitlines()))

    def close(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        logging.getLogger().removeHandler(self.handler)
        warnings.showwarning = self._show
        faulthandler.disable()
        sys.stdout, sys.stderr = self.saved
        with suppress(OSError):  # a full disk
            self.file.close()


def write(file: IO[str], text: str) -> None:
    """Writes and flushes. A log on a full disk ends nothing: its lines wait in the buffer, and what a full disk means
    is decided where a checkpoint or a record is written."""
    with suppress(OSError):
        file.write(text)
        file.flush()


def _label(record: logging.LogRecord) -> bool:
    """Information is the normal case and needs no label."""
    record.label = "" if record.levelno == logging.INFO else f"{record.levelname}: "
    return True


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    logging.getLogger("echofree").warning("%s: %s", category.__name__, message)


def quiet_native(log_file: Path) -> None:
    """Sends what native code of a rank above 0 writes to its own log instead of the shared console."""
    fd = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
