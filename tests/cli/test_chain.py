"""From the cloud to the edge in one command: interrupted, gone on with, one table at its end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import run_verb

from echofree.chain import filled, last_wins, read, stages
from echofree.errors import ConfigError

NEEDED = ("flwr", "onnx", "onnxruntime")
SMALLER = (
    "all.data.num_train=20", "all.data.num_test=4", "all.data.test_segment_s=1.0", "all.data.num_valid=2",
    "devices.federated.local_steps=1", "devices.train.batch_size=2", "all.train.device=cpu",
)  # fmt: skip


def test_words_of_a_recipe() -> None:
    recipe = read("cloud_to_edge")
    found = stages(recipe, "cloud_to_edge", "test", ["student.optim.lr=2e-4", "all.train.epochs=7"])
    by_name = {stage.name: stage for stage in found}
    assert list(by_name) == ["teacher", "student", "ship", "devices", "ship_again"]
    assert "optim.lr=2e-4" in by_name["student"].words
    assert "train.epochs=7" in by_name["teacher"].words
    assert not any(word.startswith("train.epochs") for word in by_name["ship"].words), "an export trains nothing"
    assert filled("checkpoint={student}", found, Path("here")) == "checkpoint=here/student"
    assert last_wins(["a=1", "b=2", "a=3"]) == ["a=3", "b=2"]
    for word in ("pupil.optim.lr=1", "student.optim"):
        with pytest.raises(ConfigError, match="begins with no stage"):
            stages(recipe, "cloud_to_edge", "test", [word])
    with pytest.raises(ConfigError, match="size=huge"):
        stages(recipe, "cloud_to_edge", "huge", [])
    with pytest.raises(ConfigError, match=r"there is no nowhere\.yaml"):
        read("nowhere")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason="needs echofree[federated,export]"
)
def test_the_chain_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    words = ["cloud_to_edge", "size=test", "out=all", *SMALLER]
    process = subprocess.Popen(
        [sys.executable, "-m", "echofree.chain", *words], cwd=tmp_path, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        end, round_1 = time.monotonic() + 500, tmp_path / "all/devices/checkpoints/step-000001/manifest.json"
        while not round_1.is_file():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = run_verb("chain", *words, cwd=tmp_path, timeout=300).check()
    for name in ("teacher", "student", "ship"):
        assert f"{name}: done already" in done.text
    assert "goes on after round" in done.text
    text = (tmp_path / "all/chain.md").read_text()
    rows = {cells[1].strip(): cells for cells in (line.split("|") for line in text.splitlines()[2:])}
    assert list(rows) == ["(none)", "teacher", "student", "ship", "devices", "ship_again"]
    assert all("agrees" in rows[name][-3] for name in ("ship", "ship_again")), text
    assert "before;" in rows["devices"][-4]
    assert json.loads((tmp_path / "all/devices/run.json").read_text())["federated"]["rounds"] == 3
    again = run_verb("chain", *words, cwd=tmp_path, timeout=100).check()
    assert again.text.count("done already") == 5
    other = run_verb("chain", *words, "student.optim.lr=1e-5", cwd=tmp_path, timeout=100).check(2)
    assert "student was begun with other words" in other.text
