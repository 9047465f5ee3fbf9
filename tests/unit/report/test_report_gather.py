"""What a page knows of a run: curves, scores, warnings nobody wrote down; and that half a run is a run, too."""

from __future__ import annotations

import json

import numpy as np
import pytest

from echofree.final import write_page
from echofree.report import contents, gather, main, run_folders, write_report
from echofree.report.page import embedded
from echofree.rundir import RunDir
from unit.report.fake import fake_run, wave_of


def texts(run: dict) -> str:
    return "\n".join(f"{w['kind']}: {w['text']}" for w in run["warnings"])


def test_a_run_with_everything(run_dir):
    run = gather.run(run_dir, "a", "run")
    assert (run["status"], run["best"], run["steps"], run["seconds"]) == ("done", 0.25, 60, 95.0)
    assert run["settings"] == {"optim.lr": 1e-3}
    assert run["config"]["model.hidden_size"] == 32
    assert run["model"] == "TinyNet: 12,345 parameters, latency 32 ms"
    assert run["curves"]["train"]["loss"][0] == list(range(1, 61))
    assert run["curves"]["valid"]["erle"] == [[20, 40, 60], [12.0, 14.0, 16.0]]
    assert run["scores"] == {"loss": 0.25, "erle": 16.0}
    (evaluation,) = run["evaluations"]
    assert (evaluation["name"], evaluation["own"]) == ("test", "model")
    assert list(evaluation["systems"]) == ["mic", "linear", "model"]
    assert len(evaluation["clips"]) == 9
    assert evaluation["clips"][0]["problems"] == "the output is silent </script><b>"
    badness = [c["badness"] for c in evaluation["clips"][1:]]
    assert badness == sorted(badness, reverse=True)
    assert "log: the disk is nearly full (2 times)" in texts(run)
    assert "the last evaluation is the best" in texts(run)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"status": "running"}, "killed, or the machine went down"),
        ({"resumes": [{"changed": {"optim.lr": [1e-3, 5e-4]}}]}, "gone on with 1 time"),
        ({"restarts": [{"time": 0.0}, {"time": 1.0}]}, "restarted 2 times"),
    ],
)
def test_what_nobody_has_written_down(facts, said, tmp_path):
    run = gather.run(fake_run(tmp_path / "r", evaluated=False, **facts), "r", "run")
    assert said in texts(run)
    assert "no scores" in texts(run) or run["status"] == "failed"


def test_a_wasted_end_and_hungry_steps(tmp_path):
    folder = fake_run(tmp_path / "r", evaluated=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["loss"] = line["step"] if line["kind"] == "eval" else line["loss"]
        if line["kind"] == "train":
            line |= {"data_wait_share": 0.5, "skipped_steps": 3}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')
    (folder / "code.patch").write_text("+1")
    said = texts(gather.run(folder, "r", "run"))
    assert "was best at evaluation 1 of 3" in said
    assert "50% of the time went into waiting for data" in said
    assert "3 steps were skipped" in said
    assert "uncommitted changes" in said
    assert "1 lines of metrics.jsonl can't be read" in said


def test_a_resume_changes_the_settings_shown(tmp_path):
    run = gather.run(
        fake_run(tmp_path / "r", evaluated=False, resumes=[{"changed": {"optim.lr": [1e-3, 5e-4]}}]), "r", "run"
    )
    assert run["settings"] == {"optim.lr": 5e-4}


def test_a_failed_run_has_its_traceback_and_a_broken_one_a_page(tmp_path):
    failed = fake_run(
        tmp_path / "a", evaluated=False, status="failed", error={"rank": 3, "traceback": "Traceback\nValueError: no"}
    )
    assert gather.run(failed, "a", "run")["error"] == {"rank": 3, "text": "Traceback\nValueError: no"}
    broken = tmp_path / "b"
    broken.mkdir()
    (broken / "run.json").write_text('{"status": "cre')
    run = gather.run(broken, "b", "run")
    assert run["status"] == "unreadable"
    assert "run.json can't be read" in texts(run)
    assert write_report([broken]).stat().st_size > 10_000


def test_long_curves_are_thinned_to_means():
    steps, values = list(range(1, 2001)), [float(i % 2) for i in range(2000)]
    xs, ys = gather.thinned(steps, values)
    assert len(xs) <= gather.MAX_POINTS
    assert (xs[0], xs[-1]) == (3, 2000)
    assert np.mean(ys) == pytest.approx(0.5, abs=0.01)
    assert gather.thinned([5], [1.5]) == [[5], [1.5]]


def test_a_comparison_tells_the_difference_and_what_cant_be_compared(tmp_path):
    a = fake_run(tmp_path / "a" / "1", settings={"optim.lr": 1e-3, "output_root": "x"})
    b = fake_run(tmp_path / "b" / "2", best=0.1, settings={"optim.lr": 3e-4, "output_root": "y", "model.extra": [1]})
    shown = contents([a, b], False, 4)
    assert [run["name"] for run in shown["runs"]] == ["a/1", "b/2"]
    assert shown["differences"] == [
        {"key": "optim.lr", "values": [1e-3, 3e-4]},
        {"key": "model.extra", "values": [None, [1]]},
    ]
    clip = next(c for c in shown["sounds"]["clips"] if c["index"] == 0)
    assert [s["label"] for s in clip["signals"]] == ["mic", "far", "linear", "a/1", "b/2", "target"]
    assert "can't be compared" not in texts(shown["runs"][1])
    path = b / "evaluate" / "test" / "scores.json"
    scores = json.loads(path.read_text())
    scores["protocol"] |= {"align": "none", "clips": 8}
    path.write_text(json.dumps(scores))
    assert "can't be compared with those of a/1: clips, align differ" in texts(contents([a, b], False, 4)["runs"][1])
    assert [r["evaluations"][0]["name"] for r in contents([a, b], False, 4)["runs"]] == ["test", "test of b/2"]


def test_sounds_keep_to_the_budget_and_are_the_files(run_dir):
    import base64

    all_of_it = contents([run_dir], False, 4)["sounds"]
    assert (len(all_of_it["clips"]), all_of_it["left_out"]) == (4, 0)
    first = all_of_it["clips"][0]
    assert first["why"] == "number 1 of the worst"
    assert [s["role"] for s in first["signals"]] == ["mic", "far", "other", "own", "target"]
    (run_dir / "back.flac").write_bytes(base64.b64decode(first["signals"][3]["data"]))
    np.testing.assert_array_equal(wave_of(run_dir / "back.flac"), wave_of(run_dir / "evaluate/test/listen/0-3.flac"))
    size = sum(len(s["data"]) for s in first["signals"])
    few = contents([run_dir], False, 1.5 * size / 1e6)["sounds"]
    assert (len(few["clips"]), few["left_out"]) == (1, 3)
    assert contents([run_dir], False, 0)["sounds"] == {"clips": [], "left_out": 4}


def test_places_and_refusals(run_dir, tmp_path, capsys):
    root = run_dir.parents[1]
    assert run_folders([run_dir]) == ([run_dir], False)
    assert run_folders([root]) == ([run_dir], False)
    for number in (10, 9):
        fake_run(tmp_path / "multirun" / str(number), evaluated=False)
    found, is_sweep = run_folders([tmp_path / "multirun"])
    assert ([folder.name for folder in found], is_sweep) == (["9", "10"], True)
    empty = tmp_path / "empty"
    empty.mkdir()
    for words, said in (
        ([], "runs is missing"),
        ([str(empty)], "no run in it"),
        (["runs=/no/where"], "no such folder"),
        ([str(run_dir), "outt=x"], "out=x"),
        ([str(run_dir), "out=/no/where/x.html"], "can't be written"),
    ):
        assert main(words) == 2, words
        assert said in capsys.readouterr().err


def test_the_verb_writes_where_it_says(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([str(run_dir)]) == 0
    assert "wrote tiny/2026-01-31_12-00-00/report.html" in capsys.readouterr().out
    assert (run_dir / "report.html").is_file()
    other = fake_run(tmp_path / "tiny" / "2026-01-31_12-00-01", evaluated=False)
    assert main([f"runs={run_dir},{other}"]) == 0
    assert "wrote report.html" in capsys.readouterr().out


def test_an_evaluation_without_a_run_has_a_page(run_dir, capsys):
    folder = run_dir / "evaluate" / "test"
    assert main([str(folder)]) == 0
    shown = contents([folder], False, 4)
    assert (shown["kind"], shown["runs"][0]["status"]) == ("run", "scored")
    assert [e["own"] for e in shown["runs"][0]["evaluations"]] == ["model"]
    assert len(shown["sounds"]["clips"]) == 4
    assert "can't be read" not in texts(shown["runs"][0])


def test_a_training_ends_with_its_page_or_a_warning(run_dir, caplog, monkeypatch):
    with caplog.at_level("INFO", logger="echofree"):
        write_page(RunDir(run_dir, is_first=True))
    assert caplog.messages[-1].startswith("report: ")
    assert caplog.messages[-1].endswith("2026-01-31_12-00-00/report.html")
    assert (run_dir / "report.html").is_file()
    (run_dir / "report.html").unlink()
    (run_dir / "report.html").mkdir()
    write_page(RunDir(run_dir, is_first=True))
    assert caplog.messages[-1].startswith("no report: ConfigError")
    assert "python -m echofree.report" in caplog.messages[-1]


def test_the_page_stands_alone(run_dir):
    text = write_report([run_dir]).read_text()
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "src=" not in text
    assert text.count("</script>") == 4  # the data's and those of the three scripts: none comes from a clip's name
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert data["runs"][0]["evaluations"][0]["clips"][0]["problems"] == "the output is silent </script><b>"
    assert "folder" not in data["runs"][0]["evaluations"][0]


def test_json_has_no_nan():
    assert embedded({"a": [float("nan"), 1.0], "b": "</script>"}) == '{"a":[null,1.0],"b":"\\u003c/script>"}'
