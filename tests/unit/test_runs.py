"""The table of runs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from echofree import runs
from echofree.rundir import RunDir


def make(root: Path, where: str, status: str = "done", **facts: Any) -> Path:
    folder = root / where
    folder.mkdir(parents=True)
    known = {"id": where, "status": status, "start": time.time() - 100, "end": None, "metric": "loss"}
    (folder / "run.json").write_text(json.dumps({**known, **facts}))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "outputs"
    make(root, "tiny/a", steps=50, best=0.25, settings={"optim.lr": 0.01, "name": "tiny"}, start=time.time() - 7200)
    make(root, "tiny/b", steps=50, best=0.125, settings={"optim.lr": 0.001, "seed": 3}, start=time.time() - 3600)
    make(root, "base/c", status="preempted", steps=20, best=0.5, settings={}, start=time.time() - 90)
    crashed = make(root, "base/d", status="running", settings={"optim.lr": 0.5})
    (crashed / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 12, "loss": 1}\n{"kind": "eval", "step": 13}\n{"ki'
    )
    best = crashed / "checkpoints" / "step-000010"
    best.mkdir(parents=True)
    (best / "manifest.json").write_text(json.dumps({"scores": {"loss": 0.75}}))
    (crashed / "checkpoints" / "best").write_text("step-000010\n")
    (root / "tiny" / "torn").mkdir()
    (root / "tiny" / "torn" / "run.json").write_text("{")
    return root


def names(root: Path, *words: str, capsys: Any = None) -> list[str]:
    assert runs.main([str(root), "format=json", *words]) == 0
    return [row["run"] for row in json.loads(capsys.readouterr().out)]


def test_the_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main([str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "name", "status", "step", "best", "metric", "age", "settings"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows["tiny/a"] == ["tiny/a", "tiny", "done", "50", "0.25", "loss", "2.0h", "optim.lr=0.01"]
    assert rows["base/c"][1:7] == ["base", "preempted", "20", "0.5", "loss", "1.5m"]
    assert rows["base/d"][1:6] == ["base", "failed", "13", "0.75", "loss"], "nobody holds it: not running"
    assert rows["tiny/torn"][2] == "unreadable"
    assert lines[-1].startswith("base/c"), "the newest last"


def test_a_run_that_is_held_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(root / "base/d", is_first=True)
    run.lock()
    assert names(root, "filter=status=running", capsys=capsys) == ["base/d"]
    run.unlock()
    assert names(root, "filter=status=running", capsys=capsys) == []


def test_what_a_resume_changed_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumes = [{"changed": {"optim.lr": [0.01, 0.002]}}]
    make(tmp_path, "x/y", steps=1, settings={"optim.lr": 0.01}, resumes=resumes)
    runs.main([str(tmp_path)])
    assert "optim.lr=0.002" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        ("status=done", {"tiny/a", "tiny/b"}),
        ("status!=done", {"base/c", "base/d", "tiny/torn"}),
        ("best<0.3,name=tiny", {"tiny/a", "tiny/b"}),
        ("best>=0.25", {"tiny/a", "base/c", "base/d"}),
        ("optim.lr=1e-2", {"tiny/a"}),
        ("optim.lr>0.001", {"tiny/a", "base/d"}),
        ("run~BASE", {"base/c", "base/d"}),
        ("seed=3", {"tiny/b"}),
    ],
)
def test_filters(root: Path, capsys: pytest.CaptureFixture[str], condition: str, left: set[str]) -> None:
    assert set(names(root, f"filter={condition}", capsys=capsys)) == left


def test_sorted_by_columns_and_settings(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert names(root, "sort=best", capsys=capsys) == ["tiny/torn", "tiny/b", "tiny/a", "base/c", "base/d"]
    assert names(root, "sort=-best", "limit=2", capsys=capsys) == ["tiny/a", "tiny/b"]
    assert names(root, "sort=-optim.lr", capsys=capsys)[2:] == ["base/d", "tiny/a", "tiny/b"]


def test_csv_has_every_digit(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main([str(root), "format=csv", "filter=name=tiny,status=done"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(r["run"], r["best"], r["settings"]) for r in rows] == [
        ("tiny/a", "0.25", "optim.lr=0.01"),
        ("tiny/b", "0.125", "optim.lr=0.001 seed=3"),
    ]
    assert 7000 < int(rows[0]["age"]) < 7400


def test_the_difference_of_two_configs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "tiny/a/config.yaml").write_text("optim:\n  lr: 0.01\n  eps: 1.0e-08\nlist: [1, 2]\nseed: 0\n")
    (root / "tiny/b/config.yaml").write_text("optim:\n  lr: 0.001\n  eps: 1.0e-08\nlist: [1, 3]\nextra: x\n")
    assert runs.main([str(root), "diff=[tiny/a,tiny/b]"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["setting", "extra", "list", "optim.lr", "seed"]
    assert lines[3][1].split() == ["0.01", "0.001"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dir=nowhere"], "no such folder"),
        (["filter=status"], "no condition"),
        (["sort=colour"], "sort=colour: no run has it"),
        (["format=xml"], "table | csv | json"),
        (["diff=tiny/a"], "give two runs"),
        (["diff=[tiny/a,tiny/zzz]"], "has no config.yaml"),
        (["fliter=a"], "Type: filter=a"),
    ],
)
def test_mistakes_are_told(root: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    (root / "tiny/a/config.yaml").write_text("seed: 0\n")
    assert runs.main([*([] if words[0].startswith("dir") else [str(root)]), *words]) == 2
    assert said in capsys.readouterr().err


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.main([str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_torch_and_hydra_are_not_loaded() -> None:
    code = "import sys, echofree.runs; sys.exit(', '.join({'torch', 'hydra', 'numpy'} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True)
