"""Where two runs part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echofree import checkpoint, compare
from echofree.dist.world import World


def write(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def line(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": loss, "step_s": np.random.rand(), **more}


def test_timing_and_later_steps_do_not_count(tmp_path: Path) -> None:
    run = write(tmp_path / "a", line(1, 0.5), line(2, 0.4), line(3, 0.3))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "tra')  # killed while it wrote
    assert compare.records(run, 2) == [{"kind": "train", "step": s, "loss": v} for s, v in ((1, 0.5), (2, 0.4))]


@pytest.mark.parametrize(
    ("new", "rtol", "where"),
    [
        ([line(1, 0.5), line(2, 0.25)], 0.0, None),
        ([line(1, 0.5), line(2, 0.25 + 1e-18)], 0.0, None),  # the same number
        ([line(1, 0.5), line(2, 0.25000000000000006)], 0.0, "step 2, loss: 0.25 in the run, 0.25000000000000006 in"),
        ([line(1, 0.5), line(2, 0.2501)], 0.001, None),
        ([line(1, 0.5), line(2, 0.26)], 0.001, "step 2, loss"),
        ([line(1, 0.5), line(2, None)], 0.001, "step 2, loss: 0.25 in the run, null in"),
        ([line(1, 0.5), line(3, 0.25)], 0.001, "step 2, step: 2 in the run, 3 in"),
        ([line(1, 0.5)], 0.0, "step 2, number of records: 2 in the run, 1 in"),
        ([line(1, 0.5), line(2, 0.25), line(3, 1.0)], 0.0, "step 3, number of records: 2 in the run, 3 in"),
        ([line(1, 0.5, lr=1.0), line(2, 0.25)], 0.0, "step 1, lr: null in the run, 1.0 in"),
    ],
)
def test_the_first_difference_of_records(
    tmp_path: Path, new: list[dict[str, Any]], rtol: float, where: str | None
) -> None:
    a, b = write(tmp_path / "a", line(1, 0.5), line(2, 0.25)), write(tmp_path / "b", *new)
    found = compare.in_records(compare.records(a, 99), compare.records(b, 99), rtol)
    assert (found is None) if where is None else str(found).startswith(where)


def save(root: Path, step: int, **tensors: torch.Tensor) -> Path:
    root.mkdir(exist_ok=True)
    about = {"run_id": "mine", "step": step, "epoch": 0, "scores": {}, "world_size": 1}
    optimizer = {"state": {0: {"exp_avg": tensors.pop("moment", torch.zeros(2))}}, "param_groups": [{"lr": 0.1}]}
    return checkpoint.save(root / "checkpoints", step, {"model": tensors, "optimizer": optimizer}, {}, about, World())


def test_the_first_difference_of_weights_and_moments(tmp_path: Path, rng: np.random.Generator) -> None:
    w = torch.from_numpy(rng.standard_normal((3, 4)).astype(np.float32))
    old = save(tmp_path / "a", 4, first=w, second=w)
    assert compare.in_weights(old, save(tmp_path / "b", 4, first=w, second=w), 0.0) == (None, 3)
    other = w.clone()
    other[1, 2] = torch.nextafter(w[1, 2], torch.tensor(torch.inf))
    found, _ = compare.in_weights(old, save(tmp_path / "c", 4, first=w, second=other), 0.0)
    assert str(found).startswith("step 4, model second: ")
    assert "at 6" in str(found)
    assert "(1 of 12 differ)" in str(found)
    near = save(tmp_path / "d", 4, first=w, second=w * 1.01)
    assert compare.in_weights(old, near, 0.02)[0] is None
    assert compare.in_weights(old, near, 0.005)[0] is not None
    found, _ = compare.in_weights(old, save(tmp_path / "e", 4, first=w, second=w, moment=torch.ones(2)), 0.0)
    assert "optimizer state.0.exp_avg" in str(found)
    found, _ = compare.in_weights(old, save(tmp_path / "f", 4, first=w), 0.0)
    assert str(found) == "step 4, model second: there in the run, missing in its reproduction"


def test_only_whole_checkpoints_of_the_same_step_are_compared(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path / "a", step, w=torch.ones(2))
        if step != 2:
            save(tmp_path / "b", step, w=torch.ones(2))
    (tmp_path / "b/checkpoints/step-000003/model.pt").write_bytes(b"torn")
    pairs = compare.common_checkpoints(tmp_path / "a", tmp_path / "b", 3)
    assert [(a.name, b.name) for a, b in pairs] == [("step-000001", "step-000001")]
