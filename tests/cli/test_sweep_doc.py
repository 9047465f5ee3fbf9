"""The commands of docs/sweep.md, one after another as they stand there, with less data and fewer steps."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs/sweep.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^<!-- ([^>]*?) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = ["debug=quick", "data.num_train=16", "data.num_valid=2", "data.num_workers=0", "data.segment_s=1.0"]
SHORT += ["train.batch_size=2", "train.device=cpu", "optim.warmup_steps=0"]


def run(cli: Callable[..., Any], mark: str, folder: Path, *more: str) -> list[str]:
    """-> the states of all jobs of all sweeps that the commands have made"""
    for name, text in BLOCK.findall(TEXT):
        if name.startswith("file: "):
            path = folder / name.removeprefix("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    lines = [line for name, text in BLOCK.findall(TEXT) if name == mark for line in text.splitlines()]
    assert lines
    for line in lines:
        verb, *words = shlex.split(line.removeprefix("python -m echofree."))
        short = [*SHORT, *more] if verb == "train" else []
        result = cli(verb, *words, *short, cwd=folder, timeout=280)
        # at the point where it stands, nothing is left to cancel or to start again
        assert result.returncode == 0, f"{line}\n{result.text[-6000:]}"
    tables = [path.read_text().splitlines() for path in sorted(folder.glob("multirun/**/sweep.csv"))]
    return [row["state"] for table in tables for row in csv.DictReader(table)]


@pytest.mark.slow
def test_on_this_machine(cli: Callable[..., Any], tmp_path: Path) -> None:
    assert run(cli, "run: local", tmp_path) == 6 * ["done"]  # two sweeps, of four jobs and of two


@pytest.mark.slurm
def test_on_a_cluster(cli: Callable[..., Any], tmp_path: Path) -> None:
    states = run(cli, "run: slurm", tmp_path, "hydra.launcher.timeout_min=30")
    assert states == 5 * ["done"]  # three sweeps: of two jobs, of one, of two


@pytest.mark.slow
@pytest.mark.skipif(find_spec("optuna") is None, reason="needs the extra sweep (optuna)")
def test_optuna(cli: Callable[..., Any], tmp_path: Path) -> None:
    run(cli, "extra: sweep", tmp_path)
    (results,) = tmp_path.glob("multirun/*/*/optimization_results.yaml")
    rows = (results.parent / "sweep.csv").read_text().splitlines()
    best = next(row for row in rows if ",True," in row).split(",")
    value = float(re.findall(r"best_value: (\S+)", results.read_text())[0])
    assert value == pytest.approx(float(best[rows[0].split(",").index("best")]))
    assert len(rows) == 5
