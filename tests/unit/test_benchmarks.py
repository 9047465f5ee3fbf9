"""The page of benchmarks: in step with what was measured, complete, and honest about what wasn't."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import sheet  # noqa: E402
from claims import BENCHES, Bench, Claim, at, written  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))  # slurm.py in there would hide tests/slurm

HELPERS = ("all.py", "claims.py", "sheet.py", "peer.py")
ABOUT = {"processor": "x", "cores": 2, "memory_gb": 8, "gpu": None, "torch": "2", "python": "3", "system": "Linux"}


def entry(*lines: dict) -> dict:
    return {
        "command": "python x",
        "date": "2026-01-31",
        "machine": ABOUT,
        "seconds": 1,
        "load_before": 0.1,
        "lines": lines,
    }


def test_the_pages_are_those_of_the_figures() -> None:
    path = ROOT / "benchmarks/figures.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, text in zip(("benchmarks.md", "benchmarks.zh.md"), sheet.pages(found)):
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "python benchmarks/all.py --pages"
    assert set(found) <= {bench.name for bench in BENCHES}


def test_every_benchmark_has_its_place() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")} - set(HELPERS)
    assert {bench.script for bench in BENCHES} == scripts
    assert len({bench.name for bench in BENCHES}) == len(BENCHES)
    assert all(bench.claims for bench in BENCHES)


def test_bounds_are_judged_and_missing_parts_are_left_out() -> None:
    claims = (
        Claim(("good", "好"), at("a"), 1.0, beside=("peer", "对照"), peer=written(at("p"), "{:.0f} s")),
        Claim(("low", "低"), at("a"), 1.0, most=False),
        Claim(("absent", "无"), at("b", "c"), 1.0),
        Claim(("told", "仅说明"), at("a")),
        Claim(("no peer", "无对照"), at("a"), beside=("gone", "不在"), peer=written(at("q"), "{}")),
    )
    bench = Bench("name", ("title", "标题"), "x.py", (), (), claims)
    table = sheet.rows(bench, [{"a": 0.5, "p": 3}], 0)
    assert table[2:] == [
        "| good | `0.5` | `≤ 1` kept | peer `3 s` |",
        "| low | `0.5` | `≥ 1` MISSED |  |",
        "| told | `0.5` |  |  |",
    ]
    assert sheet.rows(bench, [], 1) == []


def test_what_failed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"runs": entry({"seconds": [5.0, 4.0, 6.0]}), "scene": {**entry(), "failed": "exit code 1, no figures"}}
    said = sheet.missed(found, ["runs", "scene", "loop-1"])
    assert said == ["scene: exit code 1, no figures", "runs: the whole command, s: 5.00, bound 3"]
    page = sheet.pages(found)[0]
    assert "It failed: `exit code 1, no figures`." in page
    assert "| the whole command, s | `5.00` | `≤ 3` MISSED |" in page
    assert page.count("Not measured yet.") == len(BENCHES) - 2


@pytest.mark.slow
def test_one_command_measures_and_writes(tmp_path: Path) -> None:
    words = ["benchmarks/all.py", "--small", "--only", "runs"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((ROOT / "build/benchmarks/figures.json").read_text())["runs"]
    assert found["command"] == "python benchmarks/runs.py --runs 50 --rounds 1"
    assert found["machine"]["cores"] >= 1
    assert "| the whole command, s | `" in (ROOT / "build/benchmarks/benchmarks.md").read_text()  # quick or not
