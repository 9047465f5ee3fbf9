"""Ranks that srun and torchrun have started: one run, whoever started them, and no mixing of jobs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.jobs import EXPERIMENTS, PYTHON, TINY, Job, ask, train

pytestmark = pytest.mark.slurm


def test_two_nodes_of_two_tasks_are_four_ranks_of_one_run(submit: Callable[..., Job]) -> None:
    job = submit(f"srun {train('dist=ddp', 'data.num_train=32')}", "-N2", "--ntasks-per-node=2")
    assert job.ends("COMPLETED") == "0:0"
    world, about = job.record["world"], job.record["slurm"]
    assert (world["size"], world["hosts"], world["source"]) == (4, ["node1", "node1", "node2", "node2"], "slurm")
    assert sorted(path.name for path in job.run.glob("logs/*.log")) == [f"rank{r}.log" for r in range(4)]
    assert job.steps == [1, 2, 3, 4]
    assert about["job"] == job.number
    assert about["files"]["out"] == str(job.folder / f"{job.number}.out")
    assert job.accounted()[f"{job.number}.0"] == "COMPLETED|0:0"


def test_srun_without_a_script(tmp_path: Path) -> None:
    words = ["srun", "-N2", "--ntasks-per-node=1", PYTHON, "-m", "echofree.train", *TINY, "dist=ddp"]
    env = {**os.environ, "ECHOFREE_EXPERIMENTS": str(EXPERIMENTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "data.num_train=16"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert "2 clips x 2 data rank(s)" in done.stdout + done.stderr


def test_torchrun_in_a_script(submit: Callable[..., Job]) -> None:
    words = train("dist=ddp", "data.num_train=16").split(" ", 1)[1]
    script = f"""
        head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
        srun {PYTHON} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d \\
            --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID {words}
    """
    job = submit(script, "-N2", "--ntasks-per-node=1")
    assert job.ends("COMPLETED") == "0:0"
    assert (job.record["world"]["source"], job.record["world"]["hosts"]) == ("torchrun", ["node1", "node2"])
    assert job.record["slurm"]["job"] == job.number


def test_numbers_that_do_not_fit(submit: Callable[..., Job]) -> None:
    script = f"""
        srun {train("dist=ddp", "dist.num_procs=3")}; echo "three: $?"
        srun {train()}; echo "single: $?"
        srun {train("dist=ddp", "dist.interface=eth7")}; echo "interface: $?"
    """
    job = submit(script, "-N2", "--ntasks-per-node=1")
    job.ends("COMPLETED")
    text = job.text
    assert "2 x 1 = 2 tasks on 2 node(s), but dist.num_nodes=1 x dist.num_procs=3 = 3 rank(s)" in text, text
    assert "they would be 2 equal runs. Type: dist=ddp" in text, text
    assert "has no interface 'eth7'" in text, text
    assert ("three: 2" in text, "single: 2" in text, "interface: 2" in text) == (True, True, True), text
    assert not (job.folder / "outputs").exists()


def test_jobs_at_one_port_never_meet(submit: Callable[..., Job]) -> None:
    """Two jobs whose scripts export the same MASTER_PORT: the second says so and ends; none computes with the other."""
    long = train("dist=ddp", "data.num_train=4000", "+model.pace_s=0.05")
    first = submit(f"export MASTER_PORT=29533\nsrun {long}", "-N2", "--ntasks-per-node=1", folder="a")
    first.reaches(1)
    began = time.monotonic()
    second = submit(f"export MASTER_PORT=29533\nsrun {long}", "-N2", "--ntasks-per-node=1", folder="b")
    assert second.ends("FAILED", 40) == "1:0"
    assert time.monotonic() - began < 30
    assert "no free port among 29533 (MASTER_PORT)" in second.text, second.text
    step = max(first.steps)
    first.reaches(step + 5)  # undisturbed
    ask("scancel", first.number)
