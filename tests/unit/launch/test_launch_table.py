"""What people and programs read of a sweep."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from sweeps import end, sweep_of

from echofree.launch import follow, table
from echofree.launch import ticket as tickets
from echofree.launch.ticket import Ticket
from echofree.launch.view import Seen, View, cause, look


def view(number: int, state: str, best: float | None = None) -> View:
    final = state not in ("waiting", "starting", "running")
    return View(number, state, final, [f"seed={number}"], Path(f"/runs/{number}"), best=best, metric="loss")


@pytest.mark.parametrize(("mode", "expected"), [("min", 2), ("max", 1)])
def test_best_counts_done_jobs_only(mode, expected):
    views = [view(0, "failed", -5.0 if mode == "min" else 5.0), view(1, "done", 3.0), view(2, "done", 1.0)]
    views += [view(3, "done"), view(4, "done", float("nan"))]
    assert table.best_of(views, {i: Ticket(i, str(i), mode=mode) for i in range(5)}) == expected
    assert table.best_of(views[:1], {0: Ticket(0, "0")}) is None


def test_csv_has_a_column_for_each_setting(tmp_path):
    sweep, _ = sweep_of(tmp_path / "s", ["", ""])
    facts = {"settings": {"optim.lr": 0.1, "data.x": [1, 2]}, "resumes": [{"changed": {"optim.lr": [0.1, 0.2]}}]}
    (sweep / "1/run.json").write_text(json.dumps(facts))
    views = [look(sweep, job, Seen("ended", 0)) for job in (Ticket(0, "0"), Ticket(1, "1"))]
    path = table.write_csv(sweep, views, 1)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert [row["seed"] for row in rows] == ["0", ""]
    assert rows[1]["optim.lr"] == "0.2"
    assert json.loads(rows[1]["data.x"]) == [1, 2]
    assert [row["is_best"] for row in rows] == ["False", "True"]
    assert [row["run"] for row in rows] == ["0", "1"]


def test_a_long_table_shows_what_matters():
    views = [view(i, "done") for i in range(100)] + [view(100, "failed"), view(101, "running")]
    lines = table.table(views, limit=5)
    assert len(lines) == 1 + 5 + 1
    assert any(line.startswith("100 ") and "failed" in line for line in lines)
    assert any(line.startswith("101 ") and "running" in line for line in lines)
    assert "97 more: 97 done" in lines[-1]


def test_progress_is_read_off_the_records(tmp_path):
    sweep, _ = sweep_of(tmp_path / "s", [""])
    (sweep / "0/run.json").write_text(json.dumps({"status": "running", "total_steps": 100}))
    records = [{"kind": "train", "step": 10, "loss": 0.5, "step_s": 2.0}, {"kind": "valid", "step": 10, "loss": 0.4}]
    (sweep / "0/metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"kind": "tr')
    row = look(sweep, Ticket(0, "0"), Seen("running", node="here"))
    assert (row.state, row.step, row.loss, row.left_s) == ("running", 10, 0.5, 180.0)
    assert table.cells(row, None)[3:6] == ["10/100", "0.5", "3:00"]


def test_cause_is_the_first_failing_rank_else_the_end_of_the_output(tmp_path):
    sweep, _ = sweep_of(tmp_path / "s", [""])
    out = tmp_path / "0.out"
    out.write_text("\n".join(f"line {i}" for i in range(100)))
    job = Ticket(0, "0", files=[str(out)])
    failed = look(sweep, job, Seen("ended", 9, "OUT_OF_MEMORY"))
    text = cause(failed, job)
    assert text.startswith("OUT_OF_MEMORY, exit code 9")
    assert "line 99" in text
    assert "line 79" not in text
    first = {"rank": 3, "host": "n7", "traceback": "Traceback\nValueError: here", "kind": "error"}
    (sweep / "0/logs/first_error.json").write_text(json.dumps(first))
    assert cause(failed, job) == "rank 3 on n7:\nTraceback\nValueError: here"


class Told:
    """A queue that plays back what a scheduler would say, one answer per look."""

    trouble = ""

    def __init__(self, answers: list[dict[int, Seen]]):
        self.answers, self.cancelled = answers, []  # type: list[dict[int, Seen]], list[int]

    def look(self, sweep, jobs):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def cancel(self, sweep, numbers):
        self.cancelled += numbers
        self.answers = [
            {n: Seen("ended", None, "CANCELLED") if n in numbers else s for n, s in self.answers[-1].items()}
        ]


def failing_sweep(tmp_path: Path) -> Path:
    sweep, jobs = sweep_of(tmp_path / "s", ["", "", ""])
    for job in jobs:
        tickets.write(sweep, job)
    (sweep / "0/run.json").write_text(json.dumps({"status": "failed"}))
    (sweep / "1/run.json").write_text(json.dumps({"status": "done", "best": 0.5, "metric": "loss"}))
    first = {"rank": 1, "host": "n1", "traceback": "ValueError: at once", "kind": "error"}
    (sweep / "0/logs/first_error.json").write_text(json.dumps(first))
    return sweep


def test_a_failure_is_told_while_the_others_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(follow, "TICK_S", 0.0)
    sweep = failing_sweep(tmp_path)
    running = {0: Seen("running"), 1: Seen("running"), 2: Seen("waiting")}
    after = {**running, 0: Seen("ended", 1)}
    last = {0: Seen("ended", 1), 1: Seen("ended", 0), 2: Seen("ended", 0)}
    (sweep / "2/run.json").write_text(json.dumps({"status": "done"}))
    views = follow.follow(sweep, Told([running, after, last]), [0, 1, 2], "continue", "leave")
    said = capsys.readouterr().err
    assert said.index("ValueError: at once") < said.index("job 1 done")
    assert said.count("ValueError: at once") == 1
    assert "rank 1 on n1" in said
    assert [view.state for view in views] == ["failed", "done", "done"]
    assert follow.exit_code(views) == 1
    follow.summarise(sweep, views)
    out = capsys.readouterr().out
    assert "best: job 1 (seed=1), loss 0.5" in out
    assert "retry" in out
    assert (sweep / "sweep.csv").is_file()


def test_a_scheduler_that_does_not_answer_is_told_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(follow, "TICK_S", 0.0)
    sweep = failing_sweep(tmp_path)
    queue = Told([{0: Seen("running")}, {0: Seen("running")}, {0: Seen("ended", 1)}])
    queue.trouble = "Unable to contact slurm controller"
    follow.follow(sweep, queue, [0], "continue", "leave")
    assert capsys.readouterr().err.count("Unable to contact slurm controller") == 1


def test_on_failure_stop_cancels_what_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "TICK_S", 0.0)
    sweep = failing_sweep(tmp_path)
    queue = Told([{0: Seen("ended", 1), 1: Seen("ended", 0), 2: Seen("waiting")}])
    follow.follow(sweep, queue, [0, 1, 2], "stop", "leave")
    assert queue.cancelled == [2]


@pytest.mark.parametrize(("policy", "cancelled"), [("leave", []), ("ask", []), ("cancel", [0, 1, 2])])
def test_ctrl_c_follows_the_policy(tmp_path, capsys, policy, cancelled):
    sweep = failing_sweep(tmp_path)

    class Interrupting(Told):
        def look(self, sweep, jobs):
            raise KeyboardInterrupt

    queue = Interrupting([{}])
    with pytest.raises(follow.Left):
        follow.follow(sweep, queue, [0, 1, 2], "continue", policy)  # nobody at a terminal: ask means leave
    assert queue.cancelled == cancelled
    assert f"python -m echofree.sweep {sweep}" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_table_is_redrawn_and_what_is_told_stays():
    out, now = Terminal(), [0.0]
    screen = follow.Screen(out, lambda: now[0])
    screen.show([view(0, "running"), view(1, "waiting")])
    first = out.getvalue()
    assert first.count("\n") == 3
    screen.show([view(0, "running"), view(1, "waiting")])
    assert out.getvalue() == first  # nothing new within a second
    now[0] = 1.5
    screen.show([view(0, "running"), view(1, "waiting")])
    assert out.getvalue()[len(first) :].startswith("\x1b[3F\x1b[J")  # up over the three lines, and away with them
    screen.write("job 0 failed")
    screen.show([view(0, "failed"), view(1, "waiting")])
    last = out.getvalue().rsplit("\x1b[J", 1)[1]
    assert last.startswith("job 0 failed\njob ")
    assert "failed" in last.splitlines()[2]


def test_elsewhere_a_line_per_change():
    out, now = io.StringIO(), [0.0]
    screen = follow.Screen(out, lambda: now[0])
    for second in range(61):
        now[0] = float(second)
        screen.show([view(0, "running" if second else "waiting"), view(1, "waiting")])
    lines = out.getvalue().splitlines()
    assert [line for line in lines if "job 0" in line] == [
        "[EchoFree] job 0 waiting: seed=0", "[EchoFree] job 0 running",
    ]  # fmt: skip
    assert lines.count("[EchoFree] 1 waiting, 1 running") == 2  # at 30 and 60 s


def test_end_helper_is_valid_json():
    assert json.loads(end("done", best=1.0).split("'")[1])["best"] == 1.0
