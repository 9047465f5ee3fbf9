"""The commands of docs/slurm.md, as they stand there, on data of seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.jobs import Job

pytestmark = pytest.mark.slurm

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "slurm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^<!-- run: (\w+) -->\n```bash\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SCRIPTS = [text for kind, text in BLOCKS if kind == "script"]
SMALL = "data.num_train=8 data.num_valid=2 train.batch_size=2 train.epochs=1 train.final_test=false train.device=cpu"


def small(text: str) -> str:
    """With few clips, and with this Python."""
    found = text.replace("-m echofree.train dist=ddp", f"-m echofree.train dist=ddp {SMALL}")
    assert found != text
    found = found.replace("srun torchrun ", f"srun {sys.executable} -m torch.distributed.run ")
    return found.replace(" python -m ", f" {sys.executable} -m ")


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_scripts(submit: Callable[..., Job], number: int) -> None:
    job = submit(small(SCRIPTS[number]).removeprefix("#!/bin/bash\n"))
    assert job.ends("COMPLETED", 200) == "0:0"
    (record,) = job.folder.glob("outputs/*/*/run.json")
    assert '"status": "done"' in record.read_text()


def test_words(tmp_path: Path) -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "words"]
    done = subprocess.run(["bash", "-ec", small(text)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
