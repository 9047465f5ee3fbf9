"""How far a long piece of work is: a bar on a terminal, plain lines elsewhere, nothing when switched off.

A bar in a log file is thousands of half lines; a job without any sign of life is as bad. So on a terminal one line is
redrawn in place, and elsewhere a whole line is written at most every `every_s` seconds. Own code instead of tqdm, since
the two other writers to the same terminal (the log and the tables) need one `write` that takes the bar away first.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, TextIO

REDRAW_S = 0.1  # faster than this only costs time and flickers
BAR_WIDTH = 24  # characters


class Progress:
    """Counts up to `total` and shows it.

    Args:
        total: units of work; None when nobody knows.
        label: what is being done, for example "train" or "evaluate valid".
        enabled: "auto": a bar on a terminal, plain lines elsewhere. True or "on": the bar everywhere (a notebook).
            False or "off": silent, though `write` still writes.
        initial: units done before now, as after a resume; they count for the position, not for the rate.
        stream: where to show it; standard error, so that results on standard output stay clean.
        every_s: seconds between two plain lines.
        clock: seconds that never go back; for tests.

    Raises:
        ValueError: `enabled` is none of the above.
    """

    def __init__(
        self,
        total: int | None,
        label: str,
        enabled: bool | str = "auto",
        *,
        initial: int = 0,
        stream: TextIO | None = None,
        every_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.label, self.initial = total, label, initial
        self.stream = sys.stderr if stream is None else stream
        self.kind = _kind(enabled, self.stream)
        self.done = initial
        self.fields: dict[str, Any] = {}
        self._every_s, self._clock = every_s, clock
        self._start_s = self._shown_s = clock()
        self._shown_done: int | None = None  # the count that the last line or bar told
        self._bar_width = 0  # characters of the bar now on the terminal
        self._closed = False

    def update(self, n: int = 1, **fields: Any) -> None:
        """`n` more units are done; `fields` replace what is shown behind the count (numbers or text)."""
        self.done += n
        self.fields.update(fields)
        if self.kind == "off" or self._closed:
            return
        now_s = self._clock()
        first_bar = self.kind == "bar" and self._shown_done is None
        if first_bar or now_s - self._shown_s >= (REDRAW_S if self.kind == "bar" else self._every_s):
            self._show(now_s)

    def write(self, line: str, stream: TextIO | None = None) -> None:
        """Writes a whole line (to `stream`, or to the stream of the bar) without tearing the bar."""
        out = self.stream if stream is None else stream
        had_bar = self._bar_width > 0
        self.hide()
        out.write(line + "\n")
        out.flush()
        if had_bar and not self._closed:
            self._show(self._clock())

    def close(self) -> None:
        """Shows the last state, once, and leaves the terminal at the start of a fresh line."""
        if self._closed:
            return
        if self.kind != "off" and (self.done > self.initial or self._shown_done is not None):
            if self.kind == "bar" or self._shown_done != self.done:
                self._show(self._clock())
            if self.kind == "bar":
                self.stream.write("\n")
                self.stream.flush()
                self._bar_width = 0
        self._closed = True

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _show(self, now_s: float) -> None:
        text = self._text(now_s)
        if self.kind == "bar":
            text = text[: max(shutil.get_terminal_size().columns - 1, 20)]  # a wrapped bar can't be taken back
            self.stream.write("\r" + text + " " * max(self._bar_width - len(text), 0))
            self._bar_width = len(text)
        else:
            self.stream.write(text + "\n")
        self.stream.flush()
        self._shown_s, self._shown_done = now_s, self.done

    def _text(self, now_s: float) -> str:
        fresh = self.done - self.initial
        rate = fresh / max(now_s - self._start_s, 1e-9)  # units per second
        parts = [f"{self.label} {self.done}"]
        if self.total:
            share = min(self.done / self.total, 1.0)
            parts[0] += f"/{self.total} ({100 * share:.0f} %)"
            if self.kind == "bar":
                full = int(share * BAR_WIDTH)
                parts.insert(0, "[" + "#" * full + "." * (BAR_WIDTH - full) + "]")
        if fresh > 0:
            parts.append(f"{rate:.2f}/s" if rate >= 0.1 else f"{1 / rate:.1f} s each")
            if self.total and self.done < self.total:
                parts.append("left " + duration((self.total - self.done) / rate))
            else:
                parts.append("took " + duration(now_s - self._start_s))
        parts += [f"{name} {number(value)}" for name, value in self.fields.items()]
        return "  ".join(parts)

    def hide(self) -> None:
        """Takes the bar off the terminal; the next `update` brings it back. For whoever else writes to it."""
        if self._bar_width > 0:
            self.stream.write("\r" + " " * self._bar_width + "\r")
            self.stream.flush()
            self._bar_width = 0


def duration(seconds: float) -> str:
    """Seconds -> "0:07" (minutes:seconds) or "1:02:03" (hours first)."""
    whole = max(int(seconds + 0.5), 0)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def number(value: Any) -> str:
    """A value as a person reads it: four significant digits for floats, "-" for None, text as it is."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _kind(enabled: bool | str, stream: TextIO) -> Literal["bar", "lines", "off"]:
    if enabled is True or enabled == "on":
        return "bar"
    if enabled is False or enabled == "off":
        return "off"
    if enabled != "auto":
        raise ValueError(f"progress is {enabled!r}; it can be auto, on or off")
    return "bar" if stream.isatty() else "lines"
