"""The trained models that come with the package: complete, small, told about, and good on scenes that their training
never met."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from echofree import checkpoint, shipped
from echofree.contracts import Scenario
from echofree.data.collate import collate
from echofree.data.synthetic import Synthetic
from echofree.errors import CheckpointError

MODELS = shipped.names()


def test_tiny_is_there() -> None:
    assert "tiny" in MODELS


@pytest.mark.parametrize("name", MODELS)
def test_folder_is_complete_and_small(name: str) -> None:
    folder = shipped.WEIGHTS / name
    assert checkpoint.damage(checkpoint.find(name)) == ""
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1.6e6
    facts = json.loads((folder / "run.json").read_text())
    assert facts["status"] == "done"
    assert f"experiment={name}" in facts["command"]
    for path in (folder / "run.json", folder / "config.yaml"):
        assert not re.search(r"(?<![\w.])/(tmp|home|work|root|data)/", path.read_text()), path


@pytest.mark.parametrize("name", MODELS)
def test_card_tells_data_scores_and_limits(name: str) -> None:
    text = (shipped.WEIGHTS / name / shipped.CARD).read_text(encoding="utf-8")
    facts = json.loads((shipped.WEIGHTS / name / "run.json").read_text())
    for part in ("## Data", "## Protocol", "## Scores", "## Limits", "CC BY 4.0", facts["id"], str(facts["steps"])):
        assert part in text, part


@pytest.mark.parametrize("name", MODELS)
def test_scores_on_scenes_it_never_met(name: str) -> None:
    """Far end alone, near end alone: the echo goes, the talker stays. 8 scenes each, of the embedded voices."""
    model, _ = checkpoint.load_model(name)
    scenes = Synthetic(num_test=64).split("test")
    assert scenes is not None
    clips = [scenes.item(i, 0) for i in range(64)]
    levels = {}
    for scenario in (Scenario.FAR_END, Scenario.NEAR_END):
        batch = collate([clip for clip in clips if clip.scenario == scenario][:8], scenes.sample_rate)
        with torch.no_grad():
            est = model(batch.mic, batch.far)
        late = slice(3 * scenes.sample_rate, None)
        ratio = batch.mic[:, late].square().sum(1) / est[:, late].square().sum(1).clamp(min=1e-9)
        levels[scenario] = float((10 * ratio.log10()).median())
    assert levels[Scenario.FAR_END] > 25
    assert abs(levels[Scenario.NEAR_END]) < 1


def test_a_folder_of_the_users_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped.named("tiny") == shipped.WEIGHTS / "tiny"
    (tmp_path / "tiny").mkdir()
    assert shipped.named("tiny") is None
    with pytest.raises(CheckpointError, match="tiny holds no complete checkpoint"):
        checkpoint.find("tiny")


@pytest.mark.slow
def test_verbs_take_the_name(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """As the README says, and what they make of it stands where the user is."""
    before = {path: path.stat().st_mtime_ns for path in shipped.WEIGHTS.rglob("*")}
    cli("evaluate", "checkpoint=tiny", "limit=1", cwd=tmp_path).check()
    assert (tmp_path / "outputs/tiny/evaluate/synthetic-test/scores.json").is_file()
    quick = ["debug=quick", "train.batch_size=2", "data.num_train=8", "data.num_valid=2", "train.final_test=false"]
    cli("train", "init_from=tiny", "data.replay.share=0.25", *quick, cwd=tmp_path).check()
    (run,) = (tmp_path / "outputs/debug").glob("*/run.json")
    assert json.loads(run.read_text())["parent"]["run_id"] == checkpoint.manifest(checkpoint.find("tiny"))["run_id"]
    if find_spec("onnxruntime") and find_spec("onnx"):
        cli("export", "checkpoint=tiny", "export=onnx", "export.minutes=0.05", cwd=tmp_path).check()
        assert (tmp_path / "outputs/tiny/export/onnx/model.onnx").is_file()
    assert before == {path: path.stat().st_mtime_ns for path in shipped.WEIGHTS.rglob("*")}


def test_nothing_is_written_into_the_package(tmp_path: Path) -> None:
    assert shipped.place(shipped.WEIGHTS / "tiny") == Path("outputs/tiny")
    assert shipped.place(tmp_path / "outputs/tiny/DATE") == tmp_path / "outputs/tiny/DATE"


def test_a_name_that_is_not_shipped_lists_what_is() -> None:
    with pytest.raises(CheckpointError, match=r"comes with EchoFree: .*tiny"):
        checkpoint.find("tinny")


def test_the_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """experiments/ship.py makes such a folder: here of the shipped one, as if it were a run."""
    import runpy

    script = Path(__file__).resolve().parents[2] / "experiments" / "ship.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(shipped.WEIGHTS / "tiny"), str(tmp_path / "again")])
    runpy.run_path(str(script), run_name="__main__")
    before, after = (checkpoint.load_model(name)[0].state_dict() for name in ("tiny", tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
