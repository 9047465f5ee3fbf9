"""Being asked to stop: signals, the time limit, a file `stop` in the run directory. A handler sets a flag and nothing
else; the loop acts at a step's edge."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType

from echofree.errors import ConfigError

FILE = "stop"  # in the run directory
FILE_EVERY_S = 1.0  # a look at a shared file system isn't free
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """Whether this rank was asked to stop, and by what.

    The first INT stops like TERM: finish the step, save. A second INT raises KeyboardInterrupt at once.

    Args:
        max_time_s: seconds from now, or None.
        file: a file whose appearance stops the run; a number in it means after that step.
    """

    def __init__(self, max_time_s: float | None = None, file: Path | None = None):
        self.reason: str | None = None
        self.file, self._looked = file, -FILE_EVERY_S
        self._at_step: int | None = None
        self.deadline = None if max_time_s is None else time.monotonic() + max_time_s
        self._old: dict[int, object] = {}

    def install(self) -> None:
        for number in SIGNALS:
            self._old[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)  # type: ignore[arg-type]
        self._old = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None and "SIGINT" in self.reason:
            raise KeyboardInterrupt
        self.reason = f"signal {signal.Signals(number).name}"

    def wanted(self, step: int = 0) -> bool:
        """Whether to stop before another step, `step` being finished."""
        if self.reason is None and self.deadline is not None and time.monotonic() > self.deadline:
            self.reason = "the time limit train.max_time"
        if self.reason is None and self.file is not None and time.monotonic() - self._looked >= FILE_EVERY_S:
            self._looked = time.monotonic()
            self._at_step = _step_in(self.file)
        if self.reason is None and self._at_step is not None and step >= self._at_step:
            self.reason = f"the file {self.file}"
        return self.reason is not None

    def obeyed(self) -> None:
        """The run has stopped: the file has done its work, or the next start would stop at once."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _step_in(file: Path) -> int | None:
    """The step that a stop file names, 0 when it is empty, None when there is no file."""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else 0


def seconds(text: str | None) -> float | None:
    """ "01:30:00", "90m", "1.5h", "45s" or "2d" -> seconds.

    Raises:
        ConfigError: another form.
    """
    if text is None:
        return None
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    try:
        if ":" in text:
            total = 0.0
            for part in text.split(":"):
                total = total * 60 + float(part)
        elif text[-1:] in units:
            total = float(text[:-1]) * units[text[-1]]
        else:
            total = float(text)
    except ValueError as error:
        raise ConfigError(
            f"train.max_time={text!r} isn't a time. Type train.max_time=01:30:00, 90m, 1.5h or 45s"
        ) from error
    if not total > 0:  # "nan" isn't either
        raise ConfigError(f"train.max_time={text!r} must be more than zero")
    return total
