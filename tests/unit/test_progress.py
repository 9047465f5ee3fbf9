"""A bar that never tears, plain lines that never flood, and silence when asked."""

from __future__ import annotations

import io

import pytest

from echofree.progress import BAR_WIDTH, Progress, duration, number


class Terminal(io.StringIO):
    """A stream that says it's a terminal and shows what a person would see on it."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines = [""]
        column = 0
        for letter in self.getvalue():
            if letter == "\n":
                lines.append("")
                column = 0
            elif letter == "\r":
                column = 0
            else:
                lines[-1] = lines[-1][:column] + letter + lines[-1][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_bar_shows_share_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    terminal, clock = Terminal(), Clock()
    bar = Progress(200, "train", "auto", stream=terminal, clock=clock)
    clock.now_s += 10.0
    bar.update(50, loss=0.12345678, lr=1e-3)
    # 50 of 200 in 10 s: 5 a second, 150 more take 30 s
    text = terminal.screen()[-1]
    assert "[" + "#" * (BAR_WIDTH // 4) + "." * (BAR_WIDTH - BAR_WIDTH // 4) + "]" in text
    assert "train 50/200 (25 %)  5.00/s  left 0:30  loss 0.1235  lr 0.001" in text


def test_resumed_steps_count_for_the_place_and_not_for_the_rate() -> None:
    terminal, clock = Terminal(), Clock()
    bar = Progress(200, "train", stream=terminal, clock=clock, initial=100)
    clock.now_s += 10.0
    bar.update(50)
    assert "150/200 (75 %)  5.00/s  left 0:10" in terminal.screen()[-1]


def test_write_leaves_whole_lines_above_the_bar() -> None:
    terminal, clock = Terminal(), Clock()
    bar = Progress(4, "evaluate", "on", stream=terminal, clock=clock)
    for step in range(4):
        clock.now_s += 1.0
        bar.update(what="x" * (20 - 5 * step))  # ever shorter: nothing of the longer bar may stay
        bar.write(f"line {step}")
    bar.close()
    screen = terminal.screen()
    assert screen[:4] == [f"line {step}" for step in range(4)]
    assert "4/4 (100 %)" in screen[4]
    assert screen[4].endswith("what xxxxx")
    assert screen[5:] == [""]


def test_hide_clears_the_line() -> None:
    terminal = Terminal()
    bar = Progress(4, "evaluate", stream=terminal, clock=Clock())
    bar.update()
    bar.hide()
    assert terminal.screen() == [""]


def test_bar_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    Progress(4, "evaluate", stream=terminal, clock=Clock()).update(what="x" * 100)
    assert max(len(line) for line in terminal.screen()) < 40


def test_bar_is_redrawn_ten_times_a_second_at_most() -> None:
    terminal, clock = Terminal(), Clock()
    bar = Progress(None, "train", stream=terminal, clock=clock)
    for _ in range(1000):
        clock.now_s += 0.001
        bar.update()
    assert 9 <= terminal.getvalue().count("\r") <= 11


def test_elsewhere_a_line_at_most_every_so_often() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(100, "train", "auto", stream=stream, every_s=30.0, clock=clock) as bar:
        for _ in range(100):
            clock.now_s += 1.0
            bar.update(loss=0.5)
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "train 30/100 (30 %)",
        "train 60/100 (60 %)",
        "train 90/100 (90 %)",
        "train 100/100 (100 %)",
    ]
    assert "took 1:40" in lines[-1]
    assert "\r" not in stream.getvalue()


def test_no_last_line_twice() -> None:
    stream, clock = io.StringIO(), Clock()
    bar = Progress(30, "train", stream=stream, clock=clock)
    clock.now_s += 30.0
    bar.update(30)
    bar.close()
    bar.close()
    assert len(stream.getvalue().splitlines()) == 1


def test_slow_work_tells_seconds_each() -> None:
    stream, clock = io.StringIO(), Clock()
    bar = Progress(None, "export", stream=stream, clock=clock)
    clock.now_s += 60.0
    bar.update(2)
    assert stream.getvalue() == "export 2  30.0 s each  took 1:00\n"


@pytest.mark.parametrize("off", [False, "off"])
def test_off_is_silent_and_still_writes(off: bool | str) -> None:
    terminal = Terminal()
    bar = Progress(4, "train", off, stream=terminal, clock=Clock())
    bar.update(4)
    assert terminal.getvalue() == ""
    bar.write("said")
    bar.close()
    assert terminal.getvalue() == "said\n"


def test_nothing_done_says_nothing() -> None:
    terminal = Terminal()
    Progress(4, "train", stream=terminal, clock=Clock()).close()
    assert terminal.getvalue() == ""


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, on or off"):
        Progress(4, "train", "yes")


def test_text_of_values() -> None:
    assert [duration(s) for s in (0, 59.6, 61, 3600, 36610)] == ["0:00", "1:00", "1:01", "1:00:00", "10:10:10"]
    assert [number(v) for v in (None, 0.000123456, 12, "x", float("nan"))] == ["-", "0.0001235", "12", "x", "nan"]
