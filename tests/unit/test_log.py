"""Every line a rank says carries its prefix, whoever says it; the console shows only what it should."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from echofree.log import Position, PrefixStream, RankLog

LINE = re.compile(r"\[EchoFree: rank=(\d+), epoch=(\d+), step=(\d+)\] .*\S.*")


Console = tuple[io.StringIO, io.StringIO]


@contextmanager
def console() -> Iterator[Console]:
    """The process's own output and error stream; RankLog has to give them back."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        yield out, err
        assert (sys.stdout, sys.stderr) == (out, err)


def said(path: Path, action: Callable[[], None], shown: bool = False) -> tuple[list[str], str, str]:
    """-> what the rank log holds without the prefixes, and what stood on the console."""
    with console() as (out, err):
        log = RankLog(path, Position(rank=3, epoch=1, step=12), console=shown, level="info")
        try:
            action()
        finally:
            log.close()
    lines = path.read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    return [line.split("] ", 1)[1] for line in lines], out.getvalue(), err.getvalue()


def test_everything_is_prefixed(tmp_path: Path) -> None:
    def speak() -> None:
        print("printed\nin two lines\n")
        print("an error line", file=sys.stderr)
        logging.getLogger("echofree").info("information")
        logging.getLogger("echofree.data").warning("a warning")
        logging.getLogger("somebody.else").error("a library's error")
        logging.getLogger("echofree").debug("hidden at this level")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", UserWarning, stacklevel=1)
        try:
            raise ValueError("multi\nline")
        except ValueError:
            traceback.print_exc()
            logging.getLogger("echofree").exception("caught")

    lines, *shown = said(tmp_path / "logs/rank3.log", speak)
    for expected in (
        "printed", "in two lines", "an error line", "information", "WARNING: a warning", "ERROR: a library's error",
        "WARNING: UserWarning: careful", "ValueError: multi", "line", "ERROR: caught",
    ):  # fmt: skip
        assert expected in lines
    assert "hidden at this level" not in lines
    assert lines.count("Traceback (most recent call last):") == 2
    assert shown == ["", ""], "the console is rank 0's"


def test_the_console_where_asked(tmp_path: Path) -> None:
    def speak() -> None:
        print("a result")
        logging.getLogger("echofree").info("information")

    prefix = "[EchoFree: rank=3, epoch=1, step=12] "
    lines, out, err = said(tmp_path / "rank0.log", speak, shown=True)
    assert (out, err) == (f"{prefix}a result\n", f"{prefix}information\n")
    assert lines == ["a result", "information"]


def test_lines_in_pieces(tmp_path: Path) -> None:
    def speak() -> None:
        sys.stdout.write("half ")
        sys.stdout.write("a line\nand the")
        sys.stdout.write(" next")
        sys.stdout.flush()
        sys.stdout.write("10 %\r20 %\r")
        sys.stdout.write("\n\n   \n")
        sys.stdout.write("left over")

    assert said(tmp_path / "rank3.log", speak)[0] == ["half a line", "and the next", "10 %", "20 %", "left over"]


def test_the_prefix_follows_the_position(tmp_path: Path) -> None:
    position = Position(rank=2)
    with open(tmp_path / "x", "w") as file:
        stream = PrefixStream(position, file, None)
        print("before", file=stream)
        position.epoch, position.step = 1, 12
        print("after", file=stream)
        stream.flush()
    assert (tmp_path / "x").read_text() == (
        "[EchoFree: rank=2, epoch=0, step=0] before\n[EchoFree: rank=2, epoch=1, step=12] after\n"
    )


def test_threads_do_not_tear_lines(tmp_path: Path) -> None:
    def speak() -> None:
        def talk(name: str) -> None:
            for _ in range(200):
                sys.stdout.write(f"{name * 40}\n")

        threads = [threading.Thread(target=talk, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lines, *_ = said(tmp_path / "rank3.log", speak)
    assert len(lines) == 400
    assert set(lines) == {"a" * 40, "b" * 40}


def test_a_second_start_goes_on_in_the_same_file(tmp_path: Path) -> None:
    said(tmp_path / "rank3.log", lambda: print("first"))
    assert said(tmp_path / "rank3.log", lambda: print("second"))[0] == ["first", "second"]


def test_a_bar_is_taken_away_before_a_line(tmp_path: Path) -> None:
    with console() as (_, err):
        log = RankLog(tmp_path / "rank0.log", Position(), console=True, level="info")
        log.before_console = lambda: err.write("<hide>")
        log.terminal.write("bar")
        logging.getLogger("echofree").info("line")
        log.close()
        assert err.getvalue() == "bar<hide>[EchoFree: rank=0, epoch=0, step=0] line\n"


def test_what_native_code_writes_goes_to_the_rank_s_own_file(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from echofree.log import quiet_native;"
        "quiet_native(Path(sys.argv[1])); os.write(1, b'from C\\n'); os.write(2, b'and its errors\\n')"
    )
    path = tmp_path / "rank1.log"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert path.read_text() == "from C\nand its errors\n"
