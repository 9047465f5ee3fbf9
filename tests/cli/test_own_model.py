"""The model that the README shows trains, and in an empty folder nothing else is needed for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = ["debug=quick", "data.num_train=32", "data.num_valid=4", "data.num_workers=0", "train.batch_size=4"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILE.findall(README.read_text(encoding="utf-8")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_readme_model_trains(cli: Callable[..., Any], folder: Path) -> None:
    cli("train", "model=mine", *SHORT, cwd=folder).check()
    (run,) = (folder / "outputs").glob("*/*")
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3]


def test_misspelt_keyword_is_refused_before_anything_is_built(cli: Callable[..., Any], folder: Path) -> None:
    result = cli("train", "model=mine", "+model.memory_sample=80", *SHORT, cwd=folder).check(2)
    assert "memory_samples" in result.text
    assert not (folder / "outputs").exists()


@pytest.mark.slow
def test_a_model_that_cannot_be_pickled_is_swept(cli: Callable[..., Any], folder: Path) -> None:
    """A lock among the module's globals, and a structured config in it: only names travel to a job."""
    path = folder / "experiments/mine.py"
    unpicklable = "import threading\nfrom dataclasses import dataclass\n\nLOCK = threading.Lock()\n\n\n"
    unpicklable += "@dataclass\nclass Settings:\n    size: int = 3\n\n\nSETTINGS = Settings()\n"
    path.write_text(path.read_text().replace("import torch\n", f"import torch\n{unpicklable}", 1))
    assert "LOCK" in path.read_text()
    cli("train", "-m", "model=mine", "seed=0,1", "hydra/launcher=local", *SHORT, cwd=folder, timeout=240).check()
    runs = sorted((folder / "multirun").glob("*/*/[01]/run.json"))
    assert [json.loads(run.read_text())["status"] for run in runs] == ["done", "done"]
