"""A run, its reproduction, and one that is not the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[1] / "ranks" / "experiments"
WORDS = [
    "model=faulty", "data=faulty", "task.metrics=[si_sdr]", "task.sample_rate=16000", "train.batch_size=2",
    "train.final_test=false", "train.device=cpu", "train.epochs=1", "data.num_train=12", "train.log_every=2",
    "train.save_every_steps=4", "name=run",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_is_reproduced_bit_for_bit_and_a_difference_is_named(cli: Callable[..., Any], tmp_path: Path) -> None:
    env = {"ECHOFREE_EXPERIMENTS": str(EXPERIMENTS)}
    cli("train", *WORDS, env=env, timeout=300).check(0)
    (run,) = (tmp_path / "empty/outputs/run").iterdir()
    again = cli("reproduce", f"run={run}", "reproduce.out=copy", timeout=300).check(0)
    assert "equal bit for bit" in again.stdout
    assert "step-000004, step-000006" in again.stdout
    assert json.loads((tmp_path / "empty/copy/run.json").read_text())["status"] == "done"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    lines[1] = json.dumps({**record, "grad_norm": record["grad_norm"] + 1e-9})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    other = cli("reproduce", f"run={run}", "reproduce.steps=5", timeout=300).check(1)
    assert (
        f"NOT equal, first at step {record['step']}, grad_norm: {record['grad_norm'] + 1e-9} in the run" in other.stdout
    )
