"""torch.compile behind the one word train.compile=true."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = ["data.num_train=8", "data.num_valid=0", "data.num_test=0", "data.segment_s=1", "data.num_workers=0"]
WORDS += ["train.batch_size=4", "train.max_steps=2", "train.log_every=1", "train.final_test=false"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_run_is_the_plain_run(cli: Callable[..., Any], tmp_path: Path) -> None:
    """Loss and gradient norm of two steps within 1e-4 of themselves."""
    found = []
    for compiled in ("false", "true"):
        folder = tmp_path / compiled
        # an empty cache: files of an interrupted compilation would be taken for good ones
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        cli("train", *WORDS, f"train.compile={compiled}", cwd=folder, timeout=800, env=env).check(0)
        lines = map(json.loads, next(folder.glob("outputs/tiny/*/metrics.jsonl")).read_text().splitlines())
        found.append([(line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line])
    assert len(found[0]) == 2
    for plain, compiled in zip(*found, strict=True):
        assert compiled == pytest.approx(plain, rel=1e-4)
