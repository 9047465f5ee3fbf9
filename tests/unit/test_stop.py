"""Being asked to stop: the handler sets a flag and nothing else; times as people write them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echofree import stop
from echofree.errors import ConfigError
from echofree.stop import SIGNALS, StopFlag, seconds


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    flag = StopFlag()
    flag.install()
    yield flag
    flag.restore()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag_and_nothing_else(flag: StopFlag, number: signal.Signals) -> None:
    assert not flag.wanted()
    before = dict(vars(flag))
    os.kill(os.getpid(), number)
    assert flag.wanted()
    changed = {k for k, v in vars(flag).items() if before[k] != v}
    assert changed == {"reason"}
    assert flag.reason == f"signal {number.name}"


def test_the_second_interrupt_does_not_wait(flag: StopFlag) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.wanted()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_after_a_term_still_saves(flag: StopFlag) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.reason == "signal SIGINT"


def test_handlers_are_given_back() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, mine)
    try:
        flag = StopFlag()
        flag.install()
        assert signal.getsignal(signal.SIGUSR1) == flag._handle
        flag.restore()
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_time_limit() -> None:
    assert not StopFlag(60.0).wanted()
    flag = StopFlag(0.02)
    assert not flag.wanted()
    time.sleep(0.03)
    assert flag.wanted()
    assert flag.reason == "the time limit train.max_time"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None), ("45s", 45.0), ("90m", 5400.0), ("1.5h", 5400.0), ("2d", 172800.0), ("30", 30.0),
        ("02:30", 150.0), ("01:30:00", 5400.0), ("00:00:01", 1.0),
    ],
)  # fmt: skip
def test_times(text: str | None, expected: float | None) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "1:xx", "10y", "h", "0", "-5m", "nan", "00:00:00"])
def test_what_is_no_time_is_told_with_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.max_time"):
        seconds(text)


# --- a file ---------------------------------------------------------------------------------------------------------


def test_a_file_in_the_run_directory_stops_and_has_then_done_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "FILE_EVERY_S", 0.0)
    flag = StopFlag(file=tmp_path / "stop")
    assert not flag.wanted(5)
    (tmp_path / "stop").touch()
    assert flag.wanted(5)
    assert "stop" in str(flag.reason)
    flag.obeyed()
    assert not (tmp_path / "stop").exists()
    flag.obeyed()


def test_a_number_in_the_file_is_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "FILE_EVERY_S", 0.0)
    (tmp_path / "stop").write_text("12\n")
    flag = StopFlag(file=tmp_path / "stop")
    assert [step for step in range(20) if flag.wanted(step)] == list(range(12, 20))


def test_the_file_is_looked_for_once_a_second(tmp_path: Path) -> None:
    flag = StopFlag(file=tmp_path / "stop")
    assert not flag.wanted()
    (tmp_path / "stop").touch()
    assert not flag.wanted(), "each look costs something on a shared file system"


def test_a_scheduler_that_warns_and_then_terms(flag: StopFlag) -> None:
    """B18: USR1, then TERM: one stop, and the handler does nothing but remember it."""
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.wanted()
    assert flag.reason in ("signal SIGUSR1", "signal SIGTERM")
