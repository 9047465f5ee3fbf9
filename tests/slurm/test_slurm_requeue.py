"""Out of time, preempted, requeued, a node lost: the job goes on in the same directory, as if nothing had happened."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from slurm.jobs import PYTHON, Job, ask, train, until

pytestmark = pytest.mark.slurm

STEPS = 60  # of 0.1 s
WORDS = ("dist=ddp", f"data.num_train={4 * STEPS}", "train.save_every_steps=5", "+model.pace_s=0.1")
TWO = ("-N2", "--ntasks-per-node=1")


def curve(job: Job) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def goes_on(job: Job, state: str = "RUNNING") -> None:
    """It is in the queue again, and runs again."""
    until(lambda: int(job.facts.get("Restarts", 0)) > 0 and job.state == state, 60, job.told)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The curve of a run that nobody disturbs."""
    import os
    import subprocess

    from slurm.jobs import EXPERIMENTS, PYTHON, TINY

    folder = tmp_path_factory.mktemp("unbroken")
    env = {**os.environ, "ECHOFREE_EXPERIMENTS": str(EXPERIMENTS), "OMP_NUM_THREADS": "1"}
    words = [PYTHON, "-m", "echofree.train", *TINY, *WORDS[:-1], "+model.pace_s=0"]
    subprocess.run(["srun", *TWO, *words], cwd=folder, env=env, check=True, timeout=90, capture_output=True)
    return curve(Job("0", folder))


def is_whole(job: Job, unbroken: list[tuple[int, float]], kinds: dict[str, int]) -> dict[str, Any]:
    assert job.ends("COMPLETED") == "0:0"
    record = job.record
    assert record["status"] == "done"
    assert record["stop_counts"] == kinds, job.told()
    assert curve(job) == unbroken  # every step once, and the same numbers
    return record


def out_of_time_twice(job: Job, signal: str, unbroken: list[tuple[int, float]]) -> dict[str, Any]:
    """Warned by a signal, twice: requeued each time, and whole at the end. -> its record"""
    for restart in (1, 2):
        job.reaches(10 * restart)
        ask("scancel", f"--signal={signal}", job.number)
        until(lambda n=restart: int(job.facts.get("Restarts", 0)) == n and job.state == "RUNNING", 60, job.told)
    record = is_whole(job, unbroken, {"timeout": 2})
    assert [stop["requeued"] for stop in record["stops"]] == [True, True]
    return record


def test_out_of_time_twice_in_an_array(submit: Callable[..., Job], unbroken: list[tuple[int, float]]) -> None:
    """--signal=USR2@n, sent by hand; a wandb run goes on under the same id."""
    job = submit(f"srun {train(*WORDS, 'logger=wandb')}", *TWO, "--array=3", "--signal=USR2@60")
    job.number += "_3"
    record = out_of_time_twice(job, "USR2", unbroken)
    assert {stop["job"] for stop in record["stops"]} == {job.number}
    runs = [path.name.rpartition("-")[0] + path.name.rpartition("-")[2] for path in job.run.glob("wandb/offline-run-*")]
    assert len(runs) == 3
    assert {path.name.split("-", 3)[3] for path in job.run.glob("wandb/offline-run-*")} == {record["id"]}


def test_preempted(submit: Callable[..., Job], unbroken: list[tuple[int, float]]) -> None:
    """SIGTERM and a grace time; the job leaves at once, makes room, and comes back when the other is done."""
    job = submit(f"srun {train(*WORDS)}", *TWO, "-p", "low", "--exclusive")
    job.reaches(10)
    began = time.monotonic()
    other = submit("sleep 3", "-N2", "-p", "high", "--exclusive", folder="b")
    other.ends("COMPLETED", 60)
    assert time.monotonic() - began < 19  # the grace time alone is 20 s
    goes_on(job)
    record = is_whole(job, unbroken, {"preemption": 1})
    assert record["stops"][0]["requeued"] is True


def test_requeued_by_hand(submit: Callable[..., Job], unbroken: list[tuple[int, float]]) -> None:
    job = submit(f"srun {train(*WORDS)}", *TWO)
    job.reaches(10)
    ask("scontrol", "requeue", job.number)
    goes_on(job)
    record = is_whole(job, unbroken, {"requeue": 1})
    assert [stop["kind"] for stop in record["stops"]] == ["requeue"]


def test_out_of_time_under_torchrun(submit: Callable[..., Job], unbroken: list[tuple[int, float]]) -> None:
    """--signal=TERM@n, sent by hand: torchrun hands it on, its ranks save, and the job comes back."""
    words = train(*WORDS).split(" ", 1)[1]
    script = f"""
        head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
        srun {PYTHON} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d \\
            --rdzv-endpoint=$head:29500 --rdzv-id=$SLURM_JOB_ID {words}
    """
    job = submit(script, *TWO, "--signal=TERM@60")
    record = out_of_time_twice(job, "TERM", unbroken)
    assert record["world"]["source"] == "torchrun"


def test_a_node_is_lost(submit: Callable[..., Job], unbroken: list[tuple[int, float]]) -> None:
    job = submit(f"srun {train(*WORDS)}", *TWO)
    job.reaches(12)
    ask("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    goes_on(job)
    assert job.ends("COMPLETED") == "0:0"
    assert sum(job.record["stop_counts"].values()) == 1, job.told()
    assert curve(job) == unbroken


def test_a_blocked_rank_at_the_time_limit(submit: Callable[..., Job]) -> None:
    """A warning with little time left; rank 0 is inside a collective, since rank 1 sleeps for ever."""
    words = (*WORDS, "model.fault=sleep", "model.rank=1", "model.step=12", "dist.timeout_s=600")
    job = submit(f'srun {train(*words)} "+model.mark=$PWD/failed"', *TWO)
    job.reaches(11)
    hours, minutes, seconds = map(int, job.facts["RunTime"].split(":"))
    limit = -(-(3600 * hours + 60 * minutes + seconds + 25) // 60)  # whole minutes: 25 to 85 s are left
    ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")
    ask("scancel", "--signal=USR2", job.number)
    until(lambda: int(job.facts.get("Restarts", 0)) > 0, 120, job.told)
    ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    goes_on(job)
    assert job.ends("COMPLETED") == "0:0"
    (stop,) = job.record["stops"]
    assert (stop["kind"], stop["blocked"], stop["requeued"]) == ("timeout", True, True)
    assert job.steps == list(range(1, STEPS + 1))
    assert "hasn't come to the end of a step in time" in job.text


def test_asked_to_stop_before_the_first_step(submit: Callable[..., Job], unbroken: list[tuple[int, float]]) -> None:
    job = submit(f"srun {train(*WORDS)}", *TWO)
    until(lambda: job.state == "RUNNING", 20, job.told)
    time.sleep(1.0)
    ask("scancel", "--signal=USR1", job.number)
    goes_on(job)
    assert job.ends("COMPLETED") == "0:0"
    assert "nothing to save" in job.text
    assert curve(job) == unbroken


def test_cancelled_or_not_to_be_requeued(submit: Callable[..., Job]) -> None:
    """scancel is the end; so is a time limit when the job doesn't want to be requeued. Both have saved."""
    job = submit(f"srun {train(*WORDS)}", "-N1", "--ntasks-per-node=2", folder="a")
    other = submit(f"srun {train(*WORDS, 'dist.max_timeouts=0')}", "-N1", "--ntasks-per-node=2", folder="b")
    job.reaches(5)
    other.reaches(5)
    ask("scancel", job.number)
    ask("scancel", "--signal=USR2", other.number)
    job.ends("CANCELLED")
    assert other.ends("FAILED") == "75:0"
    until(lambda: "stop_counts" in job.record, 5, job.told)
    assert job.record["stop_counts"] == {"cancel": 1}
    assert other.record["stop_counts"] == {"timeout": 1}
    assert (job.record["status"], other.record["status"]) == ("preempted", "preempted")
    assert f"isn't requeued (dist.max_timeouts=0). It goes on with resume={other.run}" in other.text, other.text
    assert any(job.run.glob("checkpoints/step-*/manifest.json"))
